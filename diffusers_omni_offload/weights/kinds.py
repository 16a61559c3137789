"""Where each kind of weight keeps its bytes: plain weights in themselves, quantized ones in several tensors.

The next kind is one entry of a table here, or none: a wrapper that says by `__tensor_flatten__` what it is made of
needs no entry.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from diffusers_omni_offload.weights.withheld import is_withheld

#: Tensor types whose bytes are all in their own storage.
PLAIN_TYPES = (torch.Tensor, nn.Parameter, nn.Buffer)

_BITSANDBYTES_4BIT = (
    "quant_state.absmax",
    "quant_state.code",
    "quant_state.offset",
    "quant_state.state2.absmax",
    "quant_state.state2.code",
)

#: Class of a weight that has bytes of its own -> the tensors that belong to it as attributes.
_EXTRAS_OF_WEIGHTS: dict[str, tuple[str, ...]] = {
    "Params4bit": _BITSANDBYTES_4BIT,
    "Int8Params": ("CB", "SCB"),
    "GGUFParameter": (),
}

#: Class of a module -> tensors that it keeps beside its parameters and buffers. bitsandbytes hands those of an 8-bit
#: weight to the module in the first forward; as they are the same objects, they stay the same leaves.
_EXTRAS_OF_MODULES: dict[str, tuple[str, ...]] = {
    "Linear8bitLt": ("state.CB", "state.SCB"),
}

#: Class of a weight -> why it can't be taken apart, whatever it says of itself.
_REFUSED_TYPES = {
    "DTensor": "belongs to several processes. Load this component whole, or leave it to FSDP and its CPUOffloadPolicy",
    "UninitializedParameter": "has no shape yet. Run the model once before",
    "UninitializedBuffer": "has no shape yet. Run the model once before",
}


_PACKED_FOR_CPU = (
    "was packed for the CPU by a run there, which lost what other devices need. Load this component anew, and enable "
    "offload before it runs"
)
_UNKNOWN = (
    "is of a type that isn't known here. Load this component unquantized, or quantized by torchao, bitsandbytes, "
    "quanto or GGUF"
)


class Part(NamedTuple):
    """A plain tensor that holds bytes of a weight.

    Attributes:
        tensor: the tensor.
        name: dotted, relative to the module.
        holder: the object that has it as the attribute `attribute`; None where that is a table of the module.
        attribute: see there.
    """

    tensor: torch.Tensor
    name: str
    holder: Any = None
    attribute: str = ""


def parts_of(module: nn.Module) -> Iterator[Part]:
    """The plain tensors that hold the bytes of a module's own parameters and buffers; one may come twice."""
    for table in (module._parameters, module._buffers):
        for name, weight in table.items():
            if weight is None:
                continue
            if type(weight) in PLAIN_TYPES:
                yield Part(weight, name)
            else:
                yield from _inner(weight, name)
    for name, weight in module._parameters.items():
        if weight is not None and type(weight) not in PLAIN_TYPES:
            yield from _extras(weight, name, _EXTRAS_OF_WEIGHTS.get(type(weight).__name__, ()))
    yield from _extras(module, "", _EXTRAS_OF_MODULES.get(type(module).__name__, ()))


def is_wrapper(weight: torch.Tensor) -> bool:
    """Whether a weight has no bytes but those of the tensors that it is made of."""
    if weight.is_nested:
        return False
    return hasattr(type(weight), "__tensor_flatten__") and type(weight).__name__ not in _REFUSED_TYPES


def wrappers_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """A module's own weights that are made of several tensors, by name."""
    return {name: weight for name, weight in module._parameters.items() if weight is not None and is_wrapper(weight)}


def inner_of(wrapper: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of what a wrapper is made of."""
    for name in wrapper.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        yield name, getattr(wrapper, name)


def plain_inside(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that a weight is made of, down to those that are made of no others."""
    if not is_wrapper(weight):
        yield weight
        return
    for _, inner in inner_of(weight):
        yield from plain_inside(inner)


def why_refused(tensor: torch.Tensor) -> str | None:
    """Why the bytes of a `Part` can't be taken, and what to do: what is said after "it"; None if they can."""
    cls = type(tensor)
    if tensor.is_nested:
        return "is nested. Make it a plain tensor"
    if is_withheld(tensor):
        return "has no bytes here, and there is no file to read it from. Load this component anew"
    if cls in PLAIN_TYPES:
        return None if tensor.layout is torch.strided else "isn't strided. Make it dense"
    if cls.__name__ in _REFUSED_TYPES:
        return _REFUSED_TYPES[cls.__name__]
    if cls.__name__ in _EXTRAS_OF_WEIGHTS:
        is_packed = getattr(getattr(tensor, "quant_state", None), "packing_format_for_cpu", False)
        return _PACKED_FOR_CPU if is_packed else None
    return _UNKNOWN


def _inner(weight: torch.Tensor, name: str, holder: Any = None, attribute: str = "") -> Iterator[Part]:
    if not is_wrapper(weight):
        yield Part(weight, name, holder, attribute)
        return
    for attribute, inner in inner_of(weight):
        yield from _inner(inner, f"{name}.{attribute}", weight, attribute)


def _extras(owner: Any, name: str, attributes: tuple[str, ...]) -> Iterator[Part]:
    for path in attributes:
        *parents, attribute = path.split(".")
        holder = owner
        for parent in parents:
            holder = getattr(holder, parent, None)
        tensor = getattr(holder, attribute, None)
        if isinstance(tensor, torch.Tensor):
            yield Part(tensor, f"{name}.{path}" if name else path, holder, attribute)
