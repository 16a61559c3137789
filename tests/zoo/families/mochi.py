"""Mochi: text to video."""

from __future__ import annotations

from typing import Any

import torch

from diffusers_omni_offload.demo.tiny_wan import t5_tokenizer
from tests.tiny import text_encoders
from tests.tiny.pipelines import flow_scheduler
from tests.zoo.assembly import arguments
from tests.zoo.building import build, normal
from tests.zoo.registry import Arguments, pipeline, transformer


def mochi_transformer() -> Any:
    from diffusers import MochiTransformer3DModel

    return build(
        MochiTransformer3DModel,
        75,
        patch_size=2,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=4,
        pooled_projection_dim=16,
        in_channels=12,
        text_embed_dim=32,
        time_embed_dim=4,
        max_sequence_length=16,
    )


@transformer("MochiTransformer3DModel")
def mochi() -> tuple[Any, Arguments]:
    def call() -> dict[str, Any]:
        return {
            "hidden_states": normal(1, 12, 2, 4, 4),
            "encoder_hidden_states": normal(1, 16, 32, seed=1),
            "timestep": torch.tensor([500]),
            "encoder_attention_mask": (torch.arange(16) < 12)[None],
        }

    return mochi_transformer(), call


@pipeline("MochiPipeline")
def mochi_pipeline() -> tuple[Any, Arguments]:
    from diffusers import AutoencoderKLMochi, MochiPipeline

    vae = build(
        AutoencoderKLMochi,
        74,
        latent_channels=12,
        encoder_block_out_channels=(32, 32, 32, 32),
        decoder_block_out_channels=(32, 32, 32, 32),
        layers_per_block=(1, 1, 1, 1, 1),
    )
    pipe = MochiPipeline(
        scheduler=flow_scheduler(),
        vae=vae,
        text_encoder=text_encoders.t5_encoder(32),
        tokenizer=t5_tokenizer(),
        transformer=mochi_transformer(),
    )
    return pipe, arguments(
        prompt="dance monkey",
        negative_prompt="bad",
        height=16,
        width=16,
        num_frames=7,
        num_inference_steps=2,
        guidance_scale=4.5,
        max_sequence_length=16,
        output_type="np",
    )
