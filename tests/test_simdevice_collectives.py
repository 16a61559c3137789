"""Collectives on the simulated device: values, order, hazards, the modelled clock, ranks that are gone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import simdevice
from tests.ranks import Death, Failure, RankPool, answers

pytestmark = pytest.mark.processes

DEVICE = "sim"
NBYTES = 1_000_000
"""Of a rank's share in tests of time."""


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(3, device="sim") as pool:
        yield pool


def gathered(output: torch.Tensor, share: torch.Tensor, **options: Any) -> Any:
    return dist.all_gather_single(output, share, **options)


def round_rates(**options: float) -> None:
    """Copies and kernels take no time, and what comes from other ranks a nanosecond a byte."""
    simdevice.configure(
        h2d_bytes_per_s=1e30,
        mem_bytes_per_s=1e30,
        flops_per_s=1e30,
        copy_latency_s=0,
        launch_overhead_s=0,
        kernel_overhead_s=0,
        pin_bytes_per_s=1e30,
        fabric_bytes_per_s=1e9,
        fabric_latency_s=0,
    )
    simdevice.configure(**options)
    simdevice.reset_clock()


# Values


def gathers(rank: int, size: int, counts: list[int]) -> list[bool]:
    """Shares of many sizes, also into the middle of a larger buffer."""
    found = []
    for count in counts:
        share = torch.arange(count, dtype=torch.int64).add(rank * 7).to(torch.uint8).to(DEVICE)
        arena = torch.zeros(size * count + 10, dtype=torch.uint8, device=DEVICE)
        gathered(arena[5:-5], share)
        shares = [torch.arange(count, dtype=torch.int64).add(other * 7).to(torch.uint8) for other in range(size)]
        edge = torch.zeros(5, dtype=torch.uint8)
        found.append(torch.equal(arena.cpu(), torch.cat([edge, *shares, edge])))
    return found


def test_gathers_of_any_size_are_exact(pool: RankPool) -> None:
    counts = [1, 2, 3, 255, 256, 257, 70_001]
    assert answers(pool.run(gathers, counts)) == [[True] * len(counts)] * 3


def every_collective(rank: int, size: int) -> dict[str, list[float]]:
    mine = torch.tensor([1.0, 2.0], device=DEVICE) * (rank + 1)
    parts = [torch.empty(2, device=DEVICE) for _ in range(size)]
    found = {name: torch.zeros(2, device=DEVICE) for name in ("all_reduce", "broadcast", "reduce_scatter")}
    found["all_reduce"].copy_(mine)
    dist.all_reduce(found["all_reduce"])
    found["broadcast"].copy_(mine)
    dist.broadcast(found["broadcast"], 1)
    dist.all_gather(parts, mine)
    found["all_gather"] = torch.cat(parts)
    dist.reduce_scatter_single(found["reduce_scatter"], torch.cat([mine + other for other in range(size)]))
    found["all_to_all"] = torch.empty(size, device=DEVICE)
    dist.all_to_all_single(found["all_to_all"], torch.arange(float(size), device=DEVICE) + 10 * rank)
    dist.barrier()
    assert simdevice.stats()["collectives"] >= 5
    return {name: tensor.tolist() for name, tensor in found.items()}


def test_every_collective_has_the_values_of_gloo(pool: RankPool) -> None:
    for rank, found in enumerate(answers(pool.run(every_collective))):
        assert found == {
            "all_reduce": [6.0, 12.0],
            "broadcast": [2.0, 4.0],
            "all_gather": [1.0, 2.0, 2.0, 4.0, 3.0, 6.0],
            "reduce_scatter": [6.0 + 3 * rank, 12.0 + 3 * rank],
            "all_to_all": [rank, 10.0 + rank, 20.0 + rank],
        }


