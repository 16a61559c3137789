"""Quantized weights that are made of several tensors, as a whole: what they look like, and moving them for good."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import nn

from diffusers_omni_offload.weights.kinds import is_wrapper
from diffusers_omni_offload.weights.leaves import distinct_leaves, move_tensors

Home = tuple[nn.Module, str, torch.device]
"""A module, the name of its parameter, and a device."""


def wrappers_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, weight) of a module's own weights that are made of several tensors."""
    for name, weight in module._parameters.items():
        if weight is not None and is_wrapper(weight):
            yield name, weight


def form_of(weight: torch.Tensor) -> tuple[object, ...]:
    """What a weight is made of, whatever its values and device."""
    if not is_wrapper(weight):
        return (type(weight), weight.dtype, weight.shape, weight.stride())
    names = weight.__tensor_flatten__()[0]  # type: ignore[attr-defined]
    return (type(weight), *((name, form_of(getattr(weight, name))) for name in names))


def move_wrappers(
    modules: Iterable[nn.Module], device: torch.device, held: AbstractSet[int] = frozenset()
) -> list[Home]:
    """Move the wrappers among these modules' own weights as their library does it, which may change their form.

    Args:
        modules: the modules.
        device: where to.
        held: `id` of inner tensors that are to stay where they are, and the wrappers with them.

    Returns:
        What was moved, with the devices that it came from.
    """
    moved: list[Home] = []
    for module in modules:
        for name, weight in wrappers_of(module):
            leaves = [leaf.tensor for leaf in distinct_leaves([("", _holding(weight))])]
            elsewhere = [tensor for tensor in leaves if tensor.device != device]
            if elsewhere and held.isdisjoint(map(id, leaves)):
                moved.append((module, name, elsewhere[0].device))
                _move(weight, leaves, device)
    return moved


def move_wrappers_back(homes: Iterable[Home]) -> None:
    """Move each weight to the device beside it."""
    for module, name, device in homes:
        move_wrappers([_holding(module._parameters[name])], device)


def _move(weight: Any, inner: list[torch.Tensor], device: torch.device) -> None:
    there = nn.Parameter(weight.detach().to(device), requires_grad=weight.requires_grad)
    try:
        # Its identity stays, and what it says of its device becomes true.
        torch.utils.swap_tensors(weight, there)
    except RuntimeError:
        # Somebody watches it by a weak reference, as compiled code does.
        move_tensors(inner, device)


def _holding(weight: Any) -> nn.Module:
    holder = nn.Module()
    holder._parameters["weight"] = weight
    return holder
