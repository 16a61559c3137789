"""MiniMax Music 3: the DiT of its audio, and the decoder of its codebooks."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.building import build, normal
from tests.zoo.registry import Arguments, transformer


def music_transformer(channels: int = 8, condition_dim: int = 16) -> Any:
    from diffusers import MiniMaxMusic3Transformer1DModel

    return build(
        MiniMaxMusic3Transformer1DModel,
        110,
        in_channels=channels,
        condition_dim=condition_dim,
        num_layers=4,
        num_attention_heads=2,
        attention_head_dim=16,
        ff_inner_dim=48,
        rotary_dim=8,
        fourier_embedding_dim=16,
    )


def depth_decoder(hidden_size: int = 32, audio_vocabulary: int = 32) -> Any:
    from diffusers.models.transformers import MiniMaxMusic3RVQDepthDecoder

    return build(
        MiniMaxMusic3RVQDepthDecoder,
        111,
        hidden_size=hidden_size,
        num_layers=4,
        num_attention_heads=2,
        intermediate_size=48,
        audio_vocab_size=audio_vocabulary,
        num_codebooks=4,
    )


@transformer("MiniMaxMusic3Transformer1DModel")
def minimax_music3() -> tuple[Any, Arguments]:
    def call() -> dict[str, Any]:
        return {
            "hidden_states": normal(1, 8, 12),
            "timestep": torch.tensor([0.5]),
            "encoder_hidden_states": normal(1, 12, 16, seed=1),
        }

    return music_transformer(), call


@transformer("MiniMaxMusic3RVQDepthDecoder")
def minimax_music3_depth_decoder() -> tuple[Any, Arguments]:
    return depth_decoder(), lambda: {"inputs_embeds": normal(1, 5, 32)}
