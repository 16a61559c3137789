"""From declared block containers to the ordered blocks of a stack, and who owns a block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from diffusers_omni_offload.declarations import a_type, checked_paths
from diffusers_omni_offload.topology.findings import Findings
from diffusers_omni_offload.topology.lists import blocks_read_outside
from diffusers_omni_offload.topology.paths import MissingPathError, lookup
from diffusers_omni_offload.topology.plan import BlockStack, ResolvedComponent
from diffusers_omni_offload.topology.sizes import module_nbytes

BLOCKS_ATTRIBUTE = "_layerwise_offload_blocks_attrs"
"""Class attribute of a DiT: its block containers, where the plan doesn't name them."""
DEPRECATED_BLOCKS_ATTRIBUTE = "_layerwise_offload_blocks_attr"
"""The older form for a single container, still read."""

WELL_KNOWN_CONTAINERS = (
    "blocks",
    "layers",
    "transformer_blocks",
    "single_transformer_blocks",
    "gen_layers",
    "refiner_blocks",
    "block",
    "h",
)
"""Where the blocks of an undeclared large submodule are looked for."""

Block = tuple[str, nn.Module]
"""A block and its path relative to its component."""


def declares_blocks(module: nn.Module) -> bool:
    """True if the module's class names its block containers itself."""
    return any(getattr(module, name, None) is not None for name in (BLOCKS_ATTRIBUTE, DEPRECATED_BLOCKS_ATTRIBUTE))


def declared_containers(component: ResolvedComponent, planned: tuple[str, ...], findings: Findings) -> tuple[str, ...]:
    """The block containers of a component: the plan's, else those that its class declares; () if there are none."""
    if planned:
        return planned
    owner = type(component.module).__name__
    containers = getattr(component.module, BLOCKS_ATTRIBUTE, None)
    if containers is not None:
        return checked_paths(f"{owner}.{BLOCKS_ATTRIBUTE}", containers)
    single = getattr(component.module, DEPRECATED_BLOCKS_ATTRIBUTE, None)
    if single is None:
        return ()
    findings.warn_once(
        "deprecated",
        type(component.module),
        f"{owner}.{DEPRECATED_BLOCKS_ATTRIBUTE} is deprecated; write {BLOCKS_ATTRIBUTE} = [{single!r}].",
    )
    return checked_paths(f"{owner}.{DEPRECATED_BLOCKS_ATTRIBUTE}", [single])


def collect_blocks(
    component: ResolvedComponent, containers: Iterable[str], findings: Findings, kept: Mapping[int, str] | None = None
) -> list[Block]:
    """The blocks of the containers, in the order of the containers and then of their elements, each module once.

    Blocks without parameters and buffers are left out, with a note, and so are those that stay on the device: the
    `kept` ones (`id` of the module -> why), and those of which `forward` uses a part on its own. Raises ValueError for
    a container that isn't there or that holds anything but modules.
    """
    names: dict[int, str] = {}
    for name, module in component.module.named_modules():
        names.setdefault(id(module), name)
    blocks: dict[int, Block] = {}
    empty: list[str] = []
    repeated = 0
    for container in containers:
        for path, block in _elements(component, container):
            # A container that is a property has no name among the modules; its blocks have. Saved weights use that
            # name.
            path = names.get(id(block), path)
            if module_nbytes(block) == 0:
                empty.append(path)
            elif id(block) in blocks:
                repeated += 1
            else:
                blocks[id(block)] = (path, block)
    if repeated:
        findings.note(
            f"{component.path}: {repeated} blocks are declared more than once; each is streamed as one block."
        )
    if empty:
        findings.note(f"{component.path}: {', '.join(empty)} hold no weights, so there is nothing to stream for them.")
    reasons = dict(kept or {})
    for block_id, part in blocks_read_outside(component.module, [path for path, _ in blocks.values()]).items():
        reasons.setdefault(block_id, f"{part!r} of it is used outside of its own forward")
    for block_id, reason in reasons.items():
        if block_id in blocks:
            path, _ = blocks.pop(block_id)
            findings.note(f"{component.path}.{path} stays on the device: {reason}.")
    return list(blocks.values())


def _elements(component: ResolvedComponent, container: str) -> Iterator[Block]:
    owner = f"{component.path!r} ({a_type(component.module)})"
    missing: list[MissingPathError] = []
    for name in container.split("|"):
        try:
            value = lookup(component.module, name)
        except MissingPathError as error:
            missing.append(error)
            continue
        yield from _flatten(owner, name, value)
        return
    raise ValueError(
        f"The block container {container!r} of {owner} isn't there: {'; '.join(map(str, missing))}; correct the "
        "declared block containers."
    ) from missing[-1]


