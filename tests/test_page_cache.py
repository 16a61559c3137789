"""Blocks are copied straight from the page cache, where its pages can be page-locked; otherwise they are staged."""

from __future__ import annotations

import gc
import logging
import mmap
import os
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import diffusers_omni_offload
from diffusers_omni_offload.loading import load_omni_pipeline
from diffusers_omni_offload.platform import Platform
from diffusers_omni_offload.streaming import page_cache
from diffusers_omni_offload.streaming.page_cache import FromPageCache
from diffusers_omni_offload.weights.checkpoint import CheckpointError
from tests import tiny
from tests.equality import assert_equal_outputs, build_resident, outputs
from tests.page_cached import WIDTH, Cached, check, is_mapped_shared

#: A block's bytes, in memory and in the file.
BLOCK = 4 * (WIDTH * WIDTH + WIDTH)
LIMIT_GIB = 1


@pytest.fixture
def sim_device(device: torch.device) -> torch.device:
    return torch.device("sim", 0)


def pinned(sim: ModuleType) -> int:
    """Bytes that the device sees as page-locked, staging buffers included."""
    return sim.stats()["pinned_current"]


def sentences(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if "page cache" in record.getMessage() and record.levelno == level
    ]


# ---------------------------------------------------------------------- what is copied from where


@pytest.mark.parametrize("files", [(1,), (5,), (2, 1, 3)])
@pytest.mark.parametrize("seed", range(3))
def test_bytes_are_right_and_nothing_is_staged(
    sim_device: torch.device, sim: ModuleType, files: tuple[int, ...], seed: int
) -> None:
    before = pinned(sim)
    cached = Cached(sim_device, files=files)
    order = torch.randint(len(cached.masters), (20,), generator=torch.Generator().manual_seed(seed)).tolist()
    runs = [(cached.masters[i], cached.run(cached.masters[i])) for i in order]
    for master, output in runs:
        check(master, output)
    assert cached.transport.loads == 20 and cached.staging.reads == 0
    assert pinned(sim) - before == cached.transport.locked_bytes >= sum(files) * BLOCK
    assert cached.budget.pinned_bytes == 0, "it is no part of what `pin_memory` is for"


def test_what_is_straight_is_ready_and_never_read_ahead(sim_device: torch.device) -> None:
    cached = Cached(sim_device)
    cached.transport.expect(cached.masters)
    assert all(cached.transport.is_ready(master) for master in cached.masters)
    cached.run_all()
    assert cached.staging.reads == 0 and cached.staging.lookahead == cached.transport.lookahead


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_whole_blocks_in_order_until_the_ceiling(sim_device: torch.device, count: int) -> None:
    block = 4 * (100 * 100 + 100)
    # They begin and end inside of pages.
    cached = Cached(sim_device, files=(5,), width=100, ceiling=count * block + 2 * mmap.PAGESIZE)
    assert cached.straight() == list(range(count))
    assert cached.transport.locked_bytes <= cached.ceiling
    cached.run_all()
    assert cached.staging.reads > 0


def test_blocks_that_share_a_page_are_locked_together(sim_device: torch.device, sim: ModuleType) -> None:
    before = pinned(sim)
    cached = Cached(sim_device, files=(4,), width=4)
    assert cached.straight() == [0, 1, 2, 3]
    assert pinned(sim) - before <= mmap.PAGESIZE, "four blocks of one page"


# ---------------------------------------------------------------------- a block is straight whole, or staged


@pytest.mark.parametrize("why", ["cast", "small pieces", "edited", "replaced"])
def test_a_block_that_is_not_as_the_file_has_it_is_staged(sim_device: torch.device, why: str) -> None:
    cached = Cached(
        sim_device,
        stored=torch.float16 if why == "cast" else torch.float32,
        pieces=4 if why == "small pieces" else 1,
    )
    expected = []
    if why in ("edited", "replaced"):
        if why == "edited":
            cached.blocks[1].weight.data.mul_(2)
        else:
            cached.blocks[1].bias = torch.nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        assert not cached.masters[1].is_current()
        for master in cached.masters:
            if not master.is_current():
                master.pack()
        # A neighbour on the same page may count as edited as well.
        expected = [i for i, m in enumerate(cached.masters) if not any(torch.is_tensor(s) for _, s in m.source.leaves)]
        assert 1 not in expected
    assert cached.straight() == expected


def test_an_edit_after_pages_were_locked_counts(sim_device: torch.device) -> None:
    cached = Cached(sim_device, width=100)
    assert cached.straight() == [0, 1, 2]
    cached.blocks[1].weight.data.mul_(2)
    for master in cached.masters:
        if not master.is_current():
            master.pack()
    doubled = cached.blocks[1].weight.detach().clone()
    output = cached.run(cached.masters[1]).cpu()
    offset = next(o for o, leaf in cached.masters[1].source.leaves if leaf.nbytes == doubled.nbytes)
    assert torch.equal(output[offset : offset + doubled.nbytes].view(torch.float32), doubled.reshape(-1))
    assert 1 not in cached.straight()