def of_groups(rank: int, size: int) -> list[float]:
    """A group of two, a group of one, and the CPU's collectives in another order than the device's."""
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    within, value, host = (torch.ones(1) * (rank + 1) * factor for factor in (1, 10, 100))
    within, value = within.to(DEVICE), value.to(DEVICE)
    dist.all_reduce(within, group=groups[rank % 2])
    if rank < 2:
        dist.all_reduce(value)
        dist.all_reduce(host)
    else:
        pending = dist.all_reduce(host, async_op=True)
        dist.all_reduce(value)
        pending.wait()
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, rank)
    return [within.item(), value.item(), host.item(), *objects]


def test_groups_and_the_cpus_collectives_are_apart(pool: RankPool) -> None:
    of_all = [60.0, 600.0, 0, 1, 2]
    assert answers(pool.run(of_groups)) == [[4.0, *of_all], [2.0, *of_all], [4.0, *of_all]]


def refuses(rank: int, size: int) -> list[str]:
    found = []
    value, host = torch.ones(1, device=DEVICE), torch.ones(1)
    attempts: list[Callable[[], Any]] = [
        lambda: dist.send(value, (rank + 1) % size),
        lambda: gathered(torch.empty(size, device=DEVICE), host),
        lambda: gathered(torch.empty(size + 1, device=DEVICE), value),
    ]
    for attempt in attempts:
        try:
            attempt()
            found.append("")
        except (RuntimeError, ValueError) as error:
            found.append(str(error))
    return found


def test_what_it_cannot_do_is_said(pool: RankPool) -> None:
    for send, mixed, too_large in answers(pool.run(refuses)):
        assert "messages between two ranks are not simulated (c10d::send)" in send
        assert "two devices, sim and cpu" in mixed
        assert too_large


# Order


def of_a_copy(rank: int, size: int, is_ordered: bool, race: int) -> list[float]:
    """A share that is copied on one stream and gathered on another, which waits for the copy or doesn't."""
    simdevice.configure(race=race)
    source = torch.full((4,), rank + 1.0, pin_memory=True)
    share, output = torch.zeros(4, device=DEVICE), torch.zeros(4 * size, device=DEVICE)
    copies, gathers, copied = torch.Stream(DEVICE), torch.Stream(DEVICE), torch.Event(DEVICE)
    torch.accelerator.synchronize()
    with copies:
        share.copy_(source, non_blocking=True)
        copied.record()
    with gathers:
        if is_ordered:
            gathers.wait_event(copied)
        try:
            gathered(output, share)
        finally:
            torch.accelerator.synchronize()
    return output[::4].tolist()


def test_a_gather_reads_what_its_stream_has_waited_for(pool: RankPool) -> None:
    assert answers(pool.run(of_a_copy, True, 2)) == [[1.0, 2.0, 3.0]] * 3


def test_a_copy_that_nobody_waited_for_is_a_hazard(pool: RankPool) -> None:
    for outcome in pool.run(of_a_copy, False, 2):
        assert isinstance(outcome, Failure)
        assert "c10d::_allgather_base_ on stream" in outcome.text and "reads" in outcome.text


def test_without_the_wait_the_old_bytes_are_gathered(pool: RankPool) -> None:
    assert answers(pool.run(of_a_copy, False, 0)) == [[0.0] * 3] * 3


def of_a_consumer(rank: int, size: int, is_ordered: bool, is_asynchronous: bool) -> list[float]:
    """A kernel on the main stream uses what another stream, or an asynchronous collective, gathers."""
    share, output = torch.full((4,), rank + 1.0, device=DEVICE), torch.zeros(4 * size, device=DEVICE)
    torch.accelerator.synchronize()
    done = torch.Event(DEVICE)
    if is_asynchronous:
        work = gathered(output, share, async_op=True)
        assert not work.is_completed()
        if is_ordered:
            work.wait()
    else:
        with torch.Stream(DEVICE):
            gathered(output, share)
            done.record()
        if is_ordered:
            torch.accelerator.current_stream().wait_event(done)
    try:
        return (output * 2)[::4].tolist()
    finally:
        torch.accelerator.synchronize()


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_a_consumer_has_to_wait_for_the_gather(pool: RankPool, is_asynchronous: bool) -> None:
    assert answers(pool.run(of_a_consumer, True, is_asynchronous)) == [[2.0, 4.0, 6.0]] * 3
    for outcome in pool.run(of_a_consumer, False, is_asynchronous):
        assert isinstance(outcome, Failure) and "c10d::_allgather_base_" not in outcome.text.split(" on stream")[0]
        assert "aten::mul" in outcome.text and "writes with no ordering" in outcome.text


