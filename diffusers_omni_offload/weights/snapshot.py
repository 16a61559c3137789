"""What some modules looked like when its bytes were taken, to see cheaply whether they are still the truth."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from typing import Any

import torch
from torch import nn

from diffusers_omni_offload.weights.leaves import Leaf, plainly

_identical = operator.is_
_pointer, _stride = torch.Tensor.data_ptr, torch.Tensor.stride


#: What follows the last value, so that one more or one less shows.
_END = object()

_ALL = ("_modules", "_parameters", "_buffers")

#: What the forwards of these classes read; LoRA layers have many of them. Nothing else in them can count.
_READ: dict[type, tuple[str, ...]] = {
    nn.Identity: (),
    nn.Dropout: (),
    nn.GELU: (),
    nn.SiLU: (),
    nn.ModuleDict: ("_modules",),
    nn.ModuleList: ("_modules",),
    nn.Sequential: ("_modules",),
    nn.ParameterDict: ("_parameters",),
}


class Snapshot:
    """The children, parameters and buffers of some modules, by identity, and the tensors' storage and geometry.

    In-place edits aren't seen, and needn't be: they edit the bytes that the snapshot is of. About 0.4 us a tensor.

    Args:
        modules: the modules whose own tables are watched; not what is below them.
        leaves: those whose bytes were taken.
    """

    def __init__(self, modules: Iterable[nn.Module], leaves: Sequence[Leaf]) -> None:
        tables: list[dict[str, Any]] = [
            vars(module)[name] for module in modules for name in _READ.get(type(module), _ALL)
        ]
        # Most tables are empty.
        self._empty = [table for table in tables if not table]
        self._filled = [table for table in tables if table]
        self._values = [*chain.from_iterable(map(dict.values, self._filled)), _END]
        self._tensors = [leaf.tensor for leaf in leaves]
        self._plainly = plainly(self._tensors)
        # Parts of quantized weights, which no table shows.
        parts = [leaf for leaf in leaves if leaf.holder is not None]
        self._holders, self._attributes = [part.holder for part in parts], [part.attribute for part in parts]
        self._parts = [part.tensor for part in parts]
        self._state = self._read()

    def is_current(self) -> bool:
        """Whether nothing was added, removed, replaced, reshaped, cast or given another storage."""
        return (
            not any(self._empty)
            and all(map(_identical, chain(chain.from_iterable(map(dict.values, self._filled)), (_END,)), self._values))
            and all(map(_identical, map(getattr, self._holders, self._attributes, repeat(None)), self._parts))
            and self._read() == self._state
        )

    def _read(self) -> tuple[list[Any], ...]:
        # Four plain lists: a tuple for each tensor would cost a third more.
        tensors = self._tensors
        with self._plainly():
            return (
                list(map(_pointer, tensors)),
                [tensor.dtype for tensor in tensors],
                [tensor.shape for tensor in tensors],
                list(map(_stride, tensors)),
            )
