"""The output is the same as without offload, bit for bit: every block count, slot count, residency and dtype."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import diffusers_omni_offload
from diffusers_omni_offload.backends import get_offload_backend
from diffusers_omni_offload.config import OffloadConfig
from diffusers_omni_offload.topology.plan import BlockStack, ResolvedPlan
from diffusers_omni_offload.topology.residents import resident_indices
from diffusers_omni_offload.topology.resolver import resolve_offload_plan
from diffusers_omni_offload.topology.sizes import module_nbytes
from tests import tiny
from tests.equality import (
    Build,
    assert_equal_outputs,
    assert_no_hazards,
    build_as,
    build_resident,
    outputs,
    pairs_of,
    pairwise,
    scale,
)

SLOTS = (1, 2, 3, 5)
RESIDENTS = ("none", "one", "half", "all")
POLICIES = ("spread", "leading")
DTYPES = (torch.float32, torch.bfloat16)


def resident_count(residents: str, blocks: int) -> int:
    return {"none": 0, "one": 1, "half": blocks // 2, "all": blocks}[residents]


def layer_options(residents: int) -> dict[str, dict[str, Any]] | None:
    return {"dit": {"resident_layers": residents}} if residents else None


# ---------------------------------------------------------------------- the full grid, on toy DiTs


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("blocks", range(1, 8))
def test_full_grid(blocks: int, dtype: torch.dtype, device: torch.device, sim: ModuleType) -> None:
    """Slots 1, 2, 3, 5 x residents 0, 1, half, all x both policies, on one pipeline: enabled and disabled each time."""

    def build() -> tuple[Any, Callable[[], dict[str, Any]]]:
        return tiny.build_toy(blocks, dtype=dtype, gate_dtype=torch.float32, sizes=[48, 16, 32])

    resident, call = build_resident(build, device)
    expected = outputs(resident, call)
    pipe, call = build()
    for slots in SLOTS:
        for residents in RESIDENTS:
            for policy in POLICIES:
                what = f"{blocks} blocks of {dtype}, {slots} slots, {residents} resident, {policy}"
                kept = resident_count(residents, blocks)
                options = {"slots": slots, "resident_policy": policy, "layer_options": layer_options(kept)}
                if blocks - kept == 1:
                    found = run_single_streamed_block(pipe, call, device, kept, options, what)
                else:
                    handle = pipe.enable_omni_offload("layer", **options)
                    found = outputs(pipe, call)
                    check_counters(handle, blocks - kept, slots, what)
                    pipe.disable_omni_offload()
                assert_equal_outputs(found, expected, what)
                assert_no_hazards(sim, what)


def check_counters(handle: Any, streamed: int, slots: int, what: str) -> None:
    """The blocks really were streamed: every call has moved each of them at least once."""
    assert sum(len(stack.streamed) for stack in handle.plan.stacks) == streamed, what
    assert handle.loads >= 3 * streamed, what
    assert handle.bytes_moved >= 3 * sum(stack.streamed_bytes for stack in handle.plan.stacks), what
    if streamed > slots:
        # Two steps a call, and no way to keep all of the blocks from one to the next.
        assert handle.loads > 3 * streamed, what
    largest = max((stack.nbytes[i] for stack in handle.plan.stacks for i in stack.streamed), default=0)
    assert slots * largest <= handle.device_bytes <= slots * (largest + 256 * 8), what


def run_single_streamed_block(
    pipe: Any, call: Callable[[], Any], device: torch.device, kept: int, options: dict[str, Any], what: str
) -> list[np.ndarray]:
    """A stack with one streamed block is refused, as it would never leave its slot; a plan made by hand may have it."""
    with pytest.raises(ValueError, match=r"'transformer'.*single block.*never leave its slot"):
        pipe.enable_omni_offload("layer", **options)
    assert pipe.omni_offload is None and next(pipe.transformer.parameters()).device.type == "cpu", what
    assert not any(hasattr(module, "_hf_hook") for module in pipe.transformer.modules()), what
    config = OffloadConfig.from_options("layer", **options)
    plan = plan_with_one_streamed_block(pipe, config, kept)
    where = torch.device(device.type, 0)
    backend = get_offload_backend(config, where)
    assert backend is not None
    backend.enable(pipe, plan)
    found = []
    for _ in range(3):
        with backend.scope.opened():
            found.append(tiny.run(pipe, call))
    assert backend.streamer.loads == 3, f"{what}: the block stays in its slot for the whole call"
    backend.disable()
    return found


def plan_with_one_streamed_block(pipe: Any, config: OffloadConfig, kept: int) -> ResolvedPlan:
    blocks = tuple(pipe.transformer.blocks)
    stack = BlockStack(
        component="transformer",
        kind="dit",
        block_paths=tuple(f"blocks.{index}" for index in range(len(blocks))),
        blocks=blocks,
        resident=resident_indices(len(blocks), kept, config.resident_policy),
        nbytes=tuple(module_nbytes(block) for block in blocks),
    )
    # The components are those of a configuration that can be resolved: everything resident.
    whole = OffloadConfig.from_options("layer", layer_options=layer_options(len(blocks)))
    return dataclasses.replace(resolve_offload_plan(pipe, whole), stacks=(stack,))


@pytest.mark.parametrize("blocks", (1, 2, 5))
def test_two_dits_and_an_encoder_share_the_slots(blocks: int, device: torch.device) -> None:
    """Two DiTs and a text encoder, streamed together: their blocks differ in bytes and take turns in the same slots."""

    def build() -> tuple[Any, Callable[[], dict[str, Any]]]:
        return tiny.build_toy(blocks + 1, two_stage=True, text_encoder=True, vae=True, sizes=[16, 64])

    resident, call = build_resident(build, device)
    expected = outputs(resident, call)
    for slots in SLOTS:
        pipe, call = build()
        pipe.enable_omni_offload("layer", components=["dit", "text_encoder"], slots=slots)
        assert_equal_outputs(outputs(pipe, call), expected, f"{slots} slots")


# ---------------------------------------------------------------------- a pairwise cover, on tiny stock pipelines


def build_wan_first_only() -> tuple[Any, Callable[[], dict[str, Any]]]:
    return tiny.build_wan(two_stage=False)


def build_wan_second_only() -> tuple[Any, Callable[[], dict[str, Any]]]:
    pipe, call = tiny.build_wan()
    pipe.transformer = None
    # Every step is below this boundary, so the second DiT runs all of them.
    pipe.register_to_config(boundary_ratio=1.0)
    return pipe, call


PIPELINES: dict[str, Build] = {
    "wan": tiny.build_wan,
    "wan_first_only": build_wan_first_only,
    "wan_second_only": build_wan_second_only,
    "wan_i2v": tiny.build_wan_i2v,
    "flux2": tiny.build_flux2,
    "sd3": tiny.build_sd3,
    "qwen_image": tiny.build_qwen_image,
}

FACTORS: dict[str, tuple[Any, ...]] = {
    "residents": RESIDENTS,
    "slots": SLOTS,
    "policy": POLICIES,
    "dtype": DTYPES,
    "components": (("dit",), ("dit", "text_encoder")),
}

ROWS = {name: pairwise(FACTORS, seed=number) for number, name in enumerate(PIPELINES)}


def test_the_cover_is_pairwise_and_small() -> None:
    names = list(FACTORS)
    wanted = {(a, x, b, y) for i, a in enumerate(names) for b in names[i + 1 :] for x in FACTORS[a] for y in FACTORS[b]}
    for name, rows in ROWS.items():
        covered = set().union(*(pairs_of(row, names) for row in rows))
        assert covered == wanted, name
    runs = sum(map(len, ROWS.values()))
    print(f"pairwise cover: {runs} runs on {len(PIPELINES)} pipelines")
    assert runs <= 120


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PIPELINES)
def test_pairwise_cover(name: str, dtype: torch.dtype, device: torch.device, sim: ModuleType) -> None:
    build = PIPELINES[name]
    resident, call = build_resident(build, device, dtype)
    expected = outputs(resident, call)
    assert np.isfinite(expected[0]).all() and expected[0].std() > 0
    del resident
    pipe, call = build_as(build, dtype)
    rows = [row for row in ROWS[name] if row["dtype"] == dtype]
    print(f"{name} in {dtype}: {len(rows)} runs of three calls")
    for row in rows:
        dits = [dit for dit in (pipe.transformer, getattr(pipe, "transformer_2", None)) if dit is not None]
        blocks = sum(len(module) for _, module in dits[0].named_children() if isinstance(module, torch.nn.ModuleList))
        handle = pipe.enable_omni_offload(
            "layer",
            components=list(row["components"]),
            layer_options=layer_options(resident_count(row["residents"], blocks)),
            slots=row["slots"],
            resident_policy=row["policy"],
        )
        what = f"{name} {row}"
        assert_equal_outputs(outputs(pipe, call), expected, what)
        assert_no_hazards(sim, what)
        stacks = {stack.component: stack for stack in handle.plan.stacks}
        assert sum(stack.kind == "dit" for stack in stacks.values()) == len(dits), what
        assert any(path.startswith("text_encoder") for path in stacks) == ("text_encoder" in row["components"]), what
        streams = any(stack.streamed for stack in stacks.values())
        assert (handle.bytes_moved > 0) == streams, what
        assert streams == (row["residents"] != "all" or "text_encoder" in row["components"]), what
        diffusers_omni_offload.disable_omni_offload(pipe)


# ---------------------------------------------------------------------- equality means something


def streamed_blocks(plan: ResolvedPlan) -> Iterator[tuple[BlockStack, int, str]]:
    for stack in plan.stacks:
        for index in stack.streamed:
            yield stack, index, f"{stack.component}.{stack.block_paths[index]}"


@pytest.mark.parametrize("name", ["wan", "wan_i2v", "flux2", "sd3", "qwen_image"])
def test_scaling_any_streamed_block_changes_the_output(name: str, device: torch.device) -> None:
    """Scaled in place, at rest: the next call shows it, exactly as a resident pipeline would."""
    resident, call = build_resident(tiny.BUILDERS[name], device)
    expected = tiny.run(resident, call)
    pipe, call = build_as(tiny.BUILDERS[name])
    handle = pipe.enable_omni_offload("layer", components=["dit", "text_encoder"])
    assert np.array_equal(tiny.run(pipe, call), expected)
    ran = blocks_that_run(pipe, call, handle.plan)
    for stack, index, path in streamed_blocks(handle.plan):
        restore = scale(stack.blocks[index])
        restore_twin = scale(twin(resident, path))
        found, reference = tiny.run(pipe, call), tiny.run(resident, call)
        assert np.array_equal(found, reference), f"{path}: scaled, it differs from the scaled resident pipeline"
        if stack.kind == "dit":
            assert not np.array_equal(found, expected), f"{path}: scaling it doesn't show"
        elif np.array_equal(found, expected):
            # A text-only prompt runs no vision block, and the last layer may come after the embeddings are taken.
            is_last = index == len(stack.blocks) - 1
            assert path not in ran or is_last, f"{path}: it runs, and scaling it doesn't show"
        restore()
        restore_twin()
    assert np.array_equal(tiny.run(pipe, call), expected)


def twin(pipe: Any, path: str) -> torch.nn.Module:
    component, _, below = path.partition(".")
    return getattr(pipe, component).get_submodule(below)


def blocks_that_run(pipe: Any, call: Callable[[], dict[str, Any]], plan: ResolvedPlan) -> set[str]:
    ran: set[str] = set()
    removable = [
        stack.blocks[index].register_forward_pre_hook(lambda module, arguments, path=path: ran.add(path))
        for stack, index, path in streamed_blocks(plan)
    ]
    tiny.run(pipe, call)
    for hook in removable:
        hook.remove()
    return ran
