"""Kandinsky 6: text and image to video with sound, and super-resolution of videos."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.zoo.building import build, normal
from tests.zoo.registry import Arguments, transformer


def kandinsky6_dit(channels: int = 16) -> Any:
    """A `Kandinsky6Transformer3DModel`: the text's blocks for video and for audio, then the fused ones."""
    from diffusers import Kandinsky6Transformer3DModel

    return build(
        Kandinsky6Transformer3DModel,
        seed=51,
        in_visual_dim=channels,
        out_visual_dim=channels,
        in_text_dim=32,
        in_text_dim2=32,
        time_dim=16,
        patch_size=(1, 2, 2),
        model_dim=32,
        ff_dim=48,
        num_text_blocks=3,
        num_visual_blocks=4,
        axes_dims=(4, 4, 8),
        in_audio_dim=8,
        out_audio_dim=8,
    )


@transformer("Kandinsky6Transformer3DModel")
def kandinsky6_transformer() -> tuple[nn.Module, Arguments]:
    def arguments() -> dict[str, Any]:
        return {
            "hidden_states": normal(1, 2, 8, 8, 33),
            "encoder_hidden_states": normal(1, 5, 32, seed=1),
            "pooled_projections": normal(1, 32, seed=2),
            "timestep": torch.tensor([700.0]),
            "audio_hidden_states": normal(1, 6, 8, seed=3),
        }

    return kandinsky6_dit(), arguments


def kandinsky6_sr_dit(channels: int = 4) -> Any:
    """A `Kandinsky6SRTransformer3DModel`, whose attention is sparse."""
    from diffusers import Kandinsky6SRTransformer3DModel

    return build(
        Kandinsky6SRTransformer3DModel,
        seed=52,
        in_visual_dim=channels,
        out_visual_dim=channels,
        time_dim=16,
        model_dim=32,
        ff_dim=48,
        num_visual_blocks=4,
        axes_dims=(4, 4, 8),
    )


@transformer("Kandinsky6SRTransformer3DModel")
def kandinsky6_sr_transformer() -> tuple[nn.Module, Arguments]:
    def arguments() -> dict[str, Any]:
        # The grid of tokens has to be divisible by 8.
        return {"hidden_states": normal(1, 2, 8, 16, 9), "timestep": torch.tensor([700.0])}

    return kandinsky6_sr_dit(), arguments
