"""Stable Diffusion 3 and 3.5: two CLIP text encoders and an optional T5, an optional image encoder, ControlNets."""

from typing import ClassVar

from diffusers_omni_offload.declarations import OffloadPlan
from diffusers_omni_offload.registry import register_adapter

_BLOCKS = {"transformer": ("transformer_blocks",)}
_TEXT = {
    "text_encoder": ("text_model.encoder.layers",),
    "text_encoder_2": ("text_model.encoder.layers",),
    "text_encoder_3": ("encoder.block",),
}
_SIGLIP = {"image_encoder": ("encoder.layers|vision_model.encoder.layers",)}


@register_adapter(
    "StableDiffusion3PAGPipeline", "StableDiffusion3PAGImg2ImgPipeline", "StableDiffusion3ModularPipeline"
)
class StableDiffusion3TextOffload:
    """Text encoders only. Skip-layer guidance leaves blocks out; the last block is smaller than the others."""

    _dit_modules: ClassVar[list[str]] = ["transformer"]
    _encoder_modules: ClassVar[list[str]] = ["text_encoder", "text_encoder_2", "text_encoder_3"]
    _vae_modules: ClassVar[list[str]] = ["vae"]
    _resident_modules: ClassVar[list[str]] = []
    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs=_BLOCKS,
        encoder_block_attrs=_TEXT,
        encoder_dlo_weight_replication=tuple(_TEXT),
        resident_dit_paths=("transformer",),
    )


@register_adapter("StableDiffusion3Pipeline", "StableDiffusion3Img2ImgPipeline", "StableDiffusion3InpaintPipeline")
class StableDiffusion3Offload(StableDiffusion3TextOffload):
    """With the image encoder that IP-Adapters use."""

    _encoder_modules: ClassVar[list[str]] = ["text_encoder", "text_encoder_2", "text_encoder_3", "image_encoder"]
    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs=_BLOCKS,
        encoder_block_attrs=_TEXT | _SIGLIP,
        encoder_dlo_weight_replication=tuple(_TEXT | _SIGLIP),
        resident_dit_paths=("transformer",),
    )


@register_adapter("StableDiffusion3ControlNetPipeline", "StableDiffusion3ControlNetInpaintingPipeline")
class StableDiffusion3ControlNetOffload(StableDiffusion3Offload):
    """The ControlNet runs before the DiT in each step, so it stays on the device."""

    _resident_modules: ClassVar[list[str]] = ["controlnet"]
