"""All-gather from enabling to disabling: failed starts, weights at rest, `gather()`, and what it can't go with."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers import FirstBlockCacheConfig
from torch import nn

from diffusers_omni_offload.weights.sharded import ShardedMaster
from tests import simdevice, tiny
from tests.apart import BOUND, BUILDS, GATHERED, Rank, attempt, changed_weights, meet, replaced, weights
from tests.equality import scale
from tests.living import fast_ones, ours_left
from tests.operations.families import WAN
from tests.operations.files import lora_file
from tests.ranks import RankPool, answers
from tests.tiny.toy import build_toy

pytestmark = pytest.mark.processes

PATIENCE = 3.0
"""The process group's timeout where ranks have to wait for it, seconds."""


@pytest.fixture(scope="module", params=fast_ones(["sim 2", "cpu 3"], "sim 2"))
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    device, size = request.param.split()
    with RankPool(int(size), device=device) as pool:
        yield pool


def pinned_bytes(device: str) -> int:
    """What is page-locked for the device."""
    gc.collect()
    return simdevice.stats()["pinned_current"] if device == "sim" else 0


# ---------------------------------------------------------------------- starts that fail


def failing_late(error: BaseException) -> Callable[[], Any]:
    """A `pack` that fails once two blocks were packed."""
    stock, count = ShardedMaster.pack, 0

    def pack(self: ShardedMaster, **options: Any) -> None:
        nonlocal count
        count += 1
        if count > 2:
            raise error
        stock(self, **options)

    return pack


def starting(rank: int, size: int, device: str, what: str) -> list[Any]:
    """The last rank's start goes wrong. What every rank has then, and whether a right start works after it."""
    ours = Rank("toy", rank, device)
    pipe, options, pack = ours.pipe, dict(GATHERED, device=device), ShardedMaster.pack
    if rank == size - 1:
        if what == "number of blocks":
            pipe = build_toy(5)[0]
        elif what == "dtype":
            pipe = build_toy(dtype="bfloat16")[0]
        elif what == "other weights":
            pipe = build_toy(seed=3)[0]
        elif what == "slots":
            options["slots"] = 3
        elif what == "packing":
            pack = failing_late(OSError("no room"))
        elif what == "interrupt":
            pack = failing_late(KeyboardInterrupt())
        elif what == "refused":
            options["components"] = ["dit", "nothing"]
    before = {path: tensor.clone() for path, tensor in weights(pipe).items()}
    pinned = pinned_bytes(device)
    with replaced(ShardedMaster, "pack", pack):
        failed = attempt(lambda: pipe.enable_omni_offload(**options))
    left = changed_weights(pipe, before) + ours_left(pipe)
    if pinned_bytes(device) != pinned:
        left.append("pinned memory")
    if what == "refused" and rank == size - 1:
        meet("given up", rank, size)
        attempt(ours.enable)  # It hears of that.
    elif what == "refused":
        meet("given up", rank, size)
    return [failed, left, attempt(ours.enable).text, ours.is_right()]


STARTS: dict[str, tuple[str, str, str, str]] = {
    "number of blocks": ("RanksDisagree", "The ranks differ in what they offload: transformer is", "RanksDisagree", ""),
    "dtype": ("RanksDisagree", "The ranks differ in the weights of their blocks: transformer.blocks.0", "", ""),
    "other weights": ("RanksDisagree", "transformer.blocks.0 has other weights on rank", "", ""),
    "slots": ("RanksDisagree", "The ranks differ in what they offload: slots is 2 on rank", "", ""),
    "packing": ("RankFailed", "Rank {} failed: OSError: no room", "OSError", "no room"),
    "interrupt": ("RankFailed", "Rank {} failed: KeyboardInterrupt", "KeyboardInterrupt", ""),
    "refused": ("RankMissing", "Rank {} didn't come to what they offload within 3 s", "ValueError", "nothing"),
}
"""How the last rank's start goes wrong: what the others raise, and what it raises itself, if that is something else."""


