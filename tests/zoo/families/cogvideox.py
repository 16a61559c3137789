"""CogVideoX: text, image and video to video, control."""

from __future__ import annotations

from typing import Any

import torch

from diffusers_omni_offload.demo.tiny_wan import t5_tokenizer
from tests.tiny import text_encoders
from tests.zoo.assembly import arguments, assemble
from tests.zoo.building import build, normal, picture
from tests.zoo.clips import clip
from tests.zoo.registry import Arguments, pipeline, transformer

# ConsisID is a CogVideoX with a face in it.
COGVIDEOX = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "out_channels": 4,
    "time_embed_dim": 8,
    "text_embed_dim": 32,
    "num_layers": 4,
    "sample_width": 2,
    "sample_height": 2,
    "sample_frames": 9,
    "patch_size": 2,
    "temporal_compression_ratio": 4,
    "max_text_seq_length": 16,
}


def cogvideox_transformer(in_channels: int = 4, **config: Any) -> Any:
    from diffusers import CogVideoXTransformer3DModel

    return build(CogVideoXTransformer3DModel, 70, **{**COGVIDEOX, "in_channels": in_channels, **config})


def cogvideox_arguments() -> dict[str, Any]:
    return {
        "hidden_states": normal(1, 3, 4, 4, 4),
        "encoder_hidden_states": normal(1, 16, 32, seed=1),
        "timestep": torch.tensor([500]),
    }


@transformer("CogVideoXTransformer3DModel")
def cogvideox() -> tuple[Any, Arguments]:
    return cogvideox_transformer(), cogvideox_arguments


def cogvideox_components(**more: Any) -> dict[str, Any]:
    """What all pipelines of the family have beside the DiT; the VAE is 8x smaller in space, 4x in time."""
    from diffusers import AutoencoderKLCogVideoX, CogVideoXDDIMScheduler

    vae = build(
        AutoencoderKLCogVideoX,
        72,
        block_out_channels=(8, 8, 8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
        temporal_compression_ratio=4,
        sample_height=16,
        sample_width=16,
    )
    return {
        "tokenizer": t5_tokenizer(),
        "text_encoder": text_encoders.t5_encoder(32),
        "vae": vae,
        "scheduler": CogVideoXDDIMScheduler(),
        **more,
    }


COGVIDEOX_CALL = {
    "prompt": "dance monkey",
    "negative_prompt": "bad",
    "height": 16,
    "width": 16,
    "num_inference_steps": 2,
    "guidance_scale": 6.0,
    "max_sequence_length": 16,
    "output_type": "np",
}


@pipeline("CogVideoXPipeline")
def cogvideox_pipeline() -> tuple[Any, Arguments]:
    from diffusers import CogVideoXPipeline

    pipe = assemble(CogVideoXPipeline, cogvideox_components(transformer=cogvideox_transformer()))
    return pipe, arguments(**COGVIDEOX_CALL, num_frames=9)


@pipeline("CogVideoXImageToVideoPipeline")
def cogvideox_image_to_video_pipeline() -> tuple[Any, Arguments]:
    from diffusers import CogVideoXImageToVideoPipeline

    dit = cogvideox_transformer(8, use_rotary_positional_embeddings=True, use_learned_positional_embeddings=True)
    pipe = assemble(CogVideoXImageToVideoPipeline, cogvideox_components(transformer=dit))
    return pipe, arguments(**COGVIDEOX_CALL, image=picture(16, 16), num_frames=9)


@pipeline("CogVideoXVideoToVideoPipeline")
def cogvideox_video_to_video_pipeline() -> tuple[Any, Arguments]:
    from diffusers import CogVideoXVideoToVideoPipeline

    pipe = assemble(CogVideoXVideoToVideoPipeline, cogvideox_components(transformer=cogvideox_transformer()))
    return pipe, arguments(**COGVIDEOX_CALL, video=clip(9), strength=1.0)


@pipeline("CogVideoXFunControlPipeline")
def cogvideox_control_pipeline() -> tuple[Any, Arguments]:
    from diffusers import CogVideoXFunControlPipeline

    pipe = assemble(CogVideoXFunControlPipeline, cogvideox_components(transformer=cogvideox_transformer(8)))
    return pipe, arguments(**COGVIDEOX_CALL, control_video=clip(9))
