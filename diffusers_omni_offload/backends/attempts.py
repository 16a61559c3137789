"""A component's forward that may find the device's memory short, and is run once more then."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from diffusers_omni_offload.nested import any_tensor


class Relief(Protocol):
    """Makes room on the device."""

    def can_make_room(self, path: str) -> bool:
        """Whether anything could leave the device so that the component at `path` may be run once more."""

    def make_room(self, path: str) -> None:
        """Let it leave."""

    def give_up(self, path: str) -> None:
        """Room couldn't be made for the component at `path`, or wasn't enough."""


class Attempt:
    """What a forward finds, so that a second one can find the same: random numbers, and its arguments unchanged.

    What it changes of its modules, as a step counter, isn't known here.

    Args:
        device: the execution device.
        args: the forward's arguments.
        kwargs: likewise.
    """

    def __init__(self, device: torch.device, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        generators = [torch.default_generator, *_default_generators(device)]
        generators += [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator)]
        self._states = [(generator, generator.get_state()) for generator in generators]
        self._versions: list[tuple[torch.Tensor, int]] = []
        any_tensor((*args, *kwargs.values()), self._note)

    def can_be_repeated(self) -> bool:
        """Whether no argument was written to."""
        return all(tensor._version == version for tensor, version in self._versions)

    def rewind(self) -> None:
        """Put random numbers back."""
        for generator, state in self._states:
            generator.set_state(state)

    def _note(self, tensor: torch.Tensor) -> bool:
        if not tensor.is_inference():  # Those have no versions.
            self._versions.append((tensor, tensor._version))
        return False


def run_with_relief(
    path: str, relief: Relief, device: torch.device, enter: Callable[[], Any], args: Sequence[Any], kwargs: Any
) -> Any:
    """`enter()`, and once more if the device's memory was too short and room can be made.

    Args:
        path: of the component.
        relief: makes room.
        device: the execution device.
        enter: runs the component.
        args: its arguments.
        kwargs: likewise.

    Raises:
        torch.OutOfMemoryError: nothing could be made of it.
    """
    attempt = Attempt(device, args, kwargs)
    try:
        return enter()
    except torch.OutOfMemoryError as error:
        if not (attempt.can_be_repeated() and relief.can_make_room(path)):
            relief.give_up(path)
            raise
        first = error.with_traceback(None)  # The frames of the failed attempt hold its tensors.
    relief.make_room(path)
    attempt.rewind()
    try:
        return enter()
    except torch.OutOfMemoryError as error:
        relief.give_up(path)
        raise error from first


def _default_generators(device: torch.device) -> list[torch.Generator]:
    generators = getattr(torch.get_device_module(device), "default_generators", None)
    return [] if not generators or device.index is None else [generators[device.index]]