@pytest.mark.parametrize("what", fast_ones(STARTS, "dtype", "interrupt"))
def test_a_start_that_fails_leaves_everything_as_it_was(what: str, pool: RankPool) -> None:
    kind, words, own_kind, own_words = STARTS[what]
    last = pool.size - 1
    found = answers(pool.run(starting, pool.device, what, group_timeout=PATIENCE))
    for rank, (failed, left, again, is_right) in enumerate(found):
        is_own = rank == last and own_kind
        assert failed.kind == (own_kind if is_own else kind) and failed.seconds < BOUND, failed
        assert (own_words if is_own else words.format(last)) in failed.text, failed
        assert left == [] and again == "" and is_right


# ---------------------------------------------------------------------- weights between calls


def resting(rank: int, size: int, device: str) -> dict[str, Any]:
    """Enabled, called, disabled, and once more."""
    ours = Rank("toy", rank, device)
    pinned = pinned_bytes(device)
    found: dict[str, Any] = {"right": [], "left": []}
    for _ in range(2):
        handle = ours.enable()
        found["right"].append(ours.is_right())
        found["pinned"] = handle.pinned_bytes
        ours.pipe.disable_omni_offload()
        found["left"] += changed_weights(ours.pipe, ours.fresh()) + ours_left(ours.pipe)
        found["left"] += ["pinned memory"] * (pinned_bytes(device) != pinned)
    found["plain"] = bool((tiny.run(ours.pipe.to(device), ours.call) == ours.expected).all())
    return found


def test_disabling_gives_every_rank_all_weights_back(pool: RankPool) -> None:
    for found in answers(pool.run(resting, pool.device)):
        assert found["right"] == [True, True] and found["left"] == [] and found["plain"]
        assert (found["pinned"] > 0) == (pool.device == "sim")


def deleting(rank: int, size: int, device: str) -> list[int]:
    ours = Rank("toy", rank, device)
    before = pinned_bytes(device)
    ours.enable()
    assert ours.is_right()
    between = pinned_bytes(device)
    ours.pipe = None
    return [between - before, pinned_bytes(device) - before]


def test_a_deleted_pipeline_gives_its_memory_back(pool: RankPool) -> None:
    for taken, left in answers(pool.run(deleting, pool.device)):
        assert left == 0 and (taken > 0) == (pool.device == "sim")


OUTSIDE: dict[str, Callable[[Any], Any]] = {
    "read": lambda pipe: pipe.transformer.blocks[1].gate.sum(),
    "write": lambda pipe: pipe.transformer.blocks[1].gate.data.mul_(2),
    "data": lambda pipe: pipe.transformer.blocks[1].gate.data,
    "state dict": lambda pipe: {path: it.clone() for path, it in pipe.transformer.state_dict().items()},
    "save": lambda pipe: pipe.save_pretrained("/nowhere/at/all"),
    "cast": lambda pipe: pipe.to(torch.bfloat16),
    "cast of the DiT": lambda pipe: pipe.transformer.to(torch.bfloat16),
    "half": lambda pipe: pipe.transformer.half(),
    "load": lambda pipe: pipe.transformer.load_state_dict(build_toy()[0].transformer.state_dict()),
    "merge": lambda pipe: pipe.omni_offload.merging().__enter__(),
}


def reading_outside(rank: int, size: int, device: str) -> Any:
    ours = Rank("toy", rank, device)
    ours.enable()
    errors = {what: attempt(lambda action=action: action(ours.pipe)) for what, action in OUTSIDE.items()}
    return [errors, ours.is_right()]


def test_what_needs_the_weights_names_gather(pool: RankPool) -> None:
    for errors, is_right in answers(pool.run(reading_outside, pool.device)):
        assert is_right
        for what, error in errors.items():
            assert error.kind in ("RuntimeError", "OSError") and "omni_offload.gather()" in error.text, (what, error)


# ---------------------------------------------------------------------- gather()


def blocks_of(pipe: Any) -> dict[str, torch.Tensor]:
    return {path: tensor for path, tensor in weights(pipe).items() if ".blocks." in path}