def test_large_pieces_are_worth_a_copy_each(sim_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_cache, "_WORTHWHILE_BYTES", 4 * WIDTH * WIDTH // 4)
    cached = Cached(sim_device, pieces=4)
    assert cached.straight() == [0, 1, 2]


# ---------------------------------------------------------------------- where it can't be


def test_a_platform_that_does_not_support_it(
    sim_device: torch.device, sim: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    sim.configure(registers_read_only=0)
    cached = Cached(sim_device)
    for _ in range(2):
        cached.run_all()
        assert cached.straight() == []
        cached.transport.release()
    assert len(sentences(caplog)) == 1 and "registers_read_only=0" in sentences(caplog)[0]
    assert "0 of 3 blocks" in sentences(caplog)[0]


def test_the_cpu_has_nothing_to_lock_pages_for(device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    cached = Cached(torch.device("cpu"))
    assert cached.straight() == [] and "'cpu'" in sentences(caplog)[0]


def test_a_ceiling_below_one_block_is_said(sim_device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    assert Cached(sim_device, ceiling=1000).straight() == []
    assert "less than blocks.00 takes" in sentences(caplog)[0]


def test_a_refusal_half_way_keeps_what_was_locked(
    sim_device: torch.device, sim: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    cached = Cached(sim_device, files=(2, 2))
    # Room for the first file's pages, and not for the second's as well.
    sim.configure(pinned_capacity_bytes=pinned(sim) + 3 * BLOCK)
    assert cached.straight() == [0, 1]
    assert len(sentences(caplog)) == 1 and "2 of 4 blocks" in sentences(caplog)[0]
    assert "cannot pin" in sentences(caplog)[0]
    before = pinned(sim)
    cached.transport.release()
    assert before - pinned(sim) >= 2 * BLOCK


class Forgetful(Platform):
    """Takes every page of a file, and page-locks none."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.taken: list[int] = []

    def register_file(self, pointer: int, nbytes: int) -> None:
        self.taken.append(pointer)

    def unregister_host_memory(self, pointer: int) -> None:
        if pointer in self.taken:
            self.taken.remove(pointer)
        else:
            super().unregister_host_memory(pointer)


def test_memory_that_is_not_seen_as_page_locked_is_given_back(
    sim_device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    platform = Forgetful(sim_device)
    cached = Cached(sim_device, platform=platform)
    assert cached.straight() == [] and platform.taken == []
    assert "doesn't see them as page-locked" in sentences(caplog)[0]


# ---------------------------------------------------------------------- files that change


@pytest.mark.parametrize("when", ["before pages are locked", "after"])
@pytest.mark.parametrize("what", ["truncated", "written to"])
def test_a_changed_file_is_an_error_that_names_it(sim_device: torch.device, when: str, what: str) -> None:
    cached = Cached(sim_device)
    if when == "after":
        assert cached.straight() == [0, 1, 2]
    if what == "truncated":
        os.truncate(cached.paths[0], mmap.PAGESIZE)
    else:
        os.utime(cached.paths[0], ns=(1, 1))
    cached.transport.expect(cached.masters)
    for master in cached.masters:
        with pytest.raises(CheckpointError, match=r"0\.safetensors was"):
            cached.run(master)


# ---------------------------------------------------------------------- giving back


def test_release_unlocks_and_unmaps_and_it_starts_anew(sim_device: torch.device, sim: ModuleType) -> None:
    before = pinned(sim)
    cached = Cached(sim_device)
    for _ in range(2):
        assert cached.straight() == [0, 1, 2] and is_mapped_shared(cached.paths[0])
        kept = cached.transport._pages
        cached.transport.release()
        torch.accelerator.synchronize()
        assert kept and pinned(sim) == before
        del kept
        assert not is_mapped_shared(cached.paths[0])
        assert cached.transport.locked_bytes == 0


def test_pages_are_unlocked_before_they_are_unmapped_when_all_is_garbage(
    sim_device: torch.device, sim: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = pinned(sim)
    cached = Cached(sim_device, files=(2, 2), folder=tmp_path)
    assert cached.straight() == [0, 1, 2, 3]
    torch.accelerator.synchronize()
    paths, unmapped = cached.paths, []
    unregister = Platform.unregister_host_memory

    def watched(self: Platform, pointer: int) -> None:
        unregister(self, pointer)
        unmapped.append([is_mapped_shared(path) for path in paths])

    monkeypatch.setattr(Platform, "unregister_host_memory", watched)
    gone = weakref.ref(cached.transport)
    del cached
    assert gone() is None, "it is in a cycle"
    assert pinned(sim) == before
    assert sorted(map(sum, unmapped)) == [1, 2], "each file is mapped until its pages are unlocked"
    assert not any(is_mapped_shared(path) for path in paths)


def test_an_interrupt_half_way_leaves_nothing_locked(
    sim_device: torch.device, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = Cached(sim_device, files=(2, 2))
    before, register, calls = pinned(sim), Platform.register_file, []

    def interrupted(self: Platform, pointer: int, nbytes: int) -> None:
        calls.append(nbytes)
        if len(calls) == 4:
            raise KeyboardInterrupt
        register(self, pointer, nbytes)

    monkeypatch.setattr(Platform, "register_file", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        cached.run(cached.masters[0])
    # Whoever keeps the error has its frames.
    assert caught.tb is not None and pinned(sim) == before
    del caught
    assert pinned(sim) == before and not any(is_mapped_shared(path) for path in cached.paths)
    cached.run_all()
    assert cached.straight() == [0, 1, 2, 3]


# ---------------------------------------------------------------------- pipelines


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Wan of two DiTs, in shards."""
    folder = tmp_path_factory.mktemp("wan")
    tiny.build_wan()[0].save_pretrained(folder, max_shard_size="20KB")
    return folder


def enabled(folder: Path, limit: float = LIMIT_GIB, **options: Any) -> tuple[Any, FromPageCache]:
    pipe = load_omni_pipeline(type(tiny.build_wan()[0]), folder)
    layer_options = {"dit": {"host_registration_limit_gib": limit, **options}}
    handle = diffusers_omni_offload.enable_omni_offload(pipe, "layer", layer_options=layer_options)
    (transport,) = [t for t in handle.backend.streamer.transports if isinstance(t, FromPageCache)]
    return pipe, transport


def straight_count(transport: FromPageCache, pipe: Any) -> int:
    masters = [master for master in pipe.omni_offload.backend.streamer.masters if master is not None]
    return sum(transport._route(master).copies is not None for master in masters)


def test_a_pipeline_gives_the_same_outputs_and_gives_all_back(
    sim_device: torch.device, sim: ModuleType, wan: Path
) -> None:
    reference, call = build_resident(tiny.build_wan, sim_device)
    before = pinned(sim)
    pipe, transport = enabled(wan)
    assert_equal_outputs(outputs(pipe, call, 2), outputs(reference, call, 2), "from the page cache")
    masters = [master for master in pipe.omni_offload.backend.streamer.masters if master is not None]
    assert transport.loads >= 2 * len(masters) and straight_count(transport, pipe) == len(masters)
    assert transport.locked_bytes == pinned(sim) - before > 0
    assert pipe.omni_offload.backend.counters().pinned_bytes == 0
    diffusers_omni_offload.disable_omni_offload(pipe)
    assert pinned(sim) == before
    assert not any(is_mapped_shared(path) for path in wan.rglob("*.safetensors"))


def test_edited_weights_of_a_pipeline_count(sim_device: torch.device, wan: Path) -> None:
    reference, call = build_resident(tiny.build_wan, sim_device)
    pipe, transport = enabled(wan)
    first = outputs(pipe, call, 1)
    for one in (pipe, reference):
        one.transformer.blocks[1].ffn.net[2].weight.data.mul_(1.5)
    found = outputs(pipe, call, 2)
    assert_equal_outputs(found, outputs(reference, call, 2), "edited")
    assert (found[0] != first[0]).any() and transport.loads > 0


def test_a_pipeline_that_is_just_deleted_gives_all_back(sim_device: torch.device, sim: ModuleType, wan: Path) -> None:
    before = pinned(sim)
    pipe, transport = enabled(wan)
    outputs(pipe, tiny.build_wan()[1], 1)
    assert pinned(sim) > before
    del pipe, transport
    gc.collect()
    assert pinned(sim) == before
    assert not any(is_mapped_shared(path) for path in wan.rglob("*.safetensors"))


def test_dits_with_the_same_options_share_the_ceiling(sim_device: torch.device, wan: Path) -> None:
    pipe, transport = enabled(wan)
    ((limit, masters),) = transport._wanted()
    assert limit == LIMIT_GIB << 30
    stacks = pipe.omni_offload.plan.stacks
    assert len(stacks) == 2 and [m.path for m in masters] == [s.path(i) for s in stacks for i in s.streamed]


def test_a_call_of_a_pipeline_whose_file_was_cut_fails_cleanly(
    sim_device: torch.device, sim: ModuleType, tmp_path: Path
) -> None:
    tiny.build_wan()[0].save_pretrained(tmp_path)
    pipe, transport = enabled(tmp_path)
    call = tiny.build_wan()[1]
    outputs(pipe, call, 1)
    loads = transport.loads
    os.truncate(tmp_path / "transformer" / "diffusion_pytorch_model.safetensors", 2 * mmap.PAGESIZE)
    with pytest.raises(CheckpointError, match=r"transformer/diffusion_pytorch_model\.safetensors"):
        outputs(pipe, call, 1)
    assert transport.loads == loads


def test_without_a_limit_nothing_is_locked(sim_device: torch.device, wan: Path) -> None:
    pipe = load_omni_pipeline(type(tiny.build_wan()[0]), wan)
    handle = diffusers_omni_offload.enable_omni_offload(pipe, "layer")
    assert not any(isinstance(transport, FromPageCache) for transport in handle.backend.streamer.transports)
