"""Chroma: text to image, image to image and inpainting."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.zoo.building import build, normal
from tests.zoo.positions import grid_ids
from tests.zoo.registry import Arguments, transformer


def chroma_dit() -> Any:
    """A `ChromaTransformer2DModel`, whose modulations come from one small network and not from its blocks."""
    from diffusers import ChromaTransformer2DModel

    return build(
        ChromaTransformer2DModel,
        111,
        patch_size=1,
        in_channels=16,
        num_layers=3,
        num_single_layers=4,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 4, 8),
        approximator_num_channels=8,
        approximator_hidden_dim=32,
        approximator_layers=2,
    )


@transformer("ChromaTransformer2DModel")
def chroma_transformer() -> tuple[nn.Module, Arguments]:
    return chroma_dit(), lambda: {
        "hidden_states": normal(1, 16, 16),
        "encoder_hidden_states": normal(1, 8, 32, seed=1),
        "timestep": torch.tensor([0.5]),
        "img_ids": grid_ids(4, 4),
        "txt_ids": torch.zeros(8, 3),
        "attention_mask": torch.ones(1, 24, dtype=torch.bool),
    }
