"""GLM-Image: an autoregressive model makes image tokens, a DiT paints them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.zoo.building import build, normal
from tests.zoo.registry import Arguments, transformer


def glm_image_dit(codebook: int = 32) -> Any:
    """A `GlmImageTransformer2DModel`."""
    from diffusers import GlmImageTransformer2DModel

    return build(
        GlmImageTransformer2DModel,
        201,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=4,
        attention_head_dim=16,
        num_attention_heads=2,
        text_embed_dim=32,
        time_embed_dim=16,
        condition_dim=4,
        prior_vq_quantizer_codebook_size=codebook,
    )


@transformer("GlmImageTransformer2DModel")
def glm_image_transformer() -> tuple[nn.Module, Arguments]:
    return glm_image_dit(), lambda: {
        "hidden_states": normal(1, 4, 8, 8),
        "encoder_hidden_states": normal(1, 8, 32, seed=1),
        "prior_token_id": torch.arange(16)[None] * 2,
        "prior_token_drop": torch.zeros(1, 16, dtype=torch.bool),
        "timestep": torch.tensor([500]),
        "target_size": torch.tensor([[16.0, 16.0]]),
        "crop_coords": torch.tensor([[0.0, 0.0]]),
    }