def _flatten(owner: str, path: str, value: Any, depth: int = 0) -> Iterator[Block]:
    if value is None:
        return
    if isinstance(value, (Mapping, nn.ModuleDict)):
        entries: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, (list, tuple, nn.ModuleList, nn.Sequential)):
        entries = enumerate(value)
    elif isinstance(value, nn.Module) and hasattr(type(value), "__iter__") and depth == 0:
        entries = enumerate(value)  # type: ignore[arg-type]
    elif isinstance(value, nn.Module):
        yield path, value
        return
    else:
        raise ValueError(
            f"The block container {path!r} of {owner} is {a_type(value)}; a ModuleList, a list, a ModuleDict or a "
            "single module is needed."
        )
    # An element of a dict may be a list of blocks; an element of a list is a block, even if it is a Sequential. But a
    # ModuleList within either has no forward of its own: its elements are what runs.
    is_mapping = isinstance(value, (Mapping, nn.ModuleDict))
    for key, entry in entries:
        is_plain = is_mapping and isinstance(entry, (list, tuple)) and depth == 0
        if is_plain or isinstance(entry, (nn.ModuleList, nn.ModuleDict)):
            yield from _flatten(owner, f"{path}.{key}", entry, depth + 1)
        elif isinstance(entry, nn.Module):
            yield f"{path}.{key}", entry
        elif entry is not None:
            raise ValueError(
                f"The block container {path!r} of {owner} holds {a_type(entry)} at {key!r}, but blocks are nn.Modules."
            )


def find_container(module: nn.Module, taken: set[int]) -> str | None:
    """The first well-known name under which `module` holds a list of two or more blocks that aren't `taken` (by id)."""
    for name in WELL_KNOWN_CONTAINERS:
        value = getattr(module, name, None)
        if isinstance(value, nn.ModuleList) and len(value) > 1 and not any(id(block) in taken for block in value):
            return name
    return None


def check_ownership(stacks: Iterable[BlockStack], components: Iterable[ResolvedComponent], declared: set[int]) -> None:
    """Raises ValueError, naming both paths, for a block that has two owners: in two stacks, inside another block, or in
    a component that doesn't contain the stack's own. `declared`: ids of the modules that were declared as components.
    """
    stacks, components = list(stacks), list(components)
    owners: dict[int, str] = {}
    for stack in stacks:
        for path, block in zip(stack.block_paths, stack.blocks, strict=True):
            here = f"{stack.component}.{path}"
            other = owners.setdefault(id(block), here)
            if other != here:
                raise ValueError(
                    f"The block {here!r} is also {other!r} of another stack; a block belongs to one stack only."
                )
    for stack in stacks:
        for path, block in zip(stack.block_paths, stack.blocks, strict=True):
            for inner in block.modules():
                if inner is not block and id(inner) in owners:
                    raise ValueError(
                        f"The block {owners[id(inner)]!r} lies inside the block {f'{stack.component}.{path}'!r}; "
                        "declare either the outer or the inner one."
                    )
    _check_sharing(stacks, components, declared)


def _check_sharing(stacks: list[BlockStack], components: list[ResolvedComponent], declared: set[int]) -> None:
    modules = {component.path: component.module for component in components}
    inside = {component.path: {id(module) for module in component.module.modules()} for component in components}
    for stack in stacks:
        own = modules[stack.component]
        for component in components:
            if component.module is own or id(own) in inside[component.path]:
                continue  # it contains the stack's component as a whole, as a DiT does that has a DiT within
            if id(component.module) not in declared and id(component.module) in inside[stack.component]:
                continue  # a second name for a part of the stack's component
            for path, block in zip(stack.block_paths, stack.blocks, strict=True):
                here = f"{stack.component}.{path}"
                if id(block) in inside[component.path]:
                    raise ValueError(
                        f"The block {here!r} is also a part of {component.path!r} ({component.role}); a streamed "
                        "block can't be shared with another component. Leave it out of the declared blocks, or give "
                        "one of them a copy."
                    )
                if id(component.module) in declared and any(component.module is inner for inner in block.modules()):
                    raise ValueError(
                        f"{component.path!r} is declared as a component ({component.role}), but lies inside the "
                        f"streamed block {here!r}; leave one of the two declarations out."
                    )
