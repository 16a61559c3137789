"""FLUX.1: text to image, image to image, inpainting and Kontext."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.zoo.building import build, normal
from tests.zoo.positions import grid_ids
from tests.zoo.registry import Arguments, transformer


def flux_dit(in_channels: int = 16, out_channels: int | None = None) -> Any:
    """A `FluxTransformer2DModel` for packed latents of 4 channels; more input channels hold the condition."""
    from diffusers import FluxTransformer2DModel

    return build(
        FluxTransformer2DModel,
        101,
        patch_size=1,
        in_channels=in_channels,
        out_channels=out_channels,
        num_layers=3,
        num_single_layers=4,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
    )


@transformer("FluxTransformer2DModel")
def flux_transformer() -> tuple[nn.Module, Arguments]:
    return flux_dit(), lambda: {
        "hidden_states": normal(1, 16, 16),
        "encoder_hidden_states": normal(1, 8, 32, seed=1),
        "pooled_projections": normal(1, 32, seed=2),
        "timestep": torch.tensor([0.5]),
        "guidance": torch.tensor([3.5]),
        "img_ids": grid_ids(4, 4),
        "txt_ids": torch.zeros(8, 3),
    }
