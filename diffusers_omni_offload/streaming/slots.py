"""Fixed device buffers that blocks take turns in."""

from __future__ import annotations

from collections.abc import Collection

import torch

from diffusers_omni_offload.platform import Event, Platform, Stream
from diffusers_omni_offload.weights.kinds import inner_of, is_wrapper


class Slot:
    """A device buffer and what it holds.

    Attributes:
        buffer: uint8, shape (nbytes,), on the device.
        tag: the block whose bytes are here, or on their way here; None means that nobody may believe the bytes.
        ready: recorded when the tagged bytes have arrived, on the stream that brings them.
        writer: that stream; None before the first load.
        free: recorded on the compute stream when the last forward that read the buffer is over. A copy into the
            buffer waits for it: this is when a slot may be reused.
        stream: the stream that `free` was last recorded on.
        other_streams: those that have read the buffer besides the one that it was allocated on.
        users: forwards that are bound to the buffer now.
    """

    __slots__ = ("buffer", "free", "other_streams", "ready", "stream", "tag", "turn", "users", "writer")

    def __init__(self, nbytes: int, platform: Platform) -> None:
        with torch.inference_mode(False):
            self.buffer = torch.empty(nbytes, dtype=torch.uint8, device=platform.device)
        self.tag: int | None = None
        self.ready: Event = platform.event()
        self.writer: Stream | None = None
        self.free: Event = platform.event()
        self.users = 0
        self.turn = 0
        # The allocator may hand out memory that earlier work of this stream still uses: the first copy waits for it.
        self.stream: Stream = platform.current_stream()
        self.free.record(self.stream)
        self.other_streams: list[Stream] = []

    def tell_allocator(self) -> None:
        """The allocator knows the stream that the buffer was made on; it has to learn which others have read it."""
        for stream in self.other_streams:
            self.buffer.record_stream(stream)  # type: ignore[arg-type]
        self.other_streams.clear()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor`, or one that it is made of, is a view of this buffer."""
        if is_wrapper(tensor):
            return any(self.holds(inner) for _, inner in inner_of(tensor))
        buffer = self.buffer
        return (
            tensor.device == buffer.device
            and tensor.layout is torch.strided
            and tensor.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        )


class SlotPool:
    """`count` slots of one size, allocated together when first needed.

    Args:
        count: number of slots, at least 1.
        platform: the device.
    """

    def __init__(self, count: int, platform: Platform) -> None:
        self.count = count
        self.slots: list[Slot] = []
        self._platform = platform
        self._turn = 0

    @property
    def nbytes(self) -> int:
        """Device bytes held."""
        return sum(slot.buffer.numel() for slot in self.slots)

    def require(self, slot_nbytes: int) -> bool:
        """Have slots of `slot_nbytes` each. True if they are new, so that views of the old ones are void."""
        if len(self.slots) == self.count and self.slots[0].buffer.numel() == slot_nbytes:
            return False
        self.slots = []
        self.slots = [Slot(slot_nbytes, self._platform) for _ in range(self.count)]
        return True

    def release(self) -> None:
        """Give the device memory back; no copy may be in flight."""
        self.slots = []

    def forget(self) -> None:
        """Believe no slot."""
        for slot in self.slots:
            slot.tag = None

    def holding(self, block: int) -> Slot | None:
        """The slot that is tagged with `block`."""
        for slot in self.slots:
            if slot.tag == block:
                return slot
        return None

    def victim(self, wanted: Collection[int]) -> Slot | None:
        """The slot to load into: not in use, not holding a wanted block, and of those the one least recently used."""
        best = None
        for slot in self.slots:
            if slot.users == 0 and slot.tag not in wanted and (best is None or slot.turn < best.turn):
                best = slot
        return best

    def touch(self, slot: Slot) -> None:
        """Note that `slot` was used just now."""
        self._turn += 1
        slot.turn = self._turn
