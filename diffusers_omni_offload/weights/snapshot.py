"""What some modules looked like when its bytes were taken, to see cheaply whether they are still the truth."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

_identical = operator.is_
_pointer, _stride = torch.Tensor.data_ptr, torch.Tensor.stride


class Snapshot:
    """The children, parameters and buffers of some modules, by identity, and the tensors' storage and geometry.

    In-place edits aren't seen, and needn't be: they edit the bytes that the snapshot is of. About 0.4 us a tensor.

    Args:
        modules: the modules whose own tables are watched; not what is below them.
        tensors: the tensors whose bytes were taken.
    """

    def __init__(self, modules: Iterable[nn.Module], tensors: Sequence[torch.Tensor]) -> None:
        self._tables: list[dict[str, Any]] = [
            table for module in modules for table in (module._modules, module._parameters, module._buffers)
        ]
        self._lengths = list(map(len, self._tables))
        # Most tables are empty; one that gets an entry shows in the lengths.
        self._filled = [table for table in self._tables if table]
        self._values = list(chain.from_iterable(map(dict.values, self._filled)))
        self._tensors = list(tensors)
        self._state = self._read()

    def is_current(self) -> bool:
        """Whether nothing was added, removed, replaced, reshaped, cast or given another storage."""
        return (
            list(map(len, self._tables)) == self._lengths
            and all(map(_identical, chain.from_iterable(map(dict.values, self._filled)), self._values))
            and self._read() == self._state
        )

    def _read(self) -> tuple[list[Any], ...]:
        # Four plain lists: a tuple for each tensor would cost a third more.
        tensors = self._tensors
        return (
            list(map(_pointer, tensors)),
            [tensor.dtype for tensor in tensors],
            [tensor.shape for tensor in tensors],
            list(map(_stride, tensors)),
        )
