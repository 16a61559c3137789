"""Mochi: text to video."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.building import build, normal
from tests.zoo.registry import Arguments, transformer


def mochi_transformer() -> Any:
    from diffusers import MochiTransformer3DModel

    return build(
        MochiTransformer3DModel,
        75,
        patch_size=2,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=4,
        pooled_projection_dim=16,
        in_channels=12,
        text_embed_dim=32,
        time_embed_dim=4,
        max_sequence_length=16,
    )


@transformer("MochiTransformer3DModel")
def mochi() -> tuple[Any, Arguments]:
    def call() -> dict[str, Any]:
        return {
            "hidden_states": normal(1, 12, 2, 4, 4),
            "encoder_hidden_states": normal(1, 16, 32, seed=1),
            "timestep": torch.tensor([500]),
            "encoder_attention_mask": (torch.arange(16) < 12)[None],
        }

    return mochi_transformer(), call
