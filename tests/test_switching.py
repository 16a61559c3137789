"""Layer mode, module mode, mixed choices and off, in any order: equal at each step, and nothing grows or is left."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from diffusers_omni_offload import disable_omni_offload, enable_omni_offload, hooks
from diffusers_omni_offload.backends.attaching import Attaching
from diffusers_omni_offload.backends.entry_points import EntryPoints
from diffusers_omni_offload.backends.mediation import Mediation
from diffusers_omni_offload.backends.residency import Residency
from diffusers_omni_offload.platform import Platform
from diffusers_omni_offload.streaming.slots import Slot
from diffusers_omni_offload.streaming.stages import Stages
from diffusers_omni_offload.weights import leaves, pinning
from diffusers_omni_offload.weights.leaves import Layout
from diffusers_omni_offload.weights.packed import PackedMaster
from diffusers_omni_offload.weights.pinning import HostBuffer
from tests import tiny
from tests.comparing import State, leftovers, modules
from tests.equality import Call, assert_no_hazards
from tests.swapped import leaves_of
from tests.tiny import build_toy

accelerator = torch.accelerator

# ---------------------------------------------------------------------- what is switched between

Options = dict[str, Any]

OFF: Options = {}
MODES: tuple[Options, ...] = (
    {"mode": "layer"},
    {"mode": "layer", "components": ["dit", "text_encoder"], "slots": 3},
    {"mode": "layer", "layer_options": {"dit": {"resident_layers": 1}}},
    {"mode": "module"},
    {"mode": "module", "components": ["text_encoder"]},
    {"mode": "module", "pin_memory": False},
    {"components": {"dit": "layer", "text_encoder": "module", "vae": "module"}},
    {"components": {"dit": "module", "vae": "module"}},
    {"components": {"dit": "module", "text_encoder": "layer"}},
    {"components": {"dit": "resident", "text_encoder": "module", "vae": "module"}},
    {"components": {"transformer": "layer", "transformer_2": "module"}},
)


def build() -> tuple[Any, Call]:
    """Two DiTs, a text encoder and a VAE, and a bias that two blocks share."""
    pipe, call = build_toy(3, two_stage=True, text_encoder=True, vae=True, width=16, sizes=[16, 48])
    pipe.transformer.blocks[2].contract.bias = pipe.transformer.blocks[0].contract.bias
    return pipe, call


@cache
def reference(device: torch.device) -> np.ndarray:
    pipe, call = build()
    output = tiny.run(pipe.to(device), call)
    assert np.ptp(output) > 0
    return output


def attributes(pipe: Any) -> dict[str, dict[str, int]]:
    """Every attribute of every module, by identity: what is wrapped isn't what it was."""
    return {path: {name: id(value) for name, value in vars(module).items()} for path, module in modules(pipe)}


@dataclass(frozen=True)
class Held:
    """What is held by the process for a pipeline."""

    allocated: int
    pinned: int
    buffers: int
    masters: int
    tensors: int

    @classmethod
    def now(cls, sim: ModuleType) -> Held:
        gc.collect()
        accelerator.synchronize()
        kinds = [type(item) for item in gc.get_objects()]
        return cls(
            accelerator.memory_allocated(),
            sim.stats()["pinned_current"],
            kinds.count(HostBuffer),
            kinds.count(PackedMaster),
            sum(issubclass(kind, torch.Tensor) for kind in kinds),
        )


