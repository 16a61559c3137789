"""Every pipeline class of diffusers that can be built offline: its outputs are those of the resident pipeline."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tests.comparing import State, leftovers
from tests.equality import assert_equal_outputs, build_as, build_resident, outputs
from tests.zoo import PIPELINES

CALLS = 2
WITHOUT_DIT = ("FluxPriorReduxPipeline", "LTX2LatentUpsamplePipeline", "LTXLatentUpsamplePipeline")
"""These denoise nothing: a prior that only encodes, and two that only enlarge."""

MODES: dict[str, dict[str, Any]] = {
    "layer": {"mode": "layer"},
    "module": {"mode": "module"},
    "a mixed choice": {"components": {"dit": "layer", "text_encoder": "module", "vae": "module"}},
    "text encoders in layers": {"components": ["dit", "text_encoder"]},
    "image encoders in layers": {"components": ["dit", "image_encoder"]},
}
"""A kind of component that a pipeline lacks is refused, and the mode with it."""

WITHOUT_BLOCKS = {("MiniMaxMusic3ModularPipeline", "text encoders in layers")}
"""Encoders of which less than 1 % is blocks: this one is small, but for the embeddings of a real vocabulary."""

pytestmark = pytest.mark.slow

names = pytest.mark.parametrize("class_name", sorted(set(PIPELINES) - set(WITHOUT_DIT)))
ran: dict[str, set[str]] = {mode: set() for mode in MODES}


def resident_outputs(class_name: str, device: torch.device) -> list[np.ndarray]:
    resident, call = build_resident(PIPELINES[class_name], device)
    assert type(resident).__name__ == class_name
    expected = outputs(resident, call, CALLS)
    assert np.isfinite(expected[0]).all() and np.ptp(expected[0]) > 0
    return expected


@names
def test_outputs_are_equal_in_every_mode(class_name: str, device: torch.device, sim: ModuleType) -> None:
    """One pipeline, switched from mode to mode: its outputs are equal, weights move, and no hook or hazard is left."""
    expected = resident_outputs(class_name, device)
    pipe, call = build_as(PIPELINES[class_name])
    for mode, arguments in MODES.items():
        what = f"{class_name}, {mode}"
        try:
            handle = pipe.enable_omni_offload(**arguments)
        except ValueError as error:
            is_due = lacks(pipe, arguments["components"]) or (class_name, mode) in WITHOUT_BLOCKS
            assert is_due and "leave it out" in str(error), f"{what}: {error}"
            continue
        calls = CALLS if mode in ("layer", "module") else 1
        assert_equal_outputs(outputs(pipe, call, calls), expected[:calls], what)
        assert handle.bytes_moved > 0 and sim.hazards() == [], what
        if mode in ("layer", "module") or not lacks(pipe, arguments["components"]):
            assert_happened(handle, mode)
        ran[mode].add(class_name)
    assert pipe.omni_offload is not None
    pipe.disable_omni_offload()
    assert leftovers(pipe) == []
    assert class_name in ran["layer"] & ran["module"]


def lacks(pipe: Any, components: Iterable[str]) -> bool:
    """Whether no component of the pipeline is called as one of these kinds is."""
    loaded = [name for name, value in pipe.components.items() if isinstance(value, torch.nn.Module)]
    kinds = set(components) - {"dit"}
    return any(not any(name.startswith(kind) for name in loaded) for kind in kinds)


def assert_happened(handle: Any, mode: str) -> None:
    """What the mode is for was done."""
    if mode == "layer":
        assert handle.loads > 0 and handle.swaps == 0
    elif mode == "module":
        assert handle.swaps > 0 and handle.loads == 0
    elif mode == "a mixed choice":
        assert handle.loads > 0 and handle.swaps > 0
    else:
        assert any(stack.kind == "encoder" and stack.streamed for stack in handle.plan.stacks)


@pytest.mark.parametrize("class_name", WITHOUT_DIT)
def test_without_a_dit(class_name: str, device: torch.device) -> None:
    pipe, _ = build_as(PIPELINES[class_name])
    before = State.of(pipe)
    with pytest.raises(ValueError, match=f"{class_name} has no DiT to offload.*Its components are .*_dit_modules"):
        pipe.enable_omni_offload("layer")
    before.assert_same(State.of(pipe))


def test_count_of_classes() -> None:
    print(f"{len(PIPELINES) - len(WITHOUT_DIT)} pipeline classes are built, {len(WITHOUT_DIT)} of others refused")
    assert len(PIPELINES) - len(WITHOUT_DIT) >= 60
