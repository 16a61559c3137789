"""Who is on the device whenever something runs: a record kept by hooks on the modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from unittest import mock

import torch
from torch import nn

from diffusers_omni_offload.handle import OffloadHandle
from diffusers_omni_offload.streaming.stages import OnDemandStage, PackedStage, Stage
from tests.swapped import leaves_of


@dataclass(frozen=True)
class Moment:
    """The end of one forward.

    Attributes:
        path: of the component that it belongs to.
        loaded: paths of the stages that are on the device.
        bound: paths of the components whose tensors are the device's now, of those that are swapped.
        allocated: device bytes.
    """

    path: str
    loaded: frozenset[str]
    bound: frozenset[str]
    allocated: int


@dataclass(frozen=True)
class Swap:
    """A stage that comes or goes.

    Attributes:
        path: the component's.
        comes: whether it comes to the device.
        before, after: device bytes.
    """

    path: str
    comes: bool
    before: int
    after: int


class Occupancy(AbstractContextManager["Occupancy"]):
    """Records every forward of a module with weights, and every swap, between entry and exit.

    Args:
        handle: of an offloaded pipeline.

    Attributes:
        moments: the forwards, in the order in which they end.
        swaps: the swaps, in their order.
    """

    def __init__(self, handle: OffloadHandle) -> None:
        self.moments: list[Moment] = []
        self.swaps: list[Swap] = []
        self._handle = handle
        self._swapped = {path: leaves_of(handle.plan.component(path).module) for path in handle.plan.swapped}
        self._undo = ExitStack()

    def __enter__(self) -> Occupancy:
        for path, module in owned_modules(self._handle):
            if module._parameters or module._buffers:
                removable = module.register_forward_hook(lambda *_, path=path: self._note(path))
                self._undo.callback(removable.remove)
        for cls in (PackedStage, OnDemandStage):
            for name in ("load", "give_up"):
                watched = self._watched(getattr(cls, name), name == "load")
                self._undo.enter_context(mock.patch.object(cls, name, watched))
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    @property
    def loads(self) -> list[str]:
        """Paths of what came to the device, in order."""
        return [swap.path for swap in self.swaps if swap.comes]

    @property
    def order(self) -> list[str]:
        """Paths of the components that ran, each once where several of its modules ran in a row."""
        paths = [moment.path for moment in self.moments]
        return [path for path, previous in zip(paths, ["", *paths], strict=False) if path != previous]

    def _note(self, path: str) -> None:
        stages = self._handle.backend.stages
        bound = frozenset(path for path, leaves in self._swapped.items() if _is_on_device(leaves))
        loaded = frozenset(stage.path for stage in stages if stage.is_loaded)
        self.moments.append(Moment(path, loaded, bound, torch.accelerator.memory_allocated()))

    def _watched(self, original: Callable[[Stage], None], comes: bool) -> Callable[[Stage], None]:
        def watched(stage: Stage) -> None:
            before, was_loaded = torch.accelerator.memory_allocated(), stage.is_loaded
            original(stage)
            if was_loaded != stage.is_loaded:
                self.swaps.append(Swap(stage.path, comes, before, torch.accelerator.memory_allocated()))

        return watched


def owned_modules(handle: OffloadHandle) -> Iterator[tuple[str, nn.Module]]:
    """(path of its component, module) for every module of the pipeline; one in two components is the inner one's."""
    components = handle.plan.components
    owner: dict[nn.Module, str] = {}
    for component in sorted(components, key=lambda component: -sum(1 for _ in component.module.modules())):
        for module in component.module.modules():
            owner[module] = component.path
    yield from ((path, module) for module, path in owner.items())


def roles(handle: OffloadHandle) -> dict[str, str]:
    """Component path -> its role."""
    return {component.path: component.role for component in handle.plan.components}


def intruders(occupancy: Occupancy, role_of: dict[str, str]) -> list[str]:
    """What was on the device although the specification has it elsewhere, in words.

    Before a DiT runs, selected encoders and other selected DiTs leave; before an encoder runs, selected DiTs leave.
    What runs beside a DiT, as a ControlNet does, makes encoders leave, and stays with the DiT. A swapped VAE is alone.
    A component and a part of it that is one, too, run together.
    """
    banned = {
        "dit": {"dit", "encoder", "vae"},
        "resident": {"encoder", "vae"},
        "encoder": {"dit", "resident", "vae"},
        "vae": {"dit", "encoder", "resident", "vae"},
    }
    found = []
    stages = {path for moment in occupancy.moments for path in moment.loaded}
    for moment in occupancy.moments:
        role = role_of[moment.path]
        if role == "vae" and moment.path not in stages:
            continue  # One that stays on the device asks nobody to leave.
        others = {other for other in moment.loaded if not are_nested(other, moment.path)}
        wrong = {other for other in others if role_of[other] in banned[role]}
        if wrong:
            found.append(f"{', '.join(sorted(wrong))} while {moment.path} runs")
    return list(dict.fromkeys(found))


def are_nested(path: str, other: str) -> bool:
    """Whether one is the other, or lies inside of it."""
    return f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}.")


def _is_on_device(leaves: list[torch.Tensor]) -> bool:
    return any(leaves[index].device.type != "cpu" for index in (0, -1))
