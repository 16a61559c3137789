"""HunyuanVideo 1.5: text and image to video."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.building import build, normal
from tests.zoo.registry import Arguments, transformer


def hunyuan_video15_transformer(task_type: str = "t2v") -> Any:
    from diffusers import HunyuanVideo15Transformer3DModel

    return build(
        HunyuanVideo15Transformer3DModel,
        65,
        in_channels=9,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=4,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        text_embed_dim=16,
        text_embed_2_dim=32,
        image_embed_dim=12,
        rope_axes_dim=(2, 6, 8),
        target_size=16,
        task_type=task_type,
    )


@transformer("HunyuanVideo15Transformer3DModel")
def hunyuan_video15() -> tuple[Any, Arguments]:
    def call() -> dict[str, Any]:
        return {
            "hidden_states": normal(1, 9, 2, 4, 4),
            "timestep": torch.tensor([500.0]),
            "encoder_hidden_states": normal(1, 8, 16, seed=1),
            "encoder_attention_mask": (torch.arange(8) < 6)[None],
            "encoder_hidden_states_2": normal(1, 4, 32, seed=2),
            "encoder_attention_mask_2": (torch.arange(4) < 3)[None],
            "image_embeds": normal(1, 3, 12, seed=3),
        }

    return hunyuan_video15_transformer(), call
