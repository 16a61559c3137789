"""Qwen-Image 2.1."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.tiny.pipelines import flow_scheduler
from tests.tiny.text_encoders import qwen3_vl
from tests.zoo.assembly import arguments
from tests.zoo.building import build, normal, picture
from tests.zoo.processors import qwen3_vl_processor
from tests.zoo.registry import Arguments, pipeline, transformer


def qwen_image_21_dit() -> Any:
    """A `QwenImage21Transformer2DModel`."""
    from diffusers import QwenImage21Transformer2DModel

    return build(
        QwenImage21Transformer2DModel,
        seed=44,
        patch_size=1,
        in_channels=16,
        out_channels=16,
        num_layers=4,
        attention_head_dim=16,
        num_attention_heads=2,
        context_in_dim=32,
        axes_dims_rope=(4, 4, 8),
    )


@transformer("QwenImage21Transformer2DModel")
def qwen_image_21_transformer() -> tuple[nn.Module, Arguments]:
    def inputs() -> dict[str, Any]:
        # 5 tokens of text; each slot of the target stands for 4 of its 16 patches.
        slots = torch.tensor([[False] * 5 + [True] * 4])
        return {
            "hidden_states": normal(1, 16, 16),
            "encoder_hidden_states": normal(1, 5, 32, seed=1),
            "timestep": torch.tensor([0.7]),
            "img_shapes": [[(1, 4, 4)]],
            "img_mask": slots,
        }

    return qwen_image_21_dit(), inputs


def qwen_image_21_vae() -> Any:
    """An `AutoencoderKLQwenImage21` with 16 latent channels, 16x smaller in space; pictures have an alpha channel."""
    from diffusers import AutoencoderKLQwenImage21

    return build(
        AutoencoderKLQwenImage21,
        seed=66,
        base_dim=4,
        decoder_base_dim=4,
        z_dim=16,
        dim_mult=[1, 1, 1, 2, 2],
        num_res_blocks=1,
        latents_mean=[0.0] * 16,
        latents_std=[1.0] * 16,
    )


@pipeline("QwenImage21Pipeline")
def qwen_image_21() -> tuple[Any, Arguments]:
    from diffusers import QwenImage21Pipeline

    pipe = QwenImage21Pipeline(
        scheduler=flow_scheduler(),
        vae=qwen_image_21_vae(),
        text_encoder=qwen3_vl(32, 3),
        processor=qwen3_vl_processor(),
        transformer=qwen_image_21_dit(),
    )
    call = arguments(
        prompt="a cat",
        negative_prompt="bad",
        image=picture(64, 64),
        output_resolution=64,
        num_inference_steps=2,
        true_cfg_scale=3.0,
        output_type="np",
    )
    return pipe, call
