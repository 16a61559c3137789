"""NextStep-1.1: an autoregressive language model, and a small flow-matching head that turns each hidden state into a
piece of the image."""

from typing import ClassVar

from diffusers_omni_offload.declarations import OffloadPlan
from diffusers_omni_offload.registry import register_adapter


@register_adapter("NextStep11Pipeline")
class NextStepOffload:
    """The DiT has no `forward`: the pipeline calls its parts. The head and the projectors run between passes through
    the layers and stay on the device."""

    _dit_modules: ClassVar[list[str]] = ["model"]
    _encoder_modules: ClassVar[list[str]] = []
    _vae_modules: ClassVar[list[str]] = ["vae"]
    _resident_modules: ClassVar[list[str]] = []
    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs={"model": ("layers",)},
        resident_dit_paths=("model",),
        entry_points={
            "model": (
                "prepare_inputs_embeds",
                "forward_model",
                "gen_pos_embed_with_ar",
                "image_head.sample",
            )
        },
    )
