"""Components that take turns on the device as wholes.

A stage is bound inside its component's entry points only. Between them its buffer keeps the bytes, until another stage
needs the room or the call ends. Nothing is ever copied back: the host's copy is the truth.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import nn

from diffusers_omni_offload.messages import logger
from diffusers_omni_offload.streaming.slots import Slot
from diffusers_omni_offload.streaming.streamer import Streamer
from diffusers_omni_offload.weights.derived import drop_derived
from diffusers_omni_offload.weights.master import Master

#: A component that is packed anew so often during calls does it in each of its forwards.
_OFTEN = 4

Rivals = Mapping[str, tuple[str, ...]]
"""The group of what runs -> the groups that leave the device before."""

RIVALS: Rivals = {
    "dit": ("dit", "encoder", "vae"),
    "resident": ("encoder", "vae"),
    "encoder": ("dit", "resident", "vae"),
    "vae": ("dit", "resident", "encoder", "vae"),
}
"""For the roles of components. A "resident" runs beside the DiT in each step, as a ControlNet does."""


def rivals_of(groups: Iterable[str]) -> Rivals:
    """`RIVALS` for the groups that are roles; those of any other group make room for all but their own."""
    found = set(groups)
    others = {group: tuple(found - {group}) for group in found if group not in RIVALS}
    return {**RIVALS, **others}


def largest_together(stages: Iterable[tuple[str, int]]) -> int:
    """The most bytes that stages, each given by group and size, take on the device at one time."""
    sizes: dict[str, list[int]] = {}
    for group, nbytes in stages:
        sizes.setdefault(group, []).append(nbytes)
    rivals = rivals_of(sizes)
    # Those of a group that make way for each other are there one at a time.
    whole = {group: max(found) if group in rivals[group] else sum(found) for group, found in sizes.items()}
    return max(
        (sum(size for other, size in whole.items() if other == group or other not in rivals[group]) for group in whole),
        default=0,
    )


class Stage(ABC):
    """A component that comes to the device when it is entered.

    Args:
        path: the component's path.
        group: what it has in common with others that stay when it runs: a component's role, or "phase <name>".

    Attributes:
        moves_itself: whether the component has a lifecycle of its own.
        is_inside: whether one of its entry points is running.
    """

    moves_itself: ClassVar[bool] = False

    def __init__(self, path: str, group: str) -> None:
        self.path, self.group = path, group
        self.is_inside = False

    @property
    @abstractmethod
    def is_loaded(self) -> bool:
        """Whether its weights are on the device, or on their way."""

    @property
    def nbytes(self) -> int:
        """Device bytes held by us for it."""
        return 0

    def settle(self, undo: ExitStack) -> None:
        """Have it on the host when offload begins, whatever it was before; `undo` gets the way back first."""
        return

    def follow(self) -> None:
        """Between entries: take in what was replaced since."""
        return

    @abstractmethod
    def load(self) -> None:
        """Bring the weights to the device; they aren't there."""

    def hold_compute(self) -> None:
        """Let the compute stream wait for the weights."""
        return

    @abstractmethod
    def give_up(self) -> None:
        """Give the room back."""

    def bind(self) -> None:
        """The module's tensors become those on the device."""
        self.is_inside = True

    def unbind(self) -> None:
        """The module's tensors are the host's again."""
        self.is_inside = False


class PackedStage(Stage):
    """A component with one master: one copy loads it into one buffer.

    Args:
        path: the component's path.
        group: its group.
        module: the component.
        master: its packed weights.
        streamer: whose device, copies and counters are used.
    """

    def __init__(self, path: str, group: str, module: nn.Module, master: Master, streamer: Streamer) -> None:
        super().__init__(path, group)
        self.master = master
        self._module, self._streamer = module, streamer
        self._slot: Slot | None = None
        self._repacks = 0

    @property
    def is_loaded(self) -> bool:
        return self._slot is not None

    @property
    def nbytes(self) -> int:
        return 0 if self._slot is None else self._slot.buffer.numel()

    @property
    def slot(self) -> Slot:
        """The buffer; it is loaded."""
        assert self._slot is not None
        return self._slot

    def follow(self) -> None:
        """Pack anew what was replaced during the call, as a VAE is that is cast before it decodes; this locks pages
        anew."""
        if not self.is_inside and self._streamer.is_bound_apart(self.master):
            self._streamer.unbind_apart(self.master, self.slot)  # An interrupt has left it bound.
        if not self.master.is_current():
            self._say_if_often()
            self.give_up()
            # Packing unlocks the host memory that the last copy was read from.
            self._streamer.wait_for_copies()
            self.master.pack(in_place=False)

    def _say_if_often(self) -> None:
        self._repacks += 1
        if self._repacks == _OFTEN:
            logger.warning(
                "%s is packed anew for the %dth time during calls, since weights or buffers of it are replaced there: "
                "%s. Leave it resident, or keep what its forward makes as a plain attribute.",
                self.path,
                _OFTEN,
                self.master.changed_leaf() or "a cast, say",
            )

    def load(self) -> None:
        slot = Slot(self.master.nbytes, self._streamer.platform)
        self._streamer.load_apart(self.master, slot)
        self._slot = slot

    def hold_compute(self) -> None:
        self._streamer.platform.current_stream().wait_event(self.slot.ready)

    def give_up(self) -> None:
        slot, self._slot = self._slot, None
        self.master.forget_views()
        if slot is not None:
            slot.tell_allocator()
            drop_derived(self._module)

    def bind(self) -> None:
        super().bind()
        self._streamer.bind_apart(self.master, self.slot)

    def unbind(self) -> None:
        try:
            self._streamer.unbind_apart(self.master, self.slot)
        finally:
            super().unbind()


