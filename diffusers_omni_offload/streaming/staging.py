"""From files to the device through page-locked staging buffers, which a thread fills ahead of time.

The thread that runs the model decides what is read where; the reader does it, one read after another. So a buffer
never has two readers, and what is queued behind a read may rely on its end.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from diffusers_omni_offload.platform import Platform, Stream
from diffusers_omni_offload.streaming.reader import Read, Readable, ReadCounts, Reader
from diffusers_omni_offload.streaming.slots import Slot
from diffusers_omni_offload.weights.pinning import HostBuffer, PinnedBudget


class _Buffer:
    """A staging buffer.

    Attributes:
        host: the memory; None before it is first needed.
        read: what fills it, or has filled it; None means that nobody may believe the bytes.
        copied: recorded after the last copy from here.
    """

    def __init__(self, platform: Platform) -> None:
        self.host: HostBuffer | None = None
        self.read: Read | None = None
        self.copied = platform.event()

    def forget(self) -> None:
        """Believe nothing of what is here or on its way here."""
        if self.read is not None:
            self.read.is_wanted = False
            self.read = None

    def require(self, nbytes: int, platform: Platform, budget: PinnedBudget) -> torch.Tensor:
        """Memory of at least `nbytes`."""
        if self.host is None or self.host.nbytes < nbytes:
            self.copied.synchronize()
            self.give_back()  # The budget may not have room for both.
            with torch.inference_mode(False):
                self.host = HostBuffer(nbytes, platform, budget)
        return self.host.bytes

    def give_back(self) -> None:
        """Have no memory any more; no copy may be in flight."""
        if self.host is not None:
            self.host.unpin()
            self.host = None


class Staging:
    """Brings masters whose bytes are in files into slots: from the file to a staging buffer, from there to the slot.

    What is expected is read while other blocks are copied and computed. Where copies aren't asynchronous (the CPU),
    nothing is staged, and `load` reads into the slot. All methods are for the thread that runs the model.

    Args:
        platform: the device.
        budget: what may be page-locked.
        count: number of buffers, each of the size of the largest master that was expected.

    Attributes:
        lookahead: as many masters as there are buffers.
        demand_reads: reads that began only when their bytes were needed.
        waited_seconds: how long `load` has kept the host waiting for reads.
    """

    is_collective = False

    def __init__(self, platform: Platform, budget: PinnedBudget, count: int = 2) -> None:
        self.lookahead = count
        self.demand_reads, self.waited_seconds = 0, 0.0
        self._platform, self._budget = platform, budget
        self._counts = ReadCounts()
        # The least recently used one comes first.
        self._buffers: list[_Buffer] = []
        self._expected: list[Readable] = []
        self._reader: Reader | None = None
        self._end: weakref.finalize | None = None
        self._copies: Stream | None = None

    @property
    def reads(self) -> int:
        """Reads that are over, those that turned out to be of no use included."""
        return self._counts.reads

    @property
    def read_bytes(self) -> int:
        """Bytes of these reads."""
        return self._counts.read_bytes

    def serves(self, master: Any) -> bool:
        """Whether it is a master whose bytes are in files."""
        return hasattr(master, "read_into")

    def expect(self, masters: Sequence[Any]) -> None:
        """Read ahead what `load` will be asked for next, in this order; what was expected before counts no more."""
        if self._platform.is_asynchronous:
            self._expected = list(masters)
            self._read_ahead()

    def is_ready(self, master: Any) -> bool:
        """Whether the master's bytes are staged, so that `load` won't keep the host waiting."""
        buffer = self._holding(master)
        read = None if buffer is None else buffer.read
        return read is not None and read.done.is_set() and read.error is None

    def load(self, master: Any, slot: Slot, copies: Stream) -> int:
        """Copy the master's bytes into `slot.buffer` once that is free, and record `slot.ready`.

        Args:
            master: whose bytes to bring. If they aren't expected, they are read now.
            slot: where to.
            copies: the stream to copy on, always the same one.

        Returns:
            The bytes moved.

        Raises:
            BaseException: what the read has raised, whenever that was. The next `load` reads anew.
        """
        if not self._platform.is_asynchronous:
            return self._read_directly(master, slot)
        if master in self._expected:
            self._expected.remove(master)
        buffer = self._holding(master) or self._read_on_demand(master)
        read = buffer.read
        assert read is not None
        begin = time.perf_counter()
        read.done.wait()
        self.waited_seconds += time.perf_counter() - begin
        if read.error is not None:
            buffer.forget()
            try:
                raise read.error
            finally:
                read.error = None  # It has this frame now, which has the read.
        self._copies = copies
        self._mark_used(buffer)
        copies.wait_event(slot.free)
        with copies:
            slot.buffer[: master.nbytes].copy_(read.memory[: master.nbytes], non_blocking=True)
        buffer.copied.record(copies)
        slot.ready.record(copies)
        slot.writer = copies
        self._read_ahead()
        return master.nbytes

    def settle(self) -> None:
        """Forget what is staged and expected. When this returns, nothing is being read or copied any more."""
        self._expected = []
        for buffer in self._buffers:
            buffer.forget()
        if self._reader is not None and self._reader.is_serving:
            self._reader.drain()
        if self._copies is not None:
            self._copies.synchronize()

    def release(self) -> None:
        """Give the buffers and the thread back; the next read makes others."""
        self.settle()
        for buffer in self._buffers:
            buffer.give_back()
        if self._reader is not None and self._end is not None:
            self._reader.end()
            self._end.detach()

    def _holding(self, master: Readable) -> _Buffer | None:
        # A fork takes no thread along, and the buffers' memory isn't there either.
        if self._reader is not None and self._reader.is_serving:
            for buffer in self._buffers:
                if buffer.read is not None and buffer.read.master is master:
                    return buffer
        return None

    def _mark_used(self, buffer: _Buffer) -> None:
        self._buffers = [*(other for other in self._buffers if other is not buffer), buffer]

    def _read_directly(self, master: Readable, slot: Slot) -> int:
        begin = time.perf_counter()
        master.read_into(slot.buffer[: master.nbytes])
        self.waited_seconds += time.perf_counter() - begin
        self.demand_reads += 1
        self._counts.add(master.nbytes)
        return master.nbytes

    def _read_on_demand(self, master: Readable) -> _Buffer:
        self.demand_reads += 1
        for buffer in self._buffers:
            if buffer.read is not None and not buffer.read.is_started:
                buffer.forget()  # What is needed now goes first. The other is queued again behind it.
        return self._begin_read(master)

    def _read_ahead(self) -> None:
        for master in self._wanted():
            if self._holding(master) is None:
                self._begin_read(master)

    def _wanted(self) -> list[Readable]:
        return list(dict.fromkeys(self._expected))[: self.lookahead]

    def _begin_read(self, master: Readable) -> _Buffer:
        reader, buffer = self._require_reader(), self._victim()
        # In this order an interrupt may leave a read in the queue that nobody believes, but none that isn't there.
        buffer.forget()
        nbytes = max(one.nbytes for one in (master, *self._expected))
        read = Read(master, buffer.require(nbytes, self._platform, self._budget), buffer.copied)
        reader.queue.put(read)
        buffer.read = read
        self._mark_used(buffer)
        return buffer

    def _require_reader(self) -> Reader:
        if self._reader is None or not self._reader.is_serving:
            self._buffers = [_Buffer(self._platform) for _ in range(self.lookahead)]
            self._reader = Reader(self._platform.device, self._counts)
            self._end = weakref.finalize(self, self._reader.end)
            self._reader.start()
        return self._reader

    def _victim(self) -> _Buffer:
        """The buffer whose bytes are needed last, or not at all."""
        wanted = self._wanted()

        def rank(buffer: _Buffer) -> int:
            held = None if buffer.read is None else buffer.read.master
            return -wanted.index(held) if held in wanted else -len(wanted)

        return min(self._buffers, key=rank)
