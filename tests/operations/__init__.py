"""What may be done to a pipeline's weights while it is offloaded, and what comes of it beside a resident pipeline."""

# They fill the table, whose rows are in this order whoever imports one of them.
from . import at_rest, lora

__all__ = ["at_rest", "lora"]
