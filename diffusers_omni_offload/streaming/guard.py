"""What a forward on offloaded weights may do with them: read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from diffusers_omni_offload.nested import any_tensor
from diffusers_omni_offload.platform import Platform
from diffusers_omni_offload.weights.master import Master


def refuse_unservable(platform: Platform, master: Master, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a forward that offloaded weights can't serve.

    Raises:
        RuntimeError: it needs gradients, or is being captured into a graph.
    """
    if torch.is_grad_enabled():
        if master.requires_grad():
            raise RuntimeError(gradient_message(master.path, "one of its parameters"))
        if any_tensor([args, kwargs], needs_gradient):
            raise RuntimeError(gradient_message(master.path, "one of its inputs"))
    if platform.is_capturing():
        raise RuntimeError(
            f"{master.path} is offloaded, and its stream is being captured into a graph: a replay would read "
            "device memory that holds other weights by then. Run it without CUDA graphs, or leave it resident."
        )


def gradient_message(path: str, what: str) -> str:
    """What to say to a forward that needs gradients."""
    return (
        f"{path} ran with gradients enabled and {what} requires one. Offloaded weights are for inference: run it under "
        "torch.no_grad(), or disable offload to train."
    )


def written_message(leaf: str) -> str:
    """What to say of a leaf that its own forward wrote to."""
    return (
        f"{leaf} was written to during its own forward. Offloaded weights and buffers may only be read, since what is "
        "written goes to device memory that is given up. Call .eval() on the component if this is a running "
        "statistic, or leave the component out of `components`."
    )


def view_message(who: str) -> str:
    """What to say of a view of weights that outlives their time on the device."""
    return (
        f"{who} a view of its own weights, which other weights take the place of once it is over. "
        "Take a copy (.clone()), or leave the component out of `components`."
    )


def needs_gradient(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a gradient, or asks for one."""
    return tensor.requires_grad
