"""LongCat-AudioDiT: text to speech."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.building import build, normal
from tests.zoo.registry import Arguments, transformer


def longcat_audio_transformer(latent_dim: int = 8) -> Any:
    from diffusers import LongCatAudioDiTTransformer

    return build(
        LongCatAudioDiTTransformer,
        105,
        dit_dim=32,
        dit_depth=4,
        dit_heads=4,
        dit_text_dim=32,
        latent_dim=latent_dim,
        ff_mult=2.0,
    )


@transformer("LongCatAudioDiTTransformer")
def longcat_audio_dit() -> tuple[Any, Arguments]:
    def call() -> dict[str, Any]:
        return {
            "hidden_states": normal(1, 10, 8),
            "encoder_hidden_states": normal(1, 16, 32, seed=1),
            "encoder_attention_mask": torch.arange(16)[None] < 12,
            "timestep": torch.tensor([0.5]),
            "attention_mask": torch.arange(10)[None] < 9,
            "latent_cond": normal(1, 10, 8, seed=2),
        }

    return longcat_audio_transformer(), call
