"""Stable Audio: text to audio."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.building import build, normal
from tests.zoo.registry import Arguments, transformer


def stable_audio_transformer(channels: int = 4) -> Any:
    from diffusers import StableAudioDiTModel

    return build(
        StableAudioDiTModel,
        95,
        sample_size=8,
        in_channels=channels,
        num_layers=4,
        attention_head_dim=8,
        num_attention_heads=4,
        num_key_value_attention_heads=2,
        out_channels=channels,
        cross_attention_dim=16,
        time_proj_dim=8,
        global_states_input_dim=64,
        cross_attention_input_dim=32,
    )


@transformer("StableAudioDiTModel")
def stable_audio() -> tuple[Any, Arguments]:
    from diffusers.models.embeddings import get_1d_rotary_pos_embed

    def call() -> dict[str, Any]:
        return {
            "hidden_states": normal(1, 4, 8),
            "timestep": torch.tensor([0.5]),
            "encoder_hidden_states": normal(1, 16, 32, seed=1),
            "global_hidden_states": normal(1, 1, 64, seed=2),
            "rotary_embedding": get_1d_rotary_pos_embed(4, 9, use_real=True, repeat_interleave_real=False),
        }

    return stable_audio_transformer(), call
