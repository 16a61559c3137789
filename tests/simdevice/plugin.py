"""pytest plugin: the fixtures `device` and `sim`, and the rule that no test may leave a hazard.

Loaded with `-p tests.simdevice.plugin`, early enough to say how torch and the Hugging Face libraries behave in tests.
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"

import gc
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from tests import simdevice

# One thread: results and times must not depend on the machine's cores.
torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "expects_hazards: the test provokes hazards on the simulated device and may leave them"
    )


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The simulated device, installed when the first test asks for it."""
    return simdevice.install()


@pytest.fixture
def sim(device: torch.device) -> ModuleType:
    """The simulated device's own functions: `configure`, `stats`, `hazards` and the rest."""
    return simdevice


@pytest.fixture(autouse=True, scope="module")
def _module_leaves_no_frozen_garbage() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _simulated_device_is_clean(request: pytest.FixtureRequest) -> Iterator[None]:
    """Around every test that uses the device: start from defaults, end without hazards."""
    if "device" not in request.fixturenames:
        yield
        return
    request.getfixturevalue("device")
    simdevice.start_afresh()
    # The collection below need not look at torch's and diffusers' own hundreds of thousands of objects.
    gc.freeze()
    yield
    gc.collect()
    found = simdevice.hazards()
    simdevice.start_afresh()
    if found and request.node.get_closest_marker("expects_hazards") is None:
        pytest.fail("the test left hazards on the simulated device:\n" + "\n".join(found), pytrace=False)
