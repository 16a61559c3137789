"""Every pipeline class of diffusers that can be built offline: its outputs are those of the resident pipeline."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tests.comparing import State, leftovers
from tests.equality import assert_equal_outputs, build_as, build_resident, outputs
from tests.zoo import PIPELINES

MODES = ("layer",)
CALLS = 2
WITHOUT_DIT = ("FluxPriorReduxPipeline", "LTX2LatentUpsamplePipeline", "LTXLatentUpsamplePipeline")
"""These denoise nothing: a prior that only encodes, and two that only enlarge."""
WITHOUT_BLOCKS = {("MiniMaxMusic3ModularPipeline", "text_encoder")}
"""Encoders of which less than 1 % is blocks: this one is small, but for the embeddings of a real vocabulary."""

pytestmark = pytest.mark.slow

names = pytest.mark.parametrize("class_name", sorted(set(PIPELINES) - set(WITHOUT_DIT)))


@functools.cache
def resident_outputs(class_name: str, device: torch.device) -> list[np.ndarray]:
    resident, call = build_resident(PIPELINES[class_name], device)
    assert type(resident).__name__ == class_name
    expected = outputs(resident, call, CALLS)
    assert np.isfinite(expected[0]).all() and np.ptp(expected[0]) > 0
    return expected


def assert_runs_equal(
    pipe: Any, call: Any, expected: list[np.ndarray], sim: ModuleType, what: str, *arguments: Any, **options: Any
) -> None:
    """Offloaded, called and disabled: the outputs are equal, weights moved, and no hook or hazard is left."""
    handle = pipe.enable_omni_offload(*arguments, **options)
    assert_equal_outputs(outputs(pipe, call, len(expected)), expected, what)
    assert handle.bytes_moved > 0 and sim.hazards() == [], what
    pipe.disable_omni_offload()
    assert leftovers(pipe) == [], what


@pytest.mark.parametrize("mode", MODES)
@names
def test_two_calls_are_equal(class_name: str, mode: str, device: torch.device, sim: ModuleType) -> None:
    expected = resident_outputs(class_name, device)
    pipe, call = build_as(PIPELINES[class_name])
    assert_runs_equal(pipe, call, expected, sim, f"{class_name}, {mode}", mode)


@names
def test_encoders_are_streamed_too(class_name: str, device: torch.device, sim: ModuleType) -> None:
    """Text encoders and image encoders beside the DiT, where there are some; a kind that isn't there is refused."""
    expected = resident_outputs(class_name, device)
    pipe, call = build_as(PIPELINES[class_name])
    for kind in ("text_encoder", "image_encoder"):
        options = {"components": ["dit", kind]}
        try:
            pipe.enable_omni_offload("layer", **options)
        except ValueError as error:
            reason = "none of the encoders" if (class_name, kind) in WITHOUT_BLOCKS else "declares no such encoder"
            assert f"components has {kind!r}" in str(error) and reason in str(error), error
            continue
        assert_runs_equal(pipe, call, expected[:1], sim, f"{class_name}, {kind}", "layer", **options)


@pytest.mark.parametrize("class_name", WITHOUT_DIT)
def test_without_a_dit(class_name: str, device: torch.device) -> None:
    pipe, _ = build_as(PIPELINES[class_name])
    before = State.of(pipe)
    with pytest.raises(ValueError, match=f"{class_name} has no DiT to offload.*Its components are .*_dit_modules"):
        pipe.enable_omni_offload("layer")
    before.assert_same(State.of(pipe))


def test_count_of_classes() -> None:
    print(f"{len(PIPELINES) - len(WITHOUT_DIT)} pipeline classes in {', '.join(MODES)}, {len(WITHOUT_DIT)} refused")
    assert len(PIPELINES) - len(WITHOUT_DIT) >= 60
