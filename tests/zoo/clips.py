"""Clips to call video pipelines with."""

from __future__ import annotations

from PIL import Image

from tests.zoo.building import picture


def clip(frames: int = 5, height: int = 16, width: int = 16) -> list[Image.Image]:
    """A video of pictures of random pixels."""
    return [picture(height, width, seed) for seed in range(frames)]
