"""Ovis-Image: text to image, with a Qwen 3 text encoder."""

from typing import ClassVar

from diffusers_omni_offload.declarations import OffloadPlan
from diffusers_omni_offload.registry import register_adapter


@register_adapter("OvisImagePipeline")
class OvisImageOffload:
    """The text encoder is the bare language model, without a head."""

    _dit_modules: ClassVar[list[str]] = ["transformer"]
    _encoder_modules: ClassVar[list[str]] = ["text_encoder"]
    _vae_modules: ClassVar[list[str]] = ["vae"]
    _resident_modules: ClassVar[list[str]] = []
    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs={"transformer": ("transformer_blocks", "single_transformer_blocks")},
        encoder_block_attrs={"text_encoder": ("layers",)},
        encoder_dlo_weight_replication=("text_encoder",),
        resident_dit_paths=("transformer",),
    )
