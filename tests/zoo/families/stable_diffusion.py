"""Stable Diffusion 1 and 2: text and image to image, inpainting, editing, ControlNets, adapters."""

from __future__ import annotations

from typing import Any

from tests.zoo.assembly import arguments, assemble, register_all
from tests.zoo.building import generator, picture
from tests.zoo.controls import controlnet, t2i_adapter
from tests.zoo.image_encoders import clip_processor, clip_vision_projection, depth_estimator, safety_checker
from tests.zoo.registry import Arguments, pipeline
from tests.zoo.stable_diffusion import (
    CONTROL,
    CONTROL_IMAGE,
    FROM_IMAGE,
    INPAINT,
    PERTURBED,
    SIZE,
    TEXT,
    sd_components,
)


def checked(pipeline_class: type) -> Any:
    """A pipeline with a safety checker."""
    checker = {
        "safety_checker": safety_checker(),
        "feature_extractor": clip_processor(),
        "requires_safety_checker": True,
    }
    return assemble(pipeline_class, sd_components(), **checker, **PERTURBED)


def plain(pipeline_class: type) -> Any:
    """A pipeline without a safety checker."""
    return assemble(pipeline_class, sd_components(), **PERTURBED)


def controlled(pipeline_class: type) -> Any:
    """A pipeline with a ControlNet that fits its UNet."""
    components = sd_components()
    return assemble(pipeline_class, components, controlnet=controlnet(components["unet"]), **PERTURBED)


def adapted(pipeline_class: type) -> Any:
    """A pipeline with an adapter that fits its UNet."""
    components = sd_components()
    return assemble(pipeline_class, components, adapter=t2i_adapter(components["unet"]))


def editing(pipeline_class: type) -> Any:
    """A pipeline whose UNet reads the picture beside the latents."""
    return assemble(pipeline_class, sd_components(in_channels=8))


def reading_depth(pipeline_class: type) -> Any:
    """A pipeline whose UNet reads the picture's depth beside the latents."""
    estimator, processor = depth_estimator()
    return assemble(
        pipeline_class, sd_components(in_channels=5), depth_estimator=estimator, feature_extractor=processor
    )


def varying(pipeline_class: type) -> Any:
    """A pipeline that is told what to show by a picture."""
    return assemble(
        pipeline_class,
        sd_components(),
        image_encoder=clip_vision_projection(),
        feature_extractor=clip_processor(),
    )


register_all(checked, {"StableDiffusionPipeline": {**TEXT, **SIZE}})
register_all(
    plain,
    {
        "StableDiffusionImg2ImgPipeline": FROM_IMAGE,
        "StableDiffusionInpaintPipeline": INPAINT,
        "StableDiffusionPAGPipeline": {**TEXT, **SIZE, "pag_scale": 3.0},
        "StableDiffusionPAGImg2ImgPipeline": {**FROM_IMAGE, "pag_scale": 3.0},
        "StableDiffusionPAGInpaintPipeline": {**INPAINT, "pag_scale": 3.0},
    },
)
register_all(
    controlled,
    {
        "StableDiffusionControlNetPipeline": {**TEXT, **SIZE, **CONTROL, "image": picture()},
        "StableDiffusionControlNetImg2ImgPipeline": {**FROM_IMAGE, **SIZE, **CONTROL_IMAGE},
        "StableDiffusionControlNetInpaintPipeline": {**INPAINT, **CONTROL_IMAGE},
        "StableDiffusionControlNetPAGPipeline": {**TEXT, **SIZE, **CONTROL, "image": picture(), "pag_scale": 3.0},
        "StableDiffusionControlNetPAGInpaintPipeline": {**INPAINT, **CONTROL_IMAGE, "pag_scale": 3.0},
    },
)
register_all(
    adapted,
    {"StableDiffusionAdapterPipeline": {**TEXT, **SIZE, "image": picture(), "adapter_conditioning_scale": 0.8}},
)
register_all(
    editing,
    {"StableDiffusionInstructPix2PixPipeline": {**TEXT, "image": picture(), "image_guidance_scale": 1.5}},
)
register_all(reading_depth, {"StableDiffusionDepth2ImgPipeline": FROM_IMAGE})
register_all(
    varying,
    {
        "StableDiffusionImageVariationPipeline": {
            **SIZE,
            "image": picture(),
            "num_inference_steps": 2,
            "guidance_scale": 5.0,
            "output_type": "np",
        }
    },
)


@pipeline("LEditsPPPipelineStableDiffusion")
def ledits_pp() -> tuple[Any, Arguments]:
    """Its call edits the picture that was inverted last, and uses the inversion up."""
    from diffusers import DPMSolverMultistepScheduler, LEditsPPPipelineStableDiffusion

    scheduler = DPMSolverMultistepScheduler(algorithm_type="sde-dpmsolver++", solver_order=2)
    # Masks are made of cross attention where the picture is smallest.
    attending = {"down_block_types": ("CrossAttnDownBlock2D",) * 3, "up_block_types": ("CrossAttnUpBlock2D",) * 3}
    components = sd_components(**attending)
    pipe = assemble(LEditsPPPipelineStableDiffusion, components, scheduler=scheduler)
    edit = arguments(editing_prompt=["a nut"], edit_guidance_scale=3.0, output_type="np")

    def call() -> dict[str, Any]:
        pipe.invert(image=picture(), num_inversion_steps=4, skip=0.25, generator=generator(), **SIZE)
        return edit()

    return pipe, call
