"""Public cases of ranks that hold weights together: blocks that differ in size, groups that are mixed up, ranks that
skip blocks."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig, FirstBlockCacheConfig
from torch import nn

from diffusers_omni_offload import OffloadHandle, load_omni_pipeline
from diffusers_omni_offload.streaming import gather
from diffusers_omni_offload.weights.sharded import Sharding
from diffusers_omni_offload.weights.withheld import is_withheld
from tests import distributed_cases as cases
from tests import simdevice, tiny
from tests.equality import Build
from tests.living import with_arguments
from tests.ranks import Failure, RankPool, answers
from tests.test_living_parallel import BUILDS as WITH_CONTEXT_PARALLEL
from tests.tiny import build_toy
from tests.transfers import WAYS

ALLGATHER, ENCODERS_APART = WAYS["allgather"].options, WAYS["allgather and encoders"].options


@pytest.fixture(scope="module")
def two() -> Iterator[RankPool]:
    with RankPool(2, device="sim") as pool:
        yield pool


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    with RankPool(4, device="sim") as pool:
        yield pool


def twice(build: Build, options: dict[str, Any], device: str = "sim") -> list[bool]:
    """Whether two calls of an offloaded pipeline give what the resident one gives, and whether it does after."""
    pipe, call = build()
    expected = tiny.run(pipe.to(device), call)
    pipe, call = build()
    handle = pipe.enable_omni_offload(**options, device=device)
    found = [np.array_equal(tiny.run(pipe, call), expected) for _ in range(2)]
    assert handle.loads > 0
    pipe.disable_omni_offload()
    return [*found, np.array_equal(tiny.run(pipe.to(device), call), expected)]


# ---------------------------------------------------------------------- sizes

ODD_NBYTES = [*range(18), *range(255, 260), 511, 512, 513, 767, 1023, 1024, 1025, 4097, 10_000]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("chunk_nbytes", [1, 700, 1 << 20])
def test_vllm_omni_5802_every_size_is_padded_and_trimmed_right(ranks: int, chunk_nbytes: int) -> None:
    """The size check of the gather failed as soon as blocks differed in size."""
    for nbytes in ODD_NBYTES:
        block = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(nbytes))
        shardings = [Sharding(nbytes, ranks, rank, chunk_nbytes) for rank in range(ranks)]
        assert all(sharding.shard_nbytes * ranks == sharding.padded_nbytes >= nbytes for sharding in shardings)
        assert shardings[0].shard_nbytes < nbytes / ranks + 256
        shards = [shard_of(block, sharding) for sharding in shardings]
        slot = torch.full((shardings[0].padded_nbytes,), 0xFF, dtype=torch.uint8)
        for chunks in zip(*(sharding.chunks() for sharding in shardings), strict=True):
            pieces = [shard[c.shard_start :][: c.piece_nbytes] for shard, c in zip(shards, chunks, strict=True)]
            slot[chunks[0].start :][: chunks[0].piece_nbytes * ranks] = torch.cat(pieces)
        assert torch.equal(slot[:nbytes], block) and not slot[nbytes:].any()


def shard_of(block: torch.Tensor, sharding: Sharding) -> torch.Tensor:
    shard = torch.zeros(sharding.shard_nbytes, dtype=torch.uint8)
    for shard_start, start, nbytes in sharding.pieces(sharding.rank):
        shard[shard_start : shard_start + nbytes] = block[start : start + nbytes]
    return shard


def gathering_different_sizes(rank: int, size: int) -> list[bool]:
    """Blocks of 1231 and 239 MB, a thousandth of them each, in turn."""
    return twice(lambda: build_toy(5, width=64, sizes=[2400, 466]), ALLGATHER)


@pytest.mark.processes
def test_vllm_omni_5802_blocks_of_different_sizes(two: RankPool) -> None:
    assert answers(two.run(gathering_different_sizes)) == [[True] * 3] * 2


# ---------------------------------------------------------------------- groups


@pytest.mark.parametrize("start", ["built", "loaded", "mapped"])
def test_vllm_omni_6198_a_group_of_one_is_rank_local(
    start: str, device: torch.device, sim: ModuleType, tmp_path: Path
) -> None:
    """The loader thought that weights would be gathered, the backend that they wouldn't: they stayed on meta."""
    pipe, call = cases.build("wan", 0)
    expected = tiny.run(pipe.to(device), call)
    cls = type(pipe)
    if start != "built":
        cases.save("wan", tmp_path)
    pipe = {
        "built": lambda: cases.build("wan", 0)[0],
        "loaded": lambda: cases.load("wan", tmp_path, 0)[0],
        "mapped": lambda: load_omni_pipeline(cls, tmp_path),
    }[start]()
    handle = pipe.enable_omni_offload(**ALLGATHER)
    assert not any(tensor.is_meta or is_withheld(tensor) for tensor in weights(pipe))
    assert sum(master.host_nbytes for master in handle.backend.masters) == (
        0 if start == "mapped" else streamed(handle)
    )
    for _ in range(2):
        assert np.array_equal(tiny.run(pipe, call), expected)
    pipe.disable_omni_offload()
    assert not any(tensor.is_meta or is_withheld(tensor) for tensor in weights(pipe))
    assert all(tensor.device.type == "cpu" for tensor in weights(pipe))


