"""LTX-Video: text and image to video, conditions, long videos."""

from __future__ import annotations

from typing import Any

import torch

from diffusers_omni_offload.demo.tiny_wan import t5_tokenizer
from tests.tiny import text_encoders
from tests.tiny.pipelines import flow_scheduler
from tests.zoo.assembly import arguments, assemble
from tests.zoo.building import build, normal, picture
from tests.zoo.clips import clip
from tests.zoo.modular import assemble_modular
from tests.zoo.registry import Arguments, pipeline, transformer


def ltx_transformer(channels: int = 8) -> Any:
    from diffusers import LTXVideoTransformer3DModel

    return build(
        LTXVideoTransformer3DModel,
        50,
        in_channels=channels,
        out_channels=channels,
        num_attention_heads=2,
        attention_head_dim=16,
        cross_attention_dim=32,
        num_layers=4,
        caption_channels=32,
    )


@transformer("LTXVideoTransformer3DModel")
def ltx() -> tuple[Any, Arguments]:
    def call() -> dict[str, Any]:
        return {
            "hidden_states": normal(1, 8, 8),
            "encoder_hidden_states": normal(1, 16, 32, seed=1),
            "timestep": torch.tensor([500.0]),
            "encoder_attention_mask": torch.ones(1, 16, dtype=torch.bool),
            "num_frames": 2,
            "height": 2,
            "width": 2,
            "rope_interpolation_scale": (8 / 25, 32, 32),
        }

    return ltx_transformer(), call


def ltx_vae() -> Any:
    """4x smaller in space and in time."""
    from diffusers import AutoencoderKLLTXVideo

    vae = build(
        AutoencoderKLLTXVideo,
        51,
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        patch_size=1,
        patch_size_t=1,
    )
    vae.use_framewise_encoding = vae.use_framewise_decoding = False
    return vae


def ltx_components() -> dict[str, Any]:
    return {
        "scheduler": flow_scheduler(),
        "vae": ltx_vae(),
        "text_encoder": text_encoders.t5_encoder(32),
        "tokenizer": t5_tokenizer(),
        "transformer": ltx_transformer(),
    }


LTX_CALL = {
    "prompt": "dance monkey",
    "negative_prompt": "negative",
    "height": 32,
    "width": 32,
    "num_frames": 9,
    "num_inference_steps": 2,
    "guidance_scale": 3.0,
    "max_sequence_length": 16,
    "output_type": "np",
}


def ltx_pipeline(pipeline_class: type, **fixed: Any) -> tuple[Any, Arguments]:
    return assemble(pipeline_class, ltx_components()), arguments(**{**LTX_CALL, **fixed})


@pipeline("LTXPipeline")
def ltx_text_to_video_pipeline() -> tuple[Any, Arguments]:
    from diffusers import LTXPipeline

    return ltx_pipeline(LTXPipeline)


@pipeline("LTXImageToVideoPipeline")
def ltx_image_to_video_pipeline() -> tuple[Any, Arguments]:
    from diffusers import LTXImageToVideoPipeline

    return ltx_pipeline(LTXImageToVideoPipeline, image=picture())


@pipeline("LTXConditionPipeline")
def ltx_condition_pipeline() -> tuple[Any, Arguments]:
    from diffusers import LTXConditionPipeline

    return ltx_pipeline(LTXConditionPipeline, video=clip(9, 32, 32), frame_index=0, strength=0.8)


@pipeline("LTXI2VLongMultiPromptPipeline")
def ltx_long_pipeline() -> tuple[Any, Arguments]:
    """Two windows of time, each with a prompt of its own."""
    from diffusers import LTXI2VLongMultiPromptPipeline

    return ltx_pipeline(
        LTXI2VLongMultiPromptPipeline,
        prompt="dance monkey|sleep monkey",
        num_inference_steps=3,
        num_frames=17,
        temporal_tile_size=12,
        temporal_overlap=4,
        cond_image=picture(),
        decode_horizontal_tiles=1,
        decode_vertical_tiles=1,
        decode_overlap=0,
        seed=0,
    )


@pipeline("LTXLatentUpsamplePipeline")
def ltx_upsample_pipeline() -> tuple[Any, Arguments]:
    from diffusers import LTXLatentUpsamplePipeline
    from diffusers.pipelines.ltx.modeling_latent_upsampler import LTXLatentUpsamplerModel

    upsampler = build(LTXLatentUpsamplerModel, 52, in_channels=8, mid_channels=32, num_blocks_per_stage=3)
    pipe = LTXLatentUpsamplePipeline(vae=ltx_vae(), latent_upsampler=upsampler)
    return pipe, arguments(video=clip(5, 32, 32), height=32, width=32, adain_factor=0.5, output_type="np")


@pipeline("LTXModularPipeline")
def ltx_modular_pipeline() -> tuple[Any, Arguments]:
    from diffusers import LTXAutoBlocks

    call = {name: value for name, value in LTX_CALL.items() if name != "guidance_scale"}
    return assemble_modular(LTXAutoBlocks, ltx_components()), arguments(**call, image=picture())
