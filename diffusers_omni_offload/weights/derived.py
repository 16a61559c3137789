"""Tensors that modules compute from their parameters before each forward and keep as plain attributes.

`torch.nn.utils.weight_norm` of the older kind does that to `weight`; autoencoders for sound use it for every layer.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.utils.weight_norm import WeightNorm


def drop_derived(root: nn.Module) -> None:
    """Let go of what was computed on the device; shape and dtype stay to be read, on the meta device."""
    for module, norm in _weight_norms(root):
        weight = vars(module).get(norm.name)
        if isinstance(weight, torch.Tensor) and not weight.is_meta:
            setattr(module, norm.name, torch.empty_like(weight, device="meta"))


def restore_derived(root: nn.Module) -> None:
    """Compute anew what was dropped, from parameters that are where they are to stay."""
    for module, norm in _weight_norms(root):
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            setattr(module, norm.name, norm.compute_weight(module))


def _weight_norms(root: nn.Module) -> Iterator[tuple[nn.Module, WeightNorm]]:
    for module in root.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm):
                yield module, hook
