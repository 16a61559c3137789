"""PRX, in latents and in pixels."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.zoo.building import build, normal
from tests.zoo.registry import Arguments, transformer


def prx_dit(in_channels: int = 4, **config: Any) -> Any:
    """A `PRXTransformer2DModel`."""
    from diffusers.models.transformers.transformer_prx import PRXTransformer2DModel

    return build(
        PRXTransformer2DModel,
        seed=45,
        in_channels=in_channels,
        patch_size=2,
        context_in_dim=16,
        hidden_size=32,
        mlp_ratio=2.0,
        num_heads=2,
        depth=4,
        axes_dim=[8, 8],
        **config,
    )


@transformer("PRXTransformer2DModel")
def prx_transformer() -> tuple[nn.Module, Arguments]:
    def arguments() -> dict[str, Any]:
        return {
            "hidden_states": normal(2, 4, 8, 8),
            "timestep": torch.tensor([0.7, 0.7]),
            "encoder_hidden_states": normal(2, 5, 16, seed=1),
            "attention_mask": torch.tensor([[True] * 5, [True] * 3 + [False] * 2]),
        }

    return prx_dit(), arguments
