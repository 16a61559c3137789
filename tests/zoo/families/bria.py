"""Bria 3.2 and Bria FIBO: text to image and editing."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.zoo.building import build, normal
from tests.zoo.positions import grid_ids
from tests.zoo.registry import Arguments, transformer


def bria_dit() -> Any:
    """A `BriaTransformer2DModel`: two stacks, of double and of single blocks."""
    from diffusers import BriaTransformer2DModel

    return build(
        BriaTransformer2DModel,
        121,
        patch_size=1,
        in_channels=16,
        num_layers=3,
        num_single_layers=4,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=[4, 4, 8],
    )


def bria_fibo_dit(in_channels: int = 16) -> Any:
    """A `BriaFiboTransformer2DModel`, each of whose blocks reads a layer of the text encoder."""
    from diffusers import BriaFiboTransformer2DModel

    return build(
        BriaFiboTransformer2DModel,
        122,
        patch_size=1,
        in_channels=in_channels,
        num_layers=3,
        num_single_layers=4,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=64,
        axes_dims_rope=[4, 4, 8],
        text_encoder_dim=32,
    )


@transformer("BriaTransformer2DModel")
def bria_transformer() -> tuple[nn.Module, Arguments]:
    return bria_dit(), lambda: {
        "hidden_states": normal(1, 16, 16),
        "encoder_hidden_states": normal(1, 8, 32, seed=1),
        "timestep": torch.tensor([500.0]),
        "img_ids": grid_ids(4, 4),
        "txt_ids": torch.zeros(8, 3),
    }


@transformer("BriaFiboTransformer2DModel")
def bria_fibo_transformer() -> tuple[nn.Module, Arguments]:
    return bria_fibo_dit(), lambda: {
        "hidden_states": normal(1, 16, 16),
        "encoder_hidden_states": normal(1, 8, 64, seed=1),
        "text_encoder_layers": [normal(1, 8, 32, seed=layer) for layer in range(7)],
        "timestep": torch.tensor([500.0]),
        "img_ids": grid_ids(4, 4),
        "txt_ids": torch.zeros(8, 3),
    }
