"""Motif-Video: text and image to video."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.building import build, normal
from tests.zoo.registry import Arguments, transformer


def motif_video_transformer() -> Any:
    """The last two of its five single blocks are the decoder."""
    from diffusers import MotifVideoTransformer3DModel

    return build(
        MotifVideoTransformer3DModel,
        85,
        in_channels=33,
        out_channels=16,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=3,
        num_single_layers=5,
        num_decoder_layers=2,
        mlp_ratio=2.0,
        text_embed_dim=32,
        image_embed_dim=16,
        rope_axes_dim=(4, 6, 6),
        enable_text_cross_attention_dual=True,
        enable_text_cross_attention_single=True,
    )


@transformer("MotifVideoTransformer3DModel")
def motif_video() -> tuple[Any, Arguments]:
    def call() -> dict[str, Any]:
        return {
            "hidden_states": normal(1, 33, 2, 4, 4),
            "timestep": torch.tensor([500]),
            "encoder_hidden_states": normal(1, 16, 32, seed=1),
            "encoder_attention_mask": (torch.arange(16) < 12)[None],
            "image_embeds": normal(1, 4, 16, seed=2),
        }

    return motif_video_transformer(), call
