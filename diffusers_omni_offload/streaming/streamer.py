"""Blocks in and out of slots: load, bind, prefetch, unbind.

Two rules of stream order hold everything together. A forward waits for its slot's `ready` event before it reads; a copy
waits for its slot's `free` event before it writes. Between the forwards of a call the host doesn't wait; it does when
the call ends, when weights are edited, and where whole components change places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from diffusers_omni_offload.platform import Platform
from diffusers_omni_offload.streaming.order import Order
from diffusers_omni_offload.streaming.recorder import Recorder
from diffusers_omni_offload.streaming.slots import Slot, SlotPool
from diffusers_omni_offload.streaming.transport import HostToDevice, Transport
from diffusers_omni_offload.weights.leaves import cast_tensors
from diffusers_omni_offload.weights.master import Master

#: The tag of a slot that holds no block but a master of another kind.
_APART = -1


class Streamer:
    """Streams numbered blocks through a pool of slots.

    Args:
        platform: the device.
        slot_count: number of slots.
        transports: how bytes get into a slot; the first one that serves a master loads it.

    Attributes:
        loads: copies of blocks into slots so far.
        demand_loads: those of them that a forward had to wait for from the start.
        bytes_moved: bytes of all copies to the device.
        recorder: records blocks and copies; None, as nearly always, if nobody wants to know.
        component_recorder: records components; it goes on when enough blocks were recorded.
    """

    def __init__(self, platform: Platform, slot_count: int, transports: Sequence[Transport] = ()) -> None:
        self.platform = platform
        self.loads = self.demand_loads = self.bytes_moved = 0
        self.masters: list[Master | None] = []
        self.slots = SlotPool(slot_count, platform)
        self.order = Order()
        self.recorder: Recorder | None = None
        self.component_recorder: Recorder | None = None
        self._paths: list[str] = []
        self.transports = tuple(transports) or (HostToDevice(),)
        self._lookahead = max(transport.lookahead for transport in self.transports)
        # What is loaded when must follow from the order alone if other ranks have to do the same.
        self._may_put_off = not any(transport.is_collective for transport in self.transports)
        self._put_off: set[int] = set()
        self._copies = platform.stream()
        self._residents: set[int] = set()
        self._bound: dict[int, Master] = {}
        self._bound_apart: dict[Master, Slot] = {}

    def add_stack(self, masters: Iterable[Master | None], paths: Sequence[str] = ()) -> list[int]:
        """Number the blocks of a stack; None stands for a resident one, which is only noted in the order."""
        first = len(self.masters)
        self.masters += masters
        self._paths += paths or [f"block {number}" for number in range(first, len(self.masters))]
        numbers = list(range(first, len(self.masters)))
        self._residents.update(number for number in numbers if self.masters[number] is None)
        self.order.add_stack(numbers)
        return numbers

    def retire(self, block: int) -> None:
        """`block` won't run any more."""
        self.masters[block] = None
        self._residents.add(block)

    def readmit(self, block: int, master: Master) -> None:
        """`block` is streamed from now on."""
        self.masters[block] = master
        self._residents.discard(block)

    @property
    def slot_nbytes(self) -> int:
        """Bytes that the largest streamed block needs."""
        return max((master.slot_nbytes for master in self.masters if master is not None), default=0)

    def require_slots(self) -> None:
        """Allocate the slots, or others if the largest block has another size now."""
        if self.slots.require(self.slot_nbytes):
            for master in self.masters:
                if master is not None:
                    master.forget_views()

    def release_slots(self) -> None:
        """Give the slots' device memory back until a block needs it again; no block may be running."""
        self.settle()
        self.slots.release()
        for transport in self.transports:
            transport.release()
        for master in self.masters:
            if master is not None:
                master.forget_views()

    @property
    def is_running(self) -> bool:
        """Whether a forward has a block bound now."""
        return bool(self._bound or self._bound_apart)

    def begin(self) -> None:
        """A call begins: no slot is believed."""
        self.require_slots()
        self.slots.forget()
        self.order.begin()
        self._put_off.clear()
        if self.component_recorder is not None:
            self.component_recorder.begin_call()
        self._expect([block for block in range(len(self.masters)) if block not in self._residents])

    def end(self) -> None:
        """A call has ended, however: nothing is bound and no copy is in flight when this returns."""
        self.settle()
        self.slots.forget()
        self.order.end()

    def settle(self) -> None:
        """Wait for every copy, and put back what a forward that was interrupted left bound."""
        for master in (*self._bound.values(), *self._bound_apart):
            master.unbind()
        self._bound.clear()
        for slot in self._bound_apart.values():
            self._mark_free(slot)
            slot.tell_allocator()
        self._bound_apart.clear()
        self.wait_for_copies()
        for slot in self.slots.slots:
            if slot.users:
                self._mark_free(slot)
                slot.users = 0
            slot.tell_allocator()

    def wait_for_copies(self) -> None:
        """Wait on the host until nothing is read from any master any more."""
        self._copies.synchronize()
        for transport in self.transports:
            transport.settle()

    def enter(self, block: int) -> Slot | None:
        """Bind `block` to its slot for a forward on the current stream, and prefetch what comes next.

        Returns:
            The slot, for `leave`; None for a resident block.
        """
        self.order.note(block)
        master = self.masters[block]
        slot = None
        if master is not None:
            slot = self.slots.holding(block) or self._load_on_demand(block)
            self.slots.touch(slot)
            stream = self.platform.current_stream()
            if self.recorder is None:
                stream.wait_event(slot.ready)
            else:
                self.recorder.enter_when(self._paths[block], stream, slot.ready)
            slot.users += 1
        elif self.recorder is not None:
            self.recorder.enter(self._paths[block], self.platform.current_stream())
        try:
            if master is not None and slot is not None:
                self._bound[block] = master
                master.bind(slot.buffer)
            self._prefetch(block, self.slots.count - (slot is not None))
        except BaseException:
            self.leave(block, slot)
            raise
        return slot

    def leave(self, block: int, slot: Slot | None) -> None:
        """Undo `enter` when the forward is over, or has failed."""
        if self.recorder is not None:
            self.recorder.leave(self._paths[block], self.platform.current_stream())
        if slot is None:
            return
        # Counted down last: a slot that an interrupt leaves in use is marked free by `settle`.
        self._mark_free(slot)
        if slot.users == 1:
            master = self._bound.get(block)
            if master is not None:
                master.unbind()
                del self._bound[block]
        slot.users -= 1

    def run_component(
        self, path: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """`function(*args, **kwargs)`, an entry point of a component; recorded, if that is wanted."""
        recorder = self.component_recorder
        if recorder is None:
            return function(*args, **kwargs)
        try:
            return recorder.run_component(path, function, args, kwargs)
        finally:
            if recorder.is_full and self.recorder is recorder:
                self.recorder = None

    def take_casts(self, block: int, casts: Iterable[tuple[torch.Tensor, torch.dtype]]) -> None:
        """Between forwards: cast leaves of `block` for good, as its forward has done with those on the device."""
        master = self.masters[block]
        assert master is not None
        if not master.takes_casts:
            return
        self.wait_for_copies()
        cast_tensors(casts)
        master.pack(in_place=False)
        for slot in self.slots.slots:
            if slot.tag == block:
                slot.tag = None
        # In a call slots only grow; the next call makes them fit.
        if master.nbytes > self.slots.slots[0].buffer.numel():
            self.require_slots()

    @contextmanager
    def held(self, block: int) -> Iterator[torch.Tensor]:
        """Between calls: the bytes of a block, packed, on the device and for the body only."""
        self.require_slots()  # Blocks may have grown since the last call.
        slot = self.slots.victim(())
        assert slot is not None
        self._load(block, self.masters[block], slot)
        self.platform.current_stream().wait_event(slot.ready)
        try:
            yield slot.buffer
        finally:
            slot.tag = None
            self._mark_free(slot)
            self.wait_for_copies()

    def load_apart(self, master: Master, slot: Slot) -> None:
        """Copy a master that is no block into a slot of its own."""
        self._load(_APART, master, slot)

    def bind_apart(self, master: Master, slot: Slot) -> None:
        """Bind a master that is no block to a slot of its own, into which it was loaded."""
        self.platform.current_stream().wait_event(slot.ready)
        self._bound_apart[master] = slot
        master.bind(slot.buffer)

    def unbind_apart(self, master: Master, slot: Slot) -> None:
        """Undo `bind_apart`."""
        # First, so that an interrupt leaves nothing that `settle` doesn't put right.
        self._mark_free(slot)
        master.unbind()
        self._bound_apart.pop(master, None)

    def is_bound_apart(self, master: Master) -> bool:
        """Whether a master that is no block is bound now."""
        return master in self._bound_apart

    def _mark_free(self, slot: Slot) -> None:
        stream = self.platform.current_stream()
        if stream != slot.stream:
            # `free` stands for all readers: the new record has to come after the old one.
            stream.wait_event(slot.free)
            slot.other_streams.append(stream)
            slot.stream = stream
        slot.free.record(stream)

    def _load_on_demand(self, block: int) -> Slot:
        if not self.slots.slots:
            self.require_slots()
        expected = self.order.upcoming(block, self.slots.count - 1, self._residents)
        slot = self.slots.victim(expected) or self.slots.victim(())
        if slot is None:
            raise RuntimeError(
                f"{self.masters[block].path} was called while every one of the {self.slots.count} slots was in use "  # type: ignore[union-attr]
                "by a block that is still running. Enable with a larger `slots=`."
            )
        self._load(block, self.masters[block], slot)
        self.loads += 1
        if block not in self._put_off:
            self.demand_loads += 1
        self._put_off.discard(block)
        return slot

    def _prefetch(self, block: int, count: int) -> None:
        upcoming = self.order.upcoming(block, count, self._residents)
        for expected in upcoming:
            if self.slots.holding(expected) is None:
                slot = self.slots.victim(upcoming)
                if slot is None:
                    break
                if self._may_put_off and not self._is_ready(expected):
                    # Its bytes are being prepared: it is loaded when it runs, and the host has given out work by then.
                    self._put_off.add(expected)
                    break
                self._load(expected, self.masters[expected], slot)
                self.loads += 1
        if self._lookahead:
            self._expect(self.order.upcoming(block, count + self._lookahead, self._residents))

    def _expect(self, blocks: Sequence[int]) -> None:
        """Let transports prepare what isn't in a slot yet."""
        if not self._lookahead:
            return
        missing = [self.masters[block] for block in blocks if self.slots.holding(block) is None]
        for transport in self.transports:
            if transport.lookahead:
                served = [master for master in missing if master is not None and transport.serves(master)]
                transport.expect(served)

    def _is_ready(self, block: int) -> bool:
        master = self.masters[block]
        assert master is not None
        return self._transport_of(master).is_ready(master)

    def _transport_of(self, master: Master) -> Transport:
        for transport in self.transports:
            if transport.serves(master):
                return transport
        raise RuntimeError(f"Nothing brings {master.path} to the device, a {type(master).__name__}.")

    def _load(self, block: int, master: Master | None, slot: Slot) -> None:
        assert master is not None
        slot.tag = None
        self.slots.touch(slot)
        if slot.writer is not None and slot.writer is not self._copies:
            # What came on another stream, perhaps for nothing, has to be over.
            self._copies.wait_event(slot.ready)
        transport = self._transport_of(master)
        if self.recorder is None:
            self.bytes_moved += transport.load(master, slot, self._copies)
        else:
            self.bytes_moved += self.recorder.load(master.path, self._copies, slot, partial(transport.load, master))
        slot.tag = block
