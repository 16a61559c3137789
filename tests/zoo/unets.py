"""UNets that differ from others in a few settings."""

from __future__ import annotations

from typing import Any

from tests.zoo.building import build


def reshaped(unet: Any, seed: int = 41, **changes: Any) -> Any:
    """A new UNet of the shape of `unet` but for `changes` of its configuration, with weights of its own."""
    # Not by `from_config`: it takes the default for whatever `unet` had by default, whatever `changes` says.
    config = {name: value for name, value in unet.config.items() if not name.startswith("_")}
    return build(type(unet), seed, **{**config, **changes})
