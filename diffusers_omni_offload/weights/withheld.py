"""Weights whose bytes aren't here between forwards: they say what they are, and reading them is an error."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from diffusers_omni_offload.nested import any_tensor

_ATTRIBUTE = "_omni_cover"

_PROPERTIES = """shape dtype layout ndim itemsize nbytes requires_grad grad grad_fn _version
    is_leaf is_nested is_sparse is_quantized is_cuda""".split()
_METHODS = """size dim numel nelement stride element_size storage_offset __len__ __hash__
    is_floating_point is_complex is_contiguous is_inference is_conj is_neg is_signed""".split()

#: What may be asked of a withheld weight: all that its bytes don't tell.
_ALLOWED: frozenset[Any] = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in _PROPERTIES]
    + [getattr(torch.Tensor, name) for name in _METHODS]
    + [torch.is_floating_point, torch.is_complex, torch.numel, torch.is_conj, torch.is_neg, torch.is_inference]
)

#: What may be changed of it; PEFT does when it wraps a layer. It counts for the insides that it hasn't now, too.
_CHANGEABLE: frozenset[Any] = frozenset([torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__])  # type: ignore[attr-defined]

#: Its insides are on meta, but whoever asks wants to know where it is at home.
_ANSWERS: dict[Any, Any] = {
    torch.Tensor.device.__get__: torch.device("cpu"),
    torch.Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
}


class Withheld:
    """A tensor without bytes. Its shape, dtype and identity are true; whatever needs its bytes raises
    RuntimeError."""

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function in _ANSWERS:
            return _ANSWERS[function]
        if function in _ALLOWED:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        if function in _CHANGEABLE:
            with torch._C.DisableTorchFunctionSubclass():
                function(vars(args[0])[_ATTRIBUTE].other, *args[1:], **(kwargs or {}))
                return function(*args, **(kwargs or {}))
        reasons: list[str] = []

        def note(tensor: torch.Tensor) -> bool:
            if is_withheld(tensor):
                reasons.append(vars(tensor)[_ATTRIBUTE].why)
            return bool(reasons)

        any_tensor([args, kwargs or {}], note)
        raise RuntimeError(reasons[0])

    def __format__(self, spec: str) -> str:
        return object.__format__(self, spec)

    def as_subclass(self, cls: type) -> Any:
        """Raises RuntimeError. Torch doesn't ask `__torch_function__` about it."""
        raise RuntimeError(vars(self)[_ATTRIBUTE].why)

    def __repr__(self) -> str:
        return f"<withheld {type(self).__name__} of shape {tuple(self.shape)}, {self.dtype}>"  # type: ignore[attr-defined]


class _Cover:
    """What takes the place of a withheld tensor's insides.

    Attributes:
        why: a sentence that says how to read it.
        other: the insides that the tensor hasn't now: nothing but shape and dtype, or nothing but room for data.
        empty: what stands in that room while there is no data.
        cls: the tensor's own class.
        is_on: whether the tensor is withheld now.
    """

    __slots__ = ("cls", "empty", "is_on", "other", "why")

    def __init__(self, why: str, other: torch.Tensor, empty: torch.Tensor, cls: type) -> None:
        self.why, self.other, self.empty, self.cls, self.is_on = why, other, empty, cls, False


def is_withheld(value: object) -> bool:
    """Whether `value` is a tensor whose bytes aren't here."""
    return isinstance(value, Withheld)


@torch.inference_mode(False)
def withhold(tensor: torch.Tensor, why: str) -> None:
    """Let the bytes of a plain tensor go; its identity, shape, strides and dtype stay.

    Args:
        tensor: a parameter or buffer that nobody else holds the insides of, as autograd graphs do.
        why: what to say to those who read it: a sentence.
    """
    if is_withheld(tensor):
        vars(tensor)[_ATTRIBUTE].why = why
        return
    with torch.inference_mode(tensor.is_inference()):
        hollow = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        hollow.requires_grad_(tensor.requires_grad)
        empty = torch.empty(0, dtype=tensor.dtype)
        vars(tensor)[_ATTRIBUTE] = _Cover(why, hollow, empty, type(tensor))
    cover(tensor)


def uncover(tensor: torch.Tensor) -> None:
    """Make room for data in a withheld tensor, for a forward: it is an empty tensor until it gets some."""
    state = vars(tensor)[_ATTRIBUTE]
    if state.is_on:
        state.is_on = False
        tensor.__class__ = state.cls
        _swap(tensor, state.other)


def cover(tensor: torch.Tensor) -> None:
    """Undo `uncover`: let go of the data."""
    state = vars(tensor)[_ATTRIBUTE]
    if not state.is_on:
        tensor.data = state.empty
        _swap(tensor, state.other)
        tensor.__class__ = _withheld_class(state.cls)
        state.is_on = True


def give_back(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Make a withheld tensor an ordinary one for good.

    Args:
        tensor: the tensor.
        data: of the shape and dtype that it has had all the time.
    """
    uncover(tensor)
    with torch.inference_mode(tensor.is_inference()):
        tensor.data = data
    vars(tensor).pop(_ATTRIBUTE)


_swap: Callable[[torch.Tensor, torch.Tensor], None] = torch._C._swap_tensor_impl


@functools.cache
def _withheld_class(cls: type) -> type:
    return type(cls.__name__, (Withheld, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})
