"""How a master's bytes get into a slot."""

from __future__ import annotations

from typing import Protocol

from diffusers_omni_offload.streaming.slots import Slot
from diffusers_omni_offload.weights.master import Master


class Transport(Protocol):
    """Issues the copy of a master's bytes into a slot's buffer on the current stream; returns the bytes moved."""

    def copy(self, master: Master, slot: Slot) -> int: ...


class HostToDevice:
    """One copy from the master's host buffer; asynchronous where that is pinned."""

    def copy(self, master: Master, slot: Slot) -> int:
        slot.buffer[: master.nbytes].copy_(master.host, non_blocking=True)
        return master.nbytes
