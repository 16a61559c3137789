"""Stable Diffusion XL: a UNet, two CLIP text encoders and, for IP-Adapters, a CLIP image encoder.

The UNet's `mid_block` runs between the two lists and is a block of its own kind, so it stays on the device.
"""

from typing import ClassVar

from diffusers_omni_offload.declarations import OffloadPlan
from diffusers_omni_offload.registry import register_adapter

_BLOCKS = {"unet": ("down_blocks", "up_blocks")}
_TEXT = {
    "text_encoder": ("text_model.encoder.layers|encoder.layers",),
    "text_encoder_2": ("text_model.encoder.layers",),
}
_CLIP_VISION = {"image_encoder": ("vision_model.encoder.layers",)}


@register_adapter("StableDiffusionXLInstructPix2PixPipeline")
class StableDiffusionXLTextOffload:
    """Text encoders only."""

    _dit_modules: ClassVar[list[str]] = ["unet"]
    _encoder_modules: ClassVar[list[str]] = ["text_encoder", "text_encoder_2"]
    _vae_modules: ClassVar[list[str]] = ["vae"]
    _resident_modules: ClassVar[list[str]] = []
    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs=_BLOCKS,
        encoder_block_attrs=_TEXT,
        encoder_dlo_weight_replication=tuple(_TEXT),
        resident_dit_paths=("unet",),
    )


@register_adapter("StableDiffusionXLControlNetXSPipeline")
class StableDiffusionXLControlNetXSOffload(StableDiffusionXLTextOffload):
    """The pipeline copies the adapter's weights into the UNet's blocks, so that both run as one."""

    _resident_modules: ClassVar[list[str]] = ["controlnet"]


@register_adapter(
    "StableDiffusionXLPipeline",
    "StableDiffusionXLImg2ImgPipeline",
    "StableDiffusionXLInpaintPipeline",
    "StableDiffusionXLPAGPipeline",
    "StableDiffusionXLPAGImg2ImgPipeline",
    "StableDiffusionXLPAGInpaintPipeline",
    "LEditsPPPipelineStableDiffusionXL",
    "TextToVideoZeroSDXLPipeline",
)
class StableDiffusionXLOffload(StableDiffusionXLTextOffload):
    """With the image encoder that IP-Adapters use."""

    _encoder_modules: ClassVar[list[str]] = ["text_encoder", "text_encoder_2", "image_encoder"]
    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs=_BLOCKS,
        encoder_block_attrs=_TEXT | _CLIP_VISION,
        encoder_dlo_weight_replication=tuple(_TEXT | _CLIP_VISION),
        resident_dit_paths=("unet",),
    )


@register_adapter(
    "StableDiffusionXLControlNetPipeline",
    "StableDiffusionXLControlNetImg2ImgPipeline",
    "StableDiffusionXLControlNetInpaintPipeline",
    "StableDiffusionXLControlNetPAGPipeline",
    "StableDiffusionXLControlNetPAGImg2ImgPipeline",
    "StableDiffusionXLControlNetUnionPipeline",
    "StableDiffusionXLControlNetUnionImg2ImgPipeline",
    "StableDiffusionXLControlNetUnionInpaintPipeline",
    "StableDiffusionXLModularPipeline",
)
class StableDiffusionXLControlNetOffload(StableDiffusionXLOffload):
    """The ControlNet runs before the UNet in each step, so it stays on the device."""

    _resident_modules: ClassVar[list[str]] = ["controlnet"]


@register_adapter("StableDiffusionXLAdapterPipeline")
class StableDiffusionXLAdapterOffload(StableDiffusionXLOffload):
    """The T2I-Adapter is small and runs once, before the steps."""

    _resident_modules: ClassVar[list[str]] = ["adapter"]


@register_adapter("AnimateDiffSDXLPipeline")
class AnimateDiffSDXLOffload(StableDiffusionXLOffload):
    """The pipeline copies the motion modules into the UNet's blocks."""

    _resident_modules: ClassVar[list[str]] = ["motion_adapter"]
