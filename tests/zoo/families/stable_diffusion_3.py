"""Stable Diffusion 3: text and image to image, inpainting, ControlNet."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests import tiny
from tests.tiny.transformers import sd3_transformer
from tests.zoo.building import normal
from tests.zoo.registry import Arguments, pipeline, transformer


@transformer("SD3Transformer2DModel")
def sd3_dit() -> tuple[nn.Module, Arguments]:
    def arguments() -> dict[str, Any]:
        return {
            "hidden_states": normal(2, 4, 8, 8),
            "encoder_hidden_states": normal(2, 5, 64, seed=1),
            "pooled_projections": normal(2, 64, seed=2),
            "timestep": torch.tensor([700.0, 700.0]),
        }

    return sd3_transformer(), arguments


@pipeline("StableDiffusion3Pipeline")
def sd3() -> tuple[Any, Arguments]:
    return tiny.build_sd3()
