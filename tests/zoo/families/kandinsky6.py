"""Kandinsky 6: text and image to video with sound, and super-resolution of videos."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.tiny.pipelines import flow_scheduler
from tests.tiny.text_encoders import clip_text, qwen25_vl
from tests.tiny.tokenizers import clip_tokenizer
from tests.zoo.assembly import arguments
from tests.zoo.building import build, normal, picture
from tests.zoo.clips import clip
from tests.zoo.families.hunyuan_video import hunyuan_vae
from tests.zoo.processors import qwen2_vl_processor
from tests.zoo.registry import Arguments, pipeline, transformer

CHANNELS = 4
AUDIO_CHANNELS = 8
MEL_BINS = 16


def kandinsky6_dit() -> Any:
    """A `Kandinsky6Transformer3DModel`: the text's blocks for video and for audio, then the fused ones."""
    from diffusers import Kandinsky6Transformer3DModel

    return build(
        Kandinsky6Transformer3DModel,
        seed=51,
        in_visual_dim=CHANNELS,
        out_visual_dim=CHANNELS,
        in_text_dim=32,
        in_text_dim2=32,
        time_dim=16,
        patch_size=(1, 2, 2),
        model_dim=32,
        ff_dim=48,
        num_text_blocks=3,
        num_visual_blocks=4,
        axes_dims=(4, 4, 8),
        in_audio_dim=AUDIO_CHANNELS,
        out_audio_dim=AUDIO_CHANNELS,
        visual_token_type_num_embeddings=2,
    )


@transformer("Kandinsky6Transformer3DModel")
def kandinsky6_transformer() -> tuple[nn.Module, Arguments]:
    def inputs() -> dict[str, Any]:
        return {
            "hidden_states": normal(1, 2, 8, 8, 2 * CHANNELS + 1),
            "encoder_hidden_states": normal(1, 5, 32, seed=1),
            "pooled_projections": normal(1, 32, seed=2),
            "timestep": torch.tensor([700.0]),
            "audio_hidden_states": normal(1, 6, AUDIO_CHANNELS, seed=3),
        }

    return kandinsky6_dit(), inputs


def kandinsky6_sr_dit() -> Any:
    """A `Kandinsky6SRTransformer3DModel`, whose attention is sparse."""
    from diffusers import Kandinsky6SRTransformer3DModel

    return build(
        Kandinsky6SRTransformer3DModel,
        seed=52,
        in_visual_dim=CHANNELS,
        out_visual_dim=CHANNELS,
        time_dim=16,
        model_dim=32,
        ff_dim=48,
        num_visual_blocks=4,
        axes_dims=(4, 4, 8),
        tile_sizes=((32, 32),),
    )


@transformer("Kandinsky6SRTransformer3DModel")
def kandinsky6_sr_transformer() -> tuple[nn.Module, Arguments]:
    def inputs() -> dict[str, Any]:
        # The grid of tokens has to be divisible by 8.
        return {"hidden_states": normal(1, 2, 8, 16, 2 * CHANNELS + 1), "timestep": torch.tensor([700.0])}

    return kandinsky6_sr_dit(), inputs


def sound_parts() -> dict[str, Any]:
    """The VAE of the sound, which gives a spectrogram, and the vocoder, which makes it a wave; both coarse in time."""
    from diffusers import MMAudioVAE, MMAudioVocoder

    audio_vae = build(
        MMAudioVAE,
        seed=73,
        mel_bins=MEL_BINS,
        latent_channels=AUDIO_CHANNELS,
        hidden_channels=16,
        channel_multipliers=(1, 2),
        layers_per_block=1,
        sample_rate=1600,
        n_fft=64,
        hop_length=8,
    )
    vocoder = build(
        MMAudioVocoder,
        seed=74,
        num_mels=MEL_BINS,
        upsample_initial_channel=16,
        upsample_rates=(4, 2),
        upsample_kernel_sizes=(8, 4),
        resblock_kernel_sizes=(3,),
        resblock_dilation_sizes=((1, 3, 5),),
    )
    return {"audio_vae": audio_vae, "vocoder": vocoder}


@pipeline("Kandinsky6TI2VAPipeline")
def kandinsky6_ti2va() -> tuple[Any, Arguments]:
    from diffusers import Kandinsky6TI2VAPipeline

    pipe = Kandinsky6TI2VAPipeline(
        transformer=kandinsky6_dit(),
        vae=hunyuan_vae(),
        text_encoder=qwen25_vl(32),
        tokenizer=qwen2_vl_processor(),
        text_encoder_2=clip_text(False),
        tokenizer_2=clip_tokenizer(),
        scheduler=flow_scheduler(),
        **sound_parts(),
    )
    call = arguments(
        prompt="a cat",
        negative_prompt="bad",
        image=picture(),
        height=32,
        width=32,
        num_frames=5,
        num_inference_steps=2,
        guidance_scale=4.0,
        max_sequence_length=512,
        output_type="np",
    )
    return pipe, call


@pipeline("Kandinsky6SRPipeline")
def kandinsky6_sr() -> tuple[Any, Arguments]:
    from diffusers import Kandinsky6SRLatentUpscalerBank, Kandinsky6SRPipeline, Kandinsky6SRVAE

    vae = build(
        Kandinsky6SRVAE,
        seed=75,
        latent_channels=CHANNELS,
        encoder_block_out_channels=(16, 32, 32),
        decoder_block_out_channels=(16, 32, 32),
        layers_per_block=1,
    )
    upscaler = build(
        Kandinsky6SRLatentUpscalerBank,
        seed=76,
        in_channels=CHANNELS,
        stage_channels=(32, 32, 32),
        num_pre_blocks=1,
        num_mid_blocks=1,
        num_post_blocks=1,
        num_x2_adapter_blocks=1,
        scales=(2,),
    )
    pipe = Kandinsky6SRPipeline(
        transformer=kandinsky6_sr_dit(), vae=vae, scheduler=flow_scheduler(), latent_upscaler=upscaler
    )
    # Wide enough for two tiles.
    call = arguments(video=clip(5, 16, 24), resolution_scale=2, num_inference_steps=2, output_type="np")
    return pipe, call
