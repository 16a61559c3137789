"""CogVideoX: text, image and video to video, control."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.building import build, normal
from tests.zoo.registry import Arguments, transformer

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
