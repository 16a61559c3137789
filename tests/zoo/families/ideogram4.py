"""Ideogram 4: text to image, with one DiT for the prompt and one without."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.tiny.pipelines import flow_scheduler
from tests.tiny.text_encoders import qwen3_vl
from tests.tiny.tokenizers import qwen_tokenizer
from tests.tiny.vaes import flux2_vae
from tests.zoo.assembly import arguments
from tests.zoo.building import build, normal
from tests.zoo.positions import grid_ids
from tests.zoo.registry import Arguments, pipeline, transformer


def ideogram4_dit(llm_features_dim: int = 64, seed: int = 221) -> Any:
    """An `Ideogram4Transformer2DModel`: text and image tokens in one sequence."""
    from diffusers import Ideogram4Transformer2DModel

    return build(
        Ideogram4Transformer2DModel,
        seed,
        in_channels=16,
        num_layers=4,
        attention_head_dim=16,
        num_attention_heads=2,
        intermediate_size=64,
        adaln_dim=16,
        llm_features_dim=llm_features_dim,
        mrope_section=(4, 2, 2),
    )


@transformer("Ideogram4Transformer2DModel")
def ideogram4_transformer() -> tuple[nn.Module, Arguments]:
    from diffusers.models.transformers.transformer_ideogram4 import LLM_TOKEN_INDICATOR, OUTPUT_IMAGE_INDICATOR

    def arguments() -> dict[str, Any]:
        text, image = 8, 16
        return {
            "hidden_states": normal(1, text + image, 16),
            "timestep": torch.tensor([0.5]),
            "encoder_hidden_states": normal(1, text + image, 64, seed=1),
            "position_ids": torch.cat([grid_ids(text, 1), grid_ids(4, 4)])[None].long(),
            "segment_ids": torch.ones(1, text + image, dtype=torch.long),
            "indicator": torch.tensor([[LLM_TOKEN_INDICATOR] * text + [OUTPUT_IMAGE_INDICATOR] * image]),
        }

    return ideogram4_dit(), arguments


@pipeline("Ideogram4Pipeline")
def ideogram4() -> tuple[Any, Arguments]:
    """The pipeline runs the text encoder's layers itself, one by one, and reads 13 of 36."""
    from diffusers import Ideogram4Pipeline

    features = 13 * 16
    pipe = Ideogram4Pipeline(
        scheduler=flow_scheduler(),
        vae=flux2_vae(),
        text_encoder=qwen3_vl(hidden=16, layers=36).model,
        tokenizer=qwen_tokenizer(),
        transformer=ideogram4_dit(features),
        unconditional_transformer=ideogram4_dit(features, seed=222),
    )
    call = arguments(
        prompt="a cat",
        height=16,
        width=16,
        num_inference_steps=2,
        guidance_scale=5.0,
        guidance_schedule=None,
        max_sequence_length=64,
        output_type="np",
    )
    return pipe, call
