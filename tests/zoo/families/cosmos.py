"""Cosmos 1, 2 and 2.5: worlds from texts, pictures and videos."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.building import build, normal
from tests.zoo.registry import Arguments, transformer


def cosmos_transformer(in_channels: int = 16, **config: Any) -> Any:
    """Without the padding mask, whose resizing needs torchvision."""
    from diffusers import CosmosTransformer3DModel

    sizes: dict[str, Any] = {
        "out_channels": 16,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 4,
        "mlp_ratio": 2.0,
        "text_embed_dim": 32,
        "adaln_lora_dim": 4,
        "max_size": (4, 32, 32),
        "concat_padding_mask": False,
    }
    return build(CosmosTransformer3DModel, 80, **{**sizes, "in_channels": in_channels, **config})


@transformer("CosmosTransformer3DModel")
def cosmos() -> tuple[Any, Arguments]:
    def call() -> dict[str, Any]:
        return {
            "hidden_states": normal(1, 16, 2, 4, 4),
            "timestep": torch.tensor([500.0]),
            "encoder_hidden_states": normal(1, 16, 32, seed=1),
            "attention_mask": (torch.arange(16) < 12)[None],
            "fps": 30,
        }

    return cosmos_transformer(), call
