"""The streaming engine below the hooks: the order of blocks, the slots, and the streamer between them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from diffusers_omni_offload.platform import CpuPlatform, Platform, Stream
from diffusers_omni_offload.streaming.order import Order
from diffusers_omni_offload.streaming.slots import Slot, SlotPool
from diffusers_omni_offload.streaming.streamer import Streamer
from diffusers_omni_offload.streaming.transport import HostToDevice
from diffusers_omni_offload.weights.leaves import find_leaves
from diffusers_omni_offload.weights.packed import PackedMaster
from diffusers_omni_offload.weights.pinning import PinnedBudget
from tests import tiny
from tests.tiny.toy import ToyBlock

# ---------------------------------------------------------------------- order


def order_of(*stacks: int) -> Order:
    """An order with stacks of so many blocks each, in a call that has just begun."""
    order = Order()
    first = 0
    for count in stacks:
        order.add_stack(range(first, first + count))
        first += count
    order.begin()
    return order


def feed(order: Order, blocks: Sequence[int]) -> None:
    for block in blocks:
        order.note(block)


def test_a_stack_runs_as_declared_and_wraps() -> None:
    order = order_of(4)
    feed(order, [0])
    assert order.upcoming(0, 2, ()) == [1, 2]
    feed(order, [1, 2, 3])
    assert order.upcoming(3, 3, ()) == [0, 1, 2]


def test_each_stack_wraps_to_its_own_first_block() -> None:
    order = order_of(3, 2)
    feed(order, [2])
    assert order.upcoming(2, 1, ()) == [0]
    feed(order, [4])
    assert order.upcoming(4, 1, ()) == [3]


def test_upcoming_leaves_out_residents_and_never_repeats() -> None:
    order = order_of(5)
    feed(order, [0])
    assert order.upcoming(0, 2, {1, 3}) == [2, 4]
    # A whole round gives no more than the others, the block itself left out.
    assert order.upcoming(0, 9, ()) == [1, 2, 3, 4]
    assert order.upcoming(0, 0, ()) == []


def test_a_deviation_is_learned_when_seen_twice_running() -> None:
    order = order_of(4)
    feed(order, [0, 2])
    order.note(0)
    assert order.upcoming(0, 1, ()) == [1], "once is not enough"
    feed(order, [2, 0])
    assert order.upcoming(0, 1, ()) == [2]
    # And back: the declared successor is a deviation now, and has to be seen twice running too.
    feed(order, [1, 0])
    assert order.upcoming(0, 1, ()) == [2]
    feed(order, [1, 0])
    assert order.upcoming(0, 1, ()) == [1]


def test_a_deviation_that_comes_and_goes_is_not_learned() -> None:
    order = order_of(4)
    for _ in range(5):
        feed(order, [0, 3, 0, 1, 2, 3])
    order.note(0)
    assert order.upcoming(0, 1, ()) == [1]


def test_two_different_deviations_running_are_not_one() -> None:
    order = order_of(4)
    feed(order, [0, 2, 0, 3, 0])
    assert order.upcoming(0, 1, ()) == [1]


def test_what_ran_last_in_a_call_says_nothing_about_the_next_call() -> None:
    order = order_of(4)
    for _ in range(4):
        order.begin()
        feed(order, [0, 1])
        order.end()
    order.begin()
    feed(order, [0, 1])
    # 1 was followed by 0 four times, but always across two calls: nothing was learned from that.
    order.end()
    order.begin()
    feed(order, [1])
    assert order.upcoming(1, 1, ()) == [2]


def test_the_end_of_a_call_is_known_from_the_one_before() -> None:
    order = order_of(3)
    feed(order, [0, 1, 2, 0, 1, 2])
    assert order.upcoming(2, 2, ()) == [0, 1], "in the first call nobody knows"
    order.end()
    order.begin()
    feed(order, [0, 1, 2, 0, 1])
    assert order.upcoming(1, 2, ()) == [2]
    order.note(2)
    assert order.upcoming(2, 2, ()) == []


def test_a_call_that_is_longer_than_the_one_before_goes_on_prefetching() -> None:
    order = order_of(3)
    feed(order, [0, 1, 2])
    order.end()
    order.begin()
    feed(order, [0, 1, 2, 0])
    assert order.upcoming(0, 2, ()) == [1, 2]


def test_an_empty_call_teaches_nothing() -> None:
    order = order_of(3)
    feed(order, [0, 1, 2, 0])
    order.end()
    order.begin()
    order.end()
    order.begin()
    feed(order, [0, 1, 2])
    assert order.upcoming(2, 2, ()) == [0]


def test_what_was_learned_can_be_forgotten() -> None:
    """As ranks do after a call that failed on one of them: they may have seen different parts of it."""
    order, fresh = order_of(4, 2), order_of(4, 2)
    for _ in range(2):
        order.begin()
        feed(order, [0, 2, 0, 2, 5, 4])
        order.end()
    order.begin()
    order.note(0)
    assert order.upcoming(0, 1, ()) == [2]
    order.unlearn()
    order.begin()
    for block in (0, 3, 4, 5):
        order.note(block)
        fresh.note(block)
        # Neither successors nor the length of the last call.
        assert order.upcoming(block, 9, ()) == fresh.upcoming(block, 9, ()) != []
    assert vars(order) == vars(fresh)


def test_a_deviation_that_was_forgotten_has_to_be_seen_twice_again() -> None:
    order = order_of(4)
    feed(order, [0, 2])
    order.unlearn()
    order.begin()
    feed(order, [0, 2, 0])
    assert order.upcoming(0, 1, ()) == [1]
    feed(order, [2, 0])
    assert order.upcoming(0, 1, ()) == [2]


def test_ranks_that_forgot_learn_the_same_from_then_on() -> None:
    """Whatever they have seen before."""
    first, second = order_of(5), order_of(5)
    feed(first, [0, 2, 4, 0, 2, 4, 0])
    feed(second, [0, 1])
    for order in (first, second):
        order.end()
        order.unlearn()
    for call in ([0, 3, 1, 4], [0, 3, 1, 4], [0, 2, 0, 2, 0], [0, 1, 2, 3, 4]):
        for order in (first, second):
            order.begin()
        for block in call:
            feed(first, [block])
            feed(second, [block])
            assert first.upcoming(block, 3, {2}) == second.upcoming(block, 3, {2})
        for order in (first, second):
            order.end()


# ---------------------------------------------------------------------- slots


@pytest.fixture
def platform(device: torch.device) -> Platform:
    return Platform(torch.device(device.type, 0))


def test_slots_are_allocated_together_and_follow_the_largest_block(platform: Platform) -> None:
    pool = SlotPool(3, platform)
    assert pool.nbytes == 0 and pool.slots == []
    assert pool.require(1000)
    assert pool.nbytes == 3000 and {slot.buffer.device for slot in pool.slots} == {platform.device}
    first = list(pool.slots)
    assert not pool.require(1000), "nothing changed"
    assert pool.slots == first
    pool.slots[0].tag = 7
    assert pool.require(2000), "a larger block doesn't"
    assert pool.nbytes == 6000 and all(slot not in first and slot.tag is None for slot in pool.slots)
    assert pool.require(800), "the largest block became smaller"
    assert pool.nbytes == 2400
    pool.release()
    assert pool.nbytes == 0


def test_a_slot_is_found_by_its_tag(platform: Platform) -> None:
    pool = SlotPool(2, platform)
    pool.require(64)
    pool.slots[1].tag = 5
    assert pool.holding(5) is pool.slots[1]
    assert pool.holding(4) is None
    pool.forget()
    assert pool.holding(5) is None


def test_the_victim_is_the_least_recently_used_slot_that_nobody_needs(platform: Platform) -> None:
    pool = SlotPool(3, platform)
    pool.require(64)
    for number, slot in enumerate(pool.slots):
        slot.tag = number
        pool.touch(slot)
    assert pool.victim(()) is pool.slots[0]
    assert pool.victim([0]) is pool.slots[1]
    pool.slots[1].users = 1
    assert pool.victim([0]) is pool.slots[2]
    assert pool.victim([0, 2]) is None, "one is wanted, one is wanted, one is in use"
    pool.slots[1].users = 0
    pool.touch(pool.slots[0])
    assert pool.victim(()) is pool.slots[1]


def test_slots_are_no_inference_tensors(platform: Platform) -> None:
    with torch.inference_mode():
        slot = Slot(64, platform)
    assert not slot.buffer.is_inference()


# ---------------------------------------------------------------------- streamer


class RecordingTransport(HostToDevice):
    """Copies, and notes which masters were copied; raises `error` before the copy that `fails_at` counts down to."""

    def __init__(self) -> None:
        self.copied: list[PackedMaster] = []
        self.fails_at: int | None = None
        self.fails_after_copy = False
        self.error: type[BaseException] = KeyboardInterrupt

    def load(self, master: PackedMaster, slot: Slot, copies: Stream) -> int:
        if self.fails_at is not None:
            self.fails_at -= 1
            if self.fails_at < 0:
                self.fails_at = None
                if self.fails_after_copy:
                    super().load(master, slot, copies)
                raise self.error
        self.copied.append(master)
        return super().load(master, slot, copies)


class Rig:
    """A streamer over toy blocks, and the same blocks resident: `run` compares the two."""

    def __init__(self, platform: Platform, counts: Sequence[int], slots: int, residents: Sequence[int] = ()) -> None:
        total = sum(counts)
        self.platform = platform
        self.transport = RecordingTransport()
        self.blocks = [self._block(index) for index in range(total)]
        self.twins = [self._block(index).to(platform.device) for index in range(total)]
        self.streamer = Streamer(platform, slots, [self.transport])
        budget = PinnedBudget(True)
        masters = [self._master(block, f"blocks.{i}", platform, budget) for i, block in enumerate(self.blocks)]
        self.numbers: list[list[int]] = []
        first = 0
        for count in counts:
            stack = range(first, first + count)
            for index in set(stack) & set(residents):
                self.blocks[index].to(platform.device)
            self.numbers.append(self.streamer.add_stack(None if i in residents else masters[i] for i in stack))
            first += count
        self.x = torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(0)).to(platform.device)

    @staticmethod
    def _block(index: int) -> ToyBlock:
        return ToyBlock(16, (16, 48, 32)[index % 3], seed=index).eval().requires_grad_(False)

    @staticmethod
    def _master(block: ToyBlock, path: str, platform: Platform, budget: PinnedBudget) -> PackedMaster:
        master = PackedMaster(lambda: find_leaves(block, path), [block], path, platform, budget)
        master.pack()
        return master

    def forward(self, order: Sequence[int], x: torch.Tensor | None = None) -> torch.Tensor:
        x = self.x if x is None else x
        for block in order:
            slot = self.streamer.enter(block)
            try:
                x = self.blocks[block](x)
            finally:
                self.streamer.leave(block, slot)
        return x

    def reference(self, order: Sequence[int], x: torch.Tensor | None = None) -> torch.Tensor:
        x = self.x if x is None else x
        for block in order:
            x = self.twins[block](x)
        return x

    def call(self, *orders: Sequence[int]) -> tuple[int, int]:
        """One call of some passes, which must be right; returns the loads and the demand loads that it took."""
        before = self.streamer.loads, self.streamer.demand_loads
        self.streamer.begin()
        results = [self.forward(order) for order in orders]
        self.streamer.end()
        for found, order in zip(results, orders, strict=True):
            assert torch.equal(found, self.reference(order)), f"wrong after {order}"
        return self.streamer.loads - before[0], self.streamer.demand_loads - before[1]

    def is_at_rest(self) -> bool:
        streamed = [
            block for block, master in zip(self.blocks, self.streamer.masters, strict=True) if master is not None
        ]
        return all(t.device.type == "cpu" for block in streamed for t in [*block.parameters(), *block.buffers()])


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("slots", (1, 2, 3, 5))
@pytest.mark.parametrize("blocks", range(1, 8))
def test_streams_any_number_of_blocks(blocks: int, slots: int, platform: Platform) -> None:
    """A single block too, which stays in its slot for the whole call."""
    rig = Rig(platform, [blocks], slots)
    everything = range(blocks)
    loads = [rig.call(everything, everything, everything)[0] for _ in range(3)]
    assert rig.is_at_rest()
    if blocks <= slots:
        assert loads == [blocks] * 3
    else:
        # From the second call on the end is known, and every load is one that a forward uses.
        assert loads[1] == loads[2] == 3 * blocks
        assert loads[0] <= loads[1] + slots - 1


@pytest.mark.parametrize("slots", (2, 3))
def test_only_the_first_load_of_a_call_is_waited_for(slots: int, platform: Platform) -> None:
    rig = Rig(platform, [6], slots)
    assert [rig.call(range(6), range(6))[1] for _ in range(3)] == [1, 1, 1]
    lone = Rig(platform, [6], 1)
    loads, demand = lone.call(range(6), range(6))
    assert loads == demand == 12, "one slot leaves no room to prefetch"


def test_every_load_is_used_from_the_second_call_on(platform: Platform) -> None:
    """No load is issued past the last forward: as many loads of each block as it has forwards."""
    rig = Rig(platform, [5], 2)
    rig.call(range(5), range(5))
    for _ in range(2):
        rig.transport.copied.clear()
        loads, _ = rig.call(range(5), range(5))
        assert loads == 10
        assert Counter(master.path for master in rig.transport.copied) == {f"blocks.{i}": 2 for i in range(5)}
    # A call that is cut short, and one of the old length after it.
    rig.call(range(3))
    rig.call(range(5), range(5))
    assert rig.call(range(5), range(5))[0] == 10


def test_residents_are_never_loaded(platform: Platform) -> None:
    rig = Rig(platform, [6], 2, residents=[0, 2, 4])
    rig.call(range(6), range(6))
    loads, demand = rig.call(range(6), range(6))
    assert {master.path for master in rig.transport.copied} == {"blocks.1", "blocks.3", "blocks.5"}
    # Block 0 runs first, so that even the first load is a prefetch.
    assert (loads, demand) == (6, 0)


@pytest.mark.parametrize("slots", (2, 3))
@pytest.mark.parametrize(
    "pattern",
    ["FSFSFSFS", "FSSFSSFSS", "FSSSFSSSFSSS", "FFSSFFSS", "FSSSSSSS", "SFSFSF"],
)
def test_full_and_cached_steps_pay_no_demand_loads_for_ever(pattern: str, slots: int, platform: Platform) -> None:
    """F runs all blocks, S the first one only, as a first-block cache does: after warm-up only a call's first load is
    waited for, however the two alternate."""
    rig = Rig(platform, [6], slots)
    passes = [range(6) if letter == "F" else range(1) for letter in pattern]
    for _ in range(3):
        rig.call(*passes)
    assert rig.call(*passes)[1] <= 1
    # Of two cached steps in a row the second moves nothing.
    rig.streamer.begin()
    moved = []
    for order in passes:
        before = rig.streamer.bytes_moved
        rig.forward(order)
        moved.append(rig.streamer.bytes_moved - before)
    rig.streamer.end()
    for index in range(1, len(pattern)):
        if pattern[index - 1 : index + 1] == "SS":
            assert moved[index] == 0, (pattern, moved)


def test_a_gap_that_comes_and_goes(platform: Platform) -> None:
    """Every other pass leaves block 2 out, as skip-layer guidance does: the full passes never wait for it, and a pass
    with the gap waits at most for the block behind it."""
    passes = [range(6), [0, 1, 3, 4, 5]] * 4
    for slots, allowed in ((2, 1 + 4), (3, 1)):
        rig = Rig(platform, [6], slots)
        for _ in range(3):
            rig.call(*passes)
        assert rig.call(*passes)[1] <= allowed


def test_two_stacks_share_the_slots(platform: Platform) -> None:
    """Nothing of the second stack is moved before its first forward, and of that at most one load is waited for."""
    rig = Rig(platform, [4, 4], 2)
    first, second = rig.numbers
    for _ in range(3):
        rig.streamer.begin()
        rig.transport.copied.clear()
        x = [rig.forward(first) for _ in range(3)]
        assert not {master.path for master in rig.transport.copied} & {f"blocks.{i}" for i in second}
        before = rig.streamer.demand_loads
        y = [rig.forward(second) for _ in range(3)]
        assert rig.streamer.demand_loads - before <= 1
        rig.streamer.end()
        assert all(torch.equal(value, rig.reference(first)) for value in x)
        assert all(torch.equal(value, rig.reference(second)) for value in y)


def test_slots_are_not_believed_across_calls(platform: Platform) -> None:
    """An edit at rest, in place and so seen by nobody, counts in the next call."""
    rig = Rig(platform, [2], 3)
    assert rig.call(range(2)) == (2, 1)
    rig.blocks[1].gate.data.add_(0.5)
    rig.twins[1].gate.data.add_(0.5)
    assert rig.call(range(2)) == (2, 1)


def test_a_block_that_is_entered_again_while_it_runs(platform: Platform) -> None:
    """Its bytes stay bound until the outermost forward has left."""
    rig = Rig(platform, [3], 1)
    rig.streamer.begin()
    outer = rig.streamer.enter(0)
    inner = rig.streamer.enter(0)
    assert inner is outer and outer is not None and outer.users == 2
    rig.streamer.leave(0, inner)
    assert rig.blocks[0].gate.device == platform.device
    assert torch.equal(rig.blocks[0](rig.x), rig.twins[0](rig.x))
    rig.streamer.leave(0, outer)
    assert rig.is_at_rest() and not rig.streamer.is_running
    rig.streamer.end()


def test_nested_blocks_need_a_slot_each(platform: Platform) -> None:
    rig = Rig(platform, [3], 2)
    rig.streamer.begin()
    slots = [rig.streamer.enter(0), rig.streamer.enter(1)]
    assert torch.equal(rig.blocks[1](rig.blocks[0](rig.x)), rig.reference([0, 1]))
    with pytest.raises(RuntimeError, match=r"blocks\.2 was called while every one of the 2 slots was in use.*slots="):
        rig.streamer.enter(2)
    for block, slot in reversed(list(enumerate(slots))):
        rig.streamer.leave(block, slot)
    assert torch.equal(rig.forward([2]), rig.reference([2]))
    rig.streamer.end()
    assert rig.is_at_rest()


@pytest.mark.parametrize("after_copy", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_copy_that_fails(error: type[BaseException], after_copy: bool, platform: Platform) -> None:
    """Whichever copy of a call fails, just before or just after it was issued: the next passes are right."""
    for fails_at in range(8):
        rig = Rig(platform, [4], 2)
        rig.transport.error, rig.transport.fails_after_copy = error, after_copy
        rig.transport.fails_at = fails_at
        rig.streamer.begin()
        with pytest.raises(error):
            for _ in range(3):
                rig.forward(range(4))
        assert rig.is_at_rest() and not rig.streamer.is_running
        assert torch.equal(rig.forward(range(4)), rig.reference(range(4))), "in the same call"
        rig.streamer.end()
        rig.call(range(4), range(4))


def test_a_forward_that_was_never_left(platform: Platform) -> None:
    """An interrupt can come between `enter` and the forward; the end of the call puts everything back."""
    rig = Rig(platform, [4], 2)
    rig.streamer.begin()
    rig.streamer.enter(0)
    rig.streamer.enter(1)
    assert rig.streamer.is_running
    rig.streamer.end()
    assert rig.is_at_rest() and not rig.streamer.is_running
    rig.call(range(4), range(4))


def test_no_copy_is_in_flight_after_a_call(platform: Platform, sim: ModuleType) -> None:
    rig = Rig(platform, [5], 3)
    sim.configure(h2d_bytes_per_s=1e6)
    for _ in range(2):
        rig.streamer.begin()
        rig.forward(range(5))
        rig.forward([0])
        rig.streamer.end()
        # A copy in flight would read this edit, and the simulated device would say so.
        for block in rig.blocks:
            block.gate.data.mul_(1.0)
        assert not sim.hazards()


def test_forwards_on_two_streams_that_know_nothing_of_each_other(platform: Platform, sim: ModuleType) -> None:
    """The slot's next copy waits for the readers on both, the slow one that began first as well."""
    rig = Rig(platform, [4], 1)
    expected = {order: rig.reference(order) for order in ((0,), (1, 2), (2, 3))}
    platform.synchronize()
    other = torch.Stream(device=platform.device)
    sim.configure(flops_per_s=1e6)
    rig.streamer.begin()
    slow = rig.forward([0])
    with other:
        sim.configure(flops_per_s=1e12)
        quick = rig.forward([0])
        beside = rig.forward([1, 2])
    after = rig.forward([2, 3])
    rig.streamer.end()
    platform.synchronize()
    assert torch.equal(slow, expected[0,]) and torch.equal(quick, expected[0,])
    assert torch.equal(beside, expected[1, 2]) and torch.equal(after, expected[2, 3])