def weights(pipe: Any) -> Iterator[torch.Tensor]:
    for component in pipe.components.values():
        if isinstance(component, nn.Module):
            yield from (*component.parameters(), *component.buffers())


def streamed(handle: OffloadHandle) -> int:
    return sum(master.nbytes for master in handle.backend.masters)


def gathering_in_two_groups(rank: int, size: int) -> list[Any]:
    """Ranks 0 and 1 share a request, 2 and 3 another one; the text encoder is streamed by each rank for itself.

    Returns the groups and the components that were gathered, the ranks that share tokens, whether the output is right.
    """
    groups: list[tuple[int, ...]] = []
    components: list[str] = []
    all_gather, load = gather._all_gather, gather.Gather.load

    def noted_gather(output: torch.Tensor, own: torch.Tensor, group: Any) -> Any:
        groups.append(tuple(dist.get_process_group_ranks(group)))
        return all_gather(output, own, group=group)

    def noted_load(self: Any, master: Any, *args: Any) -> Any:
        components.append(master.path.split(".")[0])
        return load(self, master, *args)

    pipe, call = WITH_CONTEXT_PARALLEL["wan"]()
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("data", "ring", "ulysses"))
    for dit in (pipe.transformer, pipe.transformer_2):
        dit.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2, mesh=mesh))
    sharing = pipe.transformer._parallel_config.context_parallel_config._flattened_mesh
    expected = tiny.run(pipe, call)
    handle = pipe.enable_omni_offload(**ENCODERS_APART, device="cpu")
    assert any(stack.component == "text_encoder" for stack in handle.plan.stacks)
    gather._all_gather, gather.Gather.load = noted_gather, noted_load
    try:
        is_right = np.array_equal(tiny.run(pipe, call), expected)
    finally:
        gather._all_gather, gather.Gather.load = all_gather, load
    assert 0 < len(components) < handle.loads and len(groups) >= len(components)
    return [set(groups), set(components), tuple(sharing.mesh.tolist()), is_right]


@pytest.mark.slow
@pytest.mark.processes
def test_vllm_omni_5764_each_gather_is_of_its_own_group(four: RankPool) -> None:
    """An encoder that has a group of its own was gathered over that of the denoiser."""
    for rank, found in enumerate(answers(four.run(gathering_in_two_groups, timeout=120.0))):
        first = rank // 2 * 2
        assert found == [{(rank % 2, rank % 2 + 2)}, {"transformer", "transformer_2"}, (first, first + 1), True]


# ---------------------------------------------------------------------- ranks that skip blocks


def caching(rank: int, size: int, options: dict[str, Any], when: str, who: Sequence[int]) -> list[Any]:
    """A cache on the ranks `who`, from before enabling on or from after a call."""

    def build() -> tuple[Any, Any]:
        pipe, call = cases.build("wan", rank)
        return pipe, with_arguments(call, num_inference_steps=6)

    def enable_cache(pipe: Any) -> None:
        for dit in (pipe.transformer, pipe.transformer_2):
            dit.enable_cache(FirstBlockCacheConfig(threshold=10.0))

    pipe, call = build()
    plain = tiny.run(pipe.to("sim"), call)
    enable_cache(pipe)
    cached = tiny.run(pipe, call)
    pipe, call = build()
    if when == "before" and rank in who:
        enable_cache(pipe)
    found: list[Any] = [not np.array_equal(plain, cached)]
    try:
        handle = pipe.enable_omni_offload(**options, device="sim")
        if when == "after":
            found.append(np.array_equal(tiny.run(pipe, call), plain))
            if rank in who:
                enable_cache(pipe)
        loads = handle.loads
        found.append(np.array_equal(tiny.run(pipe, call), cached if rank in who else plain))
        found.append(handle.loads - loads)
    except (ValueError, RuntimeError) as error:
        found.append(f"{type(error).__name__}: {error}")
        if when == "after":
            for dit in (pipe.transformer, pipe.transformer_2):
                if rank in who:
                    dit.disable_cache()
            found.append(np.array_equal(tiny.run(pipe, call), plain))
        else:
            found.append(pipe.omni_offload is None)
    return found


