"""Qwen-Image 2.1."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.zoo.building import build, normal
from tests.zoo.registry import Arguments, transformer


def qwen_image_21_dit() -> Any:
    """A `QwenImage21Transformer2DModel`."""
    from diffusers import QwenImage21Transformer2DModel

    return build(
        QwenImage21Transformer2DModel,
        seed=44,
        patch_size=1,
        in_channels=16,
        out_channels=16,
        num_layers=4,
        attention_head_dim=16,
        num_attention_heads=2,
        context_in_dim=32,
        axes_dims_rope=(4, 4, 8),
    )


@transformer("QwenImage21Transformer2DModel")
def qwen_image_21_transformer() -> tuple[nn.Module, Arguments]:
    def arguments() -> dict[str, Any]:
        # 5 tokens of text; each slot of the target stands for 4 of its 16 patches.
        slots = torch.tensor([[False] * 5 + [True] * 4])
        return {
            "hidden_states": normal(1, 16, 16),
            "encoder_hidden_states": normal(1, 5, 32, seed=1),
            "timestep": torch.tensor([0.7]),
            "img_shapes": [[(1, 4, 4)]],
            "img_mask": slots,
        }

    return qwen_image_21_dit(), arguments