def of_reuse(rank: int, size: int, is_ordered: bool) -> None:
    """The next gather overwrites the slot that a kernel on the main stream reads."""
    share, slot = torch.ones(4, device=DEVICE), torch.zeros(4 * size, device=DEVICE)
    torch.accelerator.synchronize()
    slot + 1
    gathers = torch.Stream(DEVICE)
    if is_ordered:
        gathers.wait_stream(torch.accelerator.current_stream())
    with gathers:
        gathered(slot, share)
    gathers.synchronize()


def test_a_gather_has_to_wait_for_the_last_reader(pool: RankPool) -> None:
    answers(pool.run(of_reuse, True))
    for outcome in pool.run(of_reuse, False):
        assert isinstance(outcome, Failure) and "c10d::_allgather_base_ on stream" in outcome.text
        assert "writes bytes" in outcome.text


def of_temporaries(rank: int, size: int, is_waited_for: bool) -> list[str]:
    """The input of an asynchronous collective is let go by the caller at once."""
    output = torch.zeros(4 * size, device=DEVICE)
    work = gathered(output, torch.ones(4, device=DEVICE) * rank, async_op=True)
    held = torch.accelerator.memory_allocated()
    if is_waited_for:
        work.wait()
        assert torch.accelerator.memory_allocated() < held
    del work
    found = simdevice.hazards()
    simdevice.clear_hazards()
    torch.accelerator.synchronize()
    return found


def test_an_asynchronous_gather_holds_its_input_until_it_is_waited_for(pool: RankPool) -> None:
    assert answers(pool.run(of_temporaries, True)) == [[]] * 3
    for found in answers(pool.run(of_temporaries, False)):
        assert len(found) == 1 and "were freed while stream" in found[0]


# Time


def times(rank: int, size: int) -> dict[str, float]:
    """Modelled seconds of each collective alone."""
    round_rates()
    share = torch.zeros(NBYTES, dtype=torch.uint8, device=DEVICE)
    output = torch.zeros(size * NBYTES, dtype=torch.uint8, device=DEVICE)
    found = {}
    for name, collective in {
        "all_gather": lambda: gathered(output, share),
        "all_reduce": lambda: dist.all_reduce(output),
        "broadcast": lambda: dist.broadcast(output, 0),
        "barrier": lambda: dist.barrier(device_ids=None),
    }.items():
        simdevice.reset_clock()
        collective()
        found[name] = simdevice.stream_time(torch.accelerator.current_stream())
        if name == "all_gather":
            stats = simdevice.stats()
            assert (stats["collectives"], stats["fabric_bytes"]) == (1, (size - 1) * NBYTES)
            assert stats["fabric_busy_ns"] == (size - 1) * NBYTES and stats["host_ns"] == 0
    simdevice.configure(fabric_latency_s=1.0)
    simdevice.reset_clock()
    gathered(output, share)
    found["latency"] = simdevice.stream_time(torch.accelerator.current_stream())
    return found


def test_a_collective_takes_the_fabrics_time(pool: RankPool) -> None:
    gather = 2 * NBYTES / 1e9
    for found in answers(pool.run(times)):
        assert found == pytest.approx(
            {"all_gather": gather, "all_reduce": 2 * gather, "broadcast": gather, "barrier": 0, "latency": 1 + gather}
        )


