"""All-gather when ranks don't do the same: each gets an error of its own in bounded time, and never a wrong output."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np
import pytest

from diffusers_omni_offload.weights.sharded import ShardedMaster
from tests.apart import BOUND, START_ANEW, Found, Rank, attempt, changed_weights, hooked, meet, replaced
from tests.living import fast_ones, ours_left
from tests.ranks import Death, RankPool, StoreKind, answers

pytestmark = pytest.mark.processes

PATIENCE = 3.0
"""The process group's timeout where ranks have to wait for it, seconds."""


@pytest.fixture(scope="module", params=fast_ones(["sim 2", "cpu 3"], "sim 2"))
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    device, size = request.param.split()
    with RankPool(int(size), device=device) as pool:
        yield pool


def joined(ranks: list[int]) -> str:
    """ "rank 1", "ranks 0 and 1", as messages have it."""
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"


def assert_in_time(found: Found, kind: str) -> None:
    assert (found.kind, found.result) == (kind, None), found
    assert found.seconds < BOUND, found


# ---------------------------------------------------------------------- calls that differ

DIFFERENT: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "steps": ("wan", {"num_inference_steps": 2}, {"num_inference_steps": 3}, "num_inference_steps is 2 on {}, 3 on {}"),
    "no steps": ("wan", {}, {"num_inference_steps": None}, "num_inference_steps is 2 on {}, None on {}"),
    "guidance": (
        "wan",
        {"guidance_scale": 5.0},
        {"guidance_scale": 1.0},
        "guidance_scale is 'above 1' on {}, 'at most 1' on {}",
    ),
    "negative prompt": (
        "wan",
        {"negative_prompt": "dark"},
        {"negative_prompt": None},
        "negative_prompt is 'given' on {}, not given on {}",
    ),
    "layers left out": ("sd3", {}, {"skip_guidance_layers": [1]}, "skip_guidance_layers is not given on {}, [1] on {}"),
    "blocks left out": ("toy", {}, {"skip": [1]}, "skip is [] on {}, [1] on {}"),
    "order": ("toy", {"order": [0, 1]}, {"order": [1, 0]}, "order is [0, 1] on {}, [1, 0] on {}"),
}
"""What a call has on all ranks but the last, what it has on the last one, and what is said of it."""


def calling_differently(rank: int, size: int, device: str, name: str, common: Any, own: Any) -> list[Any]:
    """A wave, one that differs on the last rank, and another one."""
    ours = Rank(name, rank, device)
    handle = ours.enable()
    first = ours.is_right()
    loads = handle.loads
    differing = attempt(lambda: ours.run(**(own if rank == size - 1 else common)))
    return [first, differing, handle.loads - loads, ours.is_right(), ours.is_right()]


@pytest.mark.parametrize("what", fast_ones(DIFFERENT, "steps", "order"))
def test_a_call_that_differs_is_an_error_on_every_rank(what: str, pool: RankPool) -> None:
    name, common, own, words = DIFFERENT[what]
    found = answers(pool.run(calling_differently, pool.device, name, common, own))
    others, last = joined(list(range(pool.size - 1))), joined([pool.size - 1])
    for first, differing, gathered, second, third in found:
        assert first and second and third
        assert_in_time(differing, "RanksDisagree")
        assert differing.text.startswith(f"The ranks differ in the call of {'Toy' if name == 'toy' else ''}")
        assert words.format(others, last) in differing.text and gathered == 0


def calling_without_steps(rank: int, size: int, device: str) -> list[Any]:
    ours = Rank("wan", rank, device)
    ours.enable()
    found = attempt(lambda: ours.run(num_inference_steps=None))
    arguments = ours.call()
    arguments.pop("num_inference_steps")
    return [found, attempt(lambda: ours.pipe(**arguments)), ours.is_right()]


@pytest.mark.slow
def test_a_default_number_of_steps_is_no_agreement(pool: RankPool) -> None:
    for *errors, after in answers(pool.run(calling_without_steps, pool.device)):
        assert after
        for error in errors:
            assert_in_time(error, "ValueError")
            assert "num_inference_steps isn't given for the call of WanPipeline, or is None" in error.text


def staying_away(rank: int, size: int, device: str) -> list[Any]:
    """The last rank comes to the second call when the others have given up."""
    ours = Rank("toy", rank, device)
    ours.enable()
    first = ours.is_right()
    if rank == size - 1:
        meet("given up", rank, size)
    second = attempt(ours.run)
    if rank != size - 1:
        meet("given up", rank, size)
    return [first, second, ours.is_right()]


