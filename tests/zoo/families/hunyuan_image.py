"""HunyuanImage 2.1: text to image, and its refiner."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.zoo.building import build, normal
from tests.zoo.registry import Arguments, transformer


def hunyuan_image_dit() -> Any:
    """A `HunyuanImageTransformer2DModel` for the embeddings of Qwen 2.5 VL and of ByT5."""
    from diffusers import HunyuanImageTransformer2DModel

    return build(
        HunyuanImageTransformer2DModel,
        151,
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=3,
        num_single_layers=4,
        num_refiner_layers=2,
        patch_size=(1, 1),
        text_embed_dim=32,
        text_embed_2_dim=32,
        rope_axes_dim=(8, 8),
    )


@transformer("HunyuanImageTransformer2DModel")
def hunyuan_image_transformer() -> tuple[nn.Module, Arguments]:
    return hunyuan_image_dit(), lambda: {
        "hidden_states": normal(1, 4, 6, 6),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": normal(1, 10, 32, seed=1),
        "encoder_attention_mask": (torch.arange(10) < 7).long()[None],
        "encoder_hidden_states_2": normal(1, 6, 32, seed=2),
        "encoder_attention_mask_2": (torch.arange(6) < 4).long()[None],
    }
