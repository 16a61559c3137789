"""LongCat-AudioDiT: text to speech."""

from __future__ import annotations

from typing import Any

import torch

from diffusers_omni_offload.demo.tiny_wan import t5_tokenizer
from tests.tiny import text_encoders
from tests.tiny.pipelines import flow_scheduler
from tests.zoo.assembly import arguments
from tests.zoo.building import build, normal
from tests.zoo.registry import Arguments, pipeline, transformer


def longcat_audio_transformer(latent_dim: int = 8) -> Any:
    from diffusers import LongCatAudioDiTTransformer

    return build(
        LongCatAudioDiTTransformer,
        105,
        dit_dim=32,
        dit_depth=4,
        dit_heads=4,
        dit_text_dim=32,
        latent_dim=latent_dim,
        ff_mult=2.0,
    )


@transformer("LongCatAudioDiTTransformer")
def longcat_audio_dit() -> tuple[Any, Arguments]:
    def call() -> dict[str, Any]:
        return {
            "hidden_states": normal(1, 10, 8),
            "encoder_hidden_states": normal(1, 16, 32, seed=1),
            "encoder_attention_mask": torch.arange(16)[None] < 12,
            "timestep": torch.tensor([0.5]),
            "attention_mask": torch.arange(10)[None] < 9,
            "latent_cond": normal(1, 10, 8, seed=2),
        }

    return longcat_audio_transformer(), call


@pipeline("LongCatAudioDiTPipeline")
def longcat_audio_dit_pipeline() -> tuple[Any, Arguments]:
    from diffusers import LongCatAudioDiTPipeline
    from diffusers.models.autoencoders.autoencoder_longcat_audio_dit import LongCatAudioDiTVae

    vae = build(
        LongCatAudioDiTVae,
        106,
        channels=8,
        c_mults=[1, 2],
        strides=[4, 4],
        latent_dim=8,
        encoder_latent_dim=16,
        downsampling_ratio=16,
        sample_rate=64,
    )
    pipe = LongCatAudioDiTPipeline(
        vae=vae,
        text_encoder=text_encoders.umt5_encoder(),
        tokenizer=t5_tokenizer(),
        transformer=longcat_audio_transformer(8),
        scheduler=flow_scheduler(),
    )
    return pipe, arguments(
        prompt="hello there",
        negative_prompt="bad",
        audio_duration_s=2.5,
        num_inference_steps=2,
        guidance_scale=3.0,
        output_type="np",
    )
