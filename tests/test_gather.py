"""Gathering: every rank gets the whole block, whatever the chunks; copies, gathers and compute go on side by side."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from diffusers_omni_offload.streaming import gather as gather_module
from diffusers_omni_offload.streaming.transport import Transport
from diffusers_omni_offload.weights.sharded import ShardedMaster
from diffusers_omni_offload.weights.withheld import is_withheld
from tests import simdevice
from tests.gathering import Gathered, one_rank
from tests.ranks import RankPool, answers

CHUNKS = (1, 256, 1000, 4096, 64 << 20)
ROUND_RATES = {"launch_overhead_s": 0, "kernel_overhead_s": 0, "mem_bytes_per_s": 1e30, "copy_latency_s": 0}


@pytest.fixture
def alone(sim: ModuleType) -> Iterator[None]:
    with one_rank():
        yield


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, device="sim") as pool:
        yield pool


def some_orders(seed: int, count: int) -> list[list[int]]:
    """Calls: in order, with blocks that are left out, repeated or permuted."""
    rng = random.Random(seed)
    steps = [list(range(count)), list(range(0, count, 2)), sorted(range(count), key=lambda _: rng.random()), [1, 1, 3]]
    return [[*rng.choice(steps), *rng.choice(steps), *rng.choice(steps)] for _ in range(3)]


# One rank


@pytest.mark.parametrize("chunk_nbytes", CHUNKS)
@pytest.mark.parametrize("slots", [1, 2, 4])
def test_one_rank_has_the_values_of_the_resident_run(alone: None, chunk_nbytes: int, slots: int) -> None:
    gathered = Gathered(5, slots, chunk_nbytes=chunk_nbytes, hidden=(48, 33, 90))
    for order in some_orders(slots, 5):
        gathered.check(order)
    assert gathered.gather.gathered == gathered.streamer.loads > 0
    assert all(is_withheld(tensor) for master in gathered.masters for tensor in master.tensors)


@pytest.mark.parametrize("seed", range(3))
def test_gathered_and_local_blocks_share_slots(alone: None, seed: int) -> None:
    rates = [{}, {"fabric_latency_s": 0.01}, {"h2d_bytes_per_s": 1e6}, {"flops_per_s": 1e7}]
    for options in rates:
        simdevice.restore_defaults()
        simdevice.configure(**options)
        gathered = Gathered(6, 2, local=(1, 4), hidden=(48, 33, 90))
        for order in some_orders(seed, 6):
            gathered.check(order)
        assert 0 < gathered.gather.gathered < gathered.streamer.loads


def test_it_is_a_transport(alone: None) -> None:
    gathered = Gathered(2, local=(1,))
    transport: Transport = gathered.gather
    assert transport.lookahead == 0
    assert [transport.serves(master) for master in gathered.masters] == [True, False]
    assert transport.is_ready(gathered.masters[0])
    transport.expect(gathered.masters)
    transport.settle()
    transport.release()


def test_bytes_of_this_host_are_counted(alone: None) -> None:
    gathered = Gathered(3, 3)
    gathered.check([0, 1, 2])
    assert gathered.streamer.bytes_moved == sum(master.host_nbytes for master in gathered.masters)


def test_the_digest_tells_what_was_gathered_in_which_order(alone: None) -> None:
    def digest(*calls: Sequence[int]) -> str:
        gathered = Gathered(4, 1)
        for order in calls:
            gathered.check(order)
        return gathered.gather.digest

    assert digest([0, 1, 2]) == digest([0, 1, 2]) != digest([0, 2, 1])
    assert digest([0, 1], [2]) == digest([0, 1, 2])
    assert len({digest(), digest([0]), digest([0, 1]), digest([1, 0]), digest([0, 1, 0])}) == 5


def test_a_block_that_is_gathered_in_vain_costs_its_gather_and_no_more(alone: None) -> None:
    simdevice.configure(fabric_latency_s=0.01)
    gathered = Gathered(6, 2)
    gathered.check([0, 2, 4])
    assert gathered.gather.gathered > 3, "1, 3 and 5 were expected"
    for _ in range(2):
        gathered.check([0, 2, 4, 0, 2, 4])
    before = gathered.gather.gathered
    gathered.check([0, 2, 4, 0, 2, 4])
    assert gathered.gather.gathered - before == 6, "by now the order is known"


@pytest.mark.parametrize(
    "error", [RuntimeError("the fabric\nis gone"), KeyboardInterrupt()], ids=lambda e: type(e).__name__
)
@pytest.mark.parametrize("at", [0, 3])
def test_a_collective_that_fails_breaks_the_transport_for_good(
    alone: None, monkeypatch: pytest.MonkeyPatch, error: BaseException, at: int
) -> None:
    """Where the others are is unknown from then on: what would be gathered could be of another block."""
    gathered = Gathered(4, 2, chunk_nbytes=1024)
    gathered.check([0, 1, 2, 3])
    all_gather, calls = gather_module._all_gather, []

    def failing(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) == at + 1:
            raise error
        return all_gather(*args, **options)

    monkeypatch.setattr(gather_module, "_all_gather", failing)
    with pytest.raises(type(error)) as caught:
        gathered.run([0, 1])
    if isinstance(error, RuntimeError):
        assert "blocks.0 couldn't be gathered" in str(caught.value) and "(the fabric)" in str(caught.value)
        assert caught.value.__cause__ is error
    count = len(calls)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"blocks\.0 couldn't be gathered: .* start the processes anew\.$"):
            gathered.run([1, 2])
    assert len(calls) == count, "no collective was started any more"
    assert not gathered.streamer.is_running
    assert all(is_withheld(tensor) for master in gathered.masters for tensor in master.tensors)
    simdevice.check()


# Two ranks


def values(rank: int, size: int, seed: int, chunk_nbytes: int, slots: int, options: dict[str, float]) -> list[Any]:
    simdevice.configure(**options)
    gathered = Gathered(5, slots, chunk_nbytes=chunk_nbytes, hidden=(48, 33, 90), local=(3,))
    for order in some_orders(seed, 5):
        gathered.check(order)
    shared = [master for master in gathered.masters if isinstance(master, ShardedMaster)]
    for block, master in enumerate(gathered.masters):
        if isinstance(master, ShardedMaster):
            with gathered.streamer.held(block) as buffer:
                master.restore(buffer)
            found = dict([*gathered.blocks[block].named_parameters(), *gathered.blocks[block].named_buffers()])
            for path, twin in [*gathered.twins[block].named_parameters(), *gathered.twins[block].named_buffers()]:
                assert torch.equal(found[path], twin.cpu()), path
    return [gathered.gather.digest, sum(m.host_nbytes for m in shared), sum(m.nbytes for m in shared)]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("chunk_nbytes", "slots", "options"),
    [
        (1, 2, {}),
        (1000, 1, {"h2d_bytes_per_s": 1e6}),
        (4096, 3, {"fabric_bytes_per_s": 1e6}),
        (4096, 2, {"flops_per_s": 1e7}),
        (64 << 20, 2, {"fabric_latency_s": 0.01}),
    ],
)
def test_two_ranks_have_the_values_of_the_resident_run(
    pool: RankPool, chunk_nbytes: int, slots: int, options: dict[str, float]
) -> None:
    first, second = answers(pool.run(values, 1, chunk_nbytes, slots, options))
    assert first == second
    _, held, nbytes = first
    assert nbytes <= 2 * held <= nbytes + 4 * 2 * 257, "each rank holds its half"


def steps(rank: int, size: int, ratios: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """By (copy of 1/N, gather) over compute: a modelled step's seconds, and the slowest of the three."""
    simdevice.configure(**ROUND_RATES, flops_per_s=1e8, fabric_latency_s=0, pin_bytes_per_s=1e30)
    gathered = Gathered(8, 3, chunk_nbytes=2048, hidden=(128,), width=32)
    order = list(range(8))
    gathered.check(order)
    torch.accelerator.synchronize()
    before = simdevice.stats()["compute_busy_ns"]
    gathered.resident(order)
    torch.accelerator.synchronize()
    compute = (simdevice.stats()["compute_busy_ns"] - before) / 1e9
    shard = sum(master.host_nbytes for master in gathered.masters)
    found = []
    for copy, gather in ratios:
        simdevice.configure(
            h2d_bytes_per_s=shard / (copy * compute), fabric_bytes_per_s=shard * (size - 1) / (gather * compute)
        )
        gathered.streamer.begin()
        gathered.forward(order)
        torch.accelerator.synchronize()
        begin = simdevice.stats()["host_ns"]
        for _ in range(3):
            gathered.forward(order)
        torch.accelerator.synchronize()
        found.append(((simdevice.stats()["host_ns"] - begin) / 3e9, max(compute, copy * compute, gather * compute)))
        gathered.streamer.end()
    return found


