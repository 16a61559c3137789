"""Pages of a file in the page cache, page-locked where they are for copies to the device."""

from __future__ import annotations

import mmap
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence

import torch

from diffusers_omni_offload.messages import format_bytes
from diffusers_omni_offload.platform import Platform
from diffusers_omni_offload.weights.checkpoint import CheckpointFile
from diffusers_omni_offload.weights.sources import Segment

Run = tuple[int, int]
"""Bytes [start, stop) of a file: whole pages, but for the file's end."""


class LockedPages:
    """Runs of a file's pages that are page-locked, as long as this object lives or until `unlock`.

    They are seen through a mapping that shows the page cache itself; the weights' own mapping may be edited.

    Args:
        platform: where the copies go to.
        file: the file.

    Attributes:
        address: of the file's first byte.

    Raises:
        CheckpointError: the file was changed.
    """

    def __init__(self, platform: Platform, file: CheckpointFile) -> None:
        self._platform = platform
        self._mapping = file.map_shared()
        self._runs: list[Run] = []
        self._unlock: list[weakref.finalize] = []
        self.address = self.view(0, 1).data_ptr()

    @property
    def nbytes(self) -> int:
        """How much is locked."""
        return sum(stop - start for start, stop in self._runs)

    def has(self, start: int, nbytes: int) -> bool:
        """Whether these bytes of the file lie in one locked run: a copy can't go over the end of one."""
        return any(first <= start and start + nbytes <= stop for first, stop in self._runs)

    def view(self, start: int, nbytes: int) -> torch.Tensor:
        """Bytes of the file: uint8, with a storage of its own. Nobody may write there."""
        with warnings.catch_warnings(), torch.inference_mode(False):
            warnings.simplefilter("ignore", UserWarning)  # torch has no tensors that can't be written to.
            return torch.frombuffer(self._mapping, dtype=torch.uint8, count=nbytes, offset=start)

    def lock(self, start: int, stop: int) -> str | None:
        """Lock the pages from byte `start` to `stop`; the reason if the platform refuses."""
        pointer = self.address + start
        try:
            self._platform.register_file(pointer, stop - start)
        except RuntimeError as error:
            return str(error).splitlines()[0]
        # The mapping is an argument: it can't be unmapped before the finalizer has unregistered it.
        unlock = weakref.finalize(self, _unregister, self._platform, pointer, self._mapping)
        if not (self.view(start, 1).is_pinned() and self.view(stop - 1, 1).is_pinned()):
            unlock()
            return (
                f"{str(self._platform.device)!r} took {format_bytes(stop - start)} but doesn't see them as page-locked."
            )
        self._unlock.append(unlock)
        self._runs.append((start, stop))
        return None

    def unlock(self) -> None:
        """The last copy from here has to be over."""
        self._runs.clear()
        for unlock in self._unlock:
            unlock()


def _unregister(platform: Platform, pointer: int, mapping: mmap.mmap) -> None:
    platform.unregister_host_memory(pointer)


def with_pages(
    taken: Mapping[CheckpointFile, Sequence[Run]], segments: Iterable[Segment]
) -> dict[CheckpointFile, list[Run]]:
    """These runs and the pages of some segments. Runs that share a page, or touch, become one."""
    more = {file: list(runs) for file, runs in taken.items()}
    for file, start, nbytes in segments:
        first, last = start // mmap.PAGESIZE, -(-(start + nbytes) // mmap.PAGESIZE)
        more.setdefault(file, []).append((first * mmap.PAGESIZE, min(last * mmap.PAGESIZE, file.nbytes)))
    return {file: merged(runs) for file, runs in more.items()}


def merged(runs: Sequence[Run]) -> list[Run]:
    """The same bytes in as few runs as can be, in order."""
    found: list[Run] = []
    for start, stop in sorted(runs):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found
