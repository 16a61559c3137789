"""LTX-2: video and audio in one DiT."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.building import build, normal
from tests.zoo.registry import Arguments, transformer

# Widths of both streams, which the refiner of SANA-WM takes, too.
LTX2 = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "cross_attention_dim": 16,
    "audio_in_channels": 4,
    "audio_out_channels": 4,
    "audio_num_attention_heads": 2,
    "audio_attention_head_dim": 4,
    "audio_cross_attention_dim": 8,
    "num_layers": 4,
    "caption_channels": 16,
    "rope_double_precision": False,
}


def ltx2_transformer(**config: Any) -> Any:
    from diffusers import LTX2VideoTransformer3DModel

    return build(LTX2VideoTransformer3DModel, 54, **{**LTX2, **config})


@transformer("LTX2VideoTransformer3DModel")
def ltx2() -> tuple[Any, Arguments]:
    def call() -> dict[str, Any]:
        return {
            "hidden_states": normal(1, 8, 4),
            "audio_hidden_states": normal(1, 5, 4, seed=1),
            "encoder_hidden_states": normal(1, 8, 16, seed=2),
            "audio_encoder_hidden_states": normal(1, 8, 16, seed=3),
            "timestep": torch.tensor([500.0]),
            "encoder_attention_mask": torch.ones(1, 8),
            "num_frames": 2,
            "height": 2,
            "width": 2,
            "audio_num_frames": 5,
            "fps": 25.0,
        }

    return ltx2_transformer(), call
