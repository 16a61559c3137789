"""Allegro: text to video."""

from __future__ import annotations

from typing import Any

import torch

from diffusers_omni_offload.demo.tiny_wan import t5_tokenizer
from tests.tiny import text_encoders
from tests.zoo.assembly import arguments
from tests.zoo.building import build, normal
from tests.zoo.registry import Arguments, pipeline, transformer


def allegro_transformer() -> Any:
    from diffusers import AllegroTransformer3DModel

    return build(
        AllegroTransformer3DModel,
        76,
        num_attention_heads=2,
        attention_head_dim=12,
        num_layers=4,
        cross_attention_dim=24,
        sample_height=2,
        sample_width=2,
        sample_frames=2,
        caption_channels=32,
    )


@transformer("AllegroTransformer3DModel")
def allegro() -> tuple[Any, Arguments]:
    def call() -> dict[str, Any]:
        return {
            "hidden_states": normal(1, 4, 2, 4, 4),
            "encoder_hidden_states": normal(1, 16, 32, seed=1),
            "timestep": torch.tensor([500]),
            "attention_mask": torch.ones(1, 2, 4, 4),
            "encoder_attention_mask": (torch.arange(16) < 12)[None],
            "image_rotary_emb": None,
        }

    return allegro_transformer(), call


@pipeline("AllegroPipeline")
def allegro_pipeline() -> tuple[Any, Arguments]:
    from diffusers import AllegroPipeline, AutoencoderKLAllegro, DDIMScheduler

    vae = build(
        AutoencoderKLAllegro,
        79,
        block_out_channels=(8, 8, 8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
        temporal_compression_ratio=4,
        sample_size=16,
    )
    # It decodes in tiles only, which have 24 frames.
    vae.enable_tiling()
    pipe = AllegroPipeline(
        tokenizer=t5_tokenizer(),
        text_encoder=text_encoders.t5_encoder(32),
        vae=vae,
        transformer=allegro_transformer(),
        scheduler=DDIMScheduler(),
    )
    return pipe, arguments(
        prompt="dance monkey",
        negative_prompt="bad",
        height=16,
        width=16,
        num_frames=24,
        num_inference_steps=2,
        guidance_scale=6.0,
        max_sequence_length=16,
        clean_caption=False,
        output_type="np",
    )
