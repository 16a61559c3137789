"""Leaves that don't belong to one block alone: on the device for as long as any managed forward runs."""

from __future__ import annotations

from types import TracebackType

from diffusers_omni_offload.streaming.slots import Slot
from diffusers_omni_offload.streaming.streamer import Streamer
from diffusers_omni_offload.weights.master import Master


class SharedLeaves:
    """One master for leaves that several blocks, or a block and a module outside of blocks, hold.

    A leaf like that is needed by more than one forward, so it is bound from the start of the outermost managed forward
    to its end, in a buffer of its own. Re-entrant.

    Args:
        master: the packed leaves.
        streamer: whose device, copies and counters are used.
    """

    def __init__(self, master: Master, streamer: Streamer) -> None:
        self.master = master
        self._streamer = streamer
        self._slot: Slot | None = None
        self._depth = 0

    @property
    def nbytes(self) -> int:
        """Device bytes held."""
        return 0 if self._slot is None else self._slot.buffer.numel()

    @property
    def is_bound(self) -> bool:
        """Whether a managed forward is running."""
        return self._depth > 0

    def require_slot(self) -> None:
        """Between forwards: allocate the buffer, or one of another size; what it held isn't believed."""
        self._depth = 0
        if self._slot is None or self._slot.buffer.numel() != self.master.nbytes:
            self.release()
            self._slot = Slot(self.master.nbytes, self._streamer.platform)
        self._slot.tag = None

    def release(self) -> None:
        """Give the buffer back."""
        self.master.forget_views()
        if self._slot is not None:
            self._slot.tell_allocator()
        self._slot = None

    def __enter__(self) -> None:
        if self._depth == 0:
            if self._slot is None:
                self.require_slot()
            assert self._slot is not None
            if self._slot.tag is None:
                self._streamer.load_apart(self.master, self._slot)
            self._streamer.bind_apart(self.master, self._slot)
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            assert self._slot is not None
            self._streamer.unbind_apart(self.master, self._slot)
