"""Blocks skipped, repeated, permuted, interrupted: whatever ran before, every forward reads its own weights."""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.hooks import FirstBlockCacheConfig
from torch import nn

import diffusers_omni_offload
from tests import tiny
from tests.equality import assert_equal_outputs, build_as, build_resident, outputs

# ---------------------------------------------------------------------- 2,000 random passes over a toy DiT

PASSES = 2000
BLOCKS = 6


class Boom(RuntimeError):
    """What a block raises in these tests."""


@dataclass
class Forward:
    """One forward of a DiT: which one, in which order, and what goes wrong.

    Attributes:
        order: the blocks to run; any may be missing or there again.
        fails_at: the position at which `error` is raised; None if all goes well.
        in_block: whether it is raised in the middle of the block there, or between two blocks.
        repeats: how often the forward is run, on other inputs, as guidance does.
    """

    second_dit: bool
    order: list[int]
    fails_at: int | None
    in_block: bool
    error: type[BaseException]
    repeats: int


@dataclass
class Pass:
    """Some forwards, run in one call scope, each outside of any, or in the pipeline's own call."""

    way: str
    is_caught_inside: bool
    forwards: list[Forward] = field(default_factory=list)


def random_order(rng: random.Random) -> list[int]:
    everything = list(range(BLOCKS))
    return {
        "full": lambda: everything,
        "skips": lambda: [block for block in everything if rng.random() < 0.6],
        "first only": lambda: [0],
        "repeats": lambda: [block for block in everything for _ in range(rng.choice((1, 1, 2, 3)))],
        "permutation": lambda: rng.sample(everything, BLOCKS),
        "anything": lambda: [rng.randrange(BLOCKS) for _ in range(rng.randrange(10))],
    }[rng.choice(("full", "full", "skips", "first only", "repeats", "permutation", "anything"))]()


def random_pass(rng: random.Random) -> Pass:
    made = Pass(rng.choice(("scope", "scope", "bare", "pipeline")), rng.random() < 0.5)
    for _ in range(1 if made.way == "pipeline" else rng.randrange(1, 4)):
        order = random_order(rng)
        fails = rng.random() < 0.25 and order
        made.forwards.append(
            Forward(
                second_dit=rng.random() < 0.3,
                order=order,
                fails_at=rng.randrange(len(order)) if fails else None,
                in_block=rng.random() < 0.7,
                error=rng.choice((Boom, KeyboardInterrupt)),
                repeats=rng.choice((1, 2)),
            )
        )
    return made


class Subject:
    """A pipeline under the walk. Two of them that do the same have to give the same."""

    def __init__(self, pipe: tiny.ToyPipeline, device: torch.device) -> None:
        self.pipe, self.device = pipe, device
        self.countdown: int | None = None
        self.error: type[BaseException] = Boom
        self.last_output: torch.Tensor | None = None
        for dit in (pipe.transformer, pipe.transformer_2):
            for block in () if dit is None else dit.blocks:
                # `contract` is the second half of a block, so its weights are bound and half of them were read.
                block.contract.register_forward_pre_hook(self._maybe_raise)
                block.register_forward_hook(self._note)

    def _maybe_raise(self, module: nn.Module, arguments: Any) -> None:
        if self.countdown is not None:
            if self.countdown == 0:
                self.countdown = None
                raise self.error("in a block")
            self.countdown -= 1

    def _note(self, module: nn.Module, arguments: Any, output: torch.Tensor) -> None:
        self.last_output = output

    def perform(self, wanted: Pass, seed: int) -> list[Any]:
        """What the pass gave: outputs, the last block's output before each failure, and the failures' names."""
        x = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(seed))
        results: list[Any] = []
        handle = self.pipe.omni_offload
        scope = handle.call() if handle is not None and wanted.way == "scope" else contextlib.nullcontext()
        try:
            with scope:
                for forward in wanted.forwards:
                    for number in range(forward.repeats):
                        try:
                            self._arm(forward)
                            results.append(self._forward(forward, wanted.way, x * (1 - 0.25 * number)))
                        except (Boom, KeyboardInterrupt) as error:
                            results += [type(error).__name__, self.last_output]
                            if not wanted.is_caught_inside:
                                raise
        except (Boom, KeyboardInterrupt):
            results.append("left")
        self.countdown = None
        return [value.cpu() if isinstance(value, torch.Tensor) else value for value in results]

    def _arm(self, forward: Forward) -> None:
        self.last_output = None
        self.error = forward.error
        self.countdown = forward.fails_at if forward.in_block else None

    @torch.no_grad()
    def _forward(self, forward: Forward, way: str, x: torch.Tensor) -> torch.Tensor:
        if way == "pipeline":
            return self.pipe(x, order=_Raising(forward), forwards_per_step=2).images
        dit = self.pipe.transformer_2 if forward.second_dit and self.pipe.transformer_2 else self.pipe.transformer
        return dit(x.to(self.device), order=_Raising(forward))


