"""UNets with three narrow blocks down and three up."""

from __future__ import annotations

from typing import Any

from tests.zoo.building import build


def reshaped(unet: Any, seed: int = 41, **changes: Any) -> Any:
    """A new UNet of the shape of `unet` but for `changes` of its configuration, with weights of its own."""
    return build(type(unet).from_config, seed, config={**unet.config, **changes})
