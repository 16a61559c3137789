"""Nucleus-MoE-Image."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.tiny.pipelines import flow_scheduler
from tests.tiny.text_encoders import qwen3_vl
from tests.tiny.vaes import qwen_image_vae
from tests.zoo.assembly import arguments
from tests.zoo.building import build, generator, normal
from tests.zoo.processors import qwen3_vl_processor
from tests.zoo.registry import Arguments, pipeline, transformer


def nucleusmoe_image_dit() -> Any:
    """A `NucleusMoEImageTransformer2DModel`: a dense block, then blocks of experts."""
    from diffusers import NucleusMoEImageTransformer2DModel

    model = build(
        NucleusMoEImageTransformer2DModel,
        seed=49,
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=4,
        attention_head_dim=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        joint_attention_dim=32,
        axes_dims_rope=(8, 4, 4),
        dense_moe_strategy="leave_first_block_dense",
        num_experts=4,
        moe_intermediate_dim=24,
        capacity_factors=2.0,
    )
    # The class leaves the experts' weights uninitialised.
    drawn = generator(49)
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.data.normal_(std=0.1, generator=drawn)
    return model


@transformer("NucleusMoEImageTransformer2DModel")
def nucleusmoe_image_transformer() -> tuple[nn.Module, Arguments]:
    def inputs() -> dict[str, Any]:
        return {
            "hidden_states": normal(1, 16, 16),
            "img_shapes": [(1, 4, 4)],
            "encoder_hidden_states": normal(1, 5, 32, seed=1),
            "encoder_hidden_states_mask": torch.tensor([[True] * 4 + [False]]),
            "timestep": torch.tensor([0.7]),
        }

    return nucleusmoe_image_dit(), inputs


@pipeline("NucleusMoEImagePipeline")
def nucleusmoe_image() -> tuple[Any, Arguments]:
    from diffusers import NucleusMoEImagePipeline

    pipe = NucleusMoEImagePipeline(
        transformer=nucleusmoe_image_dit(),
        scheduler=flow_scheduler(),
        vae=qwen_image_vae(),
        text_encoder=qwen3_vl(32, 3),
        processor=qwen3_vl_processor(),
    )
    call = arguments(
        prompt="a cat",
        negative_prompt="bad",
        height=32,
        width=32,
        num_inference_steps=2,
        guidance_scale=4.0,
        max_sequence_length=256,
        return_index=-2,
        output_type="np",
    )
    return pipe, call