def test_a_rank_that_stays_away_is_named(pool: RankPool) -> None:
    found = answers(pool.run(staying_away, pool.device, group_timeout=PATIENCE))
    for first, second, third in found:
        assert first and third
        assert_in_time(second, "RankMissing")
        assert f"Rank {pool.size - 1} didn't come to the call of ToyPipeline within 3 s" in second.text


def doing_something_else(rank: int, size: int, device: str) -> list[Any]:
    ours = Rank("toy", rank, device)
    handle = ours.enable()

    def read() -> None:
        with handle.gather():
            pass

    found = attempt(ours.run if rank else read)
    return [found, ours.is_right()]


@pytest.mark.slow
def test_ranks_at_different_points_say_where_each_is(pool: RankPool) -> None:
    for different, after in answers(pool.run(doing_something_else, pool.device)):
        assert after
        assert_in_time(different, "RanksDisagree")
        others = joined(list(range(1, pool.size)))
        assert f"'gather()' on rank 0, 'the call of ToyPipeline' on {others}" in different.text


# ---------------------------------------------------------------------- a rank that raises in a call


def failing_in_a_call(rank: int, size: int, device: str, where: str) -> list[Any]:
    """The last rank raises in its second call. Then each makes two more."""
    ours = Rank("toy with an encoder", rank, device)
    ours.enable()
    first = ours.is_right()

    def fail(*_: Any) -> dict[str, Any]:
        raise KeyError("broken here")

    is_last, transformer = rank == size - 1, ours.pipe.transformer
    if where == "step callback":
        second = attempt(lambda: ours.run(callback_on_step_end=fail if is_last else lambda *_: {}))
    else:
        module, call = {
            "first block": (transformer.blocks[0], 0),
            "block": (transformer.blocks[1], 0),
            "block of the last step": (transformer.blocks[2], 1),
            "last block": (transformer.blocks[3], 1),
            "encoder": (ours.pipe.text_encoder, 0),
            "second forward": (transformer, 1),
        }[where]
        with hooked(module, call, fail if is_last else dict):
            second = attempt(ours.run)
    return [first, second, attempt(ours.is_right), attempt(ours.is_right), attempt(ours.pipe.disable_omni_offload)]


PLACES = {
    "encoder": True,
    "step callback": True,
    "second forward": True,
    "first block": False,
    "block": False,
    "block of the last step": False,
    "last block": True,
}
"""Where a rank fails, and whether all ranks have gathered the same blocks by then."""


@pytest.mark.parametrize("where", fast_ones(PLACES, "step callback", "block"))
def test_a_rank_that_fails_in_a_call_ends_that_of_all(where: str, pool: RankPool) -> None:
    found = answers(pool.run(failing_in_a_call, pool.device, where, group_timeout=PATIENCE, timeout=100.0))
    for rank, (first, second, *later, disabled) in enumerate(found):
        assert first and second.result is None and second.seconds < BOUND
        if rank == pool.size - 1:
            assert (second.kind, second.text) == ("KeyError", "'broken here'")
        elif PLACES[where]:
            assert second.kind == "RankFailed"
            assert second.text == f"Rank {pool.size - 1} failed: KeyError: 'broken here'"
        if PLACES[where]:
            assert [it.result for it in later] == [True, True] and disabled.kind == ""
        else:
            for error in (*later, disabled):
                assert_in_time(error, error.kind)
                assert START_ANEW.search(error.text), error


# ---------------------------------------------------------------------- blocks in another order


def running_other_blocks(rank: int, size: int, device: str, blocks: list[int], on_call: int) -> list[Any]:
    """In one forward of the second call, the last rank runs other blocks than the others, without its caller's doing.
    Blocks are all of one size, so that any two of them can be gathered into one."""
    ours = Rank("toy", rank, device)
    ours.enable()
    first = ours.is_right()

    def in_other_order(transformer: Any) -> None:
        stock, calls = transformer.forward, 0

        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            return stock(*args, **{**kwargs, "order": blocks} if calls == on_call + 1 else kwargs)

        transformer.forward = forward

    expected = ours.expected
    if rank == size - 1:
        expected = ours.plain(lambda pipe: in_other_order(pipe.transformer))
        in_other_order(ours.pipe.transformer)
    second = attempt(lambda: np.array_equal(ours.run(), expected))
    later = [attempt(ours.is_right) for _ in range(2)]
    return [first, second, *later, attempt(ours.pipe.disable_omni_offload)]


