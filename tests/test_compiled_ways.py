"""Ways of compiling beside offload: with inductor, with caches and quantized weights, in parts, twice, with others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FirstBlockCacheConfig

from tests import quantized, tiny
from tests.compiling import (
    FAMILIES,
    PLACEMENTS,
    Backend,
    assert_outputs,
    compile_blocks,
    fresh_compiler,
    graph_breaks,
    graphs,
    nothing_new,
    plain,
)
from tests.equality import Call
from tests.living import fast_ones, with_arguments
from tests.modes import MODES

WAN = FAMILIES["Wan"]
CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("compiler")


# ---------------------------------------------------------------------- inductor


@functools.cache
def inductor_output() -> np.ndarray:
    with fresh_compiler():
        pipe, call = WAN.fresh()
        compile_blocks(WAN, pipe)
        return tiny.run(pipe, call)


@pytest.mark.parametrize("mode", ["layer", "module"])
@pytest.mark.slow
def test_inductor(mode: str) -> None:
    """On the CPU, where it compiles C++."""
    reference = inductor_output()
    with fresh_compiler():
        pipe, call = WAN.fresh()
        compile_blocks(WAN, pipe)
        handle = pipe.enable_omni_offload(mode, device="cpu")
        assert_outputs(pipe, call, reference, mode)
        with nothing_new():
            assert_outputs(pipe, call, reference, mode)
        assert handle.loads + handle.swaps > 0


# ---------------------------------------------------------------------- beside others


def cached_and_compiled(pipe: Any, first: str) -> None:
    """A cache on the DiT, and compiled blocks below it."""
    if first == "compiled":
        compile_blocks(WAN, pipe, backend="eager", fullgraph=False)
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=100.0))
    if first == "cached":
        compile_blocks(WAN, pipe, backend="eager", fullgraph=False)


@functools.cache
def cached_output(device: torch.device, first: str) -> tuple[np.ndarray, Call]:
    with fresh_compiler():
        pipe, call = WAN.fresh()
        call = with_arguments(call, num_inference_steps=4)
        whole = tiny.run(pipe.to(device), call)
        cached_and_compiled(pipe, first)
        output = tiny.run(pipe, call)
        assert np.isfinite(output).all() and not np.array_equal(output, whole)
        return output, call


@pytest.mark.parametrize(
    ("placement", "first", "when"),
    [
        ("streamed", "compiled", "before"),
        ("streamed", "cached", "after"),
        ("module-swapped", "compiled", "after"),
    ],
)
@pytest.mark.slow
def test_a_cache_around_compiled_blocks(
    device: torch.device, sim: ModuleType, placement: str, first: str, when: str
) -> None:
    """Blocks that the cache skips aren't loaded, and what is compiled of the others has no hook in it."""
    reference, call = cached_output(device, first)
    pipe, _ = WAN.fresh()
    if when == "before":
        cached_and_compiled(pipe, first)
    handle = pipe.enable_omni_offload(**PLACEMENTS[placement])
    if when == "after":
        cached_and_compiled(pipe, first)
    assert_outputs(pipe, call, reference, placement)
    assert graph_breaks() == 0
    loads = handle.loads
    with nothing_new():
        assert_outputs(pipe, call, reference, placement)
    cached = handle.loads - loads
    pipe.transformer.disable_cache()
    loads = handle.loads
    tiny.run(pipe, call)
    assert cached < handle.loads - loads or placement == "module-swapped"


INT8 = functools.partial(quantized.build, "torchao int8", "wan", 64, 2)


@functools.cache
def quantized_output(device: torch.device) -> np.ndarray:
    with fresh_compiler():
        pipe, call = INT8()
        compile_experts(pipe)
        return tiny.run(quantized.to_resident(pipe, device), call)


