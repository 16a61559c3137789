"""HunyuanVideo: text and image to video, SkyReels, FramePack."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.building import build, normal
from tests.zoo.registry import Arguments, transformer

HUNYUAN = {
    "num_attention_heads": 2,
    "attention_head_dim": 10,
    "num_layers": 3,
    "num_single_layers": 4,
    "num_refiner_layers": 1,
    "patch_size": 2,
    "text_embed_dim": 16,
    "pooled_projection_dim": 8,
    "rope_axes_dim": (2, 4, 4),
}


def hunyuan_video_transformer(**config: Any) -> Any:
    from diffusers import HunyuanVideoTransformer3DModel

    return build(HunyuanVideoTransformer3DModel, 60, **{**HUNYUAN, "in_channels": 4, "out_channels": 4, **config})


def framepack_transformer(**config: Any) -> Any:
    from diffusers import HunyuanVideoFramepackTransformer3DModel

    sizes = {"in_channels": 4, "out_channels": 4, "has_image_proj": True, "image_proj_dim": 16}
    return build(
        HunyuanVideoFramepackTransformer3DModel, 61, **{**HUNYUAN, **sizes, "has_clean_x_embedder": True, **config}
    )


def hunyuan_arguments(frames: int = 2) -> dict[str, Any]:
    """One forward of either DiT, with a padded text."""
    return {
        "hidden_states": normal(1, 4, frames, 4, 4),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": normal(1, 8, 16, seed=1),
        "encoder_attention_mask": (torch.arange(8) < 6)[None],
        "pooled_projections": normal(1, 8, seed=2),
        "guidance": torch.tensor([6000.0]),
    }


@transformer("HunyuanVideoTransformer3DModel")
def hunyuan_video() -> tuple[Any, Arguments]:
    return hunyuan_video_transformer(), hunyuan_arguments


@transformer("HunyuanVideoFramepackTransformer3DModel")
def framepack() -> tuple[Any, Arguments]:
    def call() -> dict[str, Any]:
        return {
            **hunyuan_arguments(),
            "image_embeds": normal(1, 3, 16, seed=3),
            "indices_latents": torch.arange(7, 9),
            "latents_clean": normal(1, 4, 2, 4, 4, seed=4),
            "indices_latents_clean": torch.tensor([0, 6]),
            "latents_history_2x": normal(1, 4, 2, 4, 4, seed=5),
            "indices_latents_history_2x": torch.arange(4, 6),
            "latents_history_4x": normal(1, 4, 4, 4, 4, seed=6),
            "indices_latents_history_4x": torch.arange(4),
        }

    return framepack_transformer(), call
