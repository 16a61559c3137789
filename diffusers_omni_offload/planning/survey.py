"""What a pipeline is made of, in bytes: its components, and which of their blocks could be streamed."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from diffusers_omni_offload.config import OffloadConfig, OffloadStrategy
from diffusers_omni_offload.declarations import SupportsModelCpuOffload
from diffusers_omni_offload.planning.costs import BlockCost, ComponentCost
from diffusers_omni_offload.topology.choices import Choices
from diffusers_omni_offload.topology.discovery import Discovery, discover, iterate_modules
from diffusers_omni_offload.topology.findings import Findings
from diffusers_omni_offload.topology.fsdp import is_left_to_fsdp, left_to_fsdp
from diffusers_omni_offload.topology.plan import BlockStack, ResolvedComponent
from diffusers_omni_offload.topology.resolver import resolve_offload_plan
from diffusers_omni_offload.weights.kinds import why_refused
from diffusers_omni_offload.weights.leaves import (
    Leaf,
    allocated_nbytes,
    distinct_leaves,
    extent,
    find_leaves,
    packed_nbytes,
    span_nbytes,
)
from diffusers_omni_offload.weights.withheld import is_withheld


def survey(pipe: Any, *, declarations: type | None = None) -> tuple[ComponentCost, ...]:
    """The sizes of a pipeline's components, from shapes and dtypes: nothing is read, moved or changed.

    Weights may be on any device, the meta device too. Each leaf counts once, in the innermost component that is
    declared to hold it. What is copied at once (a block, or a component that is swapped) has its packed size, and what
    stays on the device (residents, state) that of its allocations. Leaves that a block has in common with other blocks
    or modules count as state, as they stay on the device while blocks are streamed. So does a declared submodule of a
    DiT whose blocks are streamed with it: that the device holds less of it is a reserve.

    Args:
        pipe: a pipeline.
        declarations: a class with component declarations, used if the pipeline has none of its own; its adapter.

    Returns:
        One cost a component, without times, as nothing was run.

    Raises:
        ValueError, TypeError: a declaration is wrong.
    """
    return survey_blocks(pipe, declarations=declarations)[0]


def survey_blocks(
    pipe: Any, *, declarations: type | None = None
) -> tuple[tuple[ComponentCost, ...], dict[str, BlockStack]]:
    """`survey`, and the blocks that were found: path of a component -> its stack, in the order of its cost's blocks."""
    discovery = discover(pipe, declarations, frozenset(), Findings(explicit=False))
    stacks = streamable(pipe, declarations, discovery)
    shared = _shared(discovery.components, stacks)
    any_choice = OffloadConfig(OffloadStrategy.LAYERWISE, choices={"dit": "layer"})
    selector = Choices(any_choice, discovery, Findings(explicit=False), type(pipe).__name__).selector
    costs: dict[str, ComponentCost] = {}
    counted: set[int] = set()
    for component in _innermost_first(discovery.components):
        counted.update(left_to_fsdp(component.module))
        leaves = find_leaves(component.module, component.path, counted)
        parameters = [weight for weight in component.module.parameters() if id(weight) not in counted]
        streamed, blocks = set(counted) | shared, []
        for block in stacks[component.path].blocks if component.path in stacks else ():
            own = find_leaves(block, "", streamed)
            streamed.update(id(leaf.tensor) for leaf in own)
            blocks.append(BlockCost(packed_nbytes(own), kept_nbytes=placed_nbytes(own)))
        state = [leaf for leaf in leaves if id(leaf.tensor) in shared or id(leaf.tensor) not in streamed]
        dtypes: Counter[str] = Counter()
        for leaf in leaves:
            dtypes[str(leaf.tensor.dtype).removeprefix("torch.")] += leaf.nbytes
        costs[component.path] = ComponentCost(
            path=component.path,
            role=component.role,
            selector=selector(component) or component.path,
            nbytes=packed_nbytes(state) + sum(block.nbytes for block in blocks),
            blocks=tuple(blocks),
            state_nbytes=placed_nbytes(state),
            may_keep_blocks=bool(blocks)
            and component.role == "dit"
            and component.path in discovery.plan.resident_dit_paths,
            may_swap=bool(leaves)
            and bool(component.path)
            and not isinstance(pipe, SupportsModelCpuOffload)
            and not is_left_to_fsdp(component.module),
            dtypes=dict(dtypes),
            parameters=sum(weight.numel() for weight in parameters),
            class_name=type(component.module).__name__,
        )
        counted.update(id(leaf.tensor) for leaf in leaves)
        counted.update(map(id, parameters))
    holders = _holders(discovery.components, costs)
    found = tuple(
        replace(costs[component.path], may_swap=costs[component.path].may_swap and component.path not in holders)
        for component in discovery.components
    )
    return found, stacks


