"""Stable Diffusion XL with ControlNets: one kind of control, a union of kinds, and ControlNet-XS."""

from __future__ import annotations

from typing import Any

from tests.zoo.assembly import assemble, register_all
from tests.zoo.building import picture
from tests.zoo.controls import controlnet, controlnet_union, controlnet_xs
from tests.zoo.families.stable_diffusion_xl import sdxl_components
from tests.zoo.stable_diffusion import CONTROL, CONTROL_IMAGE, FROM_IMAGE, INPAINT, PERTURBED, SIZE, TEXT

# A picture of the second of the kinds that the ControlNet knows.
KIND: dict[str, Any] = {**CONTROL, "control_image": [picture(seed=1)], "control_mode": [1]}


def controlled(pipeline_class: type) -> Any:
    """A pipeline with a ControlNet that fits its UNet."""
    components = sdxl_components()
    return assemble(pipeline_class, components, controlnet=controlnet(components["unet"]), **PERTURBED)


def controlled_by_kind(pipeline_class: type) -> Any:
    """A pipeline with a ControlNet for several kinds of control."""
    components = sdxl_components()
    return assemble(pipeline_class, components, controlnet=controlnet_union(components["unet"]))


def controlled_within(pipeline_class: type) -> Any:
    """A pipeline whose ControlNet is woven into its UNet."""
    components = sdxl_components()
    return assemble(pipeline_class, components, controlnet=controlnet_xs(components["unet"]))


register_all(
    controlled,
    {
        "StableDiffusionXLControlNetPipeline": {**TEXT, **SIZE, **CONTROL, "image": picture()},
        "StableDiffusionXLControlNetImg2ImgPipeline": {**FROM_IMAGE, **SIZE, **CONTROL_IMAGE},
        "StableDiffusionXLControlNetInpaintPipeline": {**INPAINT, **CONTROL_IMAGE},
        "StableDiffusionXLControlNetPAGPipeline": {**TEXT, **SIZE, **CONTROL, "image": picture(), "pag_scale": 3.0},
        "StableDiffusionXLControlNetPAGImg2ImgPipeline": {**FROM_IMAGE, **SIZE, **CONTROL_IMAGE, "pag_scale": 3.0},
    },
)
register_all(
    controlled_by_kind,
    {
        "StableDiffusionXLControlNetUnionPipeline": {**TEXT, **SIZE, **KIND},
        "StableDiffusionXLControlNetUnionImg2ImgPipeline": {**FROM_IMAGE, **SIZE, **KIND},
        "StableDiffusionXLControlNetUnionInpaintPipeline": {**INPAINT, **KIND},
    },
)
register_all(
    controlled_within,
    {"StableDiffusionXLControlNetXSPipeline": {**TEXT, **SIZE, **CONTROL, "image": picture()}},
)
