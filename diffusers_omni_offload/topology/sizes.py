"""How many bytes a module holds."""

from __future__ import annotations

from torch import nn


def module_nbytes(module: nn.Module, without: frozenset[int] | set[int] = frozenset()) -> int:
    """Bytes of a module's parameters and buffers, each tensor once, from shapes and dtypes (so meta tensors count too).

    Tensors whose `id` is in `without` don't count.
    """
    seen = set(without)
    total = 0
    for tensors in (module.parameters(), module.buffers()):
        for tensor in tensors:
            if id(tensor) not in seen:
                seen.add(id(tensor))
                total += tensor.numel() * tensor.element_size()
    return total
