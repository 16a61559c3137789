"""The resolved topology: what will be offloaded, kept and placed. Frozen; backends run on it alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from diffusers_omni_offload.config import LayerOptions, OffloadStrategy
from diffusers_omni_offload.declarations import Stored
from diffusers_omni_offload.messages import format_bytes
from diffusers_omni_offload.topology.fsdp import is_left_to_fsdp
from diffusers_omni_offload.topology.sizes import module_nbytes

StackKind = Literal["dit", "encoder"]
ComponentRole = Literal["dit", "encoder", "vae", "resident"]


@dataclass(frozen=True, repr=False)
class BlockStack:
    """The ordered blocks of one component that are streamed together.

    Attributes:
        component: path of the component.
        kind: whether it is a DiT or an encoder.
        block_paths: of each block, relative to the component.
        blocks: the blocks.
        resident: sorted indices of those that are on the device while the others are streamed.
        nbytes: bytes of each block.
        options: those of the component.
        residents_may_leave: whether they may be others later, as in the mode "auto".
    """

    component: str
    kind: StackKind
    block_paths: tuple[str, ...]
    blocks: tuple[nn.Module, ...]
    resident: tuple[int, ...]
    nbytes: tuple[int, ...]
    options: LayerOptions = field(default_factory=LayerOptions)
    residents_may_leave: bool = False

    def __post_init__(self) -> None:
        if not len(self.block_paths) == len(self.blocks) == len(self.nbytes):
            raise ValueError(
                f"The stack of {self.component!r} has {len(self.block_paths)} paths, {len(self.blocks)} blocks and "
                f"{len(self.nbytes)} sizes; each block needs one of each."
            )
        in_order = tuple(sorted(set(self.resident))) == self.resident
        if not in_order or any(not 0 <= index < len(self.blocks) for index in self.resident):
            raise ValueError(
                f"The stack of {self.component!r} has the residents {self.resident}; they must be sorted, unique "
                f"indices below {len(self.blocks)}."
            )

    @property
    def streamed(self) -> tuple[int, ...]:
        """Indices of the blocks that are streamed."""
        kept = set(self.resident)
        return tuple(index for index in range(len(self.blocks)) if index not in kept)

    @property
    def moving(self) -> tuple[int, ...]:
        """Indices of the blocks that aren't where they are for good: the streamed ones, or all."""
        return tuple(range(len(self.blocks))) if self.residents_may_leave else self.streamed

    @property
    def streamed_bytes(self) -> int:
        """Bytes of the streamed blocks, each counted once."""
        return sum(self.nbytes[index] for index in self.streamed)

    @property
    def resident_bytes(self) -> int:
        """Bytes of the blocks that stay on the device."""
        return sum(self.nbytes[index] for index in self.resident)

    def path(self, index: int) -> str:
        """The dotted path of a block, from the pipeline on."""
        return f"{self.component}.{self.block_paths[index]}"

    @property
    def paths(self) -> list[str]:
        """The dotted path of each block, from the pipeline on."""
        return [self.path(index) for index in range(len(self.blocks))]

    def describe(self) -> str:
        """One line: counts, and sizes as they are now, which a cast may have changed."""
        streamed, resident = (
            format_bytes(sum(module_nbytes(self.blocks[index]) for index in indices))
            for indices in (self.streamed, self.resident)
        )
        line = f"{len(self.streamed)} of {len(self.blocks)} blocks streamed ({streamed})"
        if self.resident:
            line += f", {len(self.resident)} resident ({resident})"
        return line

    def __repr__(self) -> str:
        return f"BlockStack({self.component!r}, {self.kind}: {self.describe()})"


@dataclass(frozen=True, repr=False)
class ResolvedComponent:
    """One module of the pipeline.

    Attributes:
        path: its first dotted path; "" for the pipeline module itself.
        module: the module.
        role: its part.
    """

    path: str
    module: nn.Module
    role: ComponentRole

    def is_part_of(self, other: ResolvedComponent) -> bool:
        """True if `other` is another component that holds this one's module."""
        return self.module is not other.module and any(self.module is module for module in other.module.modules())

    def __repr__(self) -> str:
        return f"ResolvedComponent({self.path!r}, {type(self.module).__name__}, {self.role})"


