"""Latte: text to video; its spatial and temporal blocks take turns."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.building import build, normal
from tests.zoo.registry import Arguments, transformer


def latte_transformer() -> Any:
    from diffusers import LatteTransformer3DModel

    return build(
        LatteTransformer3DModel,
        77,
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=8,
        num_layers=4,
        cross_attention_dim=24,
        attention_bias=True,
        sample_size=4,
        patch_size=2,
        activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        norm_eps=1e-6,
        caption_channels=32,
        video_length=2,
    )


@transformer("LatteTransformer3DModel")
def latte() -> tuple[Any, Arguments]:
    def call() -> dict[str, Any]:
        return {
            "hidden_states": normal(1, 4, 2, 4, 4),
            "timestep": torch.tensor([500]),
            "encoder_hidden_states": normal(1, 16, 32, seed=1),
        }

    return latte_transformer(), call