def overlaps(rank: int, size: int) -> tuple[float, list[tuple[str, int, int]]]:
    """Copy, gather and compute, 2 ms each, on three streams, each turn beside the one before."""
    source = torch.zeros(NBYTES, dtype=torch.uint8, pin_memory=True)
    shares = [torch.zeros(NBYTES, dtype=torch.uint8, device=DEVICE) for _ in range(3)]
    slots = [torch.zeros(size * NBYTES, dtype=torch.uint8, device=DEVICE) for _ in range(3)]
    copies, gathers, compute = (torch.Stream(DEVICE) for _ in range(3))
    torch.accelerator.synchronize()
    round_rates(h2d_bytes_per_s=0.5e9, mem_bytes_per_s=1.5e9, trace=1)
    for share, slot in zip(shares, slots, strict=True):
        with copies:
            share.copy_(source, non_blocking=True)
        gathers.wait_stream(copies)
        with gathers:
            gathered(slot, share)
        compute.wait_stream(gathers)
        with compute:
            slot.zero_()
    total = simdevice.stream_time(compute)
    rows = [(name.split("::")[-1], begin // 1000, end // 1000) for name, _, begin, end in simdevice.trace()]
    torch.accelerator.synchronize()
    return total, rows


def test_copies_gathers_and_compute_overlap(pool: RankPool) -> None:
    for total, rows in answers(pool.run(overlaps)):
        assert total == pytest.approx(0.010)  # 18 ms one after another
        expected = []
        for turn in range(3):
            begin = 2000 * turn
            expected += [
                ("copy_h2d", begin, begin + 2000),
                ("_allgather_base_", begin + 2000, begin + 4000),
                ("zero_", begin + 4000, begin + 6000),
            ]
        assert rows == expected


def two_at_once(rank: int, size: int) -> tuple[float, float]:
    """Two gathers on two streams share the fabric."""
    round_rates()
    share = torch.zeros(NBYTES, dtype=torch.uint8, device=DEVICE)
    outputs = [torch.zeros(size * NBYTES, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    torch.accelerator.synchronize()
    simdevice.reset_clock()
    gathered(outputs[0], share)
    other = torch.Stream(DEVICE)
    with other:
        gathered(outputs[1], share)
    torch.accelerator.synchronize()
    return simdevice.stream_time(torch.accelerator.current_stream()), simdevice.stream_time(other)


def test_two_gathers_share_the_fabric(pool: RankPool) -> None:
    gather = 2 * NBYTES / 1e9
    assert answers(pool.run(two_at_once)) == [pytest.approx((gather, 2 * gather))] * 3


# Ranks that are gone


def without_one(rank: int, size: int, how: str) -> float:
    """Rank 1 stays away, raises or dies; the others need it for a gather. Their seconds, if they get so far."""
    begin = time.monotonic()
    gathered(torch.zeros(size, device=DEVICE), torch.zeros(1, device=DEVICE))
    if rank == 1 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and how == "raises":
        raise ValueError("rank one has had enough")
    if rank == 1 and how == "stays away":
        return 0.0
    try:
        gathered(torch.zeros(size, device=DEVICE), torch.zeros(1, device=DEVICE))
    except RuntimeError:
        return time.monotonic() - begin
    return -1.0


@pytest.mark.parametrize("how", ["stays away", "raises", "killed"])
def test_a_missing_rank_is_an_error_of_the_others_in_time(pool: RankPool, how: str) -> None:
    expect_death = [1] if how == "killed" else []
    first, second, third = pool.run(without_one, how, timeout=20.0, group_timeout=2.0, expect_death=expect_death)
    assert 0 < first < 10 and 0 < third < 10
    if how == "killed":
        assert second == Death(-signal.SIGKILL)
    elif how == "raises":
        assert isinstance(second, Failure) and second.kind == "ValueError"
    answers(pool.run(gathers, [3]))