def walk(pipe: Any, call: Call, steps: int, seed: int, expected: np.ndarray, sim: ModuleType) -> None:
    """Random switches with a call after each."""
    rng = random.Random(seed)
    device = torch.device("sim")
    tiny.run(pipe.to(device), call)
    pipe.to("cpu")
    before, clean = State.of(pipe), attributes(pipe)
    idle = Held.now(sim)
    seen: dict[str, Held] = {}
    for step in range(steps):
        options = rng.choice((*MODES, OFF, OFF))
        what = f"step {step} of walk {seed}: {options or 'off'}"
        if options:
            handle = enable_omni_offload(pipe, **options)
            assert pipe.omni_offload is handle and handle.is_enabled(), what
            for path in handle.plan.swapped:
                assert {tensor.device.type for tensor in leaves_of(getattr(pipe, path))} == {"cpu"}, what
        else:
            disable_omni_offload(pipe)
            assert leftovers(pipe) == [] and attributes(pipe) == clean, what
            assert_same_tensors(before, pipe)
            pipe.to("cpu")  # It may have been off before, and on the device.
            assert Held.now(sim) == idle, what
            pipe.to(device)
            before = State.of(pipe)
        for _ in range(rng.choice((0, 1, 1, 2)) or (1 if not options else 0)):
            assert np.array_equal(tiny.run(pipe, call), expected), what
        if not options:
            # Half of the time the next mode finds it on the device.
            if rng.random() < 0.5:
                pipe.to("cpu")
                before = State.of(pipe)
            continue
        held = Held.now(sim)
        assert seen.setdefault(f"{options}", held).pinned == held.pinned == handle.pinned_bytes + idle.pinned, what
        # The first call of a mode makes what is kept, such as views of slots.
        assert held.allocated <= seen[f"{options}"].allocated + 4096 and held.buffers == seen[f"{options}"].buffers, (
            what
        )
        if rng.random() < 0.2:
            # An edit in place, of what is swapped, streamed and resident, and the way back.
            edit(pipe, 2.0)
            assert not np.array_equal(tiny.run(pipe, call), expected), what
            edit(pipe, 0.5)
    disable_omni_offload(pipe)
    assert leftovers(pipe) == [] and attributes(pipe) == clean
    assert_same_tensors(before, pipe)
    pipe.to("cpu")
    assert Held.now(sim) == idle
    assert_no_hazards(sim, f"walk {seed}")


def assert_same_tensors(before: State, pipe: Any) -> None:
    """The same objects with the same values, wherever they are."""
    now = State.of(pipe)
    devices = {name: tensor[1] for name, tensor in now.tensors.items()}
    moved = {name: (tensor[0], devices[name], *tensor[2:]) for name, tensor in before.tensors.items()}
    replace(before, tensors=moved).assert_same(now)


def edit(pipe: Any, factor: float) -> None:
    """Powers of two, so that the way back is exact."""
    for module in (pipe.transformer, pipe.transformer_2, pipe.text_encoder):
        for parameter in module.parameters():
            parameter.data.mul_(factor)


@pytest.mark.parametrize("seed", range(2))
def test_a_random_walk(seed: int, device: torch.device, sim: ModuleType) -> None:
    walk(*build(), 24, seed, reference(device), sim)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 13))
def test_a_long_random_walk(seed: int, device: torch.device, sim: ModuleType) -> None:
    walk(*build(), 200, seed, reference(device), sim)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wan", "sdxl"])
def test_a_random_walk_of_a_stock_pipeline(name: str, device: torch.device, sim: ModuleType) -> None:
    resident, call = tiny.BUILDERS[name]()
    expected = tiny.run(resident.to(device), call)
    del resident
    pipe, call = tiny.BUILDERS[name]()
    names = {"transformer", "transformer_2"}
    options = [one for one in MODES if name == "wan" or not names & set(one.get("components", ()))]
    options = [one for one in options if name == "wan" or "layer_options" not in one]
    rng, swaps = random.Random(5), 0
    pinned = sim.stats()["pinned_current"]
    for step in range(40):
        chosen, was_on = rng.choice((*options, OFF)), pipe.omni_offload is not None
        if chosen:
            handle = enable_omni_offload(pipe, **chosen)
        else:
            disable_omni_offload(pipe)
            # A call without offload leaves an empty registry of hooks of diffusers' own.
            assert not was_on or leftovers(pipe) == []
            assert sim.stats()["pinned_current"] == pinned
            pipe.to(device)
        assert np.array_equal(tiny.run(pipe, call), expected), f"step {step}: {chosen}"
        swaps += handle.swaps if chosen else 0
        if not chosen and rng.random() < 0.5:
            pipe.to("cpu")
    assert swaps > 40
    assert_no_hazards(sim, name)


