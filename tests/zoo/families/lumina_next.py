"""Lumina-Next: text to image."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.zoo.building import build, normal
from tests.zoo.registry import Arguments, transformer


def lumina_next_dit() -> Any:
    """A `LuminaNextDiT2DModel`."""
    from diffusers import LuminaNextDiT2DModel

    model = build(
        LuminaNextDiT2DModel,
        251,
        sample_size=8,
        patch_size=2,
        in_channels=4,
        hidden_size=32,
        num_layers=4,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=16,
        cross_attention_dim=32,
    )
    # diffusers leaves it uninitialized, and its forward doesn't use it.
    model.pad_token.data = normal(32)
    return model


@transformer("LuminaNextDiT2DModel")
def lumina_next_transformer() -> tuple[nn.Module, Arguments]:
    from diffusers.models.embeddings import get_2d_rotary_pos_embed_lumina

    return lumina_next_dit(), lambda: {
        "hidden_states": normal(2, 4, 8, 8),
        "timestep": torch.tensor([0.5, 0.5]),
        "encoder_hidden_states": normal(2, 8, 32, seed=1),
        "encoder_mask": (torch.arange(8) < 6).long().repeat(2, 1),
        "cross_attention_kwargs": {},
        "image_rotary_emb": get_2d_rotary_pos_embed_lumina(16, 8, 8),
    }