def streamable(pipe: Any, declarations: type | None, discovery: Discovery) -> dict[str, BlockStack]:
    """The stacks of all components that can be streamed together, by path; what can't be isn't there.

    Args:
        pipe: a pipeline.
        declarations: see `survey`.
        discovery: its components.
    """
    chosen: dict[str, str] = {}
    stacks: dict[str, BlockStack] = {}
    for component in discovery.components:
        wanted = {**chosen, component.path: "layer"}
        if not component.path or component.role == "vae":
            continue  # No choice can name the pipeline itself; and a VAE is small, and runs when the DiT may be gone.
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                config = OffloadConfig(OffloadStrategy.LAYERWISE, choices=wanted)
                plan = resolve_offload_plan(pipe, config, declarations=declarations)
        except (ValueError, TypeError):
            continue
        found = {stack.component: stack for stack in plan.stacks}
        if component.path in found:
            chosen, stacks = wanted, found
    return {path: stacks[path] for path in chosen}


def placed_nbytes(leaves: Iterable[Leaf]) -> int:
    """What these leaves take on the device, each an allocation of its own."""
    sizes = {_where(leaf.tensor): span_nbytes(leaf.tensor) for leaf in leaves}
    return sum(map(allocated_nbytes, sizes.values()))


def _innermost_first(components: Iterable[ResolvedComponent]) -> list[ResolvedComponent]:
    """Those that play a part come before those that are merely there, and what lies inside others before these."""
    found = list(components)
    depths = {component.path: sum(component.is_part_of(other) for other in found) for component in found}
    return sorted(found, key=lambda component: (component.role == "resident", -depths[component.path]))


def _holders(components: Sequence[ResolvedComponent], costs: Mapping[str, ComponentCost]) -> set[str]:
    """The components that hold others, which would move with them."""
    return {
        outer.path
        for outer in components
        for inner in components
        if costs[inner.path].nbytes and inner.is_part_of(outer)
    }


def _shared(components: Iterable[ResolvedComponent], stacks: Mapping[str, BlockStack]) -> set[int]:
    """`id` of the tensors whose bytes are held by two blocks, or by a block and a module outside of any."""
    blocks = [block for stack in stacks.values() for block in stack.blocks]
    inside = {module for block in blocks for module in block.modules()}
    outside = [
        ("", module) for component in components for module in component.module.modules() if module not in inside
    ]
    owned = [find_leaves(block, "") for block in blocks] + [distinct_leaves(outside)]
    owners: dict[Hashable, set[int]] = {}
    tensors: dict[Hashable, set[int]] = {}
    for owner, leaves in enumerate(owned):
        for leaf in leaves:
            key = _where(leaf.tensor)
            owners.setdefault(key, set()).add(owner)
            tensors.setdefault(key, set()).add(id(leaf.tensor))
    return {tensor for key, found in owners.items() if len(found) > 1 for tensor in tensors[key]}


def _where(tensor: torch.Tensor) -> Hashable:
    """What tensors with the same bytes have in common."""
    if tensor.is_meta or is_withheld(tensor) or not tensor.numel() or why_refused(tensor) is not None:
        return id(tensor)
    storage, start, stop = extent(tensor)
    return storage.data_ptr(), start, stop


def nbytes_on(pipe: Any, device: torch.device) -> int:
    """Bytes of a pipeline's weights that are on a device."""
    seen = {tensor for _, module in iterate_modules(pipe) for tensor in left_to_fsdp(module)}
    total = 0
    for path, module in iterate_modules(pipe):
        leaves = find_leaves(module, path, seen)
        seen.update(id(leaf.tensor) for leaf in leaves)
        total += sum(leaf.nbytes for leaf in leaves if leaf.tensor.device == device)
    return total if device.type != "cpu" else 0
