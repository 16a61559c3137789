"""Copies straight from the page cache: pages of the checkpoint's files, page-locked where they are."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from diffusers_omni_offload.messages import format_bytes, logger
from diffusers_omni_offload.platform import Platform, Stream
from diffusers_omni_offload.progress import progress
from diffusers_omni_offload.streaming.slots import Slot
from diffusers_omni_offload.streaming.staging import Staging
from diffusers_omni_offload.weights.checkpoint import CheckpointError, CheckpointFile
from diffusers_omni_offload.weights.locked_pages import LockedPages, Run, merged, with_pages
from diffusers_omni_offload.weights.mapped import MappedMaster
from diffusers_omni_offload.weights.master import Master
from diffusers_omni_offload.weights.sources import BlockSource, LeafSource, Segment

#: A copy of fewer bytes takes the device longer than to be staged with the rest of its block, so that a leaf in several
#: pieces is worth it only if they have as many each.
_WORTHWHILE_BYTES = 256 << 10


class Ceiling(NamedTuple):
    """How many bytes of the page cache may be page-locked for some masters, which come in the order of the plan."""

    nbytes: int
    masters: tuple[Master, ...]


Wanted = Callable[[], Iterable[Ceiling]]
"""Says what may be page-locked, each master once."""


@dataclass(frozen=True)
class _Route:
    """The copies that bring a block: (offset in the slot, bytes of the page cache). None if it has to be staged."""

    source: BlockSource
    copies: tuple[tuple[int, torch.Tensor], ...] | None

    @property
    def nbytes(self) -> int:
        return sum(view.numel() for _, view in self.copies or ())


class FromPageCache:
    """Copies blocks whose pages in the page cache are page-locked from there into the slot, leaf by leaf, and has the
    others staged.

    What is page-locked is whole blocks, in the order of the plan, until a ceiling. A block is copied from there whole
    or not at all: one with a leaf that is cast, in many small pieces, or in no file (an edited one, a non-persistent
    buffer) is staged. Pages are locked when the first block is asked for.

    Args:
        platform: the device.
        staging: brings what isn't page-locked.
        wanted: what may be page-locked; asked when pages are locked.

    Attributes:
        lookahead: that of staging.
        loads: blocks that were copied straight from the page cache.
    """

    is_collective = False

    def __init__(self, platform: Platform, staging: Staging, wanted: Wanted) -> None:
        self.lookahead = staging.lookahead
        self.loads = 0
        self._platform, self._staging, self._wanted = platform, staging, wanted
        self._pages: dict[CheckpointFile, LockedPages] | None = None
        self._routes: weakref.WeakKeyDictionary[MappedMaster, _Route] = weakref.WeakKeyDictionary()
        self._copies: Stream | None = None
        self._has_reported = False

    @property
    def locked_bytes(self) -> int:
        """Bytes of the page cache that are page-locked now."""
        return sum(pages.nbytes for pages in (self._pages or {}).values())

    def serves(self, master: Any) -> bool:
        return self._staging.serves(master)

    def expect(self, masters: Sequence[Any]) -> None:
        try:
            self._staging.expect([master for master in masters if self._route(master).copies is None])
        except CheckpointError:
            return  # Whoever needs the bytes has to hear of it: `load` says it again.

    def is_ready(self, master: Any) -> bool:
        return self._route(master).copies is not None or self._staging.is_ready(master)

    def load(self, master: Any, slot: Slot, copies: Stream) -> int:
        """See `Transport.load`.

        Raises:
            CheckpointError: a file was changed since it was opened.
        """
        route = self._route(master)
        if route.copies is None:
            return self._staging.load(master, slot, copies)
        # What is left: a file that is changed after this and before the copies have run. A device reads locked pages,
        # which a truncated file keeps for it; numbers may be wrong then, and the next load, of any block of the file,
        # is an error.
        route.source.require_unchanged()
        self._copies = copies
        copies.wait_event(slot.free)
        with copies:
            for offset, view in route.copies:
                slot.buffer[offset : offset + view.numel()].copy_(view, non_blocking=True)
        slot.ready.record(copies)
        slot.writer = copies
        self.loads += 1
        return route.nbytes

    def settle(self) -> None:
        self._staging.settle()
        if self._copies is not None:
            self._copies.synchronize()

    def release(self) -> None:
        """Unlock the pages, and give staging's buffers back; the next load locks them anew."""
        self.settle()
        self._routes.clear()
        pages, self._pages = self._pages or {}, None
        for locked in pages.values():
            locked.unlock()
        self._staging.release()

    def _route(self, master: Any) -> _Route:
        if not isinstance(master, MappedMaster):
            return _STAGED
        route = self._routes.get(master)
        if route is None or route.source is not master.source:
            route = self._routes[master] = _Route(master.source, self._views_of(master.source))
        return route

    def _views_of(self, source: BlockSource) -> tuple[tuple[int, torch.Tensor], ...] | None:
        pages = self._require_pages()
        pieces = _pieces_of(source)
        if pieces is None or not all(file in pages and pages[file].has(start, n) for _, (file, start, n) in pieces):
            return None
        return tuple((offset, pages[file].view(start, nbytes)) for offset, (file, start, nbytes) in pieces)

    def _require_pages(self) -> dict[CheckpointFile, LockedPages]:
        if self._pages is None:
            ceilings = list(self._wanted())
            runs, why = _choose(ceilings)
            pages: dict[CheckpointFile, LockedPages] = {}
            try:
                why = self._lock(runs, pages) or why
            except BaseException:
                for locked in pages.values():
                    locked.unlock()
                raise
            self._pages = pages
            self._report([master for ceiling in ceilings for master in ceiling.masters], why)
        return self._pages

    def _lock(self, runs: dict[CheckpointFile, list[Run]], pages: dict[CheckpointFile, LockedPages]) -> str | None:
        """Lock runs until one is refused; the reason is returned."""
        with progress("Pinning files", sum(stop - start for wanted in runs.values() for start, stop in wanted)) as bar:
            for file, wanted in runs.items():
                locked = pages[file] = LockedPages(self._platform, file)
                why = self._platform.why_no_files(locked.address + wanted[0][0])
                for start, stop in wanted:
                    why = why or locked.lock(start, stop)
                    if why is not None:
                        return why
                    bar.advance(stop - start)
        return None

    def _report(self, masters: Sequence[Master], why: str | None) -> None:
        if self._has_reported:
            return
        self._has_reported = True
        count = sum(self._route(master).copies is not None for master in masters)
        if why is not None:
            logger.warning(
                "%d of %d blocks are copied straight from the page cache, and the others are staged: %s",
                count,
                len(masters),
                why,
            )
        else:
            size = format_bytes(self.locked_bytes)
            logger.info(
                "%d of %d blocks are copied straight from the page cache, of which %s are page-locked.",
                count,
                len(masters),
                size,
            )


