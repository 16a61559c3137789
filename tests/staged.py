"""Doubles of masters whose bytes are in files: reads that are slow, that fail, and that say who reads what."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from diffusers_omni_offload.platform import Platform, platform_for
from diffusers_omni_offload.streaming.slots import Slot
from diffusers_omni_offload.streaming.staging import Staging
from diffusers_omni_offload.weights.pinning import PinnedBudget


class FileMaster:
    """A master of random bytes that are read in two halves.

    Attributes:
        expected: its bytes.
        during: called between the halves.
        errors: raised by the next reads, between the halves.
        reads: reads that have begun.
        clashes: reads that met another one in the same memory.
    """

    #: Addresses that are being read into now, by any master.
    _busy: set[int] = set()
    _lock = threading.Lock()

    def __init__(self, number: int, nbytes: int = 4096, *, seconds: float = 0.0) -> None:
        self.path = f"blocks.{number}"
        self.nbytes = nbytes
        generator = torch.Generator().manual_seed(number)
        self.expected = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
        self.during: Callable[[], object] = lambda: time.sleep(seconds)
        self.errors: list[BaseException] = []
        self.reads = self.clashes = 0

    def read_into(self, target: torch.Tensor) -> None:
        """Fill `target`, slowly."""
        assert target.shape == (self.nbytes,) and target.dtype == torch.uint8
        with self._lock:
            self.reads += 1
            self.clashes += target.data_ptr() in self._busy
            self._busy.add(target.data_ptr())
        try:
            half = self.nbytes // 2
            target[:half] = self.expected[:half]
            self.during()
            if self.errors:
                raise self.errors.pop(0)
            target[half:] = self.expected[half:]
        finally:
            with self._lock:
                self._busy.discard(target.data_ptr())


class Gate:
    """Holds reads up until it is opened: `master.during = gate`."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.opened.wait(30), "nobody has opened the gate"


class Stage:
    """A `Staging` with a copy stream and slots, as a streamer has them."""

    def __init__(
        self, device: torch.device, *, count: int = 2, slots: int = 2, nbytes: int = 4096, pin: bool = True
    ) -> None:
        self.platform: Platform = platform_for(device)
        self.budget = PinnedBudget(pin)
        self.staging = Staging(self.platform, self.budget, count)
        self.copies = self.platform.stream()
        self.slots = [Slot(nbytes, self.platform) for _ in range(slots)]
        self._turn = 0

    def load(self, master: FileMaster) -> Slot:
        """Load into the next slot. Nothing waits for the copy, so that the device may put it off."""
        slot = self.slots[self._turn % len(self.slots)]
        self._turn += 1
        assert self.staging.load(master, slot, self.copies) == master.nbytes
        return slot

    def compute(self, slot: Slot, master: FileMaster) -> torch.Tensor:
        """Have the device read the slot: a copy of its bytes, on the device."""
        stream = self.platform.current_stream()
        stream.wait_event(slot.ready)
        output = slot.buffer[: master.nbytes].clone()
        slot.free.record(stream)
        return output

    def run(self, master: FileMaster) -> torch.Tensor:
        """Load and compute."""
        return self.compute(self.load(master), master)


def eventually(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait until the condition holds; AssertionError if it doesn't in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it didn't come true in time"
        time.sleep(0.001)
