"""A failure half-way through `enable`, during a call or while disabling leaves a pipeline that works."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch

import diffusers_omni_offload
from diffusers_omni_offload import composition, hooks
from diffusers_omni_offload.backends.mediation import Mediation
from diffusers_omni_offload.backends.residency import Residency
from diffusers_omni_offload.platform import Platform
from diffusers_omni_offload.streaming.slots import Slot
from diffusers_omni_offload.streaming.streamer import Streamer
from diffusers_omni_offload.weights import leaves, pinning
from diffusers_omni_offload.weights.leaves import Layout
from diffusers_omni_offload.weights.packed import PackedMaster
from tests.comparing import State, assert_equal, leftovers, resident_output
from tests.tiny import build_toy, run

#: Raised afresh in each test: an exception keeps the frames that it went through alive, and their buffers.
ERRORS = [RuntimeError, torch.OutOfMemoryError, KeyboardInterrupt]
PACKAGE = str(Path(diffusers_omni_offload.__file__).parent)


def build() -> tuple[Any, Callable[[], dict[str, Any]]]:
    """Two DiTs, a text encoder, a VAE, and a bias that two blocks share."""
    pipe, call = build_toy(3, two_stage=True, text_encoder=True, vae=True)
    pipe.transformer.blocks[2].contract.bias = pipe.transformer.blocks[0].contract.bias
    return pipe, call


def failing(original: Callable[..., Any], at: int, error: type[BaseException]) -> tuple[Callable[..., Any], list[int]]:
    """`original`, whose call number `at` (from 0) raises `error` instead; and the calls so far."""
    calls: list[int] = []

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) - 1 == at:
            raise error("injected")
        return original(*args, **kwargs)

    return wrapped, calls


#: Where enabling can fail: (object, attribute), and which call of it.
STEPS: dict[str, tuple[Any, str, int]] = {
    "packing the first block": (Layout, "copy_to", 0),
    "packing the fourth block": (Layout, "copy_to", 3),
    "packing the shared leaves": (Layout, "copy_to", 6),
    "placing the first tensor": (Layout, "copy_to", 7),
    "placing a later tensor": (Layout, "copy_to", 20),
    "host memory of the second block": (pinning.HostBuffer, "__init__", 1),
    "placing": (Residency, "place", 0),
    "rebinding the first tensor that moves": (leaves, "rebind", 0),
    "rebinding the ninth tensor that moves": (leaves, "rebind", 8),
    "the first slot": (Slot, "__init__", 0),
    "the second slot": (Slot, "__init__", 1),
    "the slot of shared leaves": (Slot, "__init__", 2),
    "the first block's hook": (hooks, "install_innermost", 0),
    "the fifth block's hook": (hooks, "install_innermost", 4),
    "the first component's hook": (hooks, "install_innermost", 6),
    "the last component's hook": (hooks, "install_innermost", 9),
    "the first component's execution device": (hooks.ExecutionDeviceHook, "attach", 0),
    "the third component's execution device": (hooks.ExecutionDeviceHook, "attach", 2),
    "the second component's mediation": (Mediation, "install", 1),
    "the pipeline's class": (sys.modules["diffusers_omni_offload.pipeline"], "composed_class", 0),
    "the handle": (sys.modules["diffusers_omni_offload.pipeline"], "OffloadHandle", 0),
}


@pytest.fixture(params=["from the CPU", "from the device"])
def start(request: pytest.FixtureRequest) -> bool:
    """Whether the pipeline is on the device before offload is enabled."""
    return request.param == "from the device"


def _start(on_device: bool, device: torch.device) -> tuple[Any, Callable[[], dict[str, Any]]]:
    pipe, call = build()
    if on_device:
        pipe.to(device)
    return pipe, call


def _memory(sim: ModuleType) -> tuple[int, int]:
    gc.collect()
    torch.accelerator.synchronize()
    return torch.accelerator.memory_allocated(), sim.stats()["pinned_current"]


#: A pipeline that is on the device already has nothing that must be moved there.
_MOVES = ("placing the first tensor", "placing a later tensor", "rebinding the first", "rebinding the ninth")


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize(
    ("step", "start"),
    [(step, start) for step in STEPS for start in (False, True) if not (start and step.startswith(_MOVES))],
    ids=lambda value: value if isinstance(value, str) else "from the device" if value else "from the CPU",
)
def test_enable_is_all_or_nothing(
    device: torch.device,
    sim: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    start: bool,
    error: type[BaseException],
) -> None:
    reference = _reference(device)
    pipe, call = _start(start, device)
    before, memory = State.of(pipe), _memory(sim)
    owner, name, at = STEPS[step]
    wrapped, calls = failing(getattr(owner, name), at, error)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, staticmethod(wrapped) if name == "attach" else wrapped)
        with pytest.raises(error, match="injected"):
            pipe.enable_omni_offload("layer")
    assert len(calls) > at
    before.assert_same(State.of(pipe))
    assert leftovers(pipe) == [] and pipe.omni_offload is None
    assert _memory(sim) == memory
    if start:
        assert_equal(run(pipe, call), reference)
    pipe.enable_omni_offload("layer")
    assert_equal(run(pipe, call), reference)
    pipe.disable_omni_offload()
    assert leftovers(pipe) == []
    assert _memory(sim)[1] == memory[1]


_references: dict[str, Any] = {}


def _reference(device: torch.device) -> Any:
    if "toy" not in _references:
        _references["toy"] = resident_output(build, device)
    return _references["toy"]


@pytest.mark.parametrize("at", range(7))
def test_an_interrupt_while_pinning_undoes_everything(
    device: torch.device, sim: ModuleType, monkeypatch: pytest.MonkeyPatch, start: bool, at: int
) -> None:
    pipe, call = _start(start, device)
    before, memory = State.of(pipe), _memory(sim)
    wrapped, calls = failing(Platform.register_host_memory, at, KeyboardInterrupt)
    with monkeypatch.context() as patch:
        patch.setattr(Platform, "register_host_memory", wrapped)
        with pytest.raises(KeyboardInterrupt, match="injected"):
            pipe.enable_omni_offload("layer")
    assert len(calls) == at + 1
    before.assert_same(State.of(pipe))
    assert leftovers(pipe) == [] and _memory(sim) == memory
    pipe.enable_omni_offload("layer")
    assert_equal(run(pipe, call), _reference(device))


@pytest.mark.parametrize("error", ERRORS[:2])
@pytest.mark.parametrize("at", range(7))
def test_pinning_that_fails_is_no_failure(
    device: torch.device, sim: ModuleType, monkeypatch: pytest.MonkeyPatch, at: int, error: type[BaseException]
) -> None:
    pipe, call = build()
    pinned = _memory(sim)[1]
    wrapped, _ = failing(Platform.register_host_memory, at, error)
    with monkeypatch.context() as patch:
        patch.setattr(Platform, "register_host_memory", wrapped)
        handle = pipe.enable_omni_offload("layer")
    assert_equal(run(pipe, call), _reference(device))
    assert (handle.pinned_bytes > 0) == (at > 0)
    pipe.disable_omni_offload()
    assert _memory(sim)[1] == pinned


# ---------------------------------------------------------------------- at every function that enabling enters


#: What finalizers run: Python prints and drops whatever is raised in those.
_FINALIZERS = ("pinning._unregister", "pinning.PinnedBudget.give_back", "platform.Platform.unregister_host_memory")

Point = tuple[str, int]
"""A function of the package, and which of its calls."""


@contextmanager
def _interrupt(at: Point | None) -> Iterator[dict[str, int]]:
    """Raise KeyboardInterrupt where a function of the package is entered, as Ctrl-C would; count the entries."""
    entered: dict[str, int] = {}

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE) or code.co_name.startswith("<"):
            return
        name = f"{Path(code.co_filename).stem}.{getattr(code, 'co_qualname', code.co_name)}"
        count = entered.get(name, 0)
        entered[name] = count + 1
        if (name, count) == at:
            sys.settrace(None)
            raise KeyboardInterrupt("injected")

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        yield entered
    finally:
        sys.settrace(previous)


def _points(entered: dict[str, int]) -> list[Point]:
    """The first, second, middle and last entry of each function: what is between repeats them for other blocks."""
    return [
        (name, at)
        for name, count in entered.items()
        if name not in _FINALIZERS
        for at in sorted({0, min(1, count - 1), count // 2, count - 1})
    ]


def _interrupted(action: Callable[[], Any], at: Point) -> bool:
    """Whether the interrupt came: what is done once in a process isn't entered again."""
    try:
        with _interrupt(at):
            action()
    except KeyboardInterrupt:
        return True
    return False


