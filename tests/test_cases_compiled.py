"""Public cases of compiled components: in place or wrapped, before or after offload was enabled, in every mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from tests.comparing import State, assert_equal, leftovers, modules, resident_output
from tests.modes import MODES, chosen, in_every_mode
from tests.tiny import build_toy, run


def full_toy() -> tuple[Any, Callable[[], dict[str, Any]]]:
    return build_toy(4, text_encoder=True, vae=True)


@cache
def toy_output(device: torch.device) -> np.ndarray:
    return resident_output(full_toy, device)


def _compile_components(pipe: Any, backend: str) -> None:
    for component in (pipe.transformer, pipe.text_encoder):
        component.compile(backend=backend)


def _compile_blocks(pipe: Any, backend: str) -> None:
    for block in (*pipe.transformer.blocks, *pipe.text_encoder.layers):
        block.compile(backend=backend)


def _compile_repeated_blocks(pipe: Any, backend: str) -> None:
    vars(pipe.transformer)["_repeated_blocks"] = ["ToyBlock"]
    pipe.transformer.compile_repeated_blocks(backend=backend)
    pipe.vae.decoder.compile(backend=backend)


def _compile_decode(pipe: Any, backend: str) -> None:
    pipe.vae.decode = torch.compile(pipe.vae.decode, backend=backend)


COMPILED: dict[str, Callable[[Any, str], None]] = {
    "components": _compile_components,
    "blocks": _compile_blocks,
    "repeated blocks": _compile_repeated_blocks,
    "decode": _compile_decode,
}


def compilations() -> Iterator[Any]:
    """Every combination; the fast ones are those that other tests don't come near."""
    for what in COMPILED:
        for order in ("before", "after"):
            for mode in MODES:
                for backend in ("eager", "aot_eager"):
                    is_fast = backend == "eager" and mode == ("module" if order == "before" else "mixed")
                    marks = [] if is_fast else [pytest.mark.slow]
                    yield pytest.param(what, order, mode, backend, marks=marks, id=f"{what}-{order}-{mode}-{backend}")


def compiled_modules(pipe: Any) -> list[str]:
    return [path for path, module in modules(pipe) if module._compiled_call_impl is not None]


@pytest.mark.parametrize(("what", "order", "mode", "backend"), list(compilations()))
@pytest.mark.usefixtures("compiler")
def test_diffusers_11584_compiled_in_place(
    device: torch.device, sim: ModuleType, what: str, order: str, mode: str, backend: str
) -> None:
    """Errors, duplicate hooks, or nothing compiled; and what is compiled is compiled once."""
    pipe, call = full_toy()
    if order == "before":
        COMPILED[what](pipe, backend)
    handle = pipe.enable_omni_offload(**MODES[mode])
    if order == "after":
        COMPILED[what](pipe, backend)
    frames = []
    for _ in range(4):
        assert_equal(run(pipe, call), toy_output(device))
        frames.append(counters["frames"]["total"])
    assert frames[1] == frames[3] > 0
    assert (handle.swaps > 0) == (mode != "layer") and (handle.loads > 0) == (mode != "module")
    registries = [vars(module)["_diffusers_hook"] for _, module in modules(pipe) if "_diffusers_hook" in vars(module)]
    assert registries and all(len(registry.hooks) == len(registry._fn_refs) for registry in registries)
    assert all(name.startswith("omni_offload") for registry in registries for name in registry.hooks)
    assert sim.hazards() == [] and handle.device_bytes == handle.backend.streamer.slots.nbytes
    pipe.disable_omni_offload()
    stock, _ = full_toy()
    COMPILED[what](stock, backend)
    assert compiled_modules(pipe) == compiled_modules(stock)
    pipe.to(device)
    assert_equal(run(pipe, call), toy_output(device))


@in_every_mode
@pytest.mark.parametrize("component", ["transformer", "text_encoder", "vae"])
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.usefixtures("compiler")
def test_diffusers_11584_a_wrapper_of_a_compiled_component(
    device: torch.device, sim: ModuleType, component: str, order: str, mode: str
) -> None:
    """`pipe.transformer = torch.compile(pipe.transformer)`: it works, or a sentence says what to do instead."""
    pipe, call = full_toy()

    def wrap() -> None:
        setattr(pipe, component, torch.compile(getattr(pipe, component), backend="eager"))

    def works() -> bool:
        for _ in range(2):
            assert_equal(run(pipe, call), toy_output(device))
        return True

    if order == "before":
        wrap()
        before = State.of(pipe)
        try:
            pipe.enable_omni_offload(**MODES[mode])
        except (RuntimeError, TypeError, ValueError) as error:
            assert component in str(error) and "compile" in str(error)
            before.assert_same(State.of(pipe))
            return
        assert works()
    else:
        pipe.enable_omni_offload(**MODES[mode])
        run(pipe, call)
        wrap()
        try:
            assert works()
        except (RuntimeError, TypeError) as error:
            assert component in str(error) and ("replaced" in str(error) or "compile" in str(error))
            setattr(pipe, component, getattr(pipe, component)._orig_mod)
            assert works()
    pipe.disable_omni_offload()
    own = f"{component}.forward"  # The wrapper's.
    assert [name for name in leftovers(pipe) if name != own] == []


@in_every_mode
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.usefixtures("compiler")
def test_diffusers_11584_one_full_graph(device: torch.device, sim: ModuleType, order: str, mode: str) -> None:
    """Nothing moves inside of a swapped or resident component, so it is one graph; a streamed one is refused as one."""
    pipe, call = full_toy()
    refused = pytest.raises(TypeError, match=r"^transformer can't be compiled with fullgraph=True.*repeated_blocks")
    expectation = refused if chosen(mode, "dit") == "layer" else nullcontext()
    if order == "after":
        pipe.enable_omni_offload(**MODES[mode])
        pipe.text_encoder.compile(backend="eager", fullgraph=True)
        with expectation:
            pipe.transformer.compile(backend="eager", fullgraph=True)
    else:
        pipe.transformer.compile(backend="eager", fullgraph=True)
        before = State.of(pipe)
        with expectation:
            pipe.enable_omni_offload(**MODES[mode])
        if pipe.omni_offload is None:
            before.assert_same(State.of(pipe))
            pipe.transformer._compiled_call_impl = None
            pipe.enable_omni_offload(**MODES[mode])
    for _ in range(2):
        assert_equal(run(pipe, call), toy_output(device))
    assert sum(counters["graph_break"].values()) == 0 and sim.hazards() == []
    pipe.disable_omni_offload()
    assert leftovers(pipe) == []