def test_a_call_that_never_ended(platform: Platform) -> None:
    """A second interrupt can cut the end of a call short; the next one still believes no slot."""
    rig = Rig(platform, [2], 3)
    rig.streamer.begin()
    rig.forward(range(2))
    platform.synchronize()
    rig.blocks[1].gate.data.add_(0.5)
    rig.twins[1].gate.data.add_(0.5)
    assert rig.call(range(2)) == (2, 1)


def test_released_slots_come_back_with_the_next_block(platform: Platform) -> None:
    rig = Rig(platform, [3], 2)
    rig.streamer.begin()
    first = rig.forward(range(3))
    rig.streamer.release_slots()
    assert rig.streamer.slots.nbytes == 0
    assert torch.equal(rig.forward(range(3)), first)
    rig.streamer.end()
    assert rig.streamer.slots.nbytes == 2 * rig.streamer.slot_nbytes


def test_slots_hold_the_largest_block(platform: Platform) -> None:
    rig = Rig(platform, [3, 3], 2)
    masters = [master for master in rig.streamer.masters if master is not None]
    assert rig.streamer.slot_nbytes == max(master.nbytes for master in masters)
    rig.call(range(6))
    assert rig.streamer.bytes_moved == sum(master.nbytes for master in rig.transport.copied)