@pytest.mark.parametrize(
    "first", [pytest.param(first, marks=[pytest.mark.slow] if first % 6 else []) for first in range(0, len(MODES), 2)]
)
def test_each_mode_after_each(first: int, device: torch.device, sim: ModuleType) -> None:
    """Every ordered pair, with a call in both, and off."""
    pipe, call = build()
    clean = attributes(pipe)
    for one in MODES[first : first + 2]:
        for other in MODES:
            for options in (one, other):
                enable_omni_offload(pipe, **options)
                assert np.array_equal(tiny.run(pipe, call), reference(device)), f"{one} -> {other}"
        disable_omni_offload(pipe)
        assert leftovers(pipe) == [] and attributes(pipe) == clean
    assert_no_hazards(sim, str(first))


@pytest.mark.parametrize("options", MODES, ids=str)
def test_enabling_again_is_the_same_handle(options: Options, device: torch.device, sim: ModuleType) -> None:
    pipe, call = build()
    handle = enable_omni_offload(pipe, **options)
    tiny.run(pipe, call)
    before, held, counts = attributes(pipe), Held.now(sim), (handle.swaps, handle.loads)
    assert enable_omni_offload(pipe, **options) is handle
    assert attributes(pipe) == before and Held.now(sim) == held and (handle.swaps, handle.loads) == counts
    assert np.array_equal(tiny.run(pipe, call), reference(device))
    # The same said in another way is the same, too; anything else isn't.
    reordered = dict(options)
    if isinstance(options.get("components"), dict):
        reordered["components"] = dict(reversed(options["components"].items()))
    assert enable_omni_offload(pipe, **reordered) is handle
    assert enable_omni_offload(pipe, **{**options, "slots": 4}) is not handle
    assert not handle.is_enabled()


@pytest.mark.parametrize("options", MODES, ids=str)
def test_switching_during_a_call_is_refused(options: Options, device: torch.device) -> None:
    pipe, call = build()
    handle = enable_omni_offload(pipe, **options)

    def switch(pipe: Any, step: int, *others: Any) -> dict[str, Any]:
        for action in (
            lambda: disable_omni_offload(pipe),
            lambda: enable_omni_offload(pipe, "layer", slots=5),
            lambda: enable_omni_offload(pipe, components={"vae": "module"}),
        ):
            with pytest.raises(RuntimeError, match="while a call is running"):
                action()
        return {}

    output = tiny.run(pipe, lambda: {**call(), "callback_on_step_end": switch})
    assert np.array_equal(output, reference(device)) and pipe.omni_offload is handle and handle.is_enabled()


def test_a_smaller_device_takes_the_smaller_mode(device: torch.device, sim: ModuleType) -> None:
    """What doesn't fit is refused and the old mode stays; what fits is taken, whatever mode was there."""

    def build_large() -> tuple[Any, Call]:
        return build_toy(6, two_stage=True, text_encoder=True, vae=True, width=64, sizes=[512])

    resident, call = build_large()
    expected = tiny.run(resident.to(device), call)
    del resident
    gc.collect()
    pipe, call = build_large()
    start = accelerator.memory_allocated()
    expert = sum(tensor.nbytes for tensor in leaves_of(pipe.transformer))
    sim.configure(capacity_bytes=start + int(1.4 * expert))
    everything = {"components": {"dit": "resident", "text_encoder": "module"}}
    for _ in range(2):
        for options in ({"mode": "module"}, {"mode": "layer"}, MODES[6], MODES[7]):
            handle = enable_omni_offload(pipe, **options)
            assert np.array_equal(tiny.run(pipe, call), expected), options
            with pytest.raises(RuntimeError, match="free, and this needs"):
                enable_omni_offload(pipe, **everything)
            assert pipe.omni_offload is handle and np.array_equal(tiny.run(pipe, call), expected), options


# ---------------------------------------------------------------------- failures while enabling


ERRORS = [RuntimeError, torch.OutOfMemoryError, KeyboardInterrupt]
EVERYTHING: Options = {"components": {"dit": "module", "text_encoder": "module", "vae": "module"}}
MIXED: Options = {"components": {"transformer": "layer", "transformer_2": "module", "text_encoder": "module"}}

