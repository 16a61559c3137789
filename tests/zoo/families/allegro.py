"""Allegro: text to video."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.building import build, normal
from tests.zoo.registry import Arguments, transformer


def allegro_transformer() -> Any:
    from diffusers import AllegroTransformer3DModel

    return build(
        AllegroTransformer3DModel,
        76,
        num_attention_heads=2,
        attention_head_dim=12,
        num_layers=4,
        cross_attention_dim=24,
        sample_height=2,
        sample_width=2,
        sample_frames=2,
        caption_channels=32,
    )


@transformer("AllegroTransformer3DModel")
def allegro() -> tuple[Any, Arguments]:
    def call() -> dict[str, Any]:
        return {
            "hidden_states": normal(1, 4, 2, 4, 4),
            "encoder_hidden_states": normal(1, 16, 32, seed=1),
            "timestep": torch.tensor([500]),
            "attention_mask": torch.ones(1, 2, 4, 4),
            "encoder_attention_mask": (torch.arange(16) < 12)[None],
            "image_rotary_emb": None,
        }

    return allegro_transformer(), call
