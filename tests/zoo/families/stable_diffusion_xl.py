"""Stable Diffusion XL: text and image to image, inpainting, editing, adapters, video."""

from __future__ import annotations

from typing import Any

from tests.tiny import build_sdxl
from tests.zoo.assembly import arguments, assemble
from tests.zoo.building import generator, masked_half, picture
from tests.zoo.controls import motion_adapter, t2i_adapter
from tests.zoo.registry import Arguments, pipeline
from tests.zoo.unets import reshaped

TEXT: dict[str, Any] = {
    "prompt": "A squirrel",
    "negative_prompt": "bad",
    "num_inference_steps": 2,
    "guidance_scale": 5.0,
    "output_type": "np",
}
SIZED: dict[str, Any] = {**TEXT, "height": 32, "width": 32}
# Two steps of three: the rest of the noise is the picture's.
FROM_IMAGE: dict[str, Any] = {**TEXT, "num_inference_steps": 3, "strength": 0.8}
PERTURBED: dict[str, Any] = {"pag_applied_layers": ["down", "mid", "up"]}
"""Perturbed attention guidance replaces attention processors in every block."""


def sdxl_components() -> dict[str, Any]:
    """The components of a `StableDiffusionXLPipeline`."""
    return build_sdxl()[0].components


def ddim_scheduler() -> Any:
    """A `DDIMScheduler` with the noise of Stable Diffusion."""
    from diffusers import DDIMScheduler

    return DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, set_alpha_to_one=False
    )


@pipeline("StableDiffusionXLPipeline")
def text_to_image() -> tuple[Any, Arguments]:
    return build_sdxl()


@pipeline("StableDiffusionXLImg2ImgPipeline")
def image_to_image() -> tuple[Any, Arguments]:
    from diffusers import StableDiffusionXLImg2ImgPipeline

    pipe = assemble(StableDiffusionXLImg2ImgPipeline, sdxl_components())
    return pipe, arguments(**FROM_IMAGE, image=picture())


@pipeline("StableDiffusionXLInpaintPipeline")
def inpaint() -> tuple[Any, Arguments]:
    from diffusers import StableDiffusionXLInpaintPipeline

    pipe = assemble(StableDiffusionXLInpaintPipeline, sdxl_components())
    return pipe, arguments(**FROM_IMAGE, height=32, width=32, image=picture(), mask_image=masked_half())


@pipeline("StableDiffusionXLInstructPix2PixPipeline")
def instruct_pix2pix() -> tuple[Any, Arguments]:
    from diffusers import StableDiffusionXLInstructPix2PixPipeline

    components = sdxl_components()
    pipe = assemble(
        StableDiffusionXLInstructPix2PixPipeline, components, unet=reshaped(components["unet"], in_channels=8)
    )
    return pipe, arguments(**SIZED, image=picture(), image_guidance_scale=1.5)


@pipeline("StableDiffusionXLAdapterPipeline")
def adapter() -> tuple[Any, Arguments]:
    from diffusers import StableDiffusionXLAdapterPipeline

    components = sdxl_components()
    pipe = assemble(StableDiffusionXLAdapterPipeline, components, adapter=t2i_adapter(components["unet"]))
    return pipe, arguments(**SIZED, image=picture(), adapter_conditioning_scale=0.8)


@pipeline("StableDiffusionXLPAGPipeline")
def pag() -> tuple[Any, Arguments]:
    from diffusers import StableDiffusionXLPAGPipeline

    pipe = assemble(StableDiffusionXLPAGPipeline, sdxl_components(), **PERTURBED)
    return pipe, arguments(**SIZED, pag_scale=3.0)


@pipeline("StableDiffusionXLPAGImg2ImgPipeline")
def pag_image_to_image() -> tuple[Any, Arguments]:
    from diffusers import StableDiffusionXLPAGImg2ImgPipeline

    pipe = assemble(StableDiffusionXLPAGImg2ImgPipeline, sdxl_components(), **PERTURBED)
    return pipe, arguments(**FROM_IMAGE, image=picture(), pag_scale=3.0)


@pipeline("StableDiffusionXLPAGInpaintPipeline")
def pag_inpaint() -> tuple[Any, Arguments]:
    from diffusers import StableDiffusionXLPAGInpaintPipeline

    pipe = assemble(StableDiffusionXLPAGInpaintPipeline, sdxl_components(), **PERTURBED)
    return pipe, arguments(**FROM_IMAGE, height=32, width=32, image=picture(), mask_image=masked_half(), pag_scale=3.0)


@pipeline("AnimateDiffSDXLPipeline")
def animate_diff() -> tuple[Any, Arguments]:
    from diffusers import AnimateDiffSDXLPipeline

    components = sdxl_components()
    pipe = assemble(
        AnimateDiffSDXLPipeline,
        components,
        motion_adapter=motion_adapter(components["unet"]),
        scheduler=ddim_scheduler(),
    )
    return pipe, arguments(**SIZED, num_frames=2)


@pipeline("LEditsPPPipelineStableDiffusionXL")
def ledits_pp() -> tuple[Any, Arguments]:
    from diffusers import LEditsPPPipelineStableDiffusionXL

    pipe = assemble(LEditsPPPipelineStableDiffusionXL, sdxl_components(), scheduler=ddim_scheduler())

    def call() -> dict[str, Any]:
        # A call edits what was inverted last, and uses the inversion up.
        pipe.invert(image=picture(), num_inversion_steps=4, skip=0.25, height=32, width=32, generator=generator())
        return {"editing_prompt": ["a nut"], "edit_guidance_scale": 3.0, "output_type": "np"}

    return pipe, call


@pipeline("TextToVideoZeroSDXLPipeline")
def text_to_video_zero() -> tuple[Any, Arguments]:
    from diffusers import TextToVideoZeroSDXLPipeline

    pipe = assemble(TextToVideoZeroSDXLPipeline, sdxl_components(), scheduler=ddim_scheduler())
    return pipe, arguments(**{**SIZED, "num_inference_steps": 3}, video_length=2, t0=1, t1=2)
