"""BAGEL: a language model makes the image; its layers have one set of weights to understand and one to generate."""

from typing import ClassVar

from diffusers_omni_offload.declarations import OffloadPlan
from diffusers_omni_offload.registry import register_adapter


@register_adapter("BagelPipeline")
class BagelOffload:
    """The DiT is also `transformer`, `bagel.language_model.model` and a part of `language_model`. The resident modules
    run beside it in each step."""

    _dit_modules: ClassVar[list[str]] = ["language_model.model"]
    _encoder_modules: ClassVar[list[str]] = []
    _vae_modules: ClassVar[list[str]] = ["vae"]
    _resident_modules: ClassVar[list[str]] = [
        "bagel.time_embedder",
        "bagel.vae2llm",
        "bagel.llm2vae",
        "bagel.latent_pos_embed",
        "bagel.vit_model",
        "bagel.connector",
        "bagel.vit_pos_embed",
    ]
    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs={"language_model.model": ("layers",)},
        resident_dit_paths=("language_model.model",),
    )
