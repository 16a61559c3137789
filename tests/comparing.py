"""What tests of whole pipelines share: the resident reference, leftovers of ours, and a pipeline's state to compare."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from diffusers_omni_offload.topology.discovery import iterate_modules
from tests.tiny import run

Call = Callable[[], dict[str, Any]]
Build = Callable[[], tuple[Any, Call]]

#: Instance attributes that offload may put on a module; none may be left when it is off.
_INSTANCE_ATTRIBUTES = (
    "_hf_hook",
    "_diffusers_hook",
    "forward",
    "_apply",
    "enable_group_offload",
    "_omni_offload_handle",
)


def resident_output(build: Build, device: torch.device, calls: int = 1) -> np.ndarray:
    """The output of the last of some calls of the same pipeline that lives on the device."""
    pipe, call = build()
    pipe.to(device)
    for _ in range(calls):
        output = run(pipe, call)
    return output


def assert_equal(output: np.ndarray, reference: np.ndarray) -> None:
    """Bit for bit, and not all the same number, which would prove nothing."""
    assert np.ptp(reference) > 0 and np.isfinite(reference).all()
    assert np.array_equal(output, reference)


def modules(pipe: Any) -> Iterator[tuple[str, nn.Module]]:
    """Every module of the pipeline's components, with its dotted path."""
    for path, component in iterate_modules(pipe):
        yield from component.named_modules(prefix=path)


def leftovers(pipe: Any) -> list[str]:
    """What a pipeline without offload must not have: instance attributes of hooks, and a composed class."""
    found = [
        f"{path}.{name}" for path, module in modules(pipe) for name in _INSTANCE_ATTRIBUTES if name in vars(module)
    ]
    found += [f"pipe.{name}" for name in _INSTANCE_ATTRIBUTES if name in vars(pipe)]
    if any(cls.__name__ == "OffloadedPipeline" for cls in inspect.getmro(type(pipe))):
        found.append("the composed class")
    return found


@dataclass(frozen=True)
class State:
    """A pipeline's modules as they are now: their tensors' identities, devices and values, and their attributes."""

    cls: type
    attributes: dict[str, tuple[str, ...]]
    tensors: dict[str, tuple[int, torch.device, torch.dtype, torch.Size, tuple[int, ...], bool]]
    values: dict[str, torch.Tensor]

    @classmethod
    def of(cls, pipe: Any) -> State:
        attributes, tensors, values = {}, {}, {}
        for path, module in modules(pipe):
            attributes[path] = tuple(sorted(vars(module)))
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is not None:
                        key = f"{path}.{name}"
                        values[key] = tensor.detach().cpu().clone()
                        tensors[key] = (
                            id(tensor), tensor.device, tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad
                        )  # fmt: skip
        return cls(type(pipe), attributes, tensors, values)

    def assert_same(self, other: State) -> None:
        """Equal in everything, values bit for bit."""
        assert other.cls is self.cls
        assert other.attributes == self.attributes
        assert other.tensors == self.tensors
        assert other.values.keys() == self.values.keys()
        for name, value in self.values.items():
            assert torch.equal(value, other.values[name]), name
