"""Wan 2.1 and 2.2: text, image and video to video, VACE, Animate. A14B checkpoints have two DiTs; either may be
None."""

from typing import ClassVar

from diffusers_omni_offload.declarations import OffloadPlan
from diffusers_omni_offload.registry import register_adapter

_UMT5 = {"text_encoder": ("encoder.block",)}
_CLIP_VISION = {"image_encoder": ("encoder.layers|vision_model.encoder.layers",)}


@register_adapter("WanPipeline", "WanModularPipeline", "Wan22ModularPipeline", "Wan22Image2VideoModularPipeline")
class WanOffload:
    """Two DiTs: `transformer` for the noisy steps, then `transformer_2`."""

    _dit_modules: ClassVar[list[str]] = ["transformer", "transformer_2"]
    _encoder_modules: ClassVar[list[str]] = ["text_encoder"]
    _vae_modules: ClassVar[list[str]] = ["vae"]
    _resident_modules: ClassVar[list[str]] = []
    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs={"transformer": ("blocks",), "transformer_2": ("blocks",)},
        encoder_block_attrs=_UMT5,
        encoder_dlo_weight_replication=tuple(_UMT5),
        resident_dit_paths=("transformer", "transformer_2"),
    )


@register_adapter("WanImageToVideoPipeline", "WanImage2VideoModularPipeline")
class WanImageToVideoOffload(WanOffload):
    """As `WanOffload`, with the CLIP image encoder of Wan 2.1."""

    _encoder_modules: ClassVar[list[str]] = ["text_encoder", "image_encoder"]
    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs={"transformer": ("blocks",), "transformer_2": ("blocks",)},
        encoder_block_attrs=_UMT5 | _CLIP_VISION,
        encoder_dlo_weight_replication=tuple(_UMT5 | _CLIP_VISION),
        resident_dit_paths=("transformer", "transformer_2"),
    )


@register_adapter("WanVideoToVideoPipeline")
class WanSingleOffload(WanOffload):
    """One DiT."""

    _dit_modules: ClassVar[list[str]] = ["transformer"]
    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs={"transformer": ("blocks",)},
        encoder_block_attrs=_UMT5,
        encoder_dlo_weight_replication=tuple(_UMT5),
        resident_dit_paths=("transformer",),
    )


@register_adapter("WanAnimate2ModularPipeline", "WanAnimate2DistilledModularPipeline")
class WanSingleImageOffload(WanSingleOffload):
    """One DiT and the CLIP image encoder."""

    _encoder_modules: ClassVar[list[str]] = ["text_encoder", "image_encoder"]
    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs={"transformer": ("blocks",)},
        encoder_block_attrs=_UMT5 | _CLIP_VISION,
        encoder_dlo_weight_replication=tuple(_UMT5 | _CLIP_VISION),
        resident_dit_paths=("transformer",),
    )


@register_adapter("WanVACEPipeline")
class WanVACEOffload(WanOffload):
    """`vace_blocks` run before `blocks`, though they are registered after them."""

    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs={"transformer": ("vace_blocks", "blocks"), "transformer_2": ("vace_blocks", "blocks")},
        encoder_block_attrs=_UMT5,
        encoder_dlo_weight_replication=tuple(_UMT5),
        resident_dit_paths=("transformer", "transformer_2"),
    )


@register_adapter("Wan22VaceModularPipeline")
class WanVACEModularOffload(WanOffload):
    """VACE in the modular pipeline, where only the second DiT's class is fixed to have `vace_blocks`."""

    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs={
            "transformer": ("vace_blocks|blocks", "blocks"),
            "transformer_2": ("vace_blocks|blocks", "blocks"),
        },
        encoder_block_attrs=_UMT5,
        encoder_dlo_weight_replication=tuple(_UMT5),
        resident_dit_paths=("transformer", "transformer_2"),
    )


@register_adapter("WanAnimatePipeline")
class WanAnimateOffload(WanSingleImageOffload):
    """The face adapter runs after every fifth block and the motion encoder before all of them; both stay on the
    device."""

    _resident_modules: ClassVar[list[str]] = ["transformer.face_adapter", "transformer.motion_encoder"]
