"""FLUX.3: the DiT alone, since diffusers has only modular pipelines of it."""

from __future__ import annotations

import torch
from torch import nn

from tests.zoo.building import build, normal
from tests.zoo.positions import grid_ids
from tests.zoo.registry import Arguments, transformer


@transformer("Flux3Transformer2DModel")
def flux3_transformer() -> tuple[nn.Module, Arguments]:
    """Each kind of token has blocks of its own, the kinds of images in a dictionary of lists."""
    from diffusers import Flux3Transformer2DModel

    model = build(
        Flux3Transformer2DModel,
        106,
        in_channels=16,
        cond_in_channels=16,
        num_layers=3,
        num_single_layers=4,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=48,
        axes_dims_rope=(4, 4, 4, 4),
    )
    return model, lambda: {
        "hidden_states": normal(1, 16, 16),
        "encoder_hidden_states": normal(1, 8, 48, seed=1),
        "timestep": torch.tensor([0.5]),
        "img_ids": grid_ids(4, 4, axes=4),
        "txt_ids": torch.zeros(8, 4),
        "image_cond_hidden_states": normal(1, 4, 16, seed=2),
        "image_cond_ids": grid_ids(2, 2, axes=4) + torch.tensor([1.0, 0.0, 0.0, 0.0]),
    }