REFUSED = "lets a rank skip blocks that 2 data parallel ranks have to gather together"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("when", "who"),
    [("before", (0, 1)), ("after", (1,)), pytest.param("before", (1,), marks=pytest.mark.slow)],
)
def test_sglang_35858_a_cache_on_a_rank_that_gathers_is_refused(when: str, who: tuple[int, ...], two: RankPool) -> None:
    """One rank took a cache hit and skipped blocks, the other one waited for it in a collective, for good."""
    for rank, found in enumerate(answers(two.run(caching, ALLGATHER, when, who))):
        skips, *before, error, after = found
        assert skips and before == [True] * len(before) and after is True
        if rank in who:
            assert error.startswith("ValueError") and REFUSED in error and "disable_cache()" in error
        else:
            assert error.startswith("RankFailed") and REFUSED in error


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("when", ["before", "after"])
def test_sglang_35858_a_cache_on_a_rank_of_its_own_skips_blocks(when: str, two: RankPool) -> None:
    local = WAYS["rank-local"].options
    first, second = answers(two.run(caching, local, when, (1,)))
    assert all(found[-2] for found in (first, second)) and second[-1] < first[-1]


def owning_a_slice(rank: int, size: int, options: dict[str, Any]) -> list[bool]:
    """Pipeline parallel: of four blocks each rank has two, and placeholders for the others."""

    def build() -> tuple[Any, Any]:
        pipe, call = build_toy(4)
        for index in range(4):
            if index // 2 != rank:
                pipe.transformer.blocks[index] = nn.Identity()
        return pipe, call

    pipe, _ = build()
    handle = pipe.enable_omni_offload(**options, device="sim")
    (stack,) = handle.plan.stacks
    assert list(stack.block_paths) == [f"blocks.{index}" for index in (2 * rank, 2 * rank + 1)]
    pipe.disable_omni_offload()
    return twice(build, options)


@pytest.mark.processes
def test_vllm_omni_6456_ranks_that_own_a_slice_of_the_blocks(two: RankPool) -> None:
    """Ranks of pipeline parallel were taken to have all blocks."""
    assert answers(two.run(owning_a_slice, WAYS["rank-local"].options)) == [[True] * 3] * 2
    for found in two.run(owning_a_slice, ALLGATHER):
        assert isinstance(found, Failure) and found.kind == "RanksDisagree"
        assert "blocks.0" in found.text and "blocks.2" in found.text


# ---------------------------------------------------------------------- the link


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def gathering_at_a_rate(rank: int, size: int, fabric_bytes_per_s: float) -> list[Any]:
    """What the line after the first call says, and how long the fabric was busy."""
    pipe, call = build_toy(12, width=64, sizes=[512])
    simdevice.configure(fabric_bytes_per_s=fabric_bytes_per_s)
    logger, seen = logging.getLogger("diffusers_omni_offload"), Lines()
    logger.addHandler(seen)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        pipe.enable_omni_offload(**ALLGATHER, device="sim")
        tiny.run(pipe, call)
    finally:
        logger.removeHandler(seen)
        logger.setLevel(level)
    del pipe
    gc.collect()
    return [line for line in seen.lines if "-bound" in line]


@pytest.mark.slow
@pytest.mark.processes
def test_sglang_34805_waiting_for_other_ranks_can_be_seen(two: RankPool) -> None:
    """Copies and collectives fought for one link, and nothing said so."""
    for (line,) in answers(two.run(gathering_at_a_rate, 1e6)):
        assert "transfer-bound" in line and "in this process's memory" in line