#: For what is no master of files.
_STAGED = _Route(BlockSource((), 0), None)


def _pieces_of(source: BlockSource) -> list[tuple[int, Segment]] | None:
    """(offset in the packed block, bytes of a file) for all of a block; None if some of it isn't there as it is needed,
    or in pieces that are too small."""
    pieces: list[tuple[int, Segment]] = []
    for offset, leaf in source.leaves:
        if not isinstance(leaf, LeafSource) or leaf.is_cast:
            return None
        if len(leaf.segments) > 1 and leaf.nbytes < len(leaf.segments) * _WORTHWHILE_BYTES:
            return None
        for segment in leaf.segments:
            if segment.nbytes:
                pieces.append((offset, segment))
            offset += segment.nbytes
    return pieces


def _choose(ceilings: Iterable[Ceiling]) -> tuple[dict[CheckpointFile, list[Run]], str | None]:
    """The runs of pages to lock, by file; and why there are none, if so."""
    chosen: dict[CheckpointFile, list[Run]] = {}
    why: str | None = "none of them lies in the files as it is needed."
    for limit, masters in ceilings:
        taken: dict[CheckpointFile, list[Run]] = {}
        for master in masters:
            pieces = _pieces_of(master.source) if isinstance(master, MappedMaster) else None
            if pieces is None:
                continue
            more = with_pages(taken, (segment for _, segment in pieces))
            if sum(stop - start for runs in more.values() for start, stop in runs) > limit:
                why = f"host_registration_limit_gib={limit / (1 << 30):g} is less than {master.path} takes."
                break
            taken = more
        for file, runs in taken.items():
            chosen[file] = merged([*chosen.get(file, ()), *runs])
    return chosen, None if chosen else why
