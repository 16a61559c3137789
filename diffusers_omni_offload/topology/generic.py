"""Declarations for a diffusers pipeline that has none and no adapter: its parts by name, its blocks by their lists."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from diffusers import DiffusionPipeline
from diffusers.modular_pipelines import ModularPipeline
from torch import nn

from diffusers_omni_offload.declarations import OffloadPlan
from diffusers_omni_offload.topology.blocks import declares_blocks
from diffusers_omni_offload.topology.lists import find_lists
from diffusers_omni_offload.topology.paths import last_name
from diffusers_omni_offload.topology.plan import ComponentRole
from diffusers_omni_offload.topology.roles import encoder_selector, roles_of

_TITLES: Mapping[ComponentRole, str] = {"dit": "DiT", "encoder": "encoder", "vae": "VAE", "resident": "others"}


def is_diffusers_pipeline(pipeline: Any) -> bool:
    """True for pipelines whose components diffusers knows by name."""
    return isinstance(pipeline, (DiffusionPipeline, ModularPipeline))


@dataclasses.dataclass(frozen=True)
class Guess:
    """What the names and lists of a pipeline say.

    Attributes:
        declared: the paths of each role.
        plan: the blocks of DiTs and encoders, and what each encoder reads.
        shared: modules that several components hold, which can't be streamed: `id` -> why.
        summary: all of it, in one sentence.
    """

    declared: Mapping[ComponentRole, tuple[str, ...]]
    plan: OffloadPlan
    shared: Mapping[int, str]
    summary: str


def guess(pipeline: Any, modules: Iterable[tuple[str, nn.Module]], plan: OffloadPlan) -> Guess:
    """Declarations for `pipeline`.

    Args:
        pipeline: a diffusers pipeline.
        modules: its modules by their paths; one that has several names counts under the first.
        plan: what its class declares of its blocks all the same, which comes first.
    """
    components: dict[str, nn.Module] = {}
    for path, module in modules:
        if path and not any(module is known for known in components.values()):
            components[path] = module
    roles = _roles(pipeline, components)
    if plan.block_attrs:
        roles.update({path: "resident" for path, role in roles.items() if role == "dit"})
        roles.update(dict.fromkeys(plan.block_attrs, "dit"))
    roles.update(dict.fromkeys(plan.encoder_block_attrs, "encoder"))
    declared: dict[ComponentRole, tuple[str, ...]] = {
        role: tuple(path for path, found in roles.items() if found == role) for role in _TITLES
    }
    declared["resident"] = ()
    silent = {path: module for path, module in components.items() if not declares_blocks(module)}
    plan = dataclasses.replace(
        plan,
        block_attrs={**_blocks(silent, declared["dit"], is_encoder=False), **plan.block_attrs},
        encoder_block_attrs={**_blocks(silent, declared["encoder"], is_encoder=True), **plan.encoder_block_attrs},
        resident_dit_paths=plan.resident_dit_paths or declared["dit"],
        encoder_component_types={
            **{path: encoder_selector(path) for path in declared["encoder"]},
            **plan.encoder_component_types,
        },
    )
    return Guess(declared, plan, _shared(components), _summary(pipeline, components, roles, plan))


def _roles(pipeline: Any, components: Mapping[str, nn.Module]) -> dict[str, ComponentRole]:
    """A component in a list or in another pipeline plays the part that its own name says, or that of its list."""
    by_name = roles_of([last_name(path) for path in components], getattr(type(pipeline), "model_cpu_offload_seq", None))
    return {path: by_name[last_name(path)] for path in components}


def _blocks(components: Mapping[str, nn.Module], paths: Iterable[str], is_encoder: bool) -> dict[str, tuple[str, ...]]:
    """The lists of blocks of those components that have some."""
    found = {path: find_lists(components[path], is_encoder=is_encoder) for path in paths if path in components}
    return {path: lists for path, lists in found.items() if lists}


def _shared(components: Mapping[str, nn.Module]) -> dict[int, str]:
    """What two components hold that are no part of each other."""
    inside = {path: {id(module) for module in component.modules()} for path, component in components.items()}
    shared: dict[int, str] = {}
    for first, second in itertools.combinations(components, 2):
        if id(components[first]) not in inside[second] and id(components[second]) not in inside[first]:
            reason = f"it is a part of {first!r} and of {second!r}"
            shared.update(dict.fromkeys(inside[first] & inside[second], reason))
    return shared


def _summary(
    pipeline: Any,
    components: Mapping[str, nn.Module],
    roles: Mapping[str, ComponentRole],
    plan: OffloadPlan,
) -> str:
    parts = []
    for role, title in _TITLES.items():
        names = []
        for path, found in roles.items():
            containers = plan.block_attrs.get(path) or plan.encoder_block_attrs.get(path)
            if found == role:
                names.append(f"{path} ({', '.join(containers)})" if containers else path)
        if names:
            parts.append(f"{title} {', '.join(names)}")
    what = "; ".join(parts) if parts else "none"
    return f"{type(pipeline).__name__} declares no components, so they were found by their names: {what}."
