"""A pipeline of a transformer and nothing else: enough to offload it, and to compare what it computes bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import nn

from tests.zoo.registry import Arguments, BuildTransformer


class AlonePipeline(DiffusionPipeline):
    """Calls its transformer. It declares nothing, so its blocks have to be found."""

    model_cpu_offload_seq = "transformer"

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.register_modules(transformer=transformer)

    @torch.no_grad()
    def __call__(self, arguments: Mapping[str, Any]) -> list[torch.Tensor]:
        """The tensors of one forward's output, on the CPU."""
        moved = {name: _moved(value, self._execution_device) for name, value in arguments.items()}
        return [tensor.detach().cpu() for tensor in _tensors(self.transformer(**moved))]


def build_alone(build: BuildTransformer, device: torch.device | None = None) -> tuple[AlonePipeline, Arguments]:
    """A new pipeline, resident on `device` if one is given, and what makes the arguments of a call."""
    transformer, arguments = build()
    pipe = AlonePipeline(transformer)
    return (pipe if device is None else pipe.to(device)), arguments


def are_equal(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Bit for bit, in shape and dtype too."""
    return len(found) == len(expected) and all(
        mine.dtype == other.dtype and torch.equal(mine, other) for mine, other in zip(found, expected, strict=True)
    )


def are_meaningful(tensors: Sequence[torch.Tensor]) -> bool:
    """Finite, and none of them the same number throughout."""
    return bool(tensors) and all(
        bool(tensor.isfinite().all()) and bool((tensor != tensor.flatten()[0]).any()) for tensor in tensors
    )


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _tensors(value)
    elif dataclasses.is_dataclass(output):
        for field in dataclasses.fields(output):
            yield from _tensors(getattr(output, field.name))


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(each, device) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(each, device) for each in value)
    return value
