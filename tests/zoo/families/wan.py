"""Wan: text, image and video to video, VACE, Animate."""

from __future__ import annotations

from typing import Any

import torch

from diffusers_omni_offload.demo.tiny_wan import t5_tokenizer, wan_transformer
from tests.tiny import build_wan, build_wan_i2v, text_encoders, vaes
from tests.tiny.pipelines import unipc_scheduler
from tests.zoo.assembly import arguments, assemble
from tests.zoo.building import build, normal, picture
from tests.zoo.clips import clip
from tests.zoo.modular import assemble_modular
from tests.zoo.registry import Arguments, pipeline, transformer

# Widths that all DiTs of the family take.
WAN = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "text_dim": 32,
    "ffn_dim": 32,
    "num_layers": 4,
    "cross_attn_norm": True,
    "rope_max_seq_len": 32,
}

# What all pipelines of the family are called with.
WAN_CALL = {
    "prompt": "dance monkey",
    "negative_prompt": "negative",
    "height": 16,
    "width": 16,
    "num_inference_steps": 2,
    "guidance_scale": 6.0,
    "max_sequence_length": 16,
    "output_type": "np",
}


# Modular pipelines have a guider of their own.
MODULAR_CALL = {name: value for name, value in WAN_CALL.items() if name != "guidance_scale"}


def wan_components() -> dict[str, Any]:
    """What the pipelines of the family have beside the DiT."""
    return {
        "tokenizer": t5_tokenizer(),
        "text_encoder": text_encoders.umt5_encoder(),
        "vae": vaes.wan_vae(),
        "scheduler": unipc_scheduler(),
    }


def wan_arguments(channels: int = 16, frames: int = 2, size: int = 4) -> dict[str, Any]:
    """Noise, a time step and a text for one forward of a DiT of the family."""
    return {
        "hidden_states": normal(1, channels, frames, size, size),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": normal(1, 16, 32, seed=1),
    }


@transformer("WanTransformer3DModel")
def wan() -> tuple[Any, Arguments]:
    return wan_transformer(), wan_arguments


def vace_transformer(seed: int = 30) -> Any:
    from diffusers import WanVACETransformer3DModel

    return build(WanVACETransformer3DModel, seed, **WAN, vace_layers=[0, 1, 3], vace_in_channels=96)


@transformer("WanVACETransformer3DModel")
def wan_vace() -> tuple[Any, Arguments]:
    return vace_transformer(), lambda: {**wan_arguments(), "control_hidden_states": normal(1, 96, 2, 4, 4, seed=2)}


def animate_transformer() -> Any:
    from diffusers import WanAnimateTransformer3DModel

    return build(
        WanAnimateTransformer3DModel,
        31,
        **WAN,
        image_dim=16,
        added_kv_proj_dim=24,
        motion_encoder_channel_sizes={"4": 8, "8": 8, "16": 8},
        motion_encoder_size=16,
        motion_style_dim=8,
        motion_dim=4,
        motion_encoder_dim=16,
        face_encoder_hidden_dim=16,
        face_encoder_num_heads=2,
        inject_face_latents_blocks=2,
    )


@transformer("WanAnimateTransformer3DModel")
def wan_animate() -> tuple[Any, Arguments]:
    def call() -> dict[str, Any]:
        return {
            **wan_arguments(channels=36, frames=3),
            "encoder_hidden_states": normal(1, 512, 32, seed=1),
            "encoder_hidden_states_image": normal(1, 4, 16, seed=2),
            "pose_hidden_states": normal(1, 16, 2, 4, 4, seed=3),
            "face_pixel_values": normal(1, 3, 5, 16, 16, seed=4),
        }

    return animate_transformer(), call


