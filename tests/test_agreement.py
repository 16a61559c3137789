"""Ranks tell each other what has to be equal: real processes, that stay away, fail, are stopped and are killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from diffusers_omni_offload.agreement import Agreement, AgreementError, RankFailed, RankMissing
from diffusers_omni_offload.parallel import WeightGroup

RANKS = 3
LONG = 60.0
"""Seconds that nothing may wait for."""
GROUP_TIMEOUT = 70

Scenario = Callable[[int], Any]
SCENARIOS: dict[str, Scenario] = {}
"""What the processes do in turn, each with its rank; what it returns is what a test sees."""


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


def group_of(rank: int, *ranks: int) -> WeightGroup:
    ranks = ranks or tuple(range(RANKS))
    return WeightGroup("data", ranks, ranks.index(rank), dist.group.WORLD)


def agree(rank: int, name: str, timeout: float | None = LONG) -> Agreement:
    return Agreement(group_of(rank), name, timeout)


def outcome(exchange: Callable[[], Any]) -> dict[str, Any]:
    """What an exchange gave, or the error that it raised, and the seconds it took."""
    start = time.monotonic()
    try:
        found: dict[str, Any] = {"value": exchange()}
    except BaseException as error:
        found = {"error": type(error).__name__, "text": str(error)}
        if isinstance(error, RankMissing):
            found["ranks"] = error.ranks
        if isinstance(error, RankFailed):
            found["ranks"] = [error.rank]
        assert isinstance(error, (AgreementError, KeyboardInterrupt, TypeError)), repr(error)
    return {**found, "seconds": time.monotonic() - start}


# ---------------------------------------------------------------------- what the processes do


@scenario
def facts_of_all(rank: int) -> Any:
    return agree(rank, "facts").exchange({"rank": rank, "sizes": (1, 2)}, "the start")


@scenario
def equal(rank: int) -> Any:
    facts = {"steps": 5 if rank else 5.0, "guidance": None}
    return outcome(lambda: agree(rank, "equal").require_equal(facts, "the call"))


@scenario
def unequal(rank: int) -> Any:
    facts: dict[str, Any] = {"steps": 5 if rank == 1 else 4, "guidance": True}
    if rank:
        facts["strength"] = 0.5
    return outcome(lambda: agree(rank, "unequal").require_equal(facts, "the call"))


@scenario
def at_different_points(rank: int) -> Any:
    return outcome(lambda: agree(rank, "points").exchange({}, "the last step" if rank == 2 else "the first step"))


@scenario
def again_after_a_disagreement(rank: int) -> Any:
    agreement = agree(rank, "again")
    first = outcome(lambda: agreement.require_equal({"steps": rank}, "the call"))
    return [first, outcome(lambda: agreement.require_equal({"steps": 4}, "the call"))]


@scenario
def one_stays_away(rank: int) -> Any:
    """And comes late; then all begin anew."""
    if rank == 2:
        time.sleep(2.5)
    late = outcome(lambda: agree(rank, "away", timeout=1.0).exchange({}, "the call"))
    return [late, agree(rank, "away").exchange({"rank": rank}, "the call")]


@scenario
def one_fails(rank: int) -> Any:
    """Another comes three seconds later, and one needn't wait for it."""
    agreement = agree(rank, "fails")
    agreement.exchange({}, "the start")
    if rank == 1:
        agreement.fail(ValueError("no memory left"))
        failed: Any = None
    else:
        if rank == 2:
            time.sleep(3.0)
        failed = outcome(lambda: agreement.exchange({}, "the call"))
        agreement.fail(RuntimeError("because of the other"))
    return [failed, agree(rank, "fails").exchange({"rank": rank}, "the next try")]


@scenario
def one_fails_while_another_still_reads(rank: int) -> Any:
    """What was before the failure stays there for the one that hasn't read it yet."""
    agreement = agree(rank, "reads", timeout=5.0)
    if rank == 2:
        check = agreement._store.check

        class Slow:
            def __getattr__(self, name: str) -> Any:
                return getattr(store, name)

            def check(self, keys: list[str]) -> bool:
                time.sleep(1.0)
                return check(keys)

        store, agreement._store = agreement._store, Slow()
    first = outcome(lambda: agreement.exchange({}, "the start"))
    if rank == 1:
        agreement.fail(ValueError("no memory left"))
        return [first, None]
    return [first, outcome(lambda: agreement.exchange({}, "the call"))]


@scenario
def one_is_interrupted(rank: int) -> Any:
    agreement = agree(rank, "interrupted")
    if rank == 0:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
    if rank == 1:
        time.sleep(3.0)
    return outcome(lambda: agreement.exchange({}, "the call"))