def test_the_cpu_in_place_of_a_device() -> None:
    rig = Rig(CpuPlatform(torch.device("cpu")), [4], 2)
    for _ in range(2):
        rig.call(range(4), [3, 1, 1, 0], range(4))


# ---------------------------------------------------------------------- the same, seen from a stock pipeline


def differences(readings: Sequence[int]) -> list[int]:
    return [after - before for before, after in itertools.pairwise(readings)]


def test_wan_moves_nothing_of_its_second_dit_before_the_boundary(device: torch.device) -> None:
    pipe, call = tiny.build_wan(num_layers=5)
    handle = pipe.enable_omni_offload("layer")
    transport = RecordingTransport()
    handle.backend.streamer.transports = (transport,)
    components: list[set[str]] = []
    demand_loads: list[int] = []

    def read(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        components.append({master.path.partition(".")[0] for master in transport.copied})
        demand_loads.append(handle.demand_loads)
        transport.copied.clear()
        return {}

    def long() -> dict[str, Any]:
        return {**call(), "num_inference_steps": 6, "callback_on_step_end": read}

    expected = tiny.run(pipe, long)
    boundary = pipe.config.boundary_ratio * pipe.scheduler.config.num_train_timesteps
    first = int((pipe.scheduler.timesteps >= boundary).sum())
    assert 0 < first < 6, "the steps that the first DiT runs"
    for _ in range(2):
        components.clear()
        demand_loads[:] = [handle.demand_loads]
        assert np.array_equal(tiny.run(pipe, long), expected)
        assert components == [{"transformer"}] * first + [{"transformer_2"}] * (6 - first)
        demand = differences(demand_loads)
        assert demand[first] <= 1 and sum(demand) <= 2, "the call's first load, and the first behind the boundary"


def test_calls_of_a_stock_pipeline_waste_no_loads(device: torch.device) -> None:
    pipe, call = tiny.build_qwen_image(num_layers=5)
    handle = pipe.enable_omni_offload("layer")
    readings = [handle.loads]
    for _ in range(4):
        tiny.run(pipe, call)
        readings.append(handle.loads)
    loads = differences(readings)
    # Two steps with and without the prompt, of five blocks each.
    assert loads[1:] == [20, 20, 20] and loads[0] <= 22
