"""FLUX.1 with a control image: in the DiT's input channels, or through a ControlNet."""

from __future__ import annotations

from typing import Any

from tests.zoo.building import build, masked_half, picture
from tests.zoo.families.flux import GUIDED, flux_call, flux_dit, flux_pipeline
from tests.zoo.registry import Arguments, pipeline


def flux_control_dit() -> Any:
    """A DiT that reads the latents and, in as many channels, those of the control image."""
    return flux_dit(in_channels=32, out_channels=16)


def flux_controlnet() -> Any:
    """A `FluxControlNetModel` with fewer blocks than the DiT, whose outputs are repeated."""
    from diffusers import FluxControlNetModel

    return build(
        FluxControlNetModel,
        104,
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        guidance_embeds=True,
        axes_dims_rope=[4, 4, 8],
    )


CONTROL = {"control_image": picture(16, 16, seed=1)}
IMAGE = {"image": picture(16, 16), "strength": 0.8, "num_inference_steps": 3}
MASK = {"mask_image": masked_half(16, 16)}


@pipeline("FluxControlPipeline")
def flux_control() -> tuple[Any, Arguments]:
    from diffusers import FluxControlPipeline

    return flux_pipeline(FluxControlPipeline, flux_control_dit()), flux_call(**CONTROL)


@pipeline("FluxControlImg2ImgPipeline")
def flux_control_img2img() -> tuple[Any, Arguments]:
    from diffusers import FluxControlImg2ImgPipeline

    return flux_pipeline(FluxControlImg2ImgPipeline, flux_control_dit()), flux_call(**CONTROL, **IMAGE)


@pipeline("FluxControlInpaintPipeline")
def flux_control_inpaint() -> tuple[Any, Arguments]:
    from diffusers import FluxControlInpaintPipeline

    return flux_pipeline(FluxControlInpaintPipeline, flux_control_dit()), flux_call(**CONTROL, **IMAGE, **MASK)


@pipeline("FluxControlNetPipeline")
def flux_controlnet_text_to_image() -> tuple[Any, Arguments]:
    from diffusers import FluxControlNetPipeline

    pipe = flux_pipeline(FluxControlNetPipeline, flux_dit(), controlnet=flux_controlnet())
    return pipe, flux_call(**CONTROL, **GUIDED)


@pipeline("FluxControlNetImg2ImgPipeline")
def flux_controlnet_img2img() -> tuple[Any, Arguments]:
    from diffusers import FluxControlNetImg2ImgPipeline

    pipe = flux_pipeline(FluxControlNetImg2ImgPipeline, flux_dit(), controlnet=flux_controlnet())
    return pipe, flux_call(**CONTROL, **IMAGE)


@pipeline("FluxControlNetInpaintPipeline")
def flux_controlnet_inpaint() -> tuple[Any, Arguments]:
    from diffusers import FluxControlNetInpaintPipeline

    pipe = flux_pipeline(FluxControlNetInpaintPipeline, flux_dit(), controlnet=flux_controlnet())
    return pipe, flux_call(**CONTROL, **IMAGE, **MASK)
