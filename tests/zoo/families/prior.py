"""The prior of Kandinsky 2 and unCLIP: a text's CLIP embedding becomes an image's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.zoo.building import build, normal
from tests.zoo.registry import Arguments, transformer


def prior_dit() -> Any:
    """A `PriorTransformer` for texts of 77 tokens."""
    from diffusers import PriorTransformer

    return build(
        PriorTransformer,
        231,
        num_attention_heads=2,
        attention_head_dim=12,
        num_layers=4,
        embedding_dim=32,
        num_embeddings=77,
    )


@transformer("PriorTransformer")
def prior_transformer() -> tuple[nn.Module, Arguments]:
    return prior_dit(), lambda: {
        "hidden_states": normal(2, 32),
        "timestep": torch.tensor([500, 500]),
        "proj_embedding": normal(2, 32, seed=1),
        "encoder_hidden_states": normal(2, 77, 32, seed=2),
        "attention_mask": (torch.arange(77) < 9).repeat(2, 1),
    }
