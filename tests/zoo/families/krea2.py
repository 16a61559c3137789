"""Krea 2."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.tiny.pipelines import flow_scheduler
from tests.tiny.text_encoders import qwen3_vl
from tests.tiny.tokenizers import qwen_tokenizer
from tests.tiny.vaes import qwen_image_vae
from tests.zoo.assembly import arguments
from tests.zoo.building import build, normal
from tests.zoo.registry import Arguments, pipeline, transformer

TEXT_LAYERS = 3


def krea2_dit() -> Any:
    """A `Krea2Transformer2DModel`: it fuses hidden states of several layers of the text encoder first."""
    from diffusers import Krea2Transformer2DModel

    return build(
        Krea2Transformer2DModel,
        seed=46,
        in_channels=16,
        num_layers=4,
        attention_head_dim=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=48,
        timestep_embed_dim=16,
        text_hidden_dim=32,
        num_text_layers=TEXT_LAYERS,
        text_num_attention_heads=2,
        text_num_key_value_heads=1,
        text_intermediate_size=48,
        axes_dims_rope=(4, 6, 6),
    )


@transformer("Krea2Transformer2DModel")
def krea2_transformer() -> tuple[nn.Module, Arguments]:
    def inputs() -> dict[str, Any]:
        return {
            "hidden_states": normal(1, 16, 16),
            "encoder_hidden_states": normal(1, 5, TEXT_LAYERS, 32, seed=1),
            "timestep": torch.tensor([0.7]),
            "position_ids": torch.arange(63.0).reshape(21, 3),
            "encoder_attention_mask": torch.tensor([[True] * 4 + [False]]),
        }

    return krea2_dit(), inputs


@pipeline("Krea2Pipeline")
def krea2() -> tuple[Any, Arguments]:
    from diffusers import Krea2Pipeline

    pipe = Krea2Pipeline(
        scheduler=flow_scheduler(),
        vae=qwen_image_vae(),
        text_encoder=qwen3_vl(32, TEXT_LAYERS).model,
        tokenizer=qwen_tokenizer(),
        transformer=krea2_dit(),
        text_encoder_select_layers=range(1, TEXT_LAYERS + 1),
    )
    call = arguments(
        prompt="a cat",
        negative_prompt="bad",
        height=32,
        width=32,
        num_inference_steps=2,
        guidance_scale=4.5,
        max_sequence_length=256,
        output_type="np",
    )
    return pipe, call