@pytest.mark.slow
def test_an_interrupt_at_any_function_of_enable_undoes_everything(
    device: torch.device, sim: ModuleType, start: bool
) -> None:
    reference = _reference(device)
    pipe, call = _start(start, device)
    with _interrupt(None) as entered:
        pipe.enable_omni_offload("layer")
    pipe.disable_omni_offload()
    del pipe
    failures = []
    pipe, call = _start(start, device)
    before, memory = State.of(pipe), _memory(sim)
    for at in _points(entered):
        if not _interrupted(lambda pipe=pipe: pipe.enable_omni_offload("layer"), at):
            pipe.disable_omni_offload()
            if start:
                pipe.to(device)
            before = State.of(pipe)
            continue
        try:
            assert leftovers(pipe) == [] and pipe.omni_offload is None
            before.assert_same(State.of(pipe))
            assert _memory(sim) == memory
        except AssertionError as error:
            failures.append(f"{at}: {str(error).splitlines()[:1]}")
            del pipe
            pipe, call = _start(start, device)
            before, memory = State.of(pipe), _memory(sim)
    assert not failures, "interrupted there, enabling left something behind:\n" + "\n".join(failures)
    pipe.enable_omni_offload("layer")
    assert_equal(run(pipe, call), reference)


@pytest.mark.slow
def test_an_interrupt_at_any_function_of_a_call_leaves_a_pipeline_that_works(device: torch.device) -> None:
    def enabled() -> tuple[Any, Callable[[], dict[str, Any]]]:
        pipe, call = build()
        pipe.enable_omni_offload("layer")
        run(pipe, call)
        return pipe, call

    reference = _reference(device)
    pipe, call = enabled()
    with _interrupt(None) as entered:
        run(pipe, call)
    failures = []
    before = State.of(pipe)
    for at in _points(entered):
        if not _interrupted(lambda pipe=pipe, call=call: run(pipe, call), at):
            continue
        try:
            # Nothing can keep an interrupt from the first instruction of an __exit__: that scope stays open.
            is_exit = at[0].endswith("__exit__")
            assert is_exit or not pipe.omni_offload.backend.scope.is_open
            assert_equal(run(pipe, call), reference)
            before.assert_same(State.of(pipe))
            if is_exit:
                pipe, call = enabled()
                before = State.of(pipe)
        except (AssertionError, RuntimeError) as error:
            failures.append(f"{at} of {entered[at[0]]}: {str(error).splitlines()[:1]}")
            pipe, call = enabled()
            before = State.of(pipe)
    assert not failures, "interrupted there, the next call was wrong:\n" + "\n".join(failures)


