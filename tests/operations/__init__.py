"""What may be done to a pipeline's weights while it is offloaded, and what comes of it beside a resident pipeline."""