ORDERS = {"one skipped": [0, 2, 3], "swapped": [0, 2, 1, 3], "one more": [0, 1, 1, 2, 3, 0], "none": [], "one": [2]}


@pytest.mark.parametrize("on_call", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize("what", fast_ones(ORDERS, "swapped"))
def test_mixed_weights_never_come_out_of_a_call(what: str, on_call: int, pool: RankPool) -> None:
    run = pool.run(running_other_blocks, pool.device, ORDERS[what], on_call, group_timeout=PATIENCE, timeout=100.0)
    found = answers(run)
    assert all(first for first, *_ in found)
    if what == "one skipped" and not any(it.kind for _, *later in found for it in later):
        # The skipped block was gathered ahead all the same: the ranks gathered alike, and each ran what it meant to.
        assert [[it.result for it in later] for _, *later in found] == [[True, True, True, None]] * pool.size
        return
    for _, *later in found:
        for error in later:
            assert_in_time(error, error.kind)
            assert START_ANEW.search(error.text), error


# ---------------------------------------------------------------------- a rank that is killed


def die(*_: Any, **__: Any) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("not reached")


def losing_a_rank(rank: int, size: int, device: str, where: str, victim: int) -> list[Any]:
    """One rank is killed. What the others find then, in what they were doing, and in what they do next."""
    ours = Rank("toy", rank, device)
    act = die if rank == victim else dict
    if where == "enable":
        with replaced(ShardedMaster, "pack", act if rank == victim else ShardedMaster.pack):
            first = attempt(ours.enable)
        return [first, changed_weights(ours.pipe, ours.fresh()) + ours_left(ours.pipe)]
    handle = ours.enable()
    assert ours.is_right()
    if where == "forward":
        with hooked(ours.pipe.transformer.blocks[1], 1, act):
            first = attempt(ours.run)
    elif where == "between calls":
        time.sleep(1.0)  # until the others are done, whose store it may be
        act()
        first = attempt(ours.run)
    elif where == "gather()":

        def look() -> None:
            with handle.gather():
                act()

        first = attempt(look)
    else:
        with replaced(ShardedMaster, "restore", act if rank == victim else ShardedMaster.restore):
            first = attempt(ours.pipe.disable_omni_offload)
    later = [attempt(ours.run), attempt(ours.pipe.disable_omni_offload)]
    return [first, *later, changed_weights(ours.pipe, ours.fresh()) if later[1].kind == "" else None]


KILLED = {
    "forward": ("RuntimeError", "transformer.blocks.. couldn't be gathered: another rank failed, is gone, or runs"),
    "between calls": ("RankMissing", "Rank {} didn't come to the call of ToyPipeline within 3 s"),
    "enable": ("RankMissing", "Rank {} didn't come to the weights of their blocks within 3 s"),
    "gather()": ("RankMissing", "Rank {} didn't come to the weights that they have changed in gather.. within 3 s"),
    "disable": ("RuntimeError", "transformer.blocks.. couldn't be gathered"),
}


@pytest.mark.parametrize("victim", [-1, pytest.param(0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("where", fast_ones(KILLED, "forward"))
def test_a_rank_that_is_killed_ends_the_others(where: str, victim: int, pool: RankPool) -> None:
    """The first rank has the store, too."""
    victim %= pool.size
    store: StoreKind = "file" if victim else "tcp"
    outcomes = pool.run(
        losing_a_rank,
        pool.device,
        where,
        victim,
        expect_death=[victim],
        store=store,
        group_timeout=PATIENCE,
        timeout=100.0,
    )
    assert outcomes[victim] == Death(-signal.SIGKILL)
    kind, words = KILLED[where]
    if kind == "RankMissing" and victim == 0:
        words = "The ranks' store doesn't answer any more"
    for first, *later, left in answers([outcome for rank, outcome in enumerate(outcomes) if rank != victim]):
        assert_in_time(first, kind)
        assert re.search(words.format(victim), first.text), first
        for error in later[:1]:
            assert_in_time(error, error.kind)
        # Weights that are whole on this rank stay so; those that are shared out are withheld, and raise.
        assert left == ([] if where in ("enable", "gather()") else None)
