"""What tests of swapped components share: sizes, what a resident run takes, tensors at rest, and pipelines."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from diffusers_omni_offload.handle import OffloadHandle
from diffusers_omni_offload.weights.leaves import ALIGNMENT
from tests.equality import Build, Call
from tests.tiny import build_toy, run
from tests.tiny import build_wan as build_tiny_wan

accelerator = torch.accelerator


def leaves_of(module: nn.Module) -> list[torch.Tensor]:
    """Its parameters and buffers, each once."""
    return list({id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}.values())


def size_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def packed_size(module: nn.Module) -> int:
    """Bytes of its tensors, each rounded up to the alignment; views of each other aren't expected."""
    sizes = [tensor.numel() * tensor.element_size() for tensor in leaves_of(module)]
    return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)


def largest_stage(handle: OffloadHandle) -> int:
    """The most bytes that swapped components may take at one time: a DiT, all encoders together, or a VAE."""
    sizes: dict[str, list[int]] = {"dit": [0], "encoder": [0], "vae": [0], "resident": [0]}
    for path in handle.plan.swapped:
        component = handle.plan.component(path)
        sizes[component.role].append(packed_size(component.module))
    beside = sum(sizes["resident"])
    return max(max(sizes["dit"]) + beside, sum(sizes["encoder"]), max(sizes["vae"]))


class AtRest:
    """What the tensors of swapped components are when their component isn't running: ordinary CPU tensors, the same
    objects as before, with the same values and strides."""

    def __init__(self, handle: Any) -> None:
        self._modules = {path: handle.plan.component(path).module for path in handle.plan.swapped}
        self._tensors = {path: leaves_of(module) for path, module in self._modules.items()}
        self._values = {path: [tensor.detach().clone() for tensor in found] for path, found in self._tensors.items()}
        self._geometry = {
            path: [(tensor.dtype, tensor.shape, tensor.stride()) for tensor in found]
            for path, found in self._tensors.items()
        }

    def check(self, *, besides: frozenset[str] = frozenset()) -> None:
        """All of them, but those `besides`."""
        for path, module in self._modules.items():
            if path in besides:
                continue
            now = leaves_of(module)
            assert list(map(id, now)) == list(map(id, self._tensors[path])), f"{path} holds other tensors"
            assert {tensor.device.type for tensor in now} == {"cpu"}, f"{path} is on the device"
            assert [(t.dtype, t.shape, t.stride()) for t in now] == self._geometry[path], path
            for tensor, value in zip(now, self._values[path], strict=True):
                assert torch.equal(tensor, value), f"{path} has other values"


@dataclass(frozen=True)
class Need:
    """What calls of a pipeline take that lives on the device: its weights, and what comes on top of them."""

    weights: int
    activations: int
    kept: int
    expected: np.ndarray

    @classmethod
    def of(cls, build: Build, device: torch.device) -> Need:
        start = accelerator.memory_allocated()
        pipe, call = build()
        pipe.to(device)
        weights = accelerator.memory_allocated() - start
        accelerator.reset_peak_memory_stats()
        for _ in range(2):
            expected = run(pipe, call)
        gc.collect()
        return cls(
            weights,
            accelerator.max_memory_allocated() - start - weights,
            accelerator.memory_allocated() - start - weights,
            expected,
        )


def build_large_toy(**options: Any) -> tuple[Any, Call]:
    """Its weights are far larger than its activations."""
    return build_toy(
        4, width=64, sizes=[512, 1000], **{"two_stage": True, "text_encoder": True, "vae": True, **options}
    )


def build_wan(boundary: float = 0.5, steps: int = 6, missing: str = "") -> tuple[Any, Call]:
    pipe, call = build_tiny_wan()
    if missing:
        setattr(pipe, missing, None)
    pipe.register_to_config(boundary_ratio=boundary)
    pipe.set_progress_bar_config(disable=True)
    return pipe, lambda: {**call(), "num_inference_steps": steps}
