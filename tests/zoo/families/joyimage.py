"""JoyImage Edit and Edit Plus."""

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
from tests.zoo.seeding import seeded


def joyimage_dit(plus: bool = False) -> Any:
    """A `JoyImageEditTransformer3DModel`, or a `JoyImageEditPlusTransformer3DModel`."""
    from diffusers import JoyImageEditPlusTransformer3DModel, JoyImageEditTransformer3DModel

    return build(
        JoyImageEditPlusTransformer3DModel if plus else JoyImageEditTransformer3DModel,
        seed=48,
        patch_size=[1, 2, 2],
        in_channels=4,
        hidden_size=32,
        num_attention_heads=2,
        text_dim=32,
        mlp_width_ratio=2.0,
        num_layers=4,
        rope_dim_list=[4, 6, 6],
    )


@transformer("JoyImageEditTransformer3DModel")
def joyimage_transformer() -> tuple[nn.Module, Arguments]:
    def inputs() -> dict[str, Any]:
        return {
            # Two items: the picture to edit, and the one that is being made.
            "hidden_states": normal(1, 2, 4, 1, 8, 8),
            "timestep": torch.tensor([700.0]),
            "encoder_hidden_states": normal(1, 5, 32, seed=1),
        }

    return joyimage_dit(), inputs


@transformer("JoyImageEditPlusTransformer3DModel")
def joyimage_plus_transformer() -> tuple[nn.Module, Arguments]:
    def inputs() -> dict[str, Any]:
        return {
            # 16 patches of the picture in the making and 8 of a reference.
            "hidden_states": normal(1, 24, 4, 1, 2, 2),
            "timestep": torch.tensor([700.0]),
            "encoder_hidden_states": normal(1, 5, 32, seed=1),
            "encoder_hidden_states_mask": torch.tensor([[1.0, 1, 1, 1, 0]]),
            "shape_list": [[(1, 4, 4), (1, 4, 2)]],
        }

    return joyimage_dit(plus=True), inputs


def coarse_vae() -> Any:
    """An `AutoencoderKLWan` that is 32x smaller in space: the pipelines scale every picture up to 1024 x 1024."""
    from diffusers import AutoencoderKLWan

    return build(
        AutoencoderKLWan,
        seed=72,
        base_dim=2,
        z_dim=4,
        dim_mult=[1] * 6,
        num_res_blocks=0,
        temperal_downsample=[False, False, False, False, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
        scale_factor_temporal=2,
        scale_factor_spatial=32,
    )


def joyimage_pipeline(pipeline_class: type, plus: bool) -> Any:
    """A pipeline of JoyImage's components."""
    processor = qwen3_vl_processor()
    return pipeline_class(
        scheduler=flow_scheduler(),
        vae=coarse_vae(),
        text_encoder=qwen3_vl(32, 3),
        tokenizer=processor.tokenizer,
        transformer=joyimage_dit(plus),
        processor=processor,
    )


def joyimage_call(**more: Any) -> Arguments:
    """What makes the arguments that both pipelines take, and `more`."""
    call = arguments(prompt="a cat", negative_prompt="bad", num_inference_steps=2, guidance_scale=4.0, **more)
    return seeded(call)


@pipeline("JoyImageEditPipeline")
def joyimage_edit() -> tuple[Any, Arguments]:
    from diffusers import JoyImageEditPipeline

    # It paints at 1024 x 1024, which takes long to decode.
    call = joyimage_call(image=picture(), output_type="latent")
    return joyimage_pipeline(JoyImageEditPipeline, plus=False), call


@pipeline("JoyImageEditPlusPipeline")
def joyimage_edit_plus() -> tuple[Any, Arguments]:
    from diffusers import JoyImageEditPlusPipeline

    call = joyimage_call(images=[picture()], height=128, width=128, output_type="np")
    return joyimage_pipeline(JoyImageEditPlusPipeline, plus=True), call