@dataclass(frozen=True, repr=False)
class ResolvedPlan:
    """What a strategy does with a pipeline.

    Attributes:
        strategy: the backend.
        components: each module component once, by identity.
        stacks: what is streamed.
        swapped: paths of the components that are moved as wholes.
        on_demand: paths of the components (or of DiT submodules) that load and offload themselves.
        entry_points: component -> its methods that use its weights.
        groups: component -> what it has in common with those that stay on the device when it runs, if that isn't its
            role.
        checkpoint_layouts: component -> what its checkpoint has in another form.
        skip_reason: why nothing at all is placed or hooked; None if something is.
        notes: what a reader of the plan should know.
    """

    strategy: OffloadStrategy
    components: tuple[ResolvedComponent, ...]
    stacks: tuple[BlockStack, ...]
    swapped: tuple[str, ...] = ()
    on_demand: tuple[str, ...] = ()
    entry_points: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    groups: Mapping[str, str] = field(default_factory=dict)
    checkpoint_layouts: Mapping[str, Mapping[str, Stored]] = field(default_factory=dict)
    skip_reason: str | None = None
    notes: tuple[str, ...] = ()

    def component(self, path: str) -> ResolvedComponent:
        """The component at `path`. KeyError with the known paths if there is none."""
        for component in self.components:
            if component.path == path:
                return component
        raise KeyError(f"No component {path!r} in the plan; it has {', '.join(c.path for c in self.components)}.")

    def group(self, component: ResolvedComponent) -> str:
        """What a component has in common with those that stay on the device when it runs."""
        return self.groups.get(component.path, component.role)

    def module(self, path: str) -> nn.Module:
        """The module at `path`: a component, or a part of one. KeyError if there is none."""
        for component in self.components:
            prefix = f"{component.path}." if component.path else ""
            if component.path == path:
                return component.module
            if path.startswith(prefix):
                try:
                    return component.module.get_submodule(path[len(prefix) :])
                except AttributeError:
                    continue
        raise KeyError(f"No module {path!r} in the plan.")

    def streamed_blocks(self) -> Iterator[tuple[str, nn.Module]]:
        """(dotted path, block) of every block that is streamed, in the order of the stacks."""
        for stack in self.stacks:
            for index in stack.streamed:
                yield stack.path(index), stack.blocks[index]

    @property
    def streamed_bytes(self) -> int:
        """Bytes that are streamed, over all stacks."""
        return sum(stack.streamed_bytes for stack in self.stacks)

    @property
    def offloaded_paths(self) -> tuple[str, ...]:
        """The paths of the components that are streamed or swapped."""
        return (*(stack.component for stack in self.stacks), *self.swapped)

    @property
    def swapped_bytes(self) -> int:
        """Bytes of the components that are moved as wholes."""
        return sum(module_nbytes(self.component(path).module) for path in self.swapped)

    @property
    def resident_bytes(self) -> int:
        """Bytes of resident blocks, over all stacks (not of resident components)."""
        return sum(stack.resident_bytes for stack in self.stacks)

    def __str__(self) -> str:
        stacks = {stack.component: stack for stack in self.stacks}
        rows = []
        for component in self.components:
            stack = stacks.get(component.path)
            outer = self._swapped_around(component)
            if outer is not None:
                what = f"moves with {outer.path}"
            elif is_left_to_fsdp(component.module):
                what = "left to FSDP"
            elif component.path in self.swapped:
                what = "swapped as a whole"
            elif component.path in self.on_demand:
                what = "loads itself on demand"
            elif stack is not None:
                what = stack.describe()
            else:
                what = "on the device"
            size = format_bytes(module_nbytes(component.module))
            rows.append((component.path or "(pipeline)", type(component.module).__name__, component.role, size, what))
        widths = [max((len(row[column]) for row in rows), default=0) for column in range(4)]
        streamed = sum(module_nbytes(block) for _, block in self.streamed_blocks())
        totals = [f"{format_bytes(streamed)} streamed"] if streamed or not self.swapped else []
        totals += [f"{format_bytes(self.swapped_bytes)} swapped"] if self.swapped else []
        lines = [f"{self.strategy.value} plan: {', '.join(totals)}"]
        if self.skip_reason is not None:
            lines.append(f"skipped: {self.skip_reason}")
        for name, class_name, role, size, what in rows:
            cells = (
                name.ljust(widths[0]),
                class_name.ljust(widths[1]),
                role.ljust(widths[2]),
                size.rjust(widths[3]),
                what,
            )
            lines.append("  " + "  ".join(cells).rstrip())
        lines.extend(f"note: {note}" for note in self.notes)
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<{self}>"

    def _swapped_around(self, component: ResolvedComponent) -> ResolvedComponent | None:
        """The swapped component that `component` is a part of."""
        if component.path in (*self.swapped, *self.on_demand, *(stack.component for stack in self.stacks)):
            return None
        return next((outer for outer in map(self.component, self.swapped) if component.is_part_of(outer)), None)