@scenario
def what_json_lacks(rank: int) -> Any:
    facts = {"dtype": torch.float32 if rank == 1 else "float32"}
    return outcome(lambda: agree(rank, "json").exchange(facts, "the call"))


@scenario
def two_of_three(rank: int) -> Any:
    if rank == 1:
        return None
    agreement = Agreement(group_of(rank, 0, 2), "facts", LONG)
    seen = agreement.exchange({"rank": rank}, "the start")
    return [seen, outcome(lambda: agreement.require_equal({"steps": rank}, "the call"))]


@scenario
def many(rank: int) -> Any:
    """Keys in the store before and after, and the seconds of an exchange."""
    agreement = agree(rank, "many")
    store = dist.distributed_c10d._get_default_store()
    agreement.exchange({}, "the start")
    dist.barrier()
    before = store.num_keys()
    dist.barrier()
    start = time.monotonic()
    for step in range(200):
        agreement.exchange({"step": step, "digest": "0" * 16}, "a step")
    seconds = (time.monotonic() - start) / 200
    dist.barrier()
    return {"before": before, "after": store.num_keys(), "seconds": seconds}


@scenario
def timeouts(rank: int) -> Any:
    return [agree(rank, "timeouts", None).timeout, agree(rank, "timeouts", 3.0).timeout]


@scenario
def the_first_is_stopped(rank: int) -> Any:
    """It has the store, so that isn't answered any more."""
    agreement = agree(rank, "stopped")
    pids = [facts["pid"] for facts in agreement.exchange({"pid": os.getpid()}, "the start")]
    if rank == 0:
        time.sleep(3.0)
        return None
    agreement.timeout = 1.0
    time.sleep(1.5)
    if rank == 1:
        os.kill(pids[0], signal.SIGSTOP)
    time.sleep(0.5)
    found = outcome(lambda: agreement.exchange({}, "the call"))
    time.sleep(0.5)
    if rank == 1:
        os.kill(pids[0], signal.SIGCONT)
    return found


@scenario
def the_first_is_killed(rank: int) -> Any:
    agreement = agree(rank, "killed")
    agreement.exchange({}, "the start")
    if rank == 0:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    found = outcome(lambda: agreement.exchange({}, "the call"))
    agreement.fail(RuntimeError("nobody hears it"))
    return found


# ---------------------------------------------------------------------- the processes


def work(rank: int, folder: str, port: int) -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    for name in ("facts_of_all", "unequal", "one_fails"):
        found[f"{name}, in a file"] = SCENARIOS[name](rank)
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=GROUP_TIMEOUT),
    )
    for name, function in SCENARIOS.items():
        found[name] = function(rank)
        Path(folder, f"{rank}.json").write_text(json.dumps(found))


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
    return port