#: Where enabling can fail: (object, attribute), and which call of it.
STEPS: dict[str, tuple[Any, str, int]] = {
    "packing the first component": (Layout, "copy_to", 0),
    "packing the last component": (Layout, "copy_to", 3),
    "host memory of the second component": (pinning.HostBuffer, "__init__", 1),
    "pinning the third component": (pinning.HostBuffer, "pin", 2),
    "placing": (Residency, "place", 0),
    "a stage": (Stages, "add", 1),
    "entry points of the first component": (EntryPoints, "install", 0),
    "entry points of the last component": (EntryPoints, "install", 2),
    "the first hook": (hooks, "install_innermost", 0),
    "a part's hook": (hooks, "install_innermost", 5),
    "a late part's hook": (hooks, "install_innermost", 18),
    "the second component's execution device": (hooks.ExecutionDeviceHook, "attach", 1),
    "the third component's mediation": (Mediation, "install", 2),
    "the parts of the plan": (Attaching, "_attach", 2),
    "the pipeline's class": (sys.modules["diffusers_omni_offload.pipeline"], "composed_class", 0),
    "the handle": (sys.modules["diffusers_omni_offload.pipeline"], "OffloadHandle", 0),
}
ONLY_MIXED: dict[str, tuple[Any, str, int]] = {
    "the first slot": (Slot, "__init__", 0),
    "the second slot": (Slot, "__init__", 1),
    "rebinding a tensor that is placed": (leaves, "rebind", 2),
}


def failing(original: Callable[..., Any], at: int, error: type[BaseException]) -> tuple[Callable[..., Any], list[int]]:
    """`original`, whose call number `at` (from 0) raises `error` instead; and the calls so far."""
    calls: list[int] = []

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) - 1 == at:
            raise error("injected")
        return original(*args, **kwargs)

    return wrapped, calls


CASES = [
    (step, choice, from_device)
    for choice, steps in (("everything", STEPS), ("mixed", {**STEPS, **ONLY_MIXED}))
    for step in steps
    for from_device in (False, True)
    if not (from_device and step == "rebinding a tensor that is placed")  # Nothing has to be placed then.
]


