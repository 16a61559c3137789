"""Ranks that share or stream weights, in every way there is: each has the output of a plain run of its own request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from diffusers import ContextParallelConfig

from tests import distributed_cases as cases
from tests import tiny
from tests.equality import Call
from tests.living import denoisers, with_arguments
from tests.nodes import can_have_nodes, run_nodes
from tests.ranks import DeviceName, RankPool, answers
from tests.test_living_parallel import BUILDS as WITH_CONTEXT_PARALLEL
from tests.transfers import WAYS, Found, can_go, save, take

pytestmark = pytest.mark.processes

LOCAL = ("rank-local", "checkpoint", "mapped")
GATHERING = ("allgather", "allgather of mapped files", "allgather of encoders")
MIXED = ("allgather of a checkpoint", "allgather and encoders")

PLACES: dict[str, dict[str, tuple[str, ...]]] = {
    "sim 2": {
        "wan": LOCAL + GATHERING + MIXED,
        "qwen_image": LOCAL + GATHERING,
        "cosmos3_split": LOCAL + GATHERING,
        "minimax_h3_spec": LOCAL + GATHERING + ("allgather and encoders",),
        "uneven": ("rank-local", "allgather"),
    },
    "cpu 2": {
        "wan": ("checkpoint", "allgather"),
        "flux2": LOCAL + GATHERING,
        "sd3": LOCAL + GATHERING,
        "cosmos3_omni": LOCAL + GATHERING,
        "minimax_h3": LOCAL + GATHERING,
        "two DiTs": ("rank-local", "allgather"),
    },
    "sim 3": {"cosmos3_omni": LOCAL + GATHERING, "uneven and mixed": ("allgather",)},
    "cpu 3": {"wan": ("allgather of encoders",), "two blocks": ("allgather",)},
    "sim 4": {"cosmos3_omni": ("mapped", "allgather of mapped files"), "uneven": ("allgather",)},
    "cpu 4": {"wan": ("allgather of encoders",), "cosmos3_split": ("rank-local", "checkpoint", "allgather")},
    "sim 1": {"cosmos3_omni": ("mapped", "allgather of mapped files"), "uneven": ("allgather",)},
    "cpu 1": {"wan": ("rank-local", "checkpoint", "allgather of encoders")},
}
"""Device and number of ranks -> pipeline -> how its weights come. Each pipeline comes in each way, and so does each
number of ranks."""

FAST = {(place, "wan", way) for place in ("sim 2", "cpu 2") for way in ("checkpoint", "allgather")}


def matrix() -> Iterator[Any]:
    for place, pipelines in PLACES.items():
        for name, ways in pipelines.items():
            for way in ways:
                if can_go(name, way):
                    marks = [] if (place, name, way) in FAST else [pytest.mark.slow]
                    yield pytest.param(place, name, way, marks=marks)


@pytest.fixture(scope="module")
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    device, size = request.param.split()
    with RankPool(int(size), device=device) as pool:
        yield pool


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Where a pipeline was saved, by its name."""
    folders: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in folders:
            folders[name] = save(name, tmp_path_factory.mktemp(name.replace(" ", "-")))
        return folders[name]

    return folder


