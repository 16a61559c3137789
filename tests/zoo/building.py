"""What the builders of the families share: seeded models, noise, pictures."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image

from diffusers_omni_offload.demo.tiny_wan import randomize_constants

__all__ = ["build", "generator", "masked_half", "normal", "picture"]


def build(model_class: Any, seed: int, **config: Any) -> Any:
    """A model of this class with weights drawn from `seed`, no parameter of it constant, in eval mode."""
    torch.manual_seed(seed)
    return randomize_constants(model_class(**config), seed).eval()


def generator(seed: int = 0) -> torch.Generator:
    """A CPU generator, so that the latents don't depend on the device."""
    return torch.Generator("cpu").manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """The same normal numbers each time."""
    return torch.randn(shape, generator=generator(seed))


def picture(height: int = 32, width: int = 32, seed: int = 0) -> Image.Image:
    """An RGB image of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def masked_half(height: int = 32, width: int = 32) -> Image.Image:
    """A mask whose right half is to be painted anew."""
    pixels = np.zeros((height, width), dtype=np.uint8)
    pixels[:, width // 2 :] = 255
    return Image.fromarray(pixels)
