"""How many bytes a module holds."""

from __future__ import annotations

from torch import nn

from diffusers_omni_offload.weights.leaves import find_leaves


def module_nbytes(module: nn.Module, without: frozenset[int] | set[int] = frozenset()) -> int:
    """Bytes of a module's leaves, each tensor once, from shapes and dtypes (so meta tensors count too).

    Tensors whose `id` is in `without` don't count.
    """
    return sum(leaf.nbytes for leaf in find_leaves(module, "", without))
