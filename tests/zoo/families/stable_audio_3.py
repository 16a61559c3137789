"""Stable Audio 3: text and audio to audio, inpainting."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.building import build, normal
from tests.zoo.registry import Arguments, transformer


def stable_audio_3_transformer(channels: int = 4) -> Any:
    from diffusers import StableAudio3DiTModel

    return build(
        StableAudio3DiTModel,
        97,
        io_channels=channels,
        embed_dim=32,
        depth=4,
        num_heads=2,
        cond_token_dim=32,
        global_cond_dim=32,
        local_add_cond_dim=channels + 1,
        timestep_features_dim=16,
        ff_mult=2.0,
        num_memory_tokens=4,
    )


@transformer("StableAudio3DiTModel")
def stable_audio_3() -> tuple[Any, Arguments]:
    def call() -> dict[str, Any]:
        return {
            "hidden_states": normal(1, 4, 8),
            "timestep": torch.tensor([0.5]),
            "encoder_hidden_states": normal(1, 16, 32, seed=1),
            "global_hidden_states": normal(1, 32, seed=2),
            "encoder_attention_mask": (torch.arange(16) < 12)[None],
            "local_add_cond": normal(1, 5, 8, seed=3),
        }

    return stable_audio_3_transformer(), call
