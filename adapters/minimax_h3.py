"""MiniMax-H3: video and sound in one DiT, with a Qwen 3 VL text encoder and a refiner for the text. A checkpoint holds
two DiTs, the second one for reference images; a workflow loads its own."""

from typing import ClassVar

from diffusers_omni_offload.declarations import OffloadPlan
from diffusers_omni_offload.registry import register_adapter


@register_adapter("MiniMaxH3ModularPipeline")
class MiniMaxH3ModularOffload:
    """The blocks of the token refiner run before those of the DiT. The pipeline calls the text encoder's inner model,
    which has no language-model head."""

    _dit_modules: ClassVar[list[str]] = ["transformer", "transformer_ref"]
    _encoder_modules: ClassVar[list[str]] = ["text_encoder"]
    _vae_modules: ClassVar[list[str]] = ["vae", "audio_vae"]
    _resident_modules: ClassVar[list[str]] = []
    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs={"transformer": ("transformer_blocks",), "transformer_ref": ("transformer_blocks",)},
        encoder_block_attrs={"text_encoder": ("model.visual.blocks", "model.language_model.layers")},
        encoder_dlo_weight_replication=("text_encoder",),
        resident_dit_paths=("transformer", "transformer_ref"),
        offload_submodules={"token_refiner": "refiner_blocks"},
    )


@register_adapter("MiniMaxH3Pipeline")
class MiniMaxH3Offload:
    """Text encoder and VAEs load and offload themselves around their own entry points."""

    _dit_modules: ClassVar[list[str]] = ["transformer", "transformers_ref"]
    _encoder_modules: ClassVar[list[str]] = ["text_encoder"]
    _vae_modules: ClassVar[list[str]] = ["video_vae", "audio_vae"]
    _resident_modules: ClassVar[list[str]] = []
    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs={"transformer": ("blocks",), "transformers_ref": ("blocks",)},
        encoder_block_attrs={"text_encoder": ("vision.blocks", "text_model.layers")},
        on_demand_component_paths=("text_encoder", "video_vae", "audio_vae"),
        resident_dit_paths=("transformer", "transformers_ref"),
        offload_submodules={"token_refiner": "blocks"},
        entry_points={
            "transformer": ("prepare_rope_table",),
            "transformers_ref": ("prepare_rope_table",),
            "text_encoder": ("encode_ids",),
        },
    )
