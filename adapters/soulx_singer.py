"""SoulX-Singer: a singing voice from a score (SVS) or from another voice (SVC), by flow matching over mel frames."""

from typing import ClassVar

from diffusers_omni_offload.declarations import OffloadPlan
from diffusers_omni_offload.registry import register_adapter

_DIT = "cfm_decoder.model.diff_estimator"


@register_adapter("SoulXSingerPipeline", "PipelineSoulXSingerSVS")
class SoulXSingerOffload:
    """Long songs are made in segments: encoders, DiT and vocoder take turns several times in a call."""

    _dit_modules: ClassVar[list[str]] = [_DIT]
    _encoder_modules: ClassVar[list[str]] = [
        "mel",
        "f0_encoder",
        "preflow",
        "note_text_encoder",
        "note_pitch_encoder",
        "note_type_encoder",
    ]
    _vae_modules: ClassVar[list[str]] = ["vocoder"]
    _resident_modules: ClassVar[list[str]] = ["cfm_decoder.model.cond_emb"]
    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs={_DIT: ("layers",)},
        resident_dit_paths=(_DIT,),
    )


@register_adapter("SoulXSingerSVCPipeline", "PipelineSoulXSingerSVC")
class SoulXSingerSVCOffload(SoulXSingerOffload):
    """A Whisper encoder, through its `encode`, in place of the score's encoders."""

    _encoder_modules: ClassVar[list[str]] = ["whisper_encoder", "mel", "f0_encoder"]
