"""Qwen-Image: text to image, image to image, inpainting and ControlNet."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests import tiny
from tests.tiny.transformers import qwen_image_transformer
from tests.zoo.building import normal
from tests.zoo.registry import Arguments, pipeline, transformer


@transformer("QwenImageTransformer2DModel")
def qwen_image_dit() -> tuple[nn.Module, Arguments]:
    def arguments() -> dict[str, Any]:
        return {
            "hidden_states": normal(1, 16, 16),
            "encoder_hidden_states": normal(1, 5, 32, seed=1),
            "encoder_hidden_states_mask": torch.ones(1, 5, dtype=torch.long),
            "timestep": torch.tensor([0.7]),
            "img_shapes": [[(1, 4, 4)]],
        }

    return qwen_image_transformer(), arguments


@pipeline("QwenImagePipeline")
def qwen_image() -> tuple[Any, Arguments]:
    return tiny.build_qwen_image()
