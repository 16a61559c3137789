"""EasyAnimate: text to video, inpainting, control."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.building import build, normal
from tests.zoo.registry import Arguments, transformer


def easyanimate_transformer(in_channels: int = 4) -> Any:
    """Its first three blocks have weights of their own for the text, the others don't."""
    from diffusers import EasyAnimateTransformer3DModel

    return build(
        EasyAnimateTransformer3DModel,
        78,
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=in_channels,
        out_channels=4,
        patch_size=2,
        time_embed_dim=8,
        num_layers=4,
        mmdit_layers=3,
        text_embed_dim=32,
    )


@transformer("EasyAnimateTransformer3DModel")
def easyanimate() -> tuple[Any, Arguments]:
    def call() -> dict[str, Any]:
        return {
            "hidden_states": normal(1, 4, 2, 4, 4),
            "timestep": torch.tensor([500.0]),
            "encoder_hidden_states": normal(1, 16, 32, seed=1),
        }

    return easyanimate_transformer(), call
