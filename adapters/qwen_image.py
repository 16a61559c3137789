"""Qwen-Image (Qwen 2.5 VL text encoder) and Qwen-Image 2.1 (Qwen 3 VL): text to image, editing, inpainting, layers,
ControlNet."""

from typing import ClassVar

from diffusers_omni_offload.declarations import OffloadPlan
from diffusers_omni_offload.registry import register_adapter


@register_adapter(
    "QwenImagePipeline",
    "QwenImageImg2ImgPipeline",
    "QwenImageInpaintPipeline",
    "QwenImageEditPipeline",
    "QwenImageEditInpaintPipeline",
    "QwenImageEditPlusPipeline",
    "QwenImageLayeredPipeline",
    "QwenImageEditModularPipeline",
    "QwenImageEditPlusModularPipeline",
    "QwenImageLayeredModularPipeline",
    "QwenImage21Pipeline",
    "QwenImage21ModularPipeline",
    "QwenImage21TurboModularPipeline",
)
class QwenImageOffload:
    """The vision blocks of the text encoder run first, when the prompt has images."""

    _dit_modules: ClassVar[list[str]] = ["transformer"]
    _encoder_modules: ClassVar[list[str]] = ["text_encoder"]
    _vae_modules: ClassVar[list[str]] = ["vae"]
    _resident_modules: ClassVar[list[str]] = []
    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs={"transformer": ("transformer_blocks",)},
        encoder_block_attrs={"text_encoder": ("model.visual.blocks", "model.language_model.layers")},
        encoder_dlo_weight_replication=("text_encoder",),
        resident_dit_paths=("transformer",),
    )


@register_adapter("QwenImageControlNetPipeline", "QwenImageControlNetInpaintPipeline", "QwenImageModularPipeline")
class QwenImageControlNetOffload(QwenImageOffload):
    """The ControlNet runs before the DiT in each step, so it stays on the device."""

    _resident_modules: ClassVar[list[str]] = ["controlnet"]