def edit(pipe: Any) -> None:
    scale(pipe.transformer.blocks[1])


def editing(rank: int, size: int, device: str) -> dict[str, Any]:
    """Read, change, and leave with an error, in three `gather()`; and a call after each."""
    ours = Rank("toy", rank, device)
    handle = ours.enable()
    found: dict[str, Any] = {}
    with handle.gather():
        fresh = {path: tensor for path, tensor in ours.fresh().items() if ".blocks." in path}
        mine = blocks_of(ours.pipe)
        found["other"] = [path for path in fresh if not torch.equal(mine[path], fresh[path])]
        found["run inside"] = attempt(lambda: ours.pipe.transformer(torch.zeros(1, 4, 8, device=device)))
    found["read"] = ours.is_right()
    with handle.gather():
        edit(ours.pipe)
    ours.expected = ours.plain(edit)
    found["edited"] = ours.is_right()

    def leave_early() -> None:
        with handle.gather():
            if rank == size - 1:
                raise KeyError("enough")

    found["left early"] = attempt(leave_early)
    found["after"] = ours.is_right()
    ours.pipe.disable_omni_offload()
    found["disabled"] = bool((tiny.run(ours.pipe.to(device), ours.call) == ours.expected).all())
    return found


def test_weights_are_read_and_edited_in_gather(pool: RankPool) -> None:
    for rank, found in enumerate(answers(pool.run(editing, pool.device))):
        assert found["other"] == [] and found["read"] and found["edited"] and found["after"] and found["disabled"]
        assert "run it after the body" in found["run inside"].text
        assert found["left early"].kind == ("KeyError" if rank == pool.size - 1 else "")


def editing_apart(rank: int, size: int, device: str, is_disabled: bool) -> list[Any]:
    """The last rank edits alone. Then it takes that back, or all turn offload off."""
    ours = Rank("toy", rank, device)
    handle = ours.enable()
    is_last = rank == size - 1

    def edit_alone() -> None:
        with handle.gather():
            if is_last:
                edit(ours.pipe)

    apart, call = attempt(edit_alone), attempt(ours.run)
    if is_disabled:
        ours.pipe.disable_omni_offload()
        expected = ours.plain(edit) if is_last else ours.expected
        return [apart, call, bool((tiny.run(ours.pipe.to(device), ours.call) == expected).all())]
    with handle.gather():
        for path, tensor in blocks_of(ours.pipe).items():
            tensor.data.copy_(ours.fresh()[path])
    return [apart, call, ours.is_right()]


@pytest.mark.parametrize("is_disabled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_edits_that_differ_are_an_error(is_disabled: bool, pool: RankPool) -> None:
    for apart, call, is_right in answers(pool.run(editing_apart, pool.device, is_disabled)):
        assert apart.kind == "RanksDisagree" and "transformer.blocks.1 has other weights on rank" in apart.text
        assert apart.seconds < BOUND
        assert call.kind in ("RuntimeError", "RankFailed") and "gather():" in call.text
        assert is_right


def with_lora(rank: int, size: int, device: str) -> list[Any]:
    ours = Rank("wan", rank, device)
    handle = ours.enable()

    def load(pipe: Any) -> None:
        pipe.load_lora_weights(lora_file(WAN, "plain"), "style")

    outside = attempt(lambda: load(ours.pipe))
    before = ours.is_right()
    with handle.gather():
        load(ours.pipe)
    plain, ours.expected = ours.expected, ours.plain(load)
    assert not (plain == ours.expected).all()
    loaded = ours.is_right()
    with handle.gather():
        ours.pipe.unload_lora_weights()
    ours.expected = plain
    return [outside, before, loaded, ours.is_right()]


@pytest.mark.slow
def test_lora_is_loaded_in_gather(pool: RankPool) -> None:
    for outside, *is_right in answers(pool.run(with_lora, pool.device)):
        assert outside.kind == "RuntimeError" and "omni_offload.gather():" in outside.text
        assert is_right == [True, True, True]


# ---------------------------------------------------------------------- what all-gather can't go with


def shard_by_fsdp(pipe: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in pipe.transformer.blocks:
        fully_shard(block, mesh=mesh)


def split_tensors(pipe: Any) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(pipe.transformer, mesh, {f"blocks.{i}.expand": ColwiseParallel() for i in range(4)})


def cache(pipe: Any) -> None:
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.1))


