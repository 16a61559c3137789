"""Quantized weights that are made of several tensors, as a whole: what they look like, and moving them for good."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet

import torch
from torch import nn

from diffusers_omni_offload.weights.kinds import inner_of, is_wrapper, plain_inside, wrappers_of
from diffusers_omni_offload.weights.leaves import move_tensors

Home = tuple[torch.Tensor, torch.device]
"""What was moved, and where it was."""


def form_of(weight: torch.Tensor) -> tuple[object, ...]:
    """What a weight is made of, whatever its values and device."""
    if not is_wrapper(weight):
        return (type(weight), weight.dtype, weight.shape, weight.stride())
    return (type(weight), *((name, form_of(inner)) for name, inner in inner_of(weight)))


def move_wrappers(
    modules: Iterable[nn.Module], device: torch.device, held: AbstractSet[int] = frozenset()
) -> list[Home]:
    """Move the wrappers among these modules' own weights as their library does it, which may change their form.

    Args:
        modules: the modules.
        device: where to.
        held: `id` of inner tensors that are to stay where they are, and the wrappers with them.

    Returns:
        What was moved, and where it was.
    """
    moved: list[Home] = []
    for module in modules:
        for weight in wrappers_of(module).values():
            inner = list(plain_inside(weight))
            elsewhere = [tensor.device for tensor in inner if tensor.device != device]
            if elsewhere and held.isdisjoint(map(id, inner)):
                moved.append((weight, elsewhere[0]))
                _move(weight, device)
    return moved


def move_wrappers_back(homes: Iterable[Home]) -> None:
    """Move each weight to where it was."""
    for weight, device in homes:
        _move(weight, device)


def _move(weight: torch.Tensor, device: torch.device) -> None:
    there = nn.Parameter(weight.detach().to(device), requires_grad=weight.requires_grad)
    try:
        # Its identity stays, and what it says of its device becomes true.
        torch.utils.swap_tensors(weight, there)
    except RuntimeError:
        # Somebody watches it by a weak reference, as compiled code does: it goes on to say that it is where it was.
        move_tensors(list(plain_inside(weight)), device)
