"""PixArt-Alpha and PixArt-Sigma."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.zoo.building import build, normal
from tests.zoo.registry import Arguments, transformer


def pixart_dit() -> Any:
    """A `PixArtTransformer2DModel` that predicts the variance, too."""
    from diffusers import PixArtTransformer2DModel

    return build(
        PixArtTransformer2DModel,
        seed=41,
        sample_size=8,
        num_layers=4,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=3,
        caption_channels=32,
        in_channels=4,
        cross_attention_dim=24,
        out_channels=8,
        use_additional_conditions=False,
    )


@transformer("PixArtTransformer2DModel")
def pixart_transformer() -> tuple[nn.Module, Arguments]:
    def arguments() -> dict[str, Any]:
        return {
            "hidden_states": normal(2, 4, 8, 8),
            "encoder_hidden_states": normal(2, 5, 32, seed=1),
            "encoder_attention_mask": torch.tensor([[1.0, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
            "timestep": torch.tensor([700, 700]),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        }

    return pixart_dit(), arguments
