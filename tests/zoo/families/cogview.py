"""CogView 3 Plus and CogView 4: text to image, and with a control image."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.zoo.building import build, normal
from tests.zoo.registry import Arguments, transformer


def cogview3_dit() -> Any:
    """A `CogView3PlusTransformer2DModel`."""
    from diffusers import CogView3PlusTransformer2DModel

    return build(
        CogView3PlusTransformer2DModel,
        171,
        patch_size=2,
        in_channels=4,
        num_layers=4,
        attention_head_dim=8,
        num_attention_heads=4,
        out_channels=4,
        text_embed_dim=32,
        time_embed_dim=16,
        condition_dim=4,
        pos_embed_max_size=8,
        sample_size=8,
    )


def cogview4_dit(in_channels: int = 4) -> Any:
    """A `CogView4Transformer2DModel`; twice the input channels hold a control image."""
    from diffusers import CogView4Transformer2DModel

    return build(
        CogView4Transformer2DModel,
        172,
        patch_size=2,
        in_channels=in_channels,
        out_channels=4,
        num_layers=4,
        attention_head_dim=8,
        num_attention_heads=4,
        text_embed_dim=32,
        time_embed_dim=16,
        condition_dim=4,
        pos_embed_max_size=8,
        sample_size=8,
        rope_axes_dim=(8, 8),
    )


def _arguments() -> dict[str, Any]:
    return {
        "hidden_states": normal(1, 4, 8, 8),
        "encoder_hidden_states": normal(1, 8, 32, seed=1),
        "timestep": torch.tensor([500]),
        "original_size": torch.tensor([[16.0, 16.0]]),
        "target_size": torch.tensor([[16.0, 16.0]]),
        "crop_coords": torch.tensor([[0.0, 0.0]]),
    }


@transformer("CogView3PlusTransformer2DModel")
def cogview3_transformer() -> tuple[nn.Module, Arguments]:
    return cogview3_dit(), _arguments


@transformer("CogView4Transformer2DModel")
def cogview4_transformer() -> tuple[nn.Module, Arguments]:
    return cogview4_dit(), _arguments
