"""Changes which blocks stay on the device, while a pipeline is offloaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from diffusers_omni_offload.backends.masters import Unit
from diffusers_omni_offload.platform import on_device
from diffusers_omni_offload.topology.plan import BlockStack
from diffusers_omni_offload.topology.residents import resident_indices

if TYPE_CHECKING:
    from diffusers_omni_offload.backends.plan_backend import PlanBackend


_Place = tuple[int, BlockStack, int]
"""A block: the streamer's number, its stack, and its index there."""


class Keeping:
    """The residents of a backend's stacks, between forwards of a call or between calls.

    Args:
        backend: what is enabled.
    """

    def __init__(self, backend: PlanBackend) -> None:
        self._backend = backend

    @property
    def can_change(self) -> bool:
        """Whether residents may come and go: not if leaves are held by several blocks, since then who shares them would
        change, too."""
        return self._backend.shared is None

    def keep(self, counts: Mapping[str, int], slots: int) -> None:
        """Have so many blocks of each stack on the device for good, spread evenly, and so many slots.

        Blocks that leave the device are packed in host memory, and those that come give that memory back. If a step
        fails, what was done before it stays done.

        Args:
            counts: path of a component with a stack -> number of its blocks; the others stay as they are.
            slots: number of slots.

        Raises:
            RuntimeError: a block is running, or the device's memory isn't enough (`torch.OutOfMemoryError`).
        """
        backend = self._backend
        assert backend.plan is not None
        if backend.streamer.is_running or backend.stages.is_running:
            raise RuntimeError("Residents can't change while a block or a swapped component is running.")
        backend.streamer.release_slots()
        wanted = {
            stack.component: resident_indices(
                len(stack.blocks), counts.get(stack.component, len(stack.resident)), backend.config.resident_policy
            )
            for stack in backend.plan.stacks
        }
        try:
            with on_device(backend.device):
                for _, stack, index in self._numbered():
                    if index not in wanted[stack.component] and backend.masters.of(stack.blocks[index]) is None:
                        backend.masters.take(Unit(stack.path(index), stack.blocks[index]))
                self._reconcile()
                self._take(
                    [stack.blocks[index] for _, stack, index in self._numbered() if index in wanted[stack.component]]
                )
        finally:
            backend.streamer.slots.count = slots
            self._reconcile()
            backend.look_again()
        backend.streamer.require_slots()

    def _numbered(self) -> Iterator[_Place]:
        """Each block."""
        assert self._backend.plan is not None
        number = 0
        for stack in self._backend.plan.stacks:
            for index in range(len(stack.blocks)):
                yield number, stack, index
                number += 1

    def _take(self, blocks: Sequence[nn.Module]) -> None:
        """Have blocks on the device, and let their masters go."""
        backend = self._backend
        masters = {block: master for block in blocks if (master := backend.masters.of(block)) is not None}
        coming = {id(tensor) for master in masters.values() for tensor in master.tensors}
        for block, master in masters.items():
            master.realize()
            backend.residency.take_back(block)
        # Copied before their host memory is unlocked: from there a copy takes a fraction of the time.
        backend.residency.place(backend.masters.held() - coming)
        for block in masters:
            backend.masters.remove(block)

    def _reconcile(self) -> None:
        """A block with a master is streamed and any other one stays, whatever was cut short before."""
        backend = self._backend
        with on_device(backend.device):
            for number, stack, index in list(self._numbered()):
                block = stack.blocks[index]
                master = backend.masters.of(block)
                if master is None:
                    backend.residency.take_back(block)
                    backend.streamer.retire(number)
                else:
                    master.unbind()
                    backend.residency.leave_out(block)
                    backend.streamer.readmit(number, master)
                if (master is None) != (index in stack.resident):
                    self._note(stack.component, index, stays=master is None)
            backend.residency.place(backend.masters.held())

    def _note(self, component: str, index: int, *, stays: bool) -> None:
        """The plan says what is so."""
        plan = self._backend.plan
        assert plan is not None
        stacks = list(plan.stacks)
        for place, stack in enumerate(stacks):
            if stack.component == component:
                kept = set(stack.resident) | {index} if stays else set(stack.resident) - {index}
                stacks[place] = replace(
                    stack,
                    resident=tuple(sorted(kept)),
                    options=replace(stack.options, resident_layers=len(kept)),
                )
        self._backend.plan = replace(plan, stacks=tuple(stacks))
