"""LongCat-Image: text to image and editing, with a Qwen 2.5 VL text encoder that also rewrites prompts."""

from typing import ClassVar

from diffusers_omni_offload.declarations import OffloadPlan
from diffusers_omni_offload.registry import register_adapter


@register_adapter("LongCatImagePipeline", "LongCatImageEditPipeline")
class LongCatImageOffload:
    """The vision blocks of the text encoder run first, when the prompt has an image."""

    _dit_modules: ClassVar[list[str]] = ["transformer"]
    _encoder_modules: ClassVar[list[str]] = ["text_encoder"]
    _vae_modules: ClassVar[list[str]] = ["vae"]
    _resident_modules: ClassVar[list[str]] = []
    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs={"transformer": ("transformer_blocks", "single_transformer_blocks")},
        encoder_block_attrs={"text_encoder": ("model.visual.blocks", "model.language_model.layers")},
        encoder_dlo_weight_replication=("text_encoder",),
        resident_dit_paths=("transformer",),
    )
