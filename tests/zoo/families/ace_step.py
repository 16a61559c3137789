"""ACE-Step: songs from tags and lyrics."""

from __future__ import annotations

from typing import Any

import torch

from tests.tiny.pipelines import flow_scheduler
from tests.tiny.text_encoders import qwen3
from tests.tiny.tokenizers import qwen_tokenizer
from tests.zoo.assembly import arguments
from tests.zoo.building import build, normal
from tests.zoo.oobleck import oobleck_vae
from tests.zoo.registry import Arguments, pipeline, transformer


def ace_step_transformer() -> Any:
    from diffusers import AceStepTransformer1DModel

    return build(
        AceStepTransformer1DModel,
        100,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        in_channels=24,
        audio_acoustic_hidden_dim=8,
        patch_size=2,
        sliding_window=4,
    )


@transformer("AceStepTransformer1DModel")
def ace_step() -> tuple[Any, Arguments]:
    def call() -> dict[str, Any]:
        return {
            "hidden_states": normal(1, 21, 8),
            "timestep": torch.tensor([0.7]),
            "timestep_r": torch.tensor([0.4]),
            "encoder_hidden_states": normal(1, 16, 32, seed=1),
            "context_latents": normal(1, 21, 16, seed=2),
        }

    return ace_step_transformer(), call


@pipeline("AceStepPipeline")
def ace_step_pipeline() -> tuple[Any, Arguments]:
    """It reads the lyrics with the embedding of its text encoder alone."""
    from diffusers import AceStepPipeline
    from diffusers.pipelines.ace_step import AceStepConditionEncoder

    condition_encoder = build(
        AceStepConditionEncoder,
        101,
        hidden_size=32,
        intermediate_size=64,
        text_hidden_dim=32,
        timbre_hidden_dim=8,
        num_lyric_encoder_hidden_layers=3,
        num_timbre_encoder_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=16,
    )
    condition_encoder.silence_latent.copy_(normal(*condition_encoder.silence_latent.shape, seed=102))
    pipe = AceStepPipeline(
        vae=oobleck_vae(8),
        text_encoder=qwen3(32),
        tokenizer=qwen_tokenizer(),
        transformer=ace_step_transformer(),
        condition_encoder=condition_encoder,
        scheduler=flow_scheduler(),
    )
    return pipe, arguments(
        prompt="a piano",
        lyrics="la la",
        audio_duration=5.0,
        num_inference_steps=2,
        guidance_scale=3.0,
        max_text_length=64,
        max_lyric_length=32,
        output_type="np",
    )
