"""The transformers that sit inside UNets' blocks, alone: no pipeline has them as a component."""

from __future__ import annotations

from torch import nn

from tests.zoo.building import build, normal
from tests.zoo.registry import Arguments, transformer


@transformer("Transformer2DModel")
def transformer_2d() -> tuple[nn.Module, Arguments]:
    from diffusers import Transformer2DModel

    return build(
        Transformer2DModel,
        241,
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=16,
        num_layers=4,
        norm_num_groups=4,
        cross_attention_dim=24,
    ), lambda: {
        "hidden_states": normal(1, 16, 6, 6),
        "encoder_hidden_states": normal(1, 8, 24, seed=1),
    }


@transformer("DreamLiteTransformer2DModel")
def dreamlite_transformer_2d() -> tuple[nn.Module, Arguments]:
    from diffusers.models.transformers import DreamLiteTransformer2DModel

    return build(
        DreamLiteTransformer2DModel,
        242,
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=16,
        num_layers=4,
        norm_num_groups=4,
        cross_attention_dim=24,
        qk_norm="rms_norm",
    ), lambda: {
        "hidden_states": normal(1, 16, 6, 6),
        "encoder_hidden_states": normal(1, 8, 24, seed=1),
    }
