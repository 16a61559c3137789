"""What a forward on offloaded weights may do with them: read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from diffusers_omni_offload.nested import any_tensor
from diffusers_omni_offload.platform import Platform
from diffusers_omni_offload.streaming.slots import Slot
from diffusers_omni_offload.streaming.streamer import Streamer
from diffusers_omni_offload.weights.master import Master

Edited = Callable[[Master], Sequence[torch.Tensor]]
"""Tells which leaves of a master the forward that is over has changed for good, as PEFT does to unmerge a LoRA."""


class Watch:
    """Looks at what one forward does with the weights that are bound for it.

    Args:
        streamer: what has bound the weights.
        master: the weights.
        slot: where they are bound.
        edited: see `Edited`.
        is_thorough: whether to look for replaced leaves and kept views, too, which costs more than most forwards are
            worth: it is done when something is new.

    Attributes:
        casts: the leaves that the forward has cast for good, as bitsandbytes does with biases, and to what.
    """

    def __init__(self, streamer: Streamer, master: Master, slot: Slot, edited: Edited, *, is_thorough: bool) -> None:
        self._streamer, self._master, self._slot = streamer, master, slot
        self._edited, self._is_thorough = edited, is_thorough
        self._versions = master.versions()
        self.casts: list[tuple[torch.Tensor, torch.dtype]] = []

    def look(self) -> None:
        """The forward is over, and the weights are bound still.

        Raises:
            RuntimeError: it wrote to them.
        """
        written = self._master.written_leaf(self._versions)
        if written is None and self._is_thorough:
            written = self._master.replaced_leaf(self._slot.buffer)
            self.casts = self._master.casts(self._slot.buffer)
        if written is not None:
            raise RuntimeError(written_message(written))
        self.take_edits()

    def take_edits(self) -> None:
        """The forward is over, or has failed: what it has changed for good goes home."""
        edited = self._edited(self._master)
        if edited:
            self._streamer.wait_for_copies()
            for tensor in edited:
                self._master.take_home(tensor, self._slot.buffer)

    def refuse_kept_views(self) -> None:
        """Raise RuntimeError if a module keeps a view of the slot as an attribute."""
        kept = self._master.attribute_where(self._slot.holds) if self._is_thorough else None
        if kept is not None:
            raise RuntimeError(view_message(f"{kept} keeps"))

    def refuse_gradients(self, output: Any) -> None:
        """Raise RuntimeError if an output asks for a gradient."""
        if torch.is_grad_enabled() and any_tensor(output, needs_gradient):
            raise RuntimeError(gradient_message(self._master.path, "its output"))


@contextmanager
def _uncached() -> Iterator[None]:
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(True)


def uncached_casts(device_type: str) -> AbstractContextManager[None]:
    """Keep autocast from caching casts of weights: it finds them by the tensor object, which holds other bytes the next
    time, and keeps them beyond the weight's time on the device."""
    is_cached = torch.is_autocast_enabled(device_type) and torch.is_autocast_cache_enabled()
    return _uncached() if is_cached else nullcontext()


def refuse_unservable(platform: Platform, master: Master, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a forward that offloaded weights can't serve.

    Raises:
        RuntimeError: it needs gradients, or is being captured into a graph.
    """
    if torch.is_grad_enabled():
        if master.requires_grad():
            raise RuntimeError(gradient_message(master.path, "one of its parameters"))
        if any_tensor([args, kwargs], needs_gradient):
            raise RuntimeError(gradient_message(master.path, "one of its inputs"))
    if platform.is_capturing():
        raise RuntimeError(
            f"{master.path} is offloaded, and its stream is being captured into a graph: a replay would read "
            "device memory that holds other weights by then. Run it without CUDA graphs, or leave it resident."
        )


def gradient_message(path: str, what: str) -> str:
    """What to say to a forward that needs gradients."""
    return (
        f"{path} ran with gradients enabled and {what} requires one. Offloaded weights are for inference: run it under "
        "torch.no_grad(), or disable offload to train."
    )


def written_message(leaf: str) -> str:
    """What to say of a leaf that its own forward wrote to."""
    return (
        f"{leaf} was written to during its own forward. Offloaded weights and buffers may only be read, since what is "
        "written goes to device memory that is given up. Call .eval() on the component if this is a running "
        "statistic, or leave the component out of `components`."
    )


def view_message(who: str) -> str:
    """What to say of a view of weights that outlives their time on the device."""
    return (
        f"{who} a view of its own weights, which other weights take the place of once it is over. "
        "Take a copy (.clone()), or leave the component out of `components`."
    )


def needs_gradient(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a gradient, or asks for one."""
    return tensor.requires_grad
