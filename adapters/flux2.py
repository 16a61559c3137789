"""FLUX.2: the dev pipeline (Mistral 3 text encoder) and Klein (Qwen 3)."""

from typing import ClassVar

from diffusers_omni_offload.declarations import OffloadPlan
from diffusers_omni_offload.registry import register_adapter

_BLOCKS = {"transformer": ("transformer_blocks", "single_transformer_blocks")}


@register_adapter("Flux2Pipeline", "Flux2ModularPipeline")
class Flux2Offload:
    """The vision tower of the text encoder runs first, when the prompt has images."""

    _dit_modules: ClassVar[list[str]] = ["transformer"]
    _encoder_modules: ClassVar[list[str]] = ["text_encoder"]
    _vae_modules: ClassVar[list[str]] = ["vae"]
    _resident_modules: ClassVar[list[str]] = []
    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs=_BLOCKS,
        encoder_block_attrs={"text_encoder": ("model.vision_tower.transformer.layers", "model.language_model.layers")},
        encoder_dlo_weight_replication=("text_encoder",),
        resident_dit_paths=("transformer",),
    )


@register_adapter(
    "Flux2KleinPipeline",
    "Flux2KleinInpaintPipeline",
    "Flux2KleinKVPipeline",
    "Flux2KleinModularPipeline",
    "Flux2KleinBaseModularPipeline",
)
class Flux2KleinOffload(Flux2Offload):
    """A language model without a vision tower."""

    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs=_BLOCKS,
        encoder_block_attrs={"text_encoder": ("model.layers",)},
        encoder_dlo_weight_replication=("text_encoder",),
        resident_dit_paths=("transformer",),
    )
