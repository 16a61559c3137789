"""Stable Diffusion XL with ControlNets: one kind of control, a union of kinds, and ControlNet-XS."""

from __future__ import annotations

from typing import Any

from tests.zoo.assembly import arguments, assemble
from tests.zoo.building import masked_half, picture
from tests.zoo.controls import controlnet, controlnet_union, controlnet_xs
from tests.zoo.families.stable_diffusion_xl import FROM_IMAGE, PERTURBED, SIZED, sdxl_components
from tests.zoo.registry import Arguments, pipeline

HALF: dict[str, Any] = {"controlnet_conditioning_scale": 0.5}


def controlled(pipeline_class: type, control: Any = controlnet, **more: Any) -> Any:
    """A pipeline whose UNet and ControlNet fit."""
    components = sdxl_components()
    return assemble(pipeline_class, components, controlnet=control(components["unet"]), **more)


@pipeline("StableDiffusionXLControlNetPipeline")
def text_to_image() -> tuple[Any, Arguments]:
    from diffusers import StableDiffusionXLControlNetPipeline

    return controlled(StableDiffusionXLControlNetPipeline), arguments(**SIZED, **HALF, image=picture())


@pipeline("StableDiffusionXLControlNetImg2ImgPipeline")
def image_to_image() -> tuple[Any, Arguments]:
    from diffusers import StableDiffusionXLControlNetImg2ImgPipeline

    return controlled(StableDiffusionXLControlNetImg2ImgPipeline), arguments(
        **FROM_IMAGE, **HALF, height=32, width=32, image=picture(), control_image=picture(seed=1)
    )


@pipeline("StableDiffusionXLControlNetInpaintPipeline")
def inpaint() -> tuple[Any, Arguments]:
    from diffusers import StableDiffusionXLControlNetInpaintPipeline

    return controlled(StableDiffusionXLControlNetInpaintPipeline), arguments(
        **FROM_IMAGE,
        **HALF,
        height=32,
        width=32,
        image=picture(),
        mask_image=masked_half(),
        control_image=picture(seed=1),
    )


@pipeline("StableDiffusionXLControlNetPAGPipeline")
def pag() -> tuple[Any, Arguments]:
    from diffusers import StableDiffusionXLControlNetPAGPipeline

    return controlled(StableDiffusionXLControlNetPAGPipeline, **PERTURBED), arguments(
        **SIZED, **HALF, image=picture(), pag_scale=3.0
    )


@pipeline("StableDiffusionXLControlNetPAGImg2ImgPipeline")
def pag_image_to_image() -> tuple[Any, Arguments]:
    from diffusers import StableDiffusionXLControlNetPAGImg2ImgPipeline

    return controlled(StableDiffusionXLControlNetPAGImg2ImgPipeline, **PERTURBED), arguments(
        **FROM_IMAGE, **HALF, height=32, width=32, image=picture(), control_image=picture(seed=1), pag_scale=3.0
    )


@pipeline("StableDiffusionXLControlNetUnionPipeline")
def union() -> tuple[Any, Arguments]:
    from diffusers import StableDiffusionXLControlNetUnionPipeline

    return controlled(StableDiffusionXLControlNetUnionPipeline, controlnet_union), arguments(
        **SIZED, **HALF, control_image=[picture(seed=1)], control_mode=[1]
    )


@pipeline("StableDiffusionXLControlNetUnionImg2ImgPipeline")
def union_image_to_image() -> tuple[Any, Arguments]:
    from diffusers import StableDiffusionXLControlNetUnionImg2ImgPipeline

    return controlled(StableDiffusionXLControlNetUnionImg2ImgPipeline, controlnet_union), arguments(
        **FROM_IMAGE,
        **HALF,
        height=32,
        width=32,
        image=picture(),
        control_image=[picture(seed=1)],
        control_mode=[1],
    )


@pipeline("StableDiffusionXLControlNetUnionInpaintPipeline")
def union_inpaint() -> tuple[Any, Arguments]:
    from diffusers import StableDiffusionXLControlNetUnionInpaintPipeline

    return controlled(StableDiffusionXLControlNetUnionInpaintPipeline, controlnet_union), arguments(
        **FROM_IMAGE,
        **HALF,
        height=32,
        width=32,
        image=picture(),
        mask_image=masked_half(),
        control_image=[picture(seed=1)],
        control_mode=[1],
    )


@pipeline("StableDiffusionXLControlNetXSPipeline")
def controlnet_xs_pipeline() -> tuple[Any, Arguments]:
    from diffusers import StableDiffusionXLControlNetXSPipeline

    return controlled(StableDiffusionXLControlNetXSPipeline, controlnet_xs), arguments(**SIZED, **HALF, image=picture())
