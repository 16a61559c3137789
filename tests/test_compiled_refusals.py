"""What can't be compiled beside offload is refused with a sentence, and the pipeline stays as it was and works."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tests import tiny
from tests.comparing import State
from tests.compiling import FAMILIES, PLACEMENTS, graphs, plain
from tests.living import before_and_after, fast_ones

WAN = FAMILIES["Wan"]

CAPTURING: dict[str, dict[str, Any]] = {
    "reduce-overhead": {"mode": "reduce-overhead"},
    "max-autotune": {"mode": "max-autotune"},
    "options": {"options": {"triton.cudagraphs": True}},
    "reduce-overhead as a full graph": {"mode": "reduce-overhead", "fullgraph": True},
    "backend": {"backend": "cudagraphs"},
}
"""Ways to ask for CUDA graphs, as arguments of `torch.compile`."""

FULL_GRAPH = r"^transformer can't be compiled with fullgraph=True while its blocks.*compile_repeated_blocks"
CUDA_GRAPHS = r"can't be compiled with CUDA graphs .* fixed addresses\. Use another mode"


pytestmark = pytest.mark.usefixtures("compiler")


def whole(pipe: Any, **options: Any) -> None:
    pipe.transformer.compile(**options)


def blocks(pipe: Any, **options: Any) -> None:
    pipe.transformer.compile_repeated_blocks(**options)


def last_block(pipe: Any, **options: Any) -> None:
    pipe.transformer.blocks[-1].compile(**options)


def part(pipe: Any, **options: Any) -> None:
    pipe.transformer.blocks[-1].attn1.compile(**options)


def encoder(pipe: Any, **options: Any) -> None:
    pipe.text_encoder.compile(**options)


def encoder_part(pipe: Any, **options: Any) -> None:
    pipe.text_encoder.encoder.compile(**options)


def uncompile(pipe: Any) -> None:
    for component in (pipe.transformer, pipe.text_encoder):
        for module in component.modules():
            module._compiled_call_impl = None


def check(change: Callable[[Any], None], match: str, placement: str, when: str, device: torch.device) -> None:
    """Refused before enabling or after it; either way the pipeline is what it was, and gives what it gave."""
    pipe, call = WAN.fresh()
    if when == "before":
        change(pipe)
        before = State.of(pipe)
        with pytest.raises(TypeError, match=match):
            pipe.enable_omni_offload(**PLACEMENTS[placement])
        before.assert_same(State.of(pipe))
        assert pipe.omni_offload is None
        uncompile(pipe)
        pipe.enable_omni_offload(**PLACEMENTS[placement])
    else:
        pipe.enable_omni_offload(**PLACEMENTS[placement])
        before = State.of(pipe)
        with pytest.raises(TypeError, match=match):
            change(pipe)
        before.assert_same(State.of(pipe))
    assert np.array_equal(tiny.run(pipe, call), plain(device)) and graphs() == 0


@pytest.mark.parametrize("placement", fast_ones(["streamed", "resident", "mixed"], "mixed"))
@before_and_after
def test_one_full_graph(device: torch.device, sim: ModuleType, placement: str, when: str) -> None:
    check(lambda pipe: whole(pipe, fullgraph=True), FULL_GRAPH, placement, when, device)


def captures() -> list[Any]:
    """What asks for CUDA graphs where, how and when: a few of them are fast."""
    wheres = [("streamed", blocks), ("mixed", encoder), ("module-swapped", whole), ("module-swapped", encoder_part)]
    cells = [(*where, name, when) for where in wheres for name in CAPTURING for when in ("before", "after")]
    others = [("streamed", whole), ("mixed", blocks), ("module-swapped", blocks), ("module-swapped", encoder)]
    cells += [(*where, "reduce-overhead", when) for where in others for when in ("before", "after")]
    return fast_ones(
        cells,
        ("streamed", blocks, "reduce-overhead as a full graph", "before"),
        ("mixed", encoder, "options", "after"),
        ("module-swapped", whole, "max-autotune", "before"),
        ("module-swapped", encoder_part, "reduce-overhead", "before"),
    )


@pytest.mark.parametrize(("placement", "change", "capturing", "when"), captures())
def test_cuda_graphs(
    device: torch.device, sim: ModuleType, placement: str, change: Any, capturing: str, when: str
) -> None:
    check(lambda pipe: change(pipe, **CAPTURING[capturing]), CUDA_GRAPHS, placement, when, device)


@pytest.mark.parametrize(("change", "when"), [(last_block, "before"), (last_block, "after"), (part, "before")])
@pytest.mark.parametrize("placement", ["streamed", "module-swapped"])
@pytest.mark.parametrize("capturing", ["reduce-overhead", "reduce-overhead as a full graph"])
@pytest.mark.slow
def test_cuda_graphs_of_what_is_inside(
    device: torch.device, sim: ModuleType, change: Any, placement: str, capturing: str, when: str
) -> None:
    """A part of what moves moves with it. (A part of a block that is compiled after enabling isn't noticed.)"""
    check(lambda pipe: change(pipe, **CAPTURING[capturing]), CUDA_GRAPHS, placement, when, device)


@before_and_after
def test_what_stays_may_be_captured(device: torch.device, sim: ModuleType, when: str) -> None:
    """Resident blocks and components have fixed addresses. (Nothing is run: the simulated device has no inductor.)"""

    def change(pipe: Any) -> None:
        for index in resident:
            pipe.transformer.blocks[index].compile(mode="reduce-overhead", fullgraph=True)
        pipe.vae.decoder.compile(mode="max-autotune")
        pipe.text_encoder.compile(mode="max-autotune-no-cudagraphs")
        streamed = [block for index, block in enumerate(pipe.transformer.blocks) if index not in resident]
        for block in streamed:
            block.compile(mode="max-autotune-no-cudagraphs")

    options: dict[str, Any] = {"mode": "layer", "layer_options": {"dit": {"resident_layers": 1}}}
    probe, _ = WAN.fresh()
    resident = probe.enable_omni_offload(**options).plan.stacks[0].resident
    assert len(resident) == 1
    pipe, _ = WAN.fresh()
    if when == "before":
        change(pipe)
    pipe.enable_omni_offload(**options)
    if when == "after":
        change(pipe)
    pipe.disable_omni_offload()
    assert all(block._compiled_call_impl is not None for block in pipe.transformer.blocks)


@pytest.mark.parametrize(
    ("placement", "component"),
    fast_ones(
        [(placement, name) for placement in PLACEMENTS for name in ("transformer", "text_encoder", "vae")],
        ("mixed", "transformer"),
    ),
)
def test_a_wrapper(device: torch.device, sim: ModuleType, component: str, placement: str) -> None:
    """`pipe.transformer = torch.compile(pipe.transformer)`."""
    pipe, call = WAN.fresh()
    setattr(pipe, component, torch.compile(getattr(pipe, component), backend="eager"))
    before = State.of(pipe)
    with pytest.raises(TypeError, match=rf"^{component} is wrapped by torch.compile.*{component}\.compile\(\)"):
        pipe.enable_omni_offload(**PLACEMENTS[placement])
    before.assert_same(State.of(pipe))
    setattr(pipe, component, getattr(pipe, component)._orig_mod)
    pipe.enable_omni_offload(**PLACEMENTS[placement])
    assert np.array_equal(tiny.run(pipe, call), plain(device)) and graphs() == 0


@pytest.mark.parametrize(
    ("placement", "path"),
    fast_ones(
        [(placement, path) for placement in PLACEMENTS for path in ("transformer", "transformer.blocks.1", "vae")],
        ("streamed", "transformer"),
        ("mixed", "transformer.blocks.1"),
    ),
)
def test_compiled_by_somebody_else(device: torch.device, sim: ModuleType, placement: str, path: str) -> None:
    """A `_compiled_call_impl` that isn't torch's."""

    def change(pipe: Any) -> None:
        name, _, below = path.partition(".")
        module = getattr(pipe, name).get_submodule(below)
        module._compiled_call_impl = lambda *args, **kwargs: module._call_impl(*args, **kwargs)

    sentence = rf"^{path} is compiled in a way that can't be continued.*Enable offload first"
    pipe, call = WAN.fresh()
    change(pipe)
    before = State.of(pipe)
    with pytest.raises(TypeError, match=sentence):
        pipe.enable_omni_offload(**PLACEMENTS[placement])
    before.assert_same(State.of(pipe))
    module = pipe.vae if path == "vae" else pipe.transformer
    for inner in module.modules():
        inner._compiled_call_impl = None
    pipe.enable_omni_offload(**PLACEMENTS[placement])
    assert np.array_equal(tiny.run(pipe, call), plain(device))