# ---------------------------------------------------------------------- reconfiguring and siblings


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize(
    "step", ["packing the fourth block", "the second slot", "the fifth block's hook", "the handle"]
)
def test_a_reconfiguration_that_fails_keeps_the_old_configuration(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, step: str, error: type[BaseException]
) -> None:
    reference = _reference(device)
    pipe, call = build()
    config = pipe.enable_omni_offload("layer").config
    run(pipe, call)
    owner, name, at = STEPS[step]
    wrapped, _ = failing(getattr(owner, name), at, error)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, wrapped)
        with pytest.raises(error, match="injected"):
            pipe.enable_omni_offload("layer", slots=3)
    assert pipe.omni_offload is not None and pipe.omni_offload.config == config
    assert_equal(run(pipe, call), reference)
    pipe.enable_omni_offload("layer", slots=3)
    assert_equal(run(pipe, call), reference)
    pipe.disable_omni_offload()
    assert leftovers(pipe) == []


def test_a_sibling_that_fails_to_enable_leaves_the_first_pipeline_alone(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = _reference(device)
    pipe, call = build()
    pipe.enable_omni_offload("layer")
    sibling = type(build()[0]).from_pipe(pipe)
    wrapped, _ = failing(composition.composed_class, 0, KeyboardInterrupt)
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["diffusers_omni_offload.pipeline"], "composed_class", wrapped)
        with pytest.raises(KeyboardInterrupt):
            sibling.enable_omni_offload("layer")
    assert sibling.omni_offload is None
    assert_equal(run(pipe, call), reference)
    sibling.enable_omni_offload("layer")
    assert_equal(run(sibling, call), reference)
    pipe.disable_omni_offload()
    assert_equal(run(sibling, call), reference)
    sibling.disable_omni_offload()
    assert leftovers(pipe) == [] and leftovers(sibling) == []


# ---------------------------------------------------------------------- during a call


def _raise_in(module: Any, error: type[BaseException]) -> Callable[[], None]:
    handle = module.register_forward_pre_hook(_raiser(error))
    return handle.remove


def _raiser(error: type[BaseException]) -> Callable[..., None]:
    def fail(*args: Any) -> None:
        raise error("injected")

    return fail


CALL_ERRORS = [*ERRORS, ValueError]


