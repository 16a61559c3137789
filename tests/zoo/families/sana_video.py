"""SANA-Video: text and image to video."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.building import build, normal
from tests.zoo.registry import Arguments, transformer


def sana_video_transformer() -> Any:
    from diffusers import SanaVideoTransformer3DModel

    return build(
        SanaVideoTransformer3DModel,
        87,
        in_channels=16,
        out_channels=16,
        num_attention_heads=2,
        attention_head_dim=12,
        num_layers=4,
        num_cross_attention_heads=2,
        cross_attention_head_dim=12,
        cross_attention_dim=24,
        caption_channels=32,
        sample_size=4,
    )


@transformer("SanaVideoTransformer3DModel")
def sana_video() -> tuple[Any, Arguments]:
    def call() -> dict[str, Any]:
        return {
            "hidden_states": normal(1, 16, 2, 4, 4),
            "encoder_hidden_states": normal(1, 16, 32, seed=1),
            "timestep": torch.tensor([500]),
            "encoder_attention_mask": (torch.arange(16) < 12)[None],
        }

    return sana_video_transformer(), call