def assert_right(found: Found, way: str, size: int, device: str) -> None:
    """What a rank found is what it was to find, in memory too."""
    chosen = WAYS[way]
    is_gathered = chosen.gathers and size > 1
    assert found.equal == [True] * 3 and found.left == [] and found.loads > 0
    assert found.group_size == (size if is_gathered else 1)
    assert bool(found.withheld) == is_gathered
    held, streamed, largest = sum(found.host_nbytes), sum(found.blocks), max(found.blocks)
    if is_gathered and chosen.gathers_all:
        assert found.host_nbytes == [-(-nbytes // size // 256) * 256 for nbytes in found.blocks]
        assert held <= streamed / size + largest
    elif chosen.start == "built":
        assert held == streamed or is_gathered
    elif not is_gathered:
        assert held == 0
    if device == "sim":
        # What stays in files goes through two buffers.
        most = 2 * largest if chosen.start != "built" and not is_gathered else held
        assert 0 < found.pinned_nbytes <= most


@pytest.mark.parametrize(("pool", "name", "way"), list(matrix()), indirect=["pool"])
def test_each_rank_has_the_output_of_a_plain_run(
    pool: RankPool, name: str, way: str, saved: Callable[[str], Path]
) -> None:
    found = answers(pool.run(take, name, way, pool.device, saved(name), timeout=200.0))
    for rank in found:
        assert_right(rank, way, pool.size, pool.device)


def test_the_matrix_leaves_nothing_out() -> None:
    rows = [
        (place.split(), name, way) for place, pipelines in PLACES.items() for name, w in pipelines.items() for way in w
    ]
    ways = LOCAL + GATHERING
    for name in cases.BUILDS:
        assert {way for _, other, way in rows if other == name} >= set(ways), name
    for size in "1234":
        there = {way for (_, other), name, way in rows if other == size and can_go(name, way)}
        assert there >= set(ways), size
        assert {device for (device, other), _, _ in rows if other == size} == {"cpu", "sim"}
    assert {way for _, _, way in rows} == set(WAYS)


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["sim 2"], indirect=True)
def test_no_file_stays_mapped_once_the_ranks_have_their_shares(pool: RankPool, saved: Callable[[str], Path]) -> None:
    for way in ("mapped", "allgather of mapped files"):
        for rank in answers(pool.run(take, "wan", way, pool.device, saved("wan"), timeout=200.0)):
            assert bool(rank.mappings) == (way == "mapped")


# ---------------------------------------------------------------------- two requests, each shared by two ranks

# On CPUs, in processes that have an accelerator: diffusers divides by the number of accelerators.
TWO_PROMPTS = ("dance monkey", "monkey dance")
"""As many tokens in both, to be shared by two."""


@dataclass(frozen=True)
class Shared:
    """What a rank found that shares its request's tokens with another one.

    Attributes:
        kind, ranks: of those that hold the weights together.
        alone, plain: outputs without offload: of one rank alone, of those that share the request.
        equal: whether an offloaded output is `plain`: of two calls, and of one after disabling.
    """

    kind: str
    ranks: tuple[int, ...]
    alone: np.ndarray
    plain: np.ndarray
    equal: list[bool]


def sharing_tokens(rank: int, size: int, name: str) -> Shared:
    """Ranks 0 and 1 work on one request, 2 and 3 on another one."""

    def build() -> tuple[Any, Call]:
        pipe, call = WITH_CONTEXT_PARALLEL[name]()
        pipe.set_progress_bar_config(disable=True)
        return pipe, with_arguments(call, prompt=TWO_PROMPTS[rank // 2], **more)

    more = {"max_sequence_length": 400} if name == "flux2" else {}
    pipe, call = build()
    alone = tiny.run(pipe, call)
    share_by_two(pipe)
    plain = tiny.run(pipe, call)
    pipe, call = build()
    share_by_two(pipe)
    handle = pipe.enable_omni_offload(**WAYS["allgather"].options, device="cpu")
    group = handle.backend.group
    equal = [np.array_equal(tiny.run(pipe, call), plain) for _ in range(2)]
    pipe.disable_omni_offload()
    equal.append(np.array_equal(tiny.run(pipe, call), plain))
    return Shared(group.kind, group.ranks, alone, plain, equal)


def share_by_two(pipe: Any) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("data", "ring", "ulysses"))
    for dit in denoisers(pipe):
        dit.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2, mesh=mesh))


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_CONTEXT_PARALLEL)
@pytest.mark.parametrize("pool", ["sim 4"], indirect=True)
def test_ranks_that_share_tokens_gather_with_those_of_another_request(name: str, pool: RankPool) -> None:
    found: list[Shared] = answers(pool.run(sharing_tokens, name, timeout=200.0))
    for rank, mine in enumerate(found):
        assert (mine.kind, mine.ranks) == ("data", (rank % 2, rank % 2 + 2))
        assert mine.equal == [True] * 3
        assert np.allclose(mine.alone, mine.plain, atol=1e-4)
    assert np.array_equal(found[0].plain, found[1].plain) and not np.array_equal(found[0].plain, found[2].plain)


def sharing_one_request(rank: int, size: int) -> list[Any]:
    """All ranks share the tokens of one request, and hold the weights together."""
    pipe, call = WITH_CONTEXT_PARALLEL["wan"]()
    pipe.set_progress_bar_config(disable=True)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, size), mesh_dim_names=("ring", "ulysses"))
    for dit in denoisers(pipe):
        dit.enable_parallelism(config=ContextParallelConfig(ulysses_degree=size, mesh=mesh))
    plain = tiny.run(pipe, call)
    handle = pipe.enable_omni_offload(**WAYS["allgather"].options, device="cpu")
    group = handle.backend.group
    return [group.kind, group.ranks, *(np.array_equal(tiny.run(pipe, call), plain) for _ in range(2))]


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["sim 2"], indirect=True)
def test_ranks_that_share_one_request_hold_its_weights_together(pool: RankPool) -> None:
    assert answers(pool.run(sharing_one_request)) == [["sequence", (0, 1), True, True]] * 2


# ---------------------------------------------------------------------- two nodes


@pytest.mark.slow
@pytest.mark.skipif(not can_have_nodes(), reason="network namespaces can't be made here")
@pytest.mark.parametrize(("where", "way"), [("cpu", "allgather of mapped files"), ("sim", "allgather of encoders")])
def test_nodes_gather_over_their_network(where: DeviceName, way: str, saved: Callable[[str], Path]) -> None:
    for rank in answers(run_nodes(take, "wan", way, where, saved("wan"), device=where)):
        assert_right(rank, way, 4, where)
