"""Loads the simulated device's plugin and keeps the libraries' progress bars and notices out of the test output."""

from __future__ import annotations

import functools
import gc
import logging
import os
import signal
from collections.abc import Iterator

import pytest
import torch

pytest_plugins = ["tests.simdevice.plugin"]

# A shell has what it starts in the background ignore Ctrl-C, which tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)
# What is measured in tests is nobody's profile.
os.environ["DIFFUSERS_OMNI_OFFLOAD_PROFILE"] = ""


@pytest.fixture(scope="session", autouse=True)
def _quiet_libraries() -> None:
    # Imported late: the plugin says first how these libraries behave in tests.
    import diffusers.utils.logging
    import transformers.utils.logging

    from diffusers_omni_offload.messages import logger

    # What this package says is tested.
    logger.setLevel(logging.INFO)
    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture
def compiler() -> Iterator[None]:
    """Nothing that torch.compile did before counts."""
    from tests.compiling import fresh_compiler

    with fresh_compiler():
        yield


@pytest.fixture
def taken(device: torch.device) -> int:
    """Bytes of other tests that are on the device: hardly any, neither garbage nor what libraries and tests cache."""
    gc.unfreeze()
    for cached in [found for found in gc.get_objects() if isinstance(found, functools._lru_cache_wrapper)]:
        if cached.__module__.split(".")[0] in ("diffusers", "tests"):
            cached.cache_clear()
    gc.collect()
    gc.freeze()
    return torch.accelerator.memory_allocated()