class _Raising:
    """A forward's order, which raises between two blocks if the forward is to fail there; it can be iterated again."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    def __iter__(self) -> Iterator[int]:
        for position, block in enumerate(self._forward.order):
            if position == self._forward.fails_at and not self._forward.in_block:
                raise self._forward.error("between blocks")
            yield block


def same(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    return len(found) == len(expected) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a is b or a == b
        for a, b in zip(found, expected, strict=True)
    )


#: One pair of twins for each: what was learned and what was interrupted in one pass is carried into the next.
SUBJECTS: tuple[dict[str, Any], ...] = (
    {"slots": 1},
    {"slots": 2},
    {"slots": 2, "two_stage": True},
    {"slots": 2, "residents": 3},
    {"slots": 3, "two_stage": True},
    {"slots": 3, "residents": 1},
    {"slots": 5, "two_stage": True, "residents": 2},
    {"slots": 8},
)


def make_twins(
    device: torch.device, slots: int, residents: int = 0, two_stage: bool = False
) -> tuple[Subject, Subject]:
    def build() -> tiny.ToyPipeline:
        return tiny.build_toy(BLOCKS, two_stage=two_stage, width=16, sizes=[16, 48, 32])[0]

    pipe = build()
    options = {"dit": {"resident_layers": residents}} if residents else None
    pipe.enable_omni_offload("layer", slots=slots, layer_options=options)
    return Subject(pipe, device), Subject(build().to(device), device)


def test_random_passes(device: torch.device, sim: ModuleType) -> None:
    """2,000 seeded passes: 0 wrong, 0 hazards."""
    pairs = [make_twins(device, **subject) for subject in SUBJECTS]
    wrong: list[int] = []
    failures = interrupts = forwards = 0
    for seed in range(PASSES):
        wanted = random_pass(random.Random(seed))
        offloaded, resident = pairs[seed % len(pairs)]
        expected = resident.perform(wanted, seed)
        if not same(offloaded.perform(wanted, seed), expected):
            wrong.append(seed)
        failures += expected.count("Boom")
        interrupts += expected.count("KeyboardInterrupt")
        forwards += len(wanted.forwards)
    assert not wrong, f"{len(wrong)} of {PASSES} passes are wrong, seeds {wrong[:10]}"
    assert not sim.hazards()
    # The walk went where it should.
    assert forwards > PASSES and failures > 200 and interrupts > 200
    for offloaded, _ in pairs:
        handle = offloaded.pipe.omni_offload
        assert handle.loads > 100 and handle.demand_loads > 0
        blocks = [stack.blocks[index] for stack in handle.plan.stacks for index in stack.streamed]
        assert all(parameter.device.type == "cpu" for block in blocks for parameter in block.parameters())


# ---------------------------------------------------------------------- Ctrl-C anywhere in the engine

FOLDERS = tuple(str(Path(diffusers_omni_offload.__file__).parent / name) for name in ("streaming", "weights"))
#: Python itself leaves a gap between a `with` and the first line that its manager protects.
UNPROTECTED = ("__enter__", "__exit__")


class _Interrupting:
    """Raises KeyboardInterrupt at the `wanted`-th line that runs in `streaming/` and `weights/`, as Ctrl-C may."""

    def __init__(self, wanted: int | None) -> None:
        self.wanted, self.lines, self.where = wanted, 0, ""

    def __enter__(self) -> _Interrupting:
        sys.settrace(self._enter)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        is_ours = frame.f_code.co_filename.startswith(FOLDERS) and frame.f_code.co_name not in UNPROTECTED
        return self._line if is_ours else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        if event == "line":
            self.lines += 1
            if self.lines == self.wanted:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_name})"
                raise KeyboardInterrupt
        return self._line


@pytest.mark.parametrize("slots", (1, 2, 3))
def test_ctrl_c_at_any_line_of_the_engine(slots: int, device: torch.device, sim: ModuleType) -> None:
    """Interrupted at any line that a call runs: the weights are at rest, and the next call is right."""

    def build() -> tuple[Any, Callable[[], dict[str, Any]]]:
        return tiny.build_toy(3, width=16, sizes=[16, 48])

    resident, call = build_resident(build, device)
    expected = tiny.run(resident, call)
    pipe, call = build()
    handle = pipe.enable_omni_offload("layer", slots=slots)
    # The first call looks at more, and measures; the lines of the others are alike.
    tiny.run(pipe, call)
    with _Interrupting(None) as counted:
        tiny.run(pipe, call)
    faults: dict[str, str] = {}
    interrupted = 0
    for wanted in range(slots, counted.lines, 3):
        tracer = _Interrupting(wanted)
        with contextlib.suppress(KeyboardInterrupt), tracer:
            tiny.run(pipe, call)
        # A call may take fewer lines than the one that was counted, and then it isn't interrupted.
        interrupted += bool(tracer.where)
        if handle.backend.scope.is_open:
            faults[tracer.where] = "the call scope is still open"
        if any(parameter.device.type != "cpu" for parameter in pipe.transformer.blocks.parameters()):
            faults[tracer.where] = "a streamed weight is still on the device"
        if not np.array_equal(tiny.run(pipe, call), expected):
            faults[tracer.where] = "the next call is wrong"
        if sim.hazards():
            faults[tracer.where] = sim.hazards()[0]
    assert not faults, faults
    assert interrupted > 200


# ---------------------------------------------------------------------- skip-layer guidance


def test_sd3_skip_layer_guidance(device: torch.device) -> None:
    """Every step runs the DiT a second time, without the layers that guidance leaves out."""

    def guided(call: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
        return lambda: {
            **call(),
            "num_inference_steps": 4,
            "skip_guidance_layers": [1, 2],
            "skip_layer_guidance_start": 0.0,
            "skip_layer_guidance_stop": 1.0,
        }

    resident, call = build_resident(tiny.build_sd3, device)
    expected = outputs(resident, guided(call))
    plain = tiny.run(resident, lambda: {**call(), "num_inference_steps": 4})
    assert not np.array_equal(plain, expected[0])
    unguided = {"num_inference_steps": 4}
    for options in ({}, {"slots": 1}, {"slots": 3}, {"layer_options": {"dit": {"resident_layers": 2}}}):
        pipe, call = build_as(tiny.build_sd3)
        pipe.enable_omni_offload("layer", **options)
        assert_equal_outputs(outputs(pipe, guided(call)), expected, f"skip-layer guidance, {options}")
        assert np.array_equal(tiny.run(pipe, lambda call=call: {**call(), **unguided}), plain)


# ---------------------------------------------------------------------- FirstBlockCache

STEPS = 8
CACHED: dict[str, Callable[[], Any]] = {
    "wan": tiny.build_wan,
    "wan_single": tiny.VARIANTS["wan_single"],
    "qwen_image": tiny.build_qwen_image,
}


def dits(pipe: Any) -> list[Any]:
    return [dit for dit in (pipe.transformer, getattr(pipe, "transformer_2", None)) if dit is not None]


def enable_cache(pipe: Any) -> None:
    """So high a threshold that only the first step of each DiT runs all blocks."""
    for dit in dits(pipe):
        dit.enable_cache(FirstBlockCacheConfig(threshold=100.0))


def disable_cache(pipe: Any) -> None:
    for dit in dits(pipe):
        dit.disable_cache()


def long(call: Callable[[], dict[str, Any]], **more: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {**call(), "num_inference_steps": STEPS, **more}


def count_by_step(
    pipe: Any, call: Callable[[], dict[str, Any]], count: Callable[[], int]
) -> tuple[np.ndarray, list[int]]:
    """A call's output, and by how much `count()` grew in each of its steps."""
    readings = [count()]

    def read(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        readings.append(count())
        return {}

    output = tiny.run(pipe, long(call, callback_on_step_end=read))
    return output, [after - before for before, after in itertools.pairwise(readings)]


@contextlib.contextmanager
def counting_blocks(pipe: Any) -> Iterator[list[int]]:
    """How many blocks really ran: an inner module is counted, as a cache answers in a skipped block's place."""
    ran = [0]

    def note(module: nn.Module, arguments: Any) -> None:
        ran[0] += 1

    removable = []
    for dit in dits(pipe):
        stack = dit.blocks if hasattr(dit, "blocks") else dit.transformer_blocks
        attentions = [block.attn1 if hasattr(block, "attn1") else block.attn for block in stack]
        removable += [attention.register_forward_pre_hook(note) for attention in attentions]
    yield ran
    for hook in removable:
        hook.remove()


def first_steps(pipe: Any, blocks_by_step: list[int]) -> set[int]:
    """The steps in which a DiT runs for the first time, and so in full."""
    full = {step for step, ran in enumerate(blocks_by_step) if ran > 2}
    assert len(full) == len(dits(pipe)), blocks_by_step
    return full


@pytest.mark.parametrize("cache_first", [True, False], ids=["cache-first", "offload-first"])
@pytest.mark.parametrize("name", CACHED)
def test_first_block_cache(name: str, cache_first: bool, device: torch.device) -> None:
    resident, call = build_resident(CACHED[name], device)
    uncached = tiny.run(resident, long(call))
    enable_cache(resident)
    expected = outputs(resident, long(call), calls=2)
    assert not np.array_equal(uncached, expected[0])

    pipe, call = build_as(CACHED[name])
    if cache_first:
        enable_cache(pipe)
    handle = pipe.enable_omni_offload("layer")
    if not cache_first:
        enable_cache(pipe)
    assert_equal_outputs(outputs(pipe, long(call), calls=2), expected, f"{name} with the cache")

    # Each step runs its DiT twice, with and without the prompt.
    with counting_blocks(pipe) as ran:
        output, blocks = count_by_step(pipe, call, lambda: ran[0])
    assert np.array_equal(output, expected[0])
    full = first_steps(pipe, blocks)
    assert all(number == 2 for step, number in enumerate(blocks) if step not in full), blocks

    output, moved = count_by_step(pipe, call, lambda: handle.bytes_moved)
    assert np.array_equal(output, expected[0])
    for step in range(2, STEPS):
        if not {step, step - 1} & full:
            assert moved[step] == 0, f"the second of two cached steps moved bytes: {moved}"
    assert all(moved[step] > 0 for step in full)

    pipe.disable_omni_offload()
    with counting_blocks(pipe) as ran:
        output, blocks = count_by_step(pipe, call, lambda: ran[0])
    assert first_steps(pipe, blocks) == full
    assert all(number == 2 for step, number in enumerate(blocks) if step not in full), "a cached step runs one block"

    pipe.enable_omni_offload("layer")
    assert np.array_equal(tiny.run(pipe, long(call)), expected[0])
    disable_cache(pipe)
    with counting_blocks(pipe) as ran:
        output, blocks = count_by_step(pipe, call, lambda: ran[0])
    assert np.array_equal(output, uncached)
    assert len(set(blocks)) == 1 and blocks[0] > 2


@pytest.mark.parametrize("name", CACHED)
def test_disabling_offload_under_a_cache_leaves_the_cache(name: str, device: torch.device) -> None:
    """Either way round, and with the cache switched off in between, the pipeline ends as an ordinary one on the CPU."""
    plain, call = build_as(CACHED[name])
    uncached = tiny.run(plain, long(call))
    enable_cache(plain)
    cached = tiny.run(plain, long(call))
    for cache_first in (True, False):
        pipe, call = build_as(CACHED[name])
        if cache_first:
            enable_cache(pipe)
        pipe.enable_omni_offload("layer")
        if not cache_first:
            enable_cache(pipe)
        tiny.run(pipe, long(call))
        pipe.disable_omni_offload()
        assert np.array_equal(tiny.run(pipe, long(call)), cached)
        disable_cache(pipe)
        assert np.array_equal(tiny.run(pipe, long(call)), uncached)
        assert not any("omni" in name for dit in dits(pipe) for module in dit.modules() for name in hook_names(module))


def hook_names(module: nn.Module) -> list[str]:
    registry = vars(module).get("_diffusers_hook")
    return [] if registry is None else list(registry.hooks)
