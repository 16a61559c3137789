"""Stable Diffusion XL: text and image to image, inpainting, editing, adapters, video."""

from __future__ import annotations

from typing import Any

from tests.tiny import build_sdxl
from tests.zoo.assembly import arguments, assemble, register_all
from tests.zoo.building import generator, picture
from tests.zoo.controls import motion_adapter, t2i_adapter
from tests.zoo.registry import Arguments, pipeline
from tests.zoo.stable_diffusion import FROM_IMAGE, INPAINT, PERTURBED, SIZE, TEXT, ddim_scheduler
from tests.zoo.unets import reshaped


def sdxl_components() -> dict[str, Any]:
    """The components of a `StableDiffusionXLPipeline`."""
    return build_sdxl()[0].components


def plain(pipeline_class: type) -> Any:
    """A pipeline of these components."""
    return assemble(pipeline_class, sdxl_components(), **PERTURBED)


def editing(pipeline_class: type) -> Any:
    """A pipeline whose UNet reads the picture beside the latents."""
    components = sdxl_components()
    return assemble(pipeline_class, components, unet=reshaped(components["unet"], in_channels=8))


def adapted(pipeline_class: type) -> Any:
    """A pipeline with an adapter that fits its UNet."""
    components = sdxl_components()
    return assemble(pipeline_class, components, adapter=t2i_adapter(components["unet"]))


def moving(pipeline_class: type) -> Any:
    """A pipeline whose UNet has motion modules if its class knows them."""
    components = sdxl_components()
    return assemble(
        pipeline_class, components, motion_adapter=motion_adapter(components["unet"]), scheduler=ddim_scheduler()
    )


pipeline("StableDiffusionXLPipeline")(build_sdxl)
register_all(
    plain,
    {
        "StableDiffusionXLImg2ImgPipeline": FROM_IMAGE,
        "StableDiffusionXLInpaintPipeline": INPAINT,
        "StableDiffusionXLPAGPipeline": {**TEXT, **SIZE, "pag_scale": 3.0},
        "StableDiffusionXLPAGImg2ImgPipeline": {**FROM_IMAGE, "pag_scale": 3.0},
        "StableDiffusionXLPAGInpaintPipeline": {**INPAINT, "pag_scale": 3.0},
    },
)
register_all(
    editing,
    {
        "StableDiffusionXLInstructPix2PixPipeline": {
            **TEXT,
            **SIZE,
            "image": picture(),
            "image_guidance_scale": 1.5,
        }
    },
)
register_all(
    adapted,
    {"StableDiffusionXLAdapterPipeline": {**TEXT, **SIZE, "image": picture(), "adapter_conditioning_scale": 0.8}},
)
register_all(
    moving,
    {
        "AnimateDiffSDXLPipeline": {**TEXT, **SIZE, "num_frames": 2},
        # The steps between `t0` and `t1` run twice.
        "TextToVideoZeroSDXLPipeline": {
            **TEXT,
            **SIZE,
            "num_inference_steps": 3,
            "video_length": 2,
            "t0": 1,
            "t1": 2,
        },
    },
)


@pipeline("LEditsPPPipelineStableDiffusionXL")
def ledits_pp() -> tuple[Any, Arguments]:
    """Its call edits the picture that was inverted last, and uses the inversion up."""
    from diffusers import LEditsPPPipelineStableDiffusionXL

    pipe = assemble(LEditsPPPipelineStableDiffusionXL, sdxl_components(), scheduler=ddim_scheduler())
    edit = arguments(editing_prompt=["a nut"], edit_guidance_scale=3.0, output_type="np")

    def call() -> dict[str, Any]:
        pipe.invert(image=picture(), num_inversion_steps=4, skip=0.25, generator=generator(), **SIZE)
        return edit()

    return pipe, call
