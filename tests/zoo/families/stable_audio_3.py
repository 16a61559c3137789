"""Stable Audio 3: text and audio to audio, inpainting."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.assembly import arguments
from tests.zoo.building import build, normal
from tests.zoo.gemma import gemma_tokenizer, t5gemma_encoder
from tests.zoo.registry import Arguments, pipeline, transformer


def stable_audio_3_transformer(channels: int = 4) -> Any:
    from diffusers import StableAudio3DiTModel

    return build(
        StableAudio3DiTModel,
        97,
        io_channels=channels,
        embed_dim=32,
        depth=4,
        num_heads=2,
        cond_token_dim=32,
        global_cond_dim=32,
        local_add_cond_dim=channels + 1,
        timestep_features_dim=16,
        ff_mult=2.0,
        num_memory_tokens=4,
    )


@transformer("StableAudio3DiTModel")
def stable_audio_3() -> tuple[Any, Arguments]:
    def call() -> dict[str, Any]:
        return {
            "hidden_states": normal(1, 4, 8),
            "timestep": torch.tensor([0.5]),
            "encoder_hidden_states": normal(1, 16, 32, seed=1),
            "global_hidden_states": normal(1, 32, seed=2),
            "encoder_attention_mask": (torch.arange(16) < 12)[None],
            "local_add_cond": normal(1, 5, 8, seed=3),
        }

    return stable_audio_3_transformer(), call


def stable_audio_3_assembled(pipeline_class: type, stochastic: bool) -> Any:
    """`stochastic`: new noise in each step, as the distilled model has it. The VAE has 16 samples a latent."""
    from diffusers import AutoencoderSAME, FlowMatchEulerDiscreteScheduler
    from diffusers.pipelines.stable_audio_3.modeling_stable_audio_3 import StableAudio3DurationEmbedder

    return pipeline_class(
        vae=build(
            AutoencoderSAME,
            98,
            patch_size=4,
            encoder_channels=16,
            encoder_c_mults=(2,),
            encoder_strides=(4,),
            encoder_transformer_depths=(2,),
            latent_dim=4,
            dim_heads=8,
            sampling_rate=64,
        ),
        text_encoder=t5gemma_encoder(32),
        tokenizer=gemma_tokenizer(),
        duration_embedder=build(StableAudio3DurationEmbedder, 99, output_dim=32, fourier_dim=16),
        transformer=stable_audio_3_transformer(4),
        scheduler=FlowMatchEulerDiscreteScheduler(stochastic_sampling=stochastic),
    )


_CALL = {"prompt": "a hammer hits wood", "duration": 2.0, "num_inference_steps": 2, "output_type": "np"}


@pipeline("StableAudio3Pipeline")
def stable_audio_3_pipeline() -> tuple[Any, Arguments]:
    from diffusers import StableAudio3Pipeline

    pipe = stable_audio_3_assembled(StableAudio3Pipeline, stochastic=False)
    return pipe, arguments(**_CALL, negative_prompt="bad", guidance_scale=3.0)


@pipeline("StableAudio3AudioToAudioPipeline")
def stable_audio_3_audio_to_audio_pipeline() -> tuple[Any, Arguments]:
    from diffusers import StableAudio3AudioToAudioPipeline

    pipe = stable_audio_3_assembled(StableAudio3AudioToAudioPipeline, stochastic=True)
    return pipe, arguments(**_CALL, audio=normal(1, 2, 128).tanh(), init_noise_level=0.8)


@pipeline("StableAudio3InpaintPipeline")
def stable_audio_3_inpaint_pipeline() -> tuple[Any, Arguments]:
    from diffusers import StableAudio3InpaintPipeline

    pipe = stable_audio_3_assembled(StableAudio3InpaintPipeline, stochastic=True)
    return pipe, arguments(**_CALL, audio=normal(1, 2, 128).tanh(), mask_start_seconds=0.5, mask_end_seconds=1.5)
