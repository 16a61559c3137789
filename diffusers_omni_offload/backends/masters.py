"""The masters of everything that a plan offloads: made, kept true, and let go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import nn

from diffusers_omni_offload.backends.sharing import shared_leaves
from diffusers_omni_offload.host import return_freed_host_memory
from diffusers_omni_offload.messages import format_bytes
from diffusers_omni_offload.progress import SILENT, Bar, progress
from diffusers_omni_offload.topology.plan import ResolvedPlan
from diffusers_omni_offload.weights.bitsandbytes import put_in_order
from diffusers_omni_offload.weights.leaves import Leaf, distinct_leaves, move_back, require_plain
from diffusers_omni_offload.weights.master import Master
from diffusers_omni_offload.weights.withheld import is_withheld
from diffusers_omni_offload.weights.wrappers import Home, move_wrappers, move_wrappers_back


@dataclass(frozen=True, eq=False)
class Unit:
    """A streamed block or a swapped component: `module` without the modules `apart`, which are other units' or move
    themselves."""

    path: str
    module: nn.Module
    apart: frozenset[nn.Module] = frozenset()

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """(path, module) for each of its modules."""
        modules = self.module.named_modules(prefix=self.path)
        return ((path, module) for path, module in modules if module not in self.apart)

    def leaves(self, exclude: AbstractSet[int] = frozenset()) -> list[Leaf]:
        """Its leaves, each once, without those whose `id` is in `exclude`."""
        return distinct_leaves(self.named_modules(), exclude)


def units_of(plan: ResolvedPlan) -> list[Unit]:
    """Everything that a plan streams or swaps; DiTs first, since what is needed at every step gets what may be
    pinned."""
    blocks = [(stack.kind, stack.path(index), stack.blocks[index]) for stack in plan.stacks for index in stack.streamed]
    swapped = [plan.component(path) for path in plan.swapped]
    inner = [block for _, _, block in blocks] + [plan.module(path) for path in plan.on_demand]
    found: list[tuple[str, Unit]] = [(kind, Unit(path, block)) for kind, path, block in blocks]
    for component in swapped:
        own = set(component.module.modules())
        apart = frozenset(module for outer in inner if outer in own for module in outer.modules())
        found.append((component.role, Unit(component.path, component.module, apart)))
    return [unit for _, unit in sorted(found, key=lambda item: item[0] != "dit")]


Find = Callable[[], list[Leaf]]
"""Returns the leaves of a unit as they are now."""


class Making(Protocol):
    """Decides what kind of master each unit gets."""

    def make(self, unit: Unit, find: Find) -> Master:
        """A master for a unit, not packed yet."""

    def make_shared(self, find: Find) -> Master:
        """A master for leaves that several units hold."""


class Masters:
    """One master for each streamed block and swapped component, and one for the leaves that several of them hold.

    Args:
        making: what kinds they are of.

    Attributes:
        shared: the master of leaves that several owners hold, or None.
    """

    def __init__(self, making: Making) -> None:
        self.shared: Master | None = None
        self._making = making
        self._units: dict[nn.Module, tuple[Unit, Master]] = {}
        self._elsewhere: Callable[[], list[Leaf]] = list
        self._shared_ids: set[int] = set()

    def __iter__(self) -> Iterator[Master]:
        for _, master in self._units.values():
            yield master
        if self.shared is not None:
            yield self.shared

    def modules(self) -> Iterator[tuple[nn.Module, Master]]:
        """All modules of what is offloaded, with their masters; one in two units comes twice."""
        for unit, master in self._units.values():
            yield from ((module, master) for _, module in unit.named_modules())

    def of(self, module: nn.Module) -> Master | None:
        """The master of a block or a component; None if it isn't offloaded."""
        found = self._units.get(module)
        return None if found is None else found[1]

    def pack(self, units: Sequence[Unit], elsewhere: Callable[[], list[Leaf]], undo: ExitStack) -> None:
        """Make a master for each unit.

        Args:
            units: what is offloaded, in the order in which it gets what may be pinned.
            elsewhere: returns the leaves that aren't offloaded, as they are now.
            undo: gets the way back of every step first.
        """
        self._elsewhere = elsewhere
        for unit in units:
            undo.callback(move_wrappers_back, _settle(unit))
        found = [unit.leaves() for unit in units]
        shared = shared_leaves(found, elsewhere())
        self._shared_ids.update(id(leaf.tensor) for leaf in shared)
        done = pinned = 0
        with progress("Packing weights", sum(map(_nbytes, found))) as bar:
            for unit, leaves in zip(units, found, strict=True):
                master = self._making.make(unit, partial(unit.leaves, self._shared_ids))
                self._units[unit.module] = (unit, master)
                done += _nbytes(leaves)
                _pack(master, undo, bar)
                pinned += master.host_nbytes * master.is_pinned
                bar.note(f"{format_bytes(pinned)} pinned")
                bar.reach(done)
        if shared:
            self.shared = self._making.make_shared(lambda: shared)
            _pack(self.shared, undo)

    def take(self, unit: Unit) -> Master:
        """Make a master for one more unit; nothing is changed if that fails."""
        with ExitStack() as undo:
            undo.callback(move_wrappers_back, _settle(unit))
            master = self._making.make(unit, partial(unit.leaves, self._shared_ids))
            _pack(master, undo)
            undo.pop_all()
        self._units[unit.module] = (unit, master)
        return master

    def held(self) -> frozenset[int]:
        """`id` of every tensor that is in a master."""
        return frozenset(id(tensor) for master in self for tensor in master.tensors)

    def stale(self) -> list[Master]:
        """Those whose modules hold other leaves, or whose leaves hold other bytes, than were packed."""
        return [master for master in self if not master.is_current()]

    def follow(self, stale: Sequence[Master]) -> None:
        """Pack these anew.

        Raises:
            RuntimeError: weights were tied or untied.
            TypeError, ValueError: a weight is of a kind that can't be packed.
        """
        for unit, master in self._units.values():
            if master in stale:
                _settle(unit, self.held())
                for leaf in unit.leaves():
                    if not is_withheld(leaf.tensor):
                        require_plain(leaf)  # All of them before the first is packed.
        shared = shared_leaves([unit.leaves() for unit, _ in self._units.values()], self._elsewhere())
        if {id(leaf.tensor) for leaf in shared} != self._shared_ids:
            raise RuntimeError(
                "Weights were tied or untied between blocks, or between a block and other modules, while offloaded: "
                f"{', '.join(leaf.path for leaf in shared[:3]) or 'a tie is gone'}. "
                "Call disable_omni_offload() and enable_omni_offload() again."
            )
        # Swapped data lies in each other's masters: written in place, the first would overwrite the second's.
        in_place = not any(
            master.holds(tensor)
            for other in stale
            for tensor in other.tensors
            if not is_withheld(tensor)
            for master in self
            if master is not other
        )
        done = 0
        with progress("Packing changed weights", sum(master.nbytes for master in stale)) as bar:
            for master in stale:
                done += master.nbytes
                master.pack(in_place=in_place, bar=bar)
                bar.reach(done)
                return_freed_host_memory()

    def remove(self, module: nn.Module) -> None:
        """Let one go: its leaves stay views of the host buffer, which isn't locked any more."""
        found = self._units.pop(module, None)
        if found is not None:
            found[1].release()


def _settle(unit: Unit, held: AbstractSet[int] = frozenset()) -> list[Home]:
    """Put a unit's quantized weights in order, and take home, whole, those that no master holds.

    One that was packed part by part would go on to say that it is on the device. Returns what was moved.
    """
    put_in_order(unit.module)
    return move_wrappers((module for _, module in unit.named_modules()), torch.device("cpu"), held)


def _nbytes(leaves: Sequence[Leaf]) -> int:
    return sum(leaf.nbytes for leaf in leaves)


def _pack(master: Master, undo: ExitStack, bar: Bar = SILENT) -> None:
    undo.callback(move_back, [(leaf.tensor, leaf.tensor.device) for leaf in master.find()])
    undo.callback(master.abandon)
    master.pack(bar=bar)
    return_freed_host_memory()
