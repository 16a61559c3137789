"""What the tests of diffusers' features share: the same thing done to a resident pipeline and to its offloaded twin."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from diffusers_omni_offload.handle import OffloadHandle
from tests import simdevice, tiny
from tests.comparing import modules
from tests.equality import Build, Call, assert_equal_outputs, assert_no_hazards, build_as, build_resident, outputs
from tests.modes import MODES

before_and_after = pytest.mark.parametrize("when", ["before", "after"])
"""Whether something is done before offload is enabled, or after that and a call."""

Change = Callable[[Any], Any]
"""Something that is done to a pipeline."""


def fast_ones(values: Iterable[Any], *fast: Any) -> list[Any]:
    """`values` as parameters of a test, all but some marked slow."""
    found = []
    for value in values:
        marks = [] if value in fast else [pytest.mark.slow]
        found.append(pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks))
    return found


def enable(pipe: Any, mode: str) -> OffloadHandle:
    """Offload a pipeline in one of the `MODES`."""
    return pipe.enable_omni_offload(**MODES[mode])


def denoisers(pipe: Any) -> list[Any]:
    """The DiTs of a pipeline, or its UNet."""
    found = (getattr(pipe, name, None) for name in ("transformer", "transformer_2", "unet"))
    return [model for model in found if model is not None]


def home(pipe: Any, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` where new weights belong: on a resident pipeline's device, on the host of an offloaded one."""
    return tensor if getattr(pipe, "omni_offload", None) is not None else tensor.to(pipe._execution_device)


def with_arguments(call: Call, **more: Any) -> Call:
    """`call` with more arguments."""
    return lambda: {**call(), **more}


def ours_left(pipe: Any) -> list[str]:
    """What offload has left on a pipeline, whatever hooks of others are there."""
    found = ["the composed class"] if any(cls.__name__ == "OffloadedPipeline" for cls in type(pipe).__mro__) else []
    for path, module in modules(pipe):
        found += [f"{path}.{name}" for name in ("_hf_hook", "_apply", "enable_group_offload") if name in vars(module)]
        registry = vars(module).get("_diffusers_hook")
        if registry is not None:
            found += [f"{path}: {name}" for name in registry.hooks if name.startswith("omni")]
    return found


@dataclass(frozen=True, eq=False)
class Feature:
    """Something that diffusers lets one do to a pipeline, and what has to come of it.

    Args:
        build: the pipeline.
        change: does it.
        shows: whether outputs change by it, as they must to prove anything; else `change` has to check what it did.
        dtype: what the pipeline is cast to at first.
        arguments: more arguments of each call.
    """

    build: Build
    change: Change
    shows: bool = True
    dtype: torch.dtype | None = None
    arguments: tuple[tuple[str, Any], ...] = ()

    def fresh(self) -> tuple[Any, Call]:
        """A pipeline on the CPU that nothing was done to."""
        pipe, call = build_as(self.build, self.dtype)
        return pipe, with_arguments(call, **dict(self.arguments))

    @functools.cache  # noqa: B019
    def expected(self, device: torch.device) -> tuple[np.ndarray, list[np.ndarray]]:
        """The resident pipeline's output before the change, and those of two calls after it."""
        pipe, call = build_resident(self.build, device, self.dtype)
        call = with_arguments(call, **dict(self.arguments))
        plain = tiny.run(pipe, call)
        self.change(pipe)
        changed = outputs(pipe, call, 2)
        assert np.isfinite(plain).all() and np.isfinite(changed[0]).all() and np.ptp(changed[0]) > 0
        assert np.array_equal(plain, changed[0]) != self.shows
        return plain, changed

    def check(self, mode: str, when: str, device: torch.device) -> None:
        """Offloaded, the pipeline gives the same; and it goes on so when offload is turned off."""
        self.check_with(MODES[mode], when, device)

    def check_with(self, options: dict[str, Any], when: str, device: torch.device) -> None:
        """`check` for other arguments of `enable_omni_offload`."""
        plain, expected = self.expected(device)
        what = f"{options}, done {when} enabling"
        pipe, call = self.fresh()
        if when == "before":
            self.change(pipe)
        handle = pipe.enable_omni_offload(**options)
        if when == "after":
            assert_equal_outputs([tiny.run(pipe, call)], [plain], f"{what}, as it was")
            self.change(pipe)
        moved = handle.bytes_moved
        assert_equal_outputs(outputs(pipe, call, 2), expected, what)
        assert_no_hazards(simdevice, what)
        assert handle.bytes_moved > moved
        pipe.disable_omni_offload()
        assert ours_left(pipe) == []
        assert_equal_outputs([tiny.run(pipe.to(device), call)], expected[:1], f"{what}, offload turned off again")


def sd3() -> tuple[Any, Call]:
    """The cheapest stock pipeline with several text encoders: Stable Diffusion 3 without T5."""
    return tiny.build_sd3(t5=False)
