"""LTX-Video: text and image to video, conditions, long videos."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.building import build, normal
from tests.zoo.registry import Arguments, transformer


def ltx_transformer(channels: int = 8) -> Any:
    from diffusers import LTXVideoTransformer3DModel

    return build(
        LTXVideoTransformer3DModel,
        50,
        in_channels=channels,
        out_channels=channels,
        num_attention_heads=2,
        attention_head_dim=16,
        cross_attention_dim=32,
        num_layers=4,
        caption_channels=32,
    )


@transformer("LTXVideoTransformer3DModel")
def ltx() -> tuple[Any, Arguments]:
    def call() -> dict[str, Any]:
        return {
            "hidden_states": normal(1, 8, 8),
            "encoder_hidden_states": normal(1, 16, 32, seed=1),
            "timestep": torch.tensor([500.0]),
            "encoder_attention_mask": torch.ones(1, 16, dtype=torch.bool),
            "num_frames": 2,
            "height": 2,
            "width": 2,
            "rope_interpolation_scale": (8 / 25, 32, 32),
        }

    return ltx_transformer(), call