@pytest.fixture(scope="module")
def found() -> Iterator[list[dict[str, Any]]]:
    """What each process found in each scenario; the last one of the first process ends it."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        processes = [context.Process(target=work, args=(rank, folder, port)) for rank in range(RANKS)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout=120)
            process.kill()
            process.join()
        assert [process.exitcode for process in processes] == [-signal.SIGKILL, 0, 0]
        yield [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(RANKS)]


def of(found: list[dict[str, Any]], name: str) -> list[Any]:
    return [rank[name] for rank in found if name in rank]


processes = pytest.mark.processes
in_a_file = pytest.mark.parametrize("where", ["", ", in a file"])


# ---------------------------------------------------------------------- what has to come of it


@processes
@in_a_file
def test_everybody_sees_the_facts_of_all(where: str, found: list[dict[str, Any]]) -> None:
    expected = [{"rank": rank, "sizes": [1, 2]} for rank in range(RANKS)]
    assert of(found, f"facts_of_all{where}") == [expected] * RANKS


@processes
def test_equal_facts(found: list[dict[str, Any]]) -> None:
    assert [result["value"] for result in of(found, "equal")] == [None] * RANKS


@processes
@in_a_file
def test_unequal_facts_are_an_error_on_every_rank(where: str, found: list[dict[str, Any]]) -> None:
    results = of(found, f"unequal{where}")
    assert {result["error"] for result in results} == {"RanksDisagree"}
    assert {result["text"] for result in results} == {
        "The ranks differ in the call: steps is 4 on ranks 0 and 2, 5 on rank 1; strength is not given on rank 0, 0.5 "
        "on ranks 1 and 2. Make them the same on each rank."
    }
    assert max(result["seconds"] for result in results) < 5


@processes
def test_ranks_at_different_points(found: list[dict[str, Any]]) -> None:
    results = of(found, "at_different_points")
    assert {result["text"] for result in results} == {
        "The ranks are at different points: 'the first step' on ranks 0 and 1, 'the last step' on rank 2. Each rank "
        "has to make the same calls, in the same order."
    }


@processes
def test_after_a_disagreement_they_may_agree(found: list[dict[str, Any]]) -> None:
    for first, second in of(found, "again_after_a_disagreement"):
        assert first["error"] == "RanksDisagree" and second["value"] is None


@processes
def test_who_stays_away_is_named(found: list[dict[str, Any]]) -> None:
    results = [late for late, _ in of(found, "one_stays_away")]
    assert {result["error"] for result in results} == {"RankMissing"}
    assert {result["text"] for result in results} == {
        "Rank 2 didn't come to the call within 1 s. Look for an error of theirs, and see that each rank makes the same "
        "calls."
    }
    assert all(result["ranks"] == [2] for result in results)
    waited = [result["seconds"] for result in results]
    assert all(1 <= seconds < 2.4 for seconds in waited[:2]) and waited[2] < 2, waited


@processes
def test_who_came_late_may_come_again(found: list[dict[str, Any]]) -> None:
    expected = [{"rank": rank} for rank in range(RANKS)]
    assert [again for _, again in of(found, "one_stays_away")] == [expected] * RANKS


@processes
@in_a_file
def test_a_failure_is_known_at_once(where: str, found: list[dict[str, Any]]) -> None:
    first, _, last = [failed for failed, _ in of(found, f"one_fails{where}")]
    for result in (first, last):
        assert result["error"] == "RankFailed" and result["ranks"] == [1]
        assert result["text"] == "Rank 1 failed: ValueError: no memory left"
        assert result["seconds"] < 2.5, "it waits neither for who failed nor for who is late"


@processes
@in_a_file
def test_after_a_failure_they_may_try_again(where: str, found: list[dict[str, Any]]) -> None:
    expected = [{"rank": rank} for rank in range(RANKS)]
    assert [again for _, again in of(found, f"one_fails{where}")] == [expected] * RANKS


@processes
def test_a_failure_takes_nothing_from_who_is_behind(found: list[dict[str, Any]]) -> None:
    results = of(found, "one_fails_while_another_still_reads")
    assert [first.get("value") for first, _ in results] == [[{}] * RANKS] * RANKS
    assert [second and second["error"] for _, second in results] == ["RankFailed", None, "RankFailed"]


@processes
def test_ctrl_c_ends_the_wait_of_all(found: list[dict[str, Any]]) -> None:
    first, *others = of(found, "one_is_interrupted")
    assert first["error"] == "KeyboardInterrupt" and first["seconds"] < 2.5
    for result in others:
        assert result["error"] == "RankFailed" and "Rank 0 failed: KeyboardInterrupt" in result["text"]
        assert result["seconds"] < 3


@processes
def test_facts_that_cannot_be_sent(found: list[dict[str, Any]]) -> None:
    first, second, third = of(found, "what_json_lacks")
    assert second["error"] == "TypeError"
    assert first["error"] == third["error"] == "RankFailed" and "Rank 1 failed: TypeError" in first["text"]


@processes
def test_ranks_that_are_not_in_the_group_are_not_asked(found: list[dict[str, Any]]) -> None:
    first, nothing, last = of(found, "two_of_three")
    assert nothing is None
    for seen, result in (first, last):
        assert seen == [{"rank": 0}, {"rank": 2}]
        assert "steps is 0 on rank 0, 2 on rank 2" in result["text"]


@processes
def test_the_store_does_not_grow(found: list[dict[str, Any]]) -> None:
    for result in of(found, "many"):
        assert result["after"] <= result["before"] + RANKS


@processes
def test_the_timeout_is_that_of_the_process_group(found: list[dict[str, Any]]) -> None:
    assert of(found, "timeouts") == [[GROUP_TIMEOUT, 3.0]] * RANKS


@processes
@pytest.mark.parametrize("name", ["the_first_is_stopped", "the_first_is_killed"])
def test_without_the_store_nobody_waits_for_long(name: str, found: list[dict[str, Any]]) -> None:
    for result in of(found, name)[-2:]:
        assert result["error"] == "RankMissing" and result["ranks"] == []
        assert "The ranks' store doesn't answer any more, at the call" in result["text"]
        assert "start all of them anew" in result["text"]
        assert result["seconds"] < 6, "the timeout and what a call of the store may take"


def test_one_rank_agrees_with_itself() -> None:
    agreement = Agreement(WeightGroup("none", (0,), 0), "alone")
    assert agreement.exchange({"sizes": (1, 2)}, "the start") == [{"sizes": [1, 2]}]
    agreement.require_equal({"steps": 4}, "the call")
    agreement.fail(ValueError("nobody else is there"))
    with pytest.raises(TypeError):
        agreement.exchange({"dtype": torch.float32}, "the call")
