"""Stable Audio: text to audio."""

from __future__ import annotations

from typing import Any

import torch

from diffusers_omni_offload.demo.tiny_wan import t5_tokenizer
from tests.tiny import text_encoders
from tests.zoo.assembly import arguments
from tests.zoo.building import build, normal
from tests.zoo.oobleck import oobleck_vae
from tests.zoo.registry import Arguments, pipeline, transformer


def stable_audio_transformer(channels: int = 4) -> Any:
    from diffusers import StableAudioDiTModel

    return build(
        StableAudioDiTModel,
        95,
        sample_size=8,
        in_channels=channels,
        num_layers=4,
        attention_head_dim=8,
        num_attention_heads=4,
        num_key_value_attention_heads=2,
        out_channels=channels,
        cross_attention_dim=16,
        time_proj_dim=8,
        global_states_input_dim=64,
        cross_attention_input_dim=32,
    )


@transformer("StableAudioDiTModel")
def stable_audio() -> tuple[Any, Arguments]:
    from diffusers.models.embeddings import get_1d_rotary_pos_embed

    def call() -> dict[str, Any]:
        return {
            "hidden_states": normal(1, 4, 8),
            "timestep": torch.tensor([0.5]),
            "encoder_hidden_states": normal(1, 16, 32, seed=1),
            "global_hidden_states": normal(1, 1, 64, seed=2),
            "rotary_embedding": get_1d_rotary_pos_embed(4, 9, use_real=True, repeat_interleave_real=False),
        }

    return stable_audio_transformer(), call


@pipeline("StableAudioPipeline")
def stable_audio_pipeline() -> tuple[Any, Arguments]:
    from diffusers import EDMDPMSolverMultistepScheduler, StableAudioPipeline
    from diffusers.pipelines.stable_audio import StableAudioProjectionModel

    pipe = StableAudioPipeline(
        vae=oobleck_vae(4),
        text_encoder=text_encoders.t5_encoder(32),
        projection_model=build(
            StableAudioProjectionModel, 96, text_encoder_dim=32, conditioning_dim=32, min_value=0, max_value=32
        ),
        tokenizer=t5_tokenizer(16),
        transformer=stable_audio_transformer(4),
        scheduler=EDMDPMSolverMultistepScheduler(
            solver_order=2, prediction_type="v_prediction", sigma_data=1.0, sigma_schedule="exponential"
        ),
    )
    return pipe, arguments(
        prompt="a hammer hits wood",
        negative_prompt="bad",
        audio_end_in_s=2.0,
        num_inference_steps=2,
        guidance_scale=3.0,
        output_type="np",
    )
