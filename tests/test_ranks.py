"""Functions run in N processes: results, errors, deaths and hangs, and that nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import simdevice
from tests.ranks import Death, Failure, RankPool, answers, run_ranks

pytestmark = pytest.mark.processes


def summed(rank: int, size: int, device: str) -> tuple[float, int, int]:
    """The sum of the ranks, this process's id and its threads."""
    value = torch.full((3,), float(rank), device=device)
    dist.all_reduce(value)
    assert dist.get_world_size() == size and dist.get_rank() == rank
    return value[0].item(), os.getpid(), torch.get_num_threads()


def raising(rank: int, size: int) -> str:
    if rank == 1:
        raise KeyError("rank one")
    return "fine"


def dying(rank: int, size: int, victim: int) -> str:
    """One is killed; the others find out in a collective."""
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(1))
    return "not reached"


def hanging_with_children(rank: int, size: int, folder: str) -> None:
    child = subprocess.Popen(["sleep", "600"])
    with open(f"{folder}/{rank}", "w") as file:
        file.write(str(child.pid))
    time.sleep(600)


def hazardous(rank: int, size: int) -> None:
    """Rank 0 reads what a copy on another stream may still write."""
    target = torch.zeros(8, device="sim")
    torch.accelerator.synchronize()
    if rank == 0:
        simdevice.configure(race=1)
        with torch.Stream(device="sim"):
            target.copy_(torch.ones(8, pin_memory=True), non_blocking=True)
        target + 1
        torch.accelerator.synchronize()


def unpicklable(rank: int, size: int) -> Any:
    return lambda: None


def absent(rank: int, size: int) -> None:
    """Rank 1 doesn't come to the collective."""
    if rank == 0:
        dist.barrier()


def hosted_by_rank_zero(rank: int, size: int) -> str:
    return dist.distributed_c10d._get_default_store().get("greeting" if rank else greet()).decode()


def greet() -> str:
    dist.distributed_c10d._get_default_store().set("greeting", "hello")
    return "greeting"


def is_alive(process_id: int) -> bool:
    try:
        with open(f"/proc/{process_id}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


@pytest.mark.parametrize(("size", "name"), [(1, "cpu"), (3, "cpu"), (2, "sim")])
def test_each_rank_gives_its_result(size: int, name: str) -> None:
    found = answers(run_ranks(summed, size, name, device=name))
    expected = float(sum(range(size)))
    assert [(total, threads) for total, _, threads in found] == [(expected, 1)] * size
    process_ids = {process_id for _, process_id, _ in found}
    assert len(process_ids) == size and not any(is_alive(process_id) for process_id in process_ids)


def test_a_pool_keeps_its_processes_after_an_error(pool: RankPool) -> None:
    before = answers(pool.run(summed, "cpu"))
    outcomes = pool.run(raising)
    assert outcomes[0] == "fine"
    assert isinstance(outcomes[1], Failure)
    assert (outcomes[1].kind, outcomes[1].text) == ("KeyError", "'rank one'") and "in raising" in outcomes[1].trace
    with pytest.raises(AssertionError, match=r"rank 1: Traceback(.|\n)*rank one"):
        answers(outcomes)
    assert answers(pool.run(summed, "cpu")) == before


def test_a_rank_that_stays_away_is_an_error_of_the_others(pool: RankPool) -> None:
    outcomes = pool.run(absent, group_timeout=1.0, timeout=20.0)
    assert isinstance(outcomes[0], Failure) and outcomes[0].kind in ("RuntimeError", "DistBackendError")
    assert outcomes[1] is None
    answers(pool.run(summed, "cpu"))


def test_a_result_that_cannot_be_sent_is_a_failure(pool: RankPool) -> None:
    assert all(isinstance(outcome, Failure) and "pickle" in outcome.text for outcome in pool.run(unpicklable))


def test_rank_zero_may_host_the_store(pool: RankPool) -> None:
    assert answers(pool.run(hosted_by_rank_zero, store="tcp")) == ["hello", "hello"]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_a_death_and_the_pool_starts_anew(pool: RankPool, victim: int) -> None:
    before = {process_id for _, process_id, _ in answers(pool.run(summed, "cpu"))}
    outcomes = pool.run(dying, victim, timeout=20.0, expect_death=[victim])
    assert outcomes[victim] == Death(-signal.SIGKILL)
    assert isinstance(outcomes[1 - victim], Failure)
    assert not any(is_alive(process_id) for process_id in before)
    after = {process_id for _, process_id, _ in answers(pool.run(summed, "cpu"))}
    assert not before & after


def test_a_death_that_nobody_expects_is_an_error(pool: RankPool) -> None:
    with pytest.raises(AssertionError, match=r"ranks \[1\] have died, \[\] were to"):
        pool.run(dying, 1, timeout=20.0)
    with pytest.raises(AssertionError, match=r"ranks \[\] have died, \[0\] were to"):
        pool.run(summed, "cpu", expect_death=[0])


def test_a_hang_ends_in_time_and_leaves_no_process(pool: RankPool, tmp_path: Any) -> None:
    answers(pool.run(summed, "cpu"))
    process_ids, begin = pool.process_ids, time.monotonic()
    with pytest.raises(AssertionError, match=r"ranks \[0, 1\] haven't answered within 2 s(.|\n)*hanging_with_children"):
        pool.run(hanging_with_children, str(tmp_path), timeout=2.0)
    assert time.monotonic() - begin < 10
    children = [int((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert not any(is_alive(process_id) for process_id in [*process_ids, *children])
    answers(pool.run(summed, "cpu"))


def test_a_restart_gives_new_processes(pool: RankPool) -> None:
    before = pool.process_ids
    pool.restart()
    assert not any(is_alive(process_id) for process_id in before)
    answers(pool.run(summed, "cpu"))
    assert not set(before) & set(pool.process_ids)


def test_hazards_of_one_rank_are_its_failure() -> None:
    with RankPool(2, device="sim") as pool:
        outcomes = pool.run(hazardous)
        assert isinstance(outcomes[0], Failure) and outcomes[0].kind == "Hazards" and "race" in outcomes[0].text
        assert outcomes[1] is None
        answers(pool.run(summed, "sim"))


@pytest.mark.slow
def test_processes_may_be_spawned() -> None:
    assert [total for total, _, _ in answers(run_ranks(summed, 2, "cpu", start="spawn"))] == [1.0, 1.0]
