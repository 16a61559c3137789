"""Stable Diffusion 3: text and image to image, inpainting, ControlNet."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests import tiny
from tests.tiny.transformers import sd3_transformer
from tests.tiny.vaes import kl_vae
from tests.zoo.assembly import arguments, assemble
from tests.zoo.building import build, masked_half, normal, picture
from tests.zoo.registry import Arguments, pipeline, transformer
from tests.zoo.seeding import seeded


@transformer("SD3Transformer2DModel")
def sd3_dit() -> tuple[nn.Module, Arguments]:
    def inputs() -> dict[str, Any]:
        return {
            "hidden_states": normal(2, 4, 8, 8),
            "encoder_hidden_states": normal(2, 5, 64, seed=1),
            "pooled_projections": normal(2, 64, seed=2),
            "timestep": torch.tensor([700.0, 700.0]),
        }

    return sd3_transformer(), inputs


@pipeline("StableDiffusion3Pipeline")
def sd3() -> tuple[Any, Arguments]:
    return tiny.build_sd3()


# The first two blocks have a second attention, which perturbed attention doesn't know.
PERTURBED = ["blocks.2"]


def sd3_pipeline(pipeline_class: type, **more: Any) -> Any:
    """A pipeline of Stable Diffusion 3's components and of `more`."""
    return assemble(pipeline_class, {**sd3()[0].components, **more})


def sd3_call(**more: Any) -> Arguments:
    """What makes the arguments that all pipelines of the family take, and `more`."""
    return arguments(
        prompt="a cat",
        negative_prompt="bad",
        height=16,
        width=16,
        num_inference_steps=2,
        guidance_scale=5.0,
        max_sequence_length=16,
        output_type="np",
        **more,
    )


def controlnet(extra_conditioning_channels: int = 0) -> Any:
    """An `SD3ControlNetModel` of two blocks; for inpainting it has a channel more, for the mask."""
    from diffusers import SD3ControlNetModel

    return build(
        SD3ControlNetModel,
        seed=67,
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=64,
        pooled_projection_dim=64,
        out_channels=4,
        pos_embed_max_size=16,
        extra_conditioning_channels=extra_conditioning_channels,
    )


def inpainting_dit() -> Any:
    """An `SD3Transformer2DModel` that is given noisy latents of 16 channels, the mask and what is kept."""
    from diffusers import SD3Transformer2DModel

    return build(
        SD3Transformer2DModel,
        seed=71,
        sample_size=8,
        patch_size=2,
        in_channels=33,
        num_layers=4,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=64,
        pooled_projection_dim=64,
        out_channels=16,
        pos_embed_max_size=16,
    )


@pipeline("StableDiffusion3Img2ImgPipeline")
def sd3_img2img() -> tuple[Any, Arguments]:
    from diffusers import StableDiffusion3Img2ImgPipeline

    return sd3_pipeline(StableDiffusion3Img2ImgPipeline), sd3_call(image=picture(16, 16), strength=1.0)


@pipeline("StableDiffusion3InpaintPipeline")
def sd3_inpaint() -> tuple[Any, Arguments]:
    from diffusers import StableDiffusion3InpaintPipeline

    pipe = sd3_pipeline(StableDiffusion3InpaintPipeline, transformer=inpainting_dit(), vae=kl_vae(16))
    return pipe, sd3_call(image=picture(16, 16), mask_image=masked_half(16, 16), strength=1.0)


@pipeline("StableDiffusion3ControlNetPipeline")
def sd3_controlnet() -> tuple[Any, Arguments]:
    from diffusers import StableDiffusion3ControlNetPipeline

    pipe = sd3_pipeline(StableDiffusion3ControlNetPipeline, controlnet=controlnet())
    return pipe, seeded(sd3_call(control_image=picture(16, 16)))


@pipeline("StableDiffusion3ControlNetInpaintingPipeline")
def sd3_controlnet_inpainting() -> tuple[Any, Arguments]:
    from diffusers import StableDiffusion3ControlNetInpaintingPipeline

    pipe = sd3_pipeline(StableDiffusion3ControlNetInpaintingPipeline, controlnet=controlnet(1))
    return pipe, seeded(sd3_call(control_image=picture(16, 16), control_mask=masked_half(16, 16)))


@pipeline("StableDiffusion3PAGPipeline")
def sd3_pag() -> tuple[Any, Arguments]:
    from diffusers import StableDiffusion3PAGPipeline

    return sd3_pipeline(StableDiffusion3PAGPipeline, pag_applied_layers=PERTURBED), sd3_call()


@pipeline("StableDiffusion3PAGImg2ImgPipeline")
def sd3_pag_img2img() -> tuple[Any, Arguments]:
    from diffusers import StableDiffusion3PAGImg2ImgPipeline

    pipe = sd3_pipeline(StableDiffusion3PAGImg2ImgPipeline, pag_applied_layers=PERTURBED)
    return pipe, sd3_call(image=picture(16, 16), strength=1.0)
