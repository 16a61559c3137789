"""ERNIE-Image: text to image, with a prompt enhancer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.zoo.building import build, normal
from tests.zoo.registry import Arguments, transformer


def ernie_image_dit() -> Any:
    """An `ErnieImageTransformer2DModel`, whose blocks share one modulation."""
    from diffusers import ErnieImageTransformer2DModel

    return build(
        ErnieImageTransformer2DModel,
        211,
        hidden_size=32,
        num_attention_heads=2,
        num_layers=4,
        ffn_hidden_size=64,
        in_channels=16,
        out_channels=16,
        patch_size=1,
        text_in_dim=16,
        rope_axes_dim=(4, 6, 6),
    )


@transformer("ErnieImageTransformer2DModel")
def ernie_image_transformer() -> tuple[nn.Module, Arguments]:
    return ernie_image_dit(), lambda: {
        "hidden_states": normal(2, 16, 4, 4),
        "timestep": torch.tensor([500.0, 500.0]),
        "text_bth": normal(2, 8, 16, seed=1),
        "text_lens": torch.tensor([8, 5]),
    }