@transformer("WanAnimate2Transformer3DModel")
def wan_animate_2() -> tuple[Any, Arguments]:
    """Its pass over the reference; the passes that generate need flex attention, which is too slow here uncompiled."""
    from diffusers import WanAnimate2Transformer3DModel
    from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache

    model = build(
        WanAnimate2Transformer3DModel,
        32,
        text_len=16,
        dim=24,
        ffn_dim=32,
        text_dim=32,
        num_heads=2,
        num_layers=4,
    )

    def call() -> dict[str, Any]:
        return {
            "hidden_states": [normal(16, 2, 4, 4)],
            "timestep": torch.tensor([500.0]),
            "encoder_hidden_states": [normal(12, 32, seed=1)],
            "condition_latents": [normal(20, 2, 4, 4, seed=2)],
            "kv_cache": WanAnimate2KVCache(4),
            "kv_cache_mode": "extract",
            "seq_len": 8,
            "encoder_hidden_states_image": normal(1, 4, 1280, seed=3),
            "offset_grid_sizes": torch.tensor([[2, 2, 2]]),
        }

    return model, call


@pipeline("WanPipeline")
def wan_pipeline() -> tuple[Any, Arguments]:
    return build_wan()


@pipeline("WanImageToVideoPipeline")
def wan_image_to_video_pipeline() -> tuple[Any, Arguments]:
    return build_wan_i2v()


@pipeline("WanVACEPipeline")
def wan_vace_pipeline() -> tuple[Any, Arguments]:
    from diffusers import WanVACEPipeline

    pipe = assemble(
        WanVACEPipeline,
        wan_components(),
        transformer=vace_transformer(),
        transformer_2=vace_transformer(33),
        boundary_ratio=0.875,
    )
    return pipe, arguments(**WAN_CALL, video=clip(5), mask=clip(5), reference_images=[picture(16, 16)], num_frames=5)


@pipeline("WanVideoToVideoPipeline")
def wan_video_to_video_pipeline() -> tuple[Any, Arguments]:
    from diffusers import WanVideoToVideoPipeline

    pipe = assemble(WanVideoToVideoPipeline, wan_components(), transformer=wan_transformer())
    return pipe, arguments(**WAN_CALL, video=clip(5))


@pipeline("WanAnimatePipeline")
def wan_animate_pipeline() -> tuple[Any, Arguments]:
    from diffusers import WanAnimatePipeline

    image_encoder, image_processor = text_encoders.clip_vision(16)
    pipe = assemble(
        WanAnimatePipeline,
        wan_components(),
        image_encoder=image_encoder,
        image_processor=image_processor,
        transformer=animate_transformer(),
    )
    call = {**WAN_CALL, "max_sequence_length": 512, "segment_frame_length": 5}
    return pipe, arguments(**call, image=picture(16, 16), pose_video=clip(5), face_video=clip(5))


@pipeline("WanModularPipeline")
def wan_modular_pipeline() -> tuple[Any, Arguments]:
    """Wan 2.2's blocks: two DiTs."""
    from diffusers import Wan22Blocks

    pipe = assemble_modular(
        Wan22Blocks, wan_components(), transformer=wan_transformer(seed=7), transformer_2=wan_transformer(seed=17)
    )
    return pipe, arguments(**MODULAR_CALL, num_frames=5)


@pipeline("WanImage2VideoModularPipeline")
def wan_image_to_video_modular_pipeline() -> tuple[Any, Arguments]:
    from diffusers import Wan22Image2VideoBlocks

    dits = {"transformer": wan_transformer(36, seed=7), "transformer_2": wan_transformer(36, seed=17)}
    pipe = assemble_modular(Wan22Image2VideoBlocks, wan_components(), **dits)
    return pipe, arguments(**MODULAR_CALL, image=picture(16, 16), num_frames=5)


@pipeline("Wan22VaceModularPipeline")
def wan_vace_modular_pipeline() -> tuple[Any, Arguments]:
    from diffusers import Wan22VaceBlocks

    dits = {"transformer": vace_transformer(), "transformer_2": vace_transformer(33)}
    pipe = assemble_modular(Wan22VaceBlocks, wan_components(), **dits)
    return pipe, arguments(**MODULAR_CALL, video=clip(5), mask=clip(5), num_frames=5)
