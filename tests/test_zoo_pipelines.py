"""Every pipeline class of diffusers that can be built offline: its outputs are those of the resident pipeline."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch

from tests import tiny
from tests.comparing import leftovers
from tests.equality import assert_equal_outputs, build_as, build_resident, outputs
from tests.zoo import PIPELINES

MODES = ("layer",)
CALLS = 2

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("class_name", sorted(PIPELINES))
def test_two_calls_are_equal(class_name: str, mode: str, device: torch.device, sim: ModuleType) -> None:
    build = PIPELINES[class_name]
    resident, call = build_resident(build, device)
    assert type(resident).__name__ == class_name
    expected = outputs(resident, call, CALLS)
    assert np.isfinite(expected[0]).all() and np.ptp(expected[0]) > 0
    del resident
    pipe, call = build_as(build)
    handle = pipe.enable_omni_offload(mode)
    assert_equal_outputs([tiny.run(pipe, call) for _ in range(CALLS)], expected, f"{class_name}, {mode}")
    assert sim.hazards() == []
    assert handle.bytes_moved > 0
    pipe.disable_omni_offload()
    assert leftovers(pipe) == []


def test_count_of_classes() -> None:
    print(f"{len(PIPELINES)} pipeline classes in {', '.join(MODES)}")
    assert len(PIPELINES) >= 60
