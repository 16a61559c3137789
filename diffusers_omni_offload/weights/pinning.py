"""Host buffers of an exact size, page-locked where the platform and the budget allow it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from typing import Any

import torch

from diffusers_omni_offload.host import host_memory
from diffusers_omni_offload.platform import Platform
from diffusers_omni_offload.progress import SILENT, Bar

#: Share of host memory that is never page-locked: the system, the page cache and the Python heap live there.
_RESERVED_SHARE = 0.1


#: Python doesn't have these names.
_PROT_NONE, _MAP_FIXED_NOREPLACE = 0, 0x100000


def _next_power_of_two(nbytes: int) -> int:
    return 1 << max(0, nbytes - 1).bit_length()


class PinnedBudget:
    """How many bytes may still be page-locked; shared by all buffers of one backend.

    Args:
        pin_memory: True pins up to 90 % of the memory of the host or its control group, False nothing,
            a number that many bytes.
    """

    def __init__(self, pin_memory: bool | int) -> None:
        if pin_memory is True:
            self.limit = int(host_memory().total_bytes * (1 - _RESERVED_SHARE))
        else:
            self.limit = int(pin_memory)
        self.pinned_bytes = 0
        self.refusal: str | None = None

    def take(self, nbytes: int) -> bool:
        """Whether `nbytes` fit in what is left; they are counted if so."""
        if self.pinned_bytes + nbytes > self.limit:
            return False
        self.pinned_bytes += nbytes
        return True

    def give_back(self, nbytes: int) -> None:
        """Return what `take` counted; there is room again, so a refusal is forgotten."""
        self.pinned_bytes -= nbytes
        self.refusal = None

    def refuse(self, nbytes: int, error: BaseException) -> None:
        """The platform refused what `take` counted: don't ask again until something was given back."""
        self.give_back(nbytes)
        self.refusal = str(error).splitlines()[0]


class HostBuffer:
    """`nbytes` of page-aligned host memory, pinned if possible, as a uint8 tensor `bytes` of shape (nbytes,).

    The memory lives as long as any tensor made from it; the page lock lives as long as this object.

    Args:
        nbytes: size.
        platform: where the copies go to.
        budget: what may be page-locked.
        pin: whether to lock the pages now; `pin()` does it later. Where torch's allocator locks them it is always now.
        bar: says so meanwhile.
    """

    def __init__(
        self, nbytes: int, platform: Platform, budget: PinnedBudget, *, pin: bool = True, bar: Bar = SILENT
    ) -> None:
        self.nbytes = nbytes
        self._platform, self._budget = platform, budget
        self.is_pinned = False
        self._memory: mmap.mmap | torch.Tensor
        self._unpin: weakref.finalize | None = None
        if not platform.registers_host_memory and platform.is_asynchronous and self._take_from_allocator(budget):
            return
        self._memory = mmap.mmap(-1, max(nbytes, 1))
        self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8, count=max(nbytes, 1))[:nbytes]
        if pin:
            self.pin(bar)

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """Bytes [offset, offset + nbytes) as a uint8 tensor that has a storage of its own, of just that size.

        Tensors that share one storage make `save_pretrained` compute wrong shard sizes and `torch.save` write the
        whole buffer.
        """
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        if isinstance(self._memory, torch.Tensor):
            source = self._memory.numpy()
            return torch.frombuffer(source, dtype=torch.uint8, count=nbytes, offset=offset)
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=nbytes, offset=offset)

    def pin(self, bar: Bar = SILENT) -> None:
        """Lock the pages, where the platform and the budget allow it; `bar` says so meanwhile."""
        if self._platform.registers_host_memory and self.nbytes and not self.is_pinned:
            with bar.meanwhile("Pinning weights"):
                self._register(self._platform, self._budget)

    def unpin(self) -> None:
        """Release the page lock; the last copy from here has to be over. The memory and its tensors stay."""
        self.is_pinned = False
        _not_forked.discard(self)
        if self._unpin is not None:
            self._unpin()

    def _register(self, platform: Platform, budget: PinnedBudget) -> None:
        if budget.refusal is not None or not budget.take(self.nbytes):
            return
        pointer = self.bytes.data_ptr()
        try:
            platform.register_host_memory(pointer, self.nbytes)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            budget.refuse(self.nbytes, error)
            return
        except BaseException:
            budget.give_back(self.nbytes)
            raise
        # The memory is an argument: it can't be unmapped before the finalizer has unregistered it.
        self._unpin = weakref.finalize(self, _unregister, platform, pointer, self.nbytes, budget, self._memory)
        self.is_pinned = True
        with contextlib.suppress(OSError, AttributeError, ValueError):
            self._memory.madvise(mmap.MADV_DONTFORK)  # type: ignore[union-attr]
            _not_forked.add(self)

    def _take_from_allocator(self, budget: PinnedBudget) -> bool:
        """Where memory can't be registered: torch's pinned allocator, whose rounding is charged to the budget."""
        charged = _next_power_of_two(self.nbytes)
        if self.nbytes == 0 or budget.refusal is not None or not budget.take(charged):
            return False
        try:
            self.bytes = self._memory = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=True)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            budget.refuse(charged, error)
            return False
        except BaseException:
            budget.give_back(charged)
            raise
        self._unpin = weakref.finalize(self, budget.give_back, charged)
        self.is_pinned = True
        return True


def _unregister(platform: Platform, pointer: int, nbytes: int, budget: PinnedBudget, memory: Any) -> None:
    platform.unregister_host_memory(pointer)
    budget.give_back(nbytes)
    with contextlib.suppress(OSError, AttributeError, ValueError):
        memory.madvise(mmap.MADV_DOFORK)


#: Buffers whose memory a forked process doesn't get: a device may write there, or read, as long as the parent lives.
_not_forked: weakref.WeakSet[HostBuffer] = weakref.WeakSet()

#: What a forked process couldn't keep the place of; it is never unmapped there.
_left_behind: list[Any] = []


def _keep_places() -> None:
    """In a forked process: let nothing be mapped where the parent's buffers were.

    They are unmapped when they die here too, and that would be the end of whatever has their place. Reading them still
    ends the process.
    """
    for buffer in _not_forked:
        if not _keep_place(buffer.bytes.data_ptr(), buffer.nbytes):
            _left_behind.append(buffer._memory)


def _keep_place(pointer: int, nbytes: int) -> bool:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED_NOREPLACE
    try:
        place = ctypes.CDLL(None).mmap
    except (OSError, AttributeError, TypeError):
        return False
    place.restype = ctypes.c_void_p
    place.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    return place(pointer, nbytes, _PROT_NONE, flags, -1, 0) == pointer


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_places)