class OnDemandStage(Stage):
    """A component that moves itself: it has `load_to_device`, which may take the device, and `offload_to_cpu`.

    Args:
        path: the component's path.
        group: its group.
        module: the component.
        device: the execution device.
    """

    moves_itself = True

    def __init__(self, path: str, group: str, module: Any, device: torch.device) -> None:
        super().__init__(path, group)
        self._module, self._device = module, device

    @property
    def is_loaded(self) -> bool:
        # The pipeline may have called the lifecycle itself.
        return any(tensor.device == self._device for tensor in chain(self._module.parameters(), self._module.buffers()))

    def settle(self, undo: ExitStack) -> None:
        if self.is_loaded:
            undo.callback(self.load)
            self._module.offload_to_cpu()

    def load(self) -> None:
        takes_device = bool(inspect.signature(self._module.load_to_device).parameters)
        self._module.load_to_device(*([self._device] if takes_device else []))

    def give_up(self) -> None:
        if self.is_loaded:
            self._module.offload_to_cpu()


class Stages:
    """All stages of a pipeline, and who makes room for whom.

    Args:
        streamer: whose device is used.

    Attributes:
        swaps: loads of whole components so far, without those of components that move themselves.
    """

    def __init__(self, streamer: Streamer) -> None:
        self.swaps = 0
        self._rivals = RIVALS
        self._streamer = streamer
        self._stages: dict[nn.Module, Stage] = {}
        self._by_path: dict[str, Stage] = {}

    def __iter__(self) -> Iterator[Stage]:
        return iter(self._stages.values())

    @property
    def is_running(self) -> bool:
        """Whether an entry point of any stage is running."""
        return any(stage.is_inside for stage in self)

    def modules(self) -> Iterable[nn.Module]:
        """The components that are stages."""
        return self._stages.keys()

    @property
    def nbytes(self) -> int:
        """Device bytes held now."""
        return sum(stage.nbytes for stage in self)

    def add(self, module: nn.Module, stage: Stage) -> None:
        """Take a stage in."""
        self._stages[module] = stage
        self._by_path[stage.path] = stage
        self._rivals = rivals_of(other.group for other in self)

    def remove(self, module: nn.Module) -> None:
        """Let a stage go, and what it holds of the device."""
        stage = self._stages.pop(module, None)
        if stage is not None:
            del self._by_path[stage.path]
            stage.give_up()

    def at(self, path: str) -> Stage | None:
        """The stage of the component at a path, if it has one."""
        return self._by_path.get(path)

    def make_room(self, group: str, newcomer: Stage | None = None) -> None:
        """Before something of this group runs: its rivals leave the device, but for those that are running."""
        rivals = self._rivals.get(group, ())
        self.leave(stage for stage in self if stage is not newcomer and stage.group in rivals)

    def bring(self, stage: Stage) -> None:
        """Have a stage's weights on the device, as they are now."""
        self.make_room(stage.group, stage)
        stage.follow()
        if not stage.is_loaded:
            stage.load()
            self.swaps += not stage.moves_itself

    def announce(self, stage: Stage) -> None:
        """Bring a stage that is about to be entered by a way of its own.

        The compute stream waits for the copy at once: as long as the stage isn't bound nobody else would, and its room
        could go to other work while the copy still writes there.
        """
        if not stage.is_inside:
            self.bring(stage)
            stage.hold_compute()

    def leave(self, stages: Iterable[Stage]) -> None:
        """These leave the device, but for those that are running."""
        self._give_up(stage for stage in stages if not stage.is_inside)

    def give_up_all(self) -> None:
        """Nothing is running: every stage leaves the device."""
        for stage in self:
            stage.is_inside = False
        self._give_up(self)

    def _give_up(self, stages: Iterable[Stage]) -> None:
        leaving = [stage for stage in stages if stage.is_loaded]
        for stage in leaving:
            stage.give_up()
        if leaving:
            # A component's buffer is one large allocation. Kept in reserve, it would be cut up for small ones that
            # stay, and then neither serve the next component nor go back.
            self._streamer.platform.return_freed_memory()
