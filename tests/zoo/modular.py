"""Put a modular pipeline together from a family's components."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def assemble_modular(blocks_class: type, components: Mapping[str, Any], **more: Any) -> Any:
    """The pipeline of these blocks, with those `components` that they expect, and with `more`."""
    blocks = blocks_class()
    expected = {spec.name for spec in blocks.expected_components}
    pipe = blocks.init_pipeline()
    pipe.update_components(**{name: value for name, value in {**components, **more}.items() if name in expected})
    return pipe