@pytest.mark.parametrize("error", CALL_ERRORS)
@pytest.mark.parametrize(
    "where", ["first block", "middle block", "last block", "second DiT", "submodule", "vae", "encoder"]
)
def test_a_forward_that_fails(device: torch.device, sim: ModuleType, where: str, error: type[BaseException]) -> None:
    pipe, call = build()
    module = {
        "first block": pipe.transformer.blocks[0],
        "middle block": pipe.transformer.blocks[1],
        "last block": pipe.transformer.blocks[2],
        "second DiT": pipe.transformer_2.blocks[1],
        "submodule": pipe.transformer.blocks[1].contract,
        "vae": pipe.vae.decoder,
        "encoder": pipe.text_encoder.layers[1],
    }[where]
    handle = pipe.enable_omni_offload("layer", components=["dit", "text_encoder"])
    assert_equal(run(pipe, call), _reference(device))
    held = _memory(sim)
    before = State.of(pipe)
    remove = _raise_in(module, error)
    with pytest.raises(error, match=r"^injected$"):
        run(pipe, call)
    remove()
    before.assert_same(State.of(pipe))
    assert _memory(sim) == held
    assert_equal(run(pipe, call), _reference(device))
    assert_equal(run(pipe, call), _reference(device))
    assert handle.is_enabled()


@pytest.mark.parametrize("error", CALL_ERRORS)
def test_a_callback_that_fails(device: torch.device, error: type[BaseException]) -> None:
    pipe, call = build()
    pipe.enable_omni_offload("layer")
    before = State.of(pipe)
    for _ in range(2):
        with pytest.raises(error, match="injected"):
            pipe(**call(), callback_on_step_end=_raiser(error))
        before.assert_same(State.of(pipe))
    assert_equal(run(pipe, call), _reference(device))


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("at", [0, 1, 4])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Streamer, "_load"),
        (Streamer, "_prefetch"),
        (Streamer, "enter"),
        (Streamer, "leave"),
        (Streamer, "begin"),
        (Streamer, "end"),
        (PackedMaster, "bind"),
        (PackedMaster, "unbind"),
    ],
)
def test_an_interrupt_inside_the_streamer(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, at: int, after: bool
) -> None:
    """Right before and right after each of its steps."""
    pipe, call = build()
    pipe.enable_omni_offload("layer")
    run(pipe, call)
    before = State.of(pipe)
    original = getattr(owner, name)
    calls: list[int] = []

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) - 1 == at and not after:
            raise KeyboardInterrupt("injected")
        result = original(*args, **kwargs)
        if len(calls) - 1 == at:
            raise KeyboardInterrupt("injected")
        return result

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt, match="injected"):
            # begin and end come once a call.
            for _ in range(at + 1 if name in ("begin", "end") else 1):
                run(pipe, call)
    assert_equal(run(pipe, call), _reference(device))
    before.assert_same(State.of(pipe))
    assert_equal(run(pipe, call), _reference(device))
    pipe.disable_omni_offload()
    assert leftovers(pipe) == []


def test_out_of_memory_in_the_slots_during_a_call(device: torch.device, sim: ModuleType) -> None:
    """The VAE had the slots' memory, and somebody else took it: the call fails, the next one works."""
    pipe, call = build()
    handle = pipe.enable_omni_offload("layer")
    run(pipe, call)
    handle.backend.streamer.release_slots()
    sim.configure(capacity_bytes=torch.accelerator.memory_allocated() + 1024)
    with pytest.raises(torch.OutOfMemoryError):
        run(pipe, call)
    sim.configure(capacity_bytes=None)
    assert_equal(run(pipe, call), _reference(device))


# ---------------------------------------------------------------------- while disabling


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize(
    ("owner", "name", "at", "left"),
    [
        (hooks, "remove_owned", 1, 1),
        (hooks, "remove_owned", 7, 1),
        (hooks.ExecutionDeviceHook, "detach", 1, 1),
        (Mediation, "remove", 0, 2),
        (PackedMaster, "release", 2, 0),
        (Streamer, "release_slots", 0, 0),
        (Residency, "move_to_host", 0, 0),
    ],
)
def test_disabling_tries_every_step(
    device: torch.device,
    sim: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    at: int,
    left: int,
    error: type[BaseException],
) -> None:
    pipe, call = build()
    pinned = _memory(sim)[1]
    pipe.enable_omni_offload("layer")
    run(pipe, call)
    wrapped, calls = failing(getattr(owner, name), at, error)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, staticmethod(wrapped) if name == "detach" else wrapped)
        with pytest.raises(error, match="injected"):
            pipe.disable_omni_offload()
    assert pipe.omni_offload is None
    # What failed may be left over once; nothing else is.
    broken = {entry.rpartition(".")[0] for entry in leftovers(pipe)}
    assert len(broken) <= left, broken
    assert all(parameter.device.type == "cpu" for parameter in pipe.transformer.blocks.parameters())
    if name != "move_to_host":
        assert all(parameter.device.type == "cpu" for parameter in pipe.vae.parameters())
    if name != "release":
        assert _memory(sim)[1] == pinned
    assert len(calls) > at