def options(component: str = "dit", **of_component: Any) -> dict[str, Any]:
    return {
        "mode": "layer",
        "components": ["dit"] if component == "dit" else ["dit", component],
        "layer_options": {component: {"weight_transfer": "allgather", **of_component}},
    }


REFUSED: dict[str, tuple[str, Callable[[Any], Any], dict[str, Any], str]] = {
    "HSDP": ("toy", shard_by_fsdp, options(), "HSDP.* shards.*already"),
    "tensor parallel": (
        "toy",
        split_tensors,
        options(),
        "is a DTensor, and can't be offloaded: it .* several processes",
    ),
    "tensor parallel, rank-local": (
        "toy",
        split_tensors,
        options(weight_transfer="rank-local"),
        "is a DTensor, and can't be offloaded: it .* several processes",
    ),
    "resident layers": ("toy", lambda pipe: None, options(resident_layers=1), "resident_layers=1 needs .*rank-local"),
    "cache": ("wan", cache, options(), r"its cache \(FirstBlockCacheConfig\) lets a rank skip blocks"),
    "encoder": (
        "toy with an encoder",
        lambda pipe: None,
        options("text_encoder"),
        "encoder_dlo_weight_replication",
    ),
}


def enabling_what_cannot_be(rank: int, size: int, device: str, what: str) -> list[Any]:
    name, prepare, arguments, _ = REFUSED[what]
    pipe, _ = BUILDS[name]()
    prepare(pipe)
    before = {path: (tensor, tensor.device, tensor.data_ptr()) for path, tensor in plain_weights(pipe).items()}
    pinned = pinned_bytes(device)
    refused = attempt(lambda: pipe.enable_omni_offload(device=device, **arguments))
    after = {path: (tensor, tensor.device, tensor.data_ptr()) for path, tensor in plain_weights(pipe).items()}
    moved = [path for path in before if before[path][1:] != after[path][1:] or before[path][0] is not after[path][0]]
    return [refused, moved, ours_left(pipe), pinned_bytes(device) - pinned]


def plain_weights(pipe: Any) -> dict[str, torch.Tensor]:
    """Those that torch hasn't spread over processes."""
    return {path: tensor for path, tensor in weights(pipe).items() if type(tensor) in (torch.Tensor, nn.Parameter)}


@pytest.mark.parametrize("what", fast_ones(REFUSED, "encoder"))
def test_what_cannot_be_combined_is_refused_before_anything_moves(what: str, pool: RankPool) -> None:
    for refused, *left in answers(pool.run(enabling_what_cannot_be, pool.device, what)):
        assert refused.kind in ("ValueError", "TypeError") and refused.seconds < BOUND, refused
        assert re.search(REFUSED[what][3], refused.text), refused
        assert left == [[], [], 0]


def caching_later(rank: int, size: int, device: str, is_on_all: bool) -> list[Any]:
    ours = Rank("wan", rank, device)
    ours.enable()
    first = ours.is_right()
    if is_on_all or rank == size - 1:
        cache(ours.pipe)
    refused = attempt(ours.run)
    if ours.pipe.transformer.is_cache_enabled:
        ours.pipe.transformer.disable_cache()
    return [first, refused, ours.is_right()]


@pytest.mark.parametrize("is_on_all", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_cache_that_comes_later_is_refused_by_the_next_call(is_on_all: bool, pool: RankPool) -> None:
    for rank, (first, refused, after) in enumerate(answers(pool.run(caching_later, pool.device, is_on_all))):
        assert first and after
        has_cache = is_on_all or rank == pool.size - 1
        assert refused.kind == ("ValueError" if has_cache else "RankFailed") and refused.seconds < BOUND
        assert "its cache (FirstBlockCacheConfig) lets a rank skip blocks" in refused.text
