"""How a master's bytes get into a slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from diffusers_omni_offload.platform import Stream
from diffusers_omni_offload.streaming.slots import Slot
from diffusers_omni_offload.weights.master import Master
from diffusers_omni_offload.weights.packed import PackedMaster


class Transport(Protocol):
    """Brings masters of one kind to the device.

    Attributes:
        lookahead: how many masters it prepares before they are loaded.
        is_collective: whether other ranks have to load the same masters in the same order.
    """

    lookahead: int
    is_collective: bool

    def serves(self, master: Master) -> bool:
        """Whether it can load this master, as it is now."""

    def expect(self, masters: Sequence[Master]) -> None:
        """These will be loaded next, in this order, as far as one can tell: they may be prepared."""

    def is_ready(self, master: Master) -> bool:
        """Whether `load` wouldn't keep the host waiting."""

    def load(self, master: Any, slot: Slot, copies: Stream) -> int:
        """Issue what brings a master's bytes into a slot's buffer once `slot.free` has come, and record `slot.ready`.

        Args:
            master: one that is served.
            slot: where to.
            copies: the stream for copies from the host.

        Returns:
            Bytes that come from this host.
        """

    def settle(self) -> None:
        """Wait on the host until nothing is prepared or moved any more, and believe nothing that was prepared."""

    def release(self) -> None:
        """Give memory and threads back; they are there anew when they are needed again."""


class HostToDevice:
    """One copy from a packed master's host buffer; asynchronous where that is pinned."""

    lookahead = 0
    is_collective = False

    def serves(self, master: Master) -> bool:
        return isinstance(master, PackedMaster)

    def expect(self, masters: Sequence[Master]) -> None: ...

    def is_ready(self, master: Master) -> bool:
        return True

    def load(self, master: PackedMaster, slot: Slot, copies: Stream) -> int:
        copies.wait_event(slot.free)
        with copies:
            slot.buffer[: master.nbytes].copy_(master.host, non_blocking=True)
        slot.ready.record(copies)
        slot.writer = copies
        return master.nbytes

    def settle(self) -> None: ...

    def release(self) -> None: ...
