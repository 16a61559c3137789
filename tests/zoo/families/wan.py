"""Wan: text, image and video to video, VACE, Animate."""

from __future__ import annotations

from typing import Any

import torch

from diffusers_omni_offload.demo.tiny_wan import wan_transformer
from tests.zoo.building import build, normal
from tests.zoo.registry import Arguments, transformer

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


@transformer("WanVACETransformer3DModel")
def wan_vace() -> tuple[Any, Arguments]:
    from diffusers import WanVACETransformer3DModel

    model = build(WanVACETransformer3DModel, 30, **WAN, vace_layers=[0, 1, 3], vace_in_channels=96)
    return model, lambda: {**wan_arguments(), "control_hidden_states": normal(1, 96, 2, 4, 4, seed=2)}


@transformer("WanAnimateTransformer3DModel")
def wan_animate() -> tuple[Any, Arguments]:
    from diffusers import WanAnimateTransformer3DModel

    model = build(
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

    def call() -> dict[str, Any]:
        return {
            **wan_arguments(channels=36, frames=3),
            "encoder_hidden_states": normal(1, 512, 32, seed=1),
            "encoder_hidden_states_image": normal(1, 4, 16, seed=2),
            "pose_hidden_states": normal(1, 16, 2, 4, 4, seed=3),
            "face_pixel_values": normal(1, 3, 5, 16, 16, seed=4),
        }

    return model, call


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
