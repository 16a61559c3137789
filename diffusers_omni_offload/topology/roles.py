"""The part that a component plays, by its name: for pipelines that declare nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from diffusers_omni_offload.topology.plan import ComponentRole

_RESIDENT = {
    *("adapter", "checker", "connector", "connectors", "controlnet", "embedder", "embeddings", "estimator", "head"),
    *("normalizer", "proj", "project", "projection", "renderer", "upsampler", "upscaler", "watermarker"),
}
"""Used beside the DiT, or too small to matter. These words come first: a `prompt_enhancer_head` isn't an enhancer."""

_WORDS: tuple[tuple[ComponentRole, frozenset[str]], ...] = (
    ("resident", frozenset(_RESIDENT)),
    ("encoder", frozenset({"encoder", "enhancer", "pe", "siglip", "bert", "clip", "t5", "qformer"})),
    ("vae", frozenset({"vae", "vqvae", "vqgan", "movq", "vocoder", "tokenizer"})),
    ("dit", frozenset({"transformer", "unet", "dit", "prior", "decoder", "denoiser", "super"})),
)
"""The first role that has a word of a name. A `prior_text_encoder` is an encoder before it is a prior."""

_NAMES: Mapping[str, ComponentRole] = {"language_model": "encoder", "text_decoder": "resident"}
"""Names whose words lead astray."""

SUBSTITUTES = ("language_model", "model", "transformer_blocks")
"""What is taken for the DiT, the first that is there, where no name says that it is one."""

_IMAGE_WORDS = frozenset({"image", "vision", "siglip"})
_TEXT_WORDS = frozenset({"text", "language", "prompt"})


def role_of_name(name: str) -> ComponentRole | None:
    """The role that a component's name speaks of, numbers aside; None if the name says nothing."""
    unnumbered = re.sub(r"_?\d+$", "", name)
    if unnumbered in _NAMES:
        return _NAMES[unnumbered]
    words = {*name.split("_"), *unnumbered.split("_")}
    for role, known in _WORDS:
        if words & known:
            return role
    return None


def encoder_kind(name: str) -> str:
    """What an encoder reads, as its selector: an encoder of pictures *and* text counts as a text encoder."""
    words = set(name.split("_"))
    return "image_encoder" if words & _IMAGE_WORDS and not words & _TEXT_WORDS else "text_encoder"


def roles_of(names: Sequence[str], sequence: str | None) -> dict[str, ComponentRole]:
    """The role of each component of a pipeline.

    Args:
        names: the components that are there, by name.
        sequence: the pipeline's `model_cpu_offload_seq`. It is no list of components (it lacks some and names others
            that aren't there), but what stands before a DiT encodes, and what stands after it decodes.
    """
    said = {name: role_of_name(name) for name in names}
    steps = [name for name in (sequence or "").split("->") if name in said]
    if "dit" not in said.values():
        for name in _candidates(said, steps):
            said[name] = "dit"
            break
    dits = [position for position, name in enumerate(steps) if said[name] == "dit"]
    roles: dict[str, ComponentRole] = {}
    for name, role in said.items():
        if role is None and dits and name in steps:
            position = steps.index(name)
            role = "encoder" if position < dits[0] else "vae" if position > dits[-1] else None
        roles[name] = role or "resident"
    return roles


def _candidates(said: Mapping[str, ComponentRole | None], steps: Sequence[str]) -> list[str]:
    """Names that may stand for a DiT: unknown ones between the encoders and the VAE, then the usual substitutes."""
    encoders = [position for position, name in enumerate(steps) if said[name] == "encoder"]
    decoders = [position for position, name in enumerate(steps) if said[name] == "vae"]
    first = encoders[-1] + 1 if encoders else 0
    last = decoders[0] if decoders else len(steps)
    between = [name for name in steps[first:last] if said[name] is None]
    return between + [name for name in SUBSTITUTES if name in said]
