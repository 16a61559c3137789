"""Cosmos 3, in diffusers' form and split into a reasoner and a generator. Neither has a text encoder: the DiT reads the
tokens itself."""

from typing import ClassVar

from diffusers_omni_offload.declarations import OffloadPlan
from diffusers_omni_offload.registry import register_adapter


@register_adapter("Cosmos3DistilledModularPipeline")
class Cosmos3DistilledOffload:
    """One list of layers, each of which understands and generates."""

    _dit_modules: ClassVar[list[str]] = ["transformer"]
    _encoder_modules: ClassVar[list[str]] = []
    _vae_modules: ClassVar[list[str]] = ["vae"]
    _resident_modules: ClassVar[list[str]] = []
    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs={"transformer": ("layers",)},
        resident_dit_paths=("transformer",),
    )


@register_adapter("Cosmos3OmniPipeline", "Cosmos3OmniModularPipeline")
class Cosmos3OmniOffload(Cosmos3DistilledOffload):
    """With sound."""

    _vae_modules: ClassVar[list[str]] = ["vae", "sound_tokenizer"]


@register_adapter("Cosmos3OmniDiffusersPipeline")
class Cosmos3SplitOffload(Cosmos3DistilledOffload):
    """Two DiTs, one inside the other: the reasoner runs once a prompt, the generator in each step. Their layers are two
    stacks."""

    _dit_modules: ClassVar[list[str]] = ["transformer.language_model", "transformer"]
    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs={"transformer.language_model": ("layers",), "transformer": ("gen_layers",)},
        resident_dit_paths=("transformer.language_model", "transformer"),
    )