def compile_experts(pipe: Any) -> None:
    for dit in (pipe.transformer, pipe.transformer_2):
        dit.compile_repeated_blocks(fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("placement", ["streamed", "module-swapped"])
@pytest.mark.slow
def test_quantized_and_compiled(device: torch.device, sim: ModuleType, placement: str) -> None:
    """The quantized weights are taken apart within the graph."""
    reference = quantized_output(device)
    with fresh_compiler():
        pipe, call = INT8()
        compile_experts(pipe)
        handle = pipe.enable_omni_offload(**PLACEMENTS[placement])
        assert_outputs(pipe, call, reference, placement)
        with nothing_new():
            assert_outputs(pipe, call, reference, placement, calls=2)
        assert handle.bytes_moved > 0


# ---------------------------------------------------------------------- in other ways


@pytest.mark.parametrize(
    ("placement", "when"),
    fast_ones(
        [("streamed", "before"), ("mixed", "after"), ("module-swapped", "before"), ("module-swapped", "after")],
        ("mixed", "after"),
    ),
)
def test_the_last_way_counts(device: torch.device, sim: ModuleType, placement: str, when: str) -> None:
    """`compile()` once more, with another backend: what was compiled first doesn't run any more."""
    first, second = Backend(), Backend()
    pipe, call = WAN.fresh()
    compile_blocks(WAN, pipe, backend=first)
    if when == "before":
        compile_blocks(WAN, pipe, backend=second, fullgraph=False)
    pipe.enable_omni_offload(**PLACEMENTS[placement])
    if when == "after":
        assert_outputs(pipe, call, plain(device), "first")
        assert first.calls > 0
        compile_blocks(WAN, pipe, backend=second, fullgraph=False)
    calls = first.calls
    assert_outputs(pipe, call, plain(device), "second", calls=2)
    assert first.calls == calls and second.calls > 0


@pytest.mark.parametrize(
    ("placement", "when"),
    fast_ones(
        [("streamed", "before"), ("mixed", "after"), ("module-swapped", "before"), ("resident", "after")],
        ("streamed", "before"),
    ),
)
def test_one_block_alone(device: torch.device, sim: ModuleType, placement: str, when: str) -> None:
    """The others run as they are."""
    backend = Backend()
    pipe, call = WAN.fresh()
    if when == "before":
        pipe.transformer.blocks[1].compile(backend=backend)
    pipe.enable_omni_offload(**PLACEMENTS[placement])
    if when == "after":
        pipe.transformer.blocks[1].compile(backend=backend)
    forwards: list[None] = []
    pipe.transformer.patch_embedding.register_forward_pre_hook(lambda *_: forwards.append(None))
    assert_outputs(pipe, call, plain(device), placement)
    assert backend.compiled == 1 and graph_breaks() == 0
    with nothing_new():
        assert_outputs(pipe, call, plain(device), placement)
    assert backend.calls == len(forwards) > 0
    pipe.disable_omni_offload()
    assert [block._compiled_call_impl is not None for block in pipe.transformer.blocks] == [False, True, False]


@pytest.mark.parametrize(
    ("placement", "first", "when"),
    [
        ("streamed", "blocks", "before"),
        ("streamed", "component", "after"),
        ("mixed", "component", "before"),
        ("resident", "blocks", "after"),
        ("module-swapped", "component", "before"),
        ("module-swapped", "blocks", "after"),
    ],
)
@pytest.mark.slow
def test_a_component_and_its_blocks(
    device: torch.device, sim: ModuleType, placement: str, first: str, when: str
) -> None:
    """Blocks that are compiled for themselves stay so; alone in a swapped component all of it is one graph."""
    inner, outer = Backend(), Backend()
    pipe, call = WAN.fresh()

    def compile_both() -> None:
        if first == "component":
            pipe.transformer.compile(backend=outer)
        compile_blocks(WAN, pipe, backend=inner)
        if first == "blocks":
            pipe.transformer.compile(backend=outer)

    if when == "before":
        compile_both()
    pipe.enable_omni_offload(**PLACEMENTS[placement])
    if when == "after":
        compile_both()
    assert_outputs(pipe, call, plain(device), placement)
    with nothing_new():
        assert_outputs(pipe, call, plain(device), placement)
    assert (inner.calls > 0, outer.calls > 0) == ((False, True) if placement == "module-swapped" else (True, False))


@pytest.mark.parametrize(
    ("mode", "when"),
    fast_ones(
        [("layer", "after"), ("module", "before"), ("module", "after"), ("mixed", "before")], ("module", "after")
    ),
)
def test_a_part_of_a_text_encoder(device: torch.device, sim: ModuleType, mode: str, when: str) -> None:
    """A swapped component's inner module is one graph, as it is in a resident one."""
    pipe, call = WAN.fresh()
    backend = Backend()
    if when == "before":
        pipe.text_encoder.encoder.block[0].compile(backend=backend)
    pipe.enable_omni_offload(**MODES[mode])
    if when == "after":
        pipe.text_encoder.encoder.block[0].compile(backend=backend)
    assert_outputs(pipe, call, plain(device), mode)
    with nothing_new():
        assert_outputs(pipe, call, plain(device), mode)
    assert backend.calls > 0
    pipe.disable_omni_offload()
    assert pipe.text_encoder.encoder.block[0]._compiled_call_impl is not None


SIZES = ((16, 16), (32, 16))


def sized_story(prepare: Callable[[Any], Any], dynamic: bool | None) -> list[tuple[np.ndarray, int]]:
    """The output and the number of graphs after a call of each of `SIZES`."""
    told = []
    with fresh_compiler():
        pipe, call = WAN.fresh()
        compile_blocks(WAN, pipe, backend="eager", dynamic=dynamic)
        prepare(pipe)
        for height, width in SIZES:
            output = tiny.run(pipe, with_arguments(call, height=height, width=width))
            told.append((output, graphs()))
    return told


@functools.cache
def resident_sized_story(device: torch.device, dynamic: bool | None) -> list[tuple[np.ndarray, int]]:
    return sized_story(lambda pipe: pipe.to(device), dynamic)


@pytest.mark.parametrize(("placement", "dynamic"), [("streamed", True), ("module-swapped", True)])
@pytest.mark.slow
def test_sizes_change(device: torch.device, sim: ModuleType, placement: str, dynamic: bool | None) -> None:
    """As many graphs as stock needs for them, with `dynamic=True` too."""
    reference = resident_sized_story(device, dynamic)
    found = sized_story(lambda pipe: pipe.enable_omni_offload(**PLACEMENTS[placement]), dynamic)
    for (output, number), (expected, most) in zip(found, reference, strict=True):
        assert np.array_equal(output, expected) and 0 < number <= most


def _encoder(pipe: Any, backend: Backend) -> None:
    pipe.text_encoder.encoder.compile(backend=backend)


def _forward(pipe: Any, backend: Backend) -> None:
    pipe.transformer.forward = torch.compile(pipe.transformer.forward, backend=backend)


AROUND = {"a part": _encoder, "a forward": _forward}
"""What has streamed blocks in it and is compiled behind our back: the blocks break its graph."""


@pytest.mark.parametrize(
    ("what", "when"),
    fast_ones([("a part", "before"), ("a part", "after"), ("a forward", "before")], ("a part", "after")),
)
def test_around_streamed_blocks(device: torch.device, sim: ModuleType, what: str, when: str) -> None:
    """Loading a block isn't traced: it stays between the graphs, which are compiled once."""
    pipe, call = WAN.fresh()
    backend = Backend()
    if when == "before":
        AROUND[what](pipe, backend)
    handle = pipe.enable_omni_offload(**PLACEMENTS["streamed"])
    if when == "after":
        AROUND[what](pipe, backend)
    assert_outputs(pipe, call, plain(device), what)
    compiled, calls, loads = backend.compiled, backend.calls, handle.loads
    assert_outputs(pipe, call, plain(device), what)
    assert backend.compiled == compiled > 0 and backend.calls > calls and handle.loads > loads
