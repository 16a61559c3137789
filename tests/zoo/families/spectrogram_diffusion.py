"""Spectrogram diffusion: the decoder of its notes, with T5's layers."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.building import build, normal
from tests.zoo.registry import Arguments, transformer


@transformer("T5FilmDecoder")
def t5_film_decoder() -> tuple[Any, Arguments]:
    from diffusers.models.transformers.t5_film_transformer import T5FilmDecoder

    model = build(
        T5FilmDecoder, 115, input_dims=8, targets_length=16, d_model=32, num_layers=4, num_heads=2, d_kv=16, d_ff=48
    )

    def call() -> dict[str, Any]:
        return {
            "encodings_and_masks": [(normal(1, 6, 32, seed=1), torch.ones(1, 6))],
            "decoder_input_tokens": normal(1, 16, 8),
            "decoder_noise_time": torch.tensor([0.5]),
        }

    return model, call
