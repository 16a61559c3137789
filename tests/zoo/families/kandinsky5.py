"""Kandinsky 5: text and image to image and to video."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.zoo.building import build, normal
from tests.zoo.registry import Arguments, transformer


def kandinsky5_dit(visual_cond: bool = False, channels: int = 16) -> Any:
    """A `Kandinsky5Transformer3DModel`; `visual_cond` gives it the latents of a picture and their mask."""
    from diffusers import Kandinsky5Transformer3DModel

    return build(
        Kandinsky5Transformer3DModel,
        seed=50,
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
        visual_cond=visual_cond,
    )


@transformer("Kandinsky5Transformer3DModel")
def kandinsky5_transformer() -> tuple[nn.Module, Arguments]:
    def arguments() -> dict[str, Any]:
        return {
            "hidden_states": normal(1, 2, 8, 8, 16),
            "encoder_hidden_states": normal(1, 5, 32, seed=1),
            "timestep": torch.tensor([700.0]),
            "pooled_projections": normal(1, 32, seed=2),
            "visual_rope_pos": [torch.arange(2), torch.arange(4), torch.arange(4)],
            "text_rope_pos": torch.arange(5),
        }

    return kandinsky5_dit(), arguments
