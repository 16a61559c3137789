"""Sana, Sana Sprint and Sana ControlNet."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.zoo.building import build, normal
from tests.zoo.registry import Arguments, transformer


def sana_dit(guidance_embeds: bool = False, qk_norm: str | None = None, num_layers: int = 4) -> Any:
    """A `SanaTransformer2DModel`; Sprint's has an embedding of the guidance and normalised queries and keys."""
    from diffusers import SanaTransformer2DModel

    return build(
        SanaTransformer2DModel,
        seed=40,
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=num_layers,
        num_attention_heads=2,
        attention_head_dim=16,
        num_cross_attention_heads=2,
        cross_attention_head_dim=16,
        cross_attention_dim=32,
        caption_channels=16,
        sample_size=32,
        guidance_embeds=guidance_embeds,
        qk_norm=qk_norm,
    )


@transformer("SanaTransformer2DModel")
def sana_transformer() -> tuple[nn.Module, Arguments]:
    def arguments() -> dict[str, Any]:
        return {
            "hidden_states": normal(2, 4, 8, 8),
            "encoder_hidden_states": normal(2, 5, 16, seed=1),
            "encoder_attention_mask": torch.ones(2, 5),
            "timestep": torch.tensor([700.0, 700.0]),
        }

    return sana_dit(), arguments