def with_errors(cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Each case with each error. One of a case's is fast, in turns."""
    return [
        pytest.param(*case, error, marks=[] if (index - number) % len(ERRORS) == 0 else [pytest.mark.slow])
        for index, case in enumerate(cases)
        for number, error in enumerate(ERRORS)
    ]


@pytest.mark.parametrize(("step", "choice", "from_device", "error"), with_errors(CASES))
def test_enabling_is_all_or_nothing(
    step: str,
    choice: str,
    from_device: bool,
    error: type[BaseException],
    device: torch.device,
    sim: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner, name, at = {**STEPS, **ONLY_MIXED}[step]
    options = MIXED if choice == "mixed" else EVERYTHING
    pipe, call = build()
    pipe.to(device) if from_device else None
    before, clean, held = State.of(pipe), attributes(pipe), Held.now(sim)
    wrapped, calls = failing(getattr(owner, name), at, error)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, staticmethod(wrapped) if name == "attach" else wrapped)
        with pytest.raises(error, match="injected"):
            enable_omni_offload(pipe, **options)
    assert len(calls) > at
    assert leftovers(pipe) == [] and pipe.omni_offload is None and attributes(pipe) == clean
    before.assert_same(State.of(pipe))
    now = Held.now(sim)
    assert (now.allocated, now.pinned, now.masters, now.buffers) == (
        held.allocated,
        held.pinned,
        held.masters,
        held.buffers,
    )
    if from_device:
        assert np.array_equal(tiny.run(pipe, call), reference(device))
    enable_omni_offload(pipe, **options)
    assert np.array_equal(tiny.run(pipe, call), reference(device))
    disable_omni_offload(pipe)
    assert leftovers(pipe) == [] and attributes(pipe) == clean


OLD_AND_STEP = [
    (old, step)
    for old in (MODES[0], MODES[3], MODES[8])
    for step in ("packing the last component", "a part's hook", "a stage", "the handle")
]


@pytest.mark.parametrize(("old", "step", "error"), with_errors(OLD_AND_STEP), ids=str)
def test_a_switch_that_fails_keeps_the_old_mode(
    old: Options, step: str, error: type[BaseException], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, call = build()
    config = enable_omni_offload(pipe, **old).config
    tiny.run(pipe, call)
    owner, name, at = STEPS[step]
    wrapped, _ = failing(getattr(owner, name), at, error)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, wrapped)
        with pytest.raises(error, match="injected"):
            enable_omni_offload(pipe, **EVERYTHING)
    assert pipe.omni_offload is not None and pipe.omni_offload.config == config
    assert np.array_equal(tiny.run(pipe, call), reference(device))
    enable_omni_offload(pipe, **EVERYTHING)
    assert np.array_equal(tiny.run(pipe, call), reference(device))
    disable_omni_offload(pipe)
    assert leftovers(pipe) == []


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize(
    ("owner", "name", "at"),
    [
        (hooks, "remove_owned", 3),
        (EntryPoints, "remove", 1),
        (Mediation, "remove", 0),
        (PackedMaster, "release", 1),
        (Stages, "give_up_all", 0),
        (Residency, "move_to_host", 0),
    ],
)
def test_disabling_tries_every_step(
    owner: Any,
    name: str,
    at: int,
    error: type[BaseException],
    device: torch.device,
    sim: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe, call = build()
    pinned = sim.stats()["pinned_current"]
    enable_omni_offload(pipe, **EVERYTHING)
    tiny.run(pipe, call)
    wrapped, calls = failing(getattr(owner, name), at, error)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, wrapped)
        with pytest.raises(error, match="injected"):
            disable_omni_offload(pipe)
    assert pipe.omni_offload is None and len(calls) > at
    # What failed may be left over on one component; nothing else is.
    assert len({entry.split(".")[0] for entry in leftovers(pipe)}) <= 1
    weights = [tensor for module in (pipe.transformer, pipe.text_encoder, pipe.vae) for tensor in leaves_of(module)]
    assert {tensor.device.type for tensor in weights} == {"cpu"}
    if name != "release":
        gc.collect()
        assert sim.stats()["pinned_current"] == pinned


@pytest.mark.slow
@pytest.mark.parametrize("from_device", [False, True])
def test_an_interrupt_at_any_function_of_enabling(from_device: bool, device: torch.device, sim: ModuleType) -> None:
    """At the entry of every function of the package that enabling module mode enters."""
    from tests.test_failures import _interrupt, _interrupted, _points

    def start() -> tuple[Any, Call]:
        pipe, call = build()
        return (pipe.to(device) if from_device else pipe), call

    pipe, call = start()
    with _interrupt(None) as entered:
        enable_omni_offload(pipe, **EVERYTHING)
    disable_omni_offload(pipe)
    failures = []
    pipe, call = start()
    before, held = State.of(pipe), Held.now(sim)
    for at in _points(entered):
        if _interrupted(lambda pipe=pipe: enable_omni_offload(pipe, **EVERYTHING), at):
            try:
                assert leftovers(pipe) == [] and pipe.omni_offload is None
                before.assert_same(State.of(pipe))
                now = Held.now(sim)
                assert (now.allocated, now.pinned) == (held.allocated, held.pinned)
                continue
            except AssertionError as error:
                failures.append(f"{at}: {str(error).splitlines()[:1]}")
        else:
            disable_omni_offload(pipe)
        del pipe
        pipe, call = start()
        before, held = State.of(pipe), Held.now(sim)
    assert not failures, "interrupted there, enabling left something behind:\n" + "\n".join(failures)
    enable_omni_offload(pipe, **EVERYTHING)
    assert np.array_equal(tiny.run(pipe, call), reference(device))


@pytest.mark.parametrize("at", range(4))
def test_pinning_that_fails_is_no_failure(
    at: int, device: torch.device, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, call = build()
    pinned = sim.stats()["pinned_current"]
    wrapped, _ = failing(Platform.register_host_memory, at, RuntimeError)
    with monkeypatch.context() as patch:
        patch.setattr(Platform, "register_host_memory", wrapped)
        handle = enable_omni_offload(pipe, **EVERYTHING)
    assert np.array_equal(tiny.run(pipe, call), reference(device))
    assert sim.stats()["pinned_current"] - pinned == handle.pinned_bytes and (handle.pinned_bytes > 0) == (at > 0)
    disable_omni_offload(pipe)
    assert sim.stats()["pinned_current"] == pinned
