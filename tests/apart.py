"""Ranks that gather weights together, and what they find when one of them does something else."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from diffusers_omni_offload.handle import OffloadHandle
from tests import distributed_cases as cases
from tests import tiny
from tests.equality import Build, Call
from tests.living import with_arguments
from tests.tiny.toy import build_toy

GATHERED: dict[str, Any] = {"mode": "layer", "layer_options": {"dit": {"weight_transfer": "allgather"}}}
"""Arguments of `enable_omni_offload`."""

BOUND = 20.0
"""Seconds within which every rank knows of an error."""

START_ANEW = re.compile("start (the processes|all of them) anew")

BUILDS: dict[str, Build] = {
    **cases.BUILDS,
    "toy": build_toy,
    "toy with an encoder": lambda: build_toy(text_encoder=True),
    "toy of two": lambda: build_toy(two_stage=True),
}


@dataclass(frozen=True)
class Found:
    """What an action has come to.

    Attributes:
        result: what it returned; None if it raised.
        kind, text: of the error; empty without one.
        seconds: how long it took.
    """

    result: Any
    kind: str
    text: str
    seconds: float


def attempt(action: Callable[[], Any]) -> Found:
    """Do something that may fail, or be interrupted."""
    start = time.monotonic()
    try:
        result = action()
    except BaseException as error:
        return Found(None, type(error).__name__, str(error), time.monotonic() - start)
    return Found(result, "", "", time.monotonic() - start)


class Rank:
    """One rank's pipeline, what it gives without offload, and where to meet the others.

    Args:
        name: of `BUILDS`. Each rank has a request of its own: another prompt, and another seed.
        rank, device: where it runs.
    """

    def __init__(self, name: str, rank: int, device: str) -> None:
        self.name, self.rank, self.device = name, rank, device
        self.pipe, self.call = self._build()
        self.expected = self.plain()

    def plain(self, change: Callable[[Any], Any] | None = None) -> np.ndarray:
        """What a plain pipeline gives, to which `change` was done on the CPU."""
        pipe, call = self._build()
        if change is not None:
            change(pipe)
        return tiny.run(pipe.to(self.device), call)

    def fresh(self) -> dict[str, torch.Tensor]:
        """The weights of a pipeline that nothing was done to."""
        return weights(self._build()[0])

    def enable(self, **options: Any) -> OffloadHandle:
        return self.pipe.enable_omni_offload(**{**GATHERED, "device": self.device, **options})

    def run(self, **arguments: Any) -> np.ndarray:
        return tiny.run(self.pipe, with_arguments(self.call, **arguments))

    def is_right(self, **arguments: Any) -> bool:
        """Whether a call's output is that of the plain pipeline; it raises what the call raises."""
        return np.array_equal(self.run(**arguments), self.expected)

    def _build(self) -> tuple[Any, Call]:
        pipe, call = BUILDS[self.name]()
        pipe.set_progress_bar_config(disable=True)
        if "toy" in self.name:
            return pipe, lambda: {**call(), "generator": torch.Generator("cpu").manual_seed(self.rank)}
        return pipe, with_arguments(call, prompt=cases.prompt_of(self.rank))


def weights(pipe: Any) -> dict[str, torch.Tensor]:
    """Parameters and buffers of all components by path."""
    found: dict[str, torch.Tensor] = {}
    for name, component in pipe.components.items():
        if isinstance(component, nn.Module):
            found.update({f"{name}.{path}": tensor for path, tensor in component.named_parameters()})
            found.update({f"{name}.{path}": tensor for path, tensor in component.named_buffers()})
    return found


def changed_weights(pipe: Any, expected: dict[str, torch.Tensor]) -> list[str]:
    """The paths of weights that aren't ordinary CPU tensors with these bytes."""
    mine = weights(pipe)
    assert list(mine) == list(expected)
    return [
        path
        for path, tensor in mine.items()
        if tensor.device.type != "cpu" or tensor.is_meta or not torch.equal(tensor, expected[path])
    ]


def meet(what: str, rank: int, size: int, seconds: float = 60.0) -> None:
    """Wait until all ranks have come to this line; this one has nothing to do with offload."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{what}/{rank}", "here")
    store.wait([f"{what}/{other}" for other in range(size)], timedelta(seconds=seconds))


@contextmanager
def hooked(module: nn.Module, on_call: int, action: Callable[[], Any]) -> Iterator[None]:
    """In the body, `action` comes before the `on_call`-th forward (from 0) of a module."""
    calls = 0

    def count(module: nn.Module, args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == on_call + 1:
            action()

    handle = module.register_forward_pre_hook(count)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """In the body, an attribute has another value. (pytest's monkeypatch isn't there in a rank's process.)"""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
