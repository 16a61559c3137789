"""Text-to-video UNets: the transformer over time that stands before their blocks."""

from __future__ import annotations

from typing import Any

from tests.zoo.building import build, normal
from tests.zoo.registry import Arguments, transformer


@transformer("TransformerTemporalModel")
def transformer_temporal() -> tuple[Any, Arguments]:
    from diffusers.models.transformers import TransformerTemporalModel

    model = build(
        TransformerTemporalModel,
        116,
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=8,
        num_layers=4,
        norm_num_groups=4,
        cross_attention_dim=8,
    )
    return model, lambda: {"hidden_states": normal(3, 8, 4, 4), "num_frames": 3}
