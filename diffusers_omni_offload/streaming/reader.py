"""The thread that reads masters from files, one after another."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Protocol

import torch

from diffusers_omni_offload.platform import Event, on_device

#: How long the thread's end is waited for, in seconds: a read may hang, as from a server that is gone.
_PATIENCE = 5.0


class Readable(Protocol):
    """A master whose bytes are in files: `read_into` fills uint8, shape (nbytes,), on any thread."""

    @property
    def nbytes(self) -> int: ...

    def read_into(self, target: torch.Tensor) -> None: ...


@dataclass(eq=False)
class Read:
    """A master on its way into a buffer.

    Attributes:
        master: whose bytes to read.
        memory: where to: uint8, at least of the master's size.
        copied: the last copy from there, which has to be over before.
        is_wanted: a read that isn't any more when its turn comes is left out.
        is_started: whether its turn has come.
        error: what it has raised.
        done: set when it is over, however.
    """

    master: Readable
    memory: torch.Tensor
    copied: Event
    is_wanted: bool = True
    is_started: bool = False
    error: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)


@dataclass
class ReadCounts:
    """Reads that are over, those that turned out to be of no use included, and their bytes."""

    reads: int = 0
    read_bytes: int = 0

    def add(self, nbytes: int) -> None:
        """Count one more."""
        self.reads += 1
        self.read_bytes += nbytes


class Reader(threading.Thread):
    """Does what is put into its queue, in that order. It knows nothing of who puts it there, who may become garbage.

    Args:
        device: where the buffers are copied to.
        counts: what counts the reads.

    Attributes:
        queue: reads, events that are set when their turn comes, and None at the end.
    """

    def __init__(self, device: torch.device, counts: ReadCounts) -> None:
        super().__init__(name="omni-offload-reader", daemon=True)
        self.queue: SimpleQueue[Read | threading.Event | None] = SimpleQueue()
        self._device, self._counts, self._is_over = device, counts, False

    def run(self) -> None:
        """The thread."""
        with on_device(self._device):
            while (read := self.queue.get()) is not None and not self._is_over:
                if isinstance(read, threading.Event):
                    read.set()
                    continue
                # Not in a function of its own: an error keeps frames alive, and they mustn't hold the read that has it.
                try:
                    read.is_started = True
                    if read.is_wanted:
                        read.copied.synchronize()
                        read.master.read_into(read.memory[: read.master.nbytes])
                        self._counts.add(read.master.nbytes)
                except BaseException as error:
                    read.error = error
                read.done.set()
                del read

    @property
    def is_serving(self) -> bool:
        """Whether what is put into the queue is done. A forked process has no reader, only the object."""
        return self.is_alive() and not self._is_over

    def drain(self) -> None:
        """Wait until all that is in the queue now is over."""
        turn = threading.Event()
        self.queue.put(turn)
        turn.wait()

    def end(self) -> None:
        """Leave out what is queued, and wait a while for the read that is under way."""
        self._is_over = True
        self.queue.put(None)
        if self.is_alive() and threading.current_thread() is not self:
            self.join(_PATIENCE)