@pytest.mark.processes
def test_a_modelled_step_takes_as_long_as_the_slowest_of_copy_gather_and_compute(pool: RankPool) -> None:
    ratios = [(0.1, 0.1), (0.9, 0.9), (1.0, 0.2), (0.2, 1.0), (2.0, 0.5), (0.5, 2.0), (2.0, 2.0)]
    for found in answers(pool.run(steps, ratios)):
        for ratio, (seconds, slowest) in zip(ratios, found, strict=True):
            assert seconds < 1.15 * slowest, f"copy, gather / compute {ratio}: {seconds / slowest:.2f} x the slowest"


def left_alone(rank: int, size: int) -> tuple[str, str, float]:
    """Rank 1 doesn't gather the second block."""
    gathered = Gathered(3, 1)
    gathered.check([0])
    if rank == 1:
        time.sleep(0.1)
        raise ValueError("something else")
    begin, texts = time.monotonic(), []
    for block in (1, 2):
        with pytest.raises(RuntimeError) as caught:
            gathered.run([block])
        texts.append(str(caught.value))
    return texts[0], texts[1], time.monotonic() - begin


@pytest.mark.processes
def test_a_rank_that_is_left_alone_gets_an_error_and_never_another_block(pool: RankPool) -> None:
    first, second = pool.run(left_alone, group_timeout=5.0)
    assert second.text == "something else"
    one, two, seconds = first
    assert one.startswith("blocks.1 couldn't be gathered: another rank failed, is gone") and seconds < 20
    assert two.startswith("blocks.1 couldn't be gathered") and two.endswith("start the processes anew.")
    assert not dist.is_initialized()
