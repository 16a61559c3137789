"""What a managed component does with requests to move it, or to offload it in another way."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import nn

from diffusers_omni_offload import hooks
from diffusers_omni_offload.weights.leaves import rebind
from diffusers_omni_offload.weights.withheld import is_withheld

#: Methods of models and pipelines that merge LoRA layers into weights or take them out again: choosing another adapter
#: does, too, if one is merged, and one that is disabled is taken out in its next forward.
MERGING_METHODS = (
    "fuse_lora",
    "unfuse_lora",
    "load_lora_weights",
    "load_lora_adapter",
    "load_adapter",
    "add_adapter",
    "set_adapters",
    "set_adapter",
    "disable_lora",
    "enable_lora",
    "disable_adapters",
    "enable_adapters",
)


class Mediation:
    """Stands between a managed component and `.to()`, `.cuda()`, `.half()` ...: casts pass, moves don't.

    Libraries move a component to where it already is as a matter of course, so a move to the execution device or to the
    host leaves every tensor where it is; a move to anywhere else is an error.

    Args:
        module: the component.
        path: its path, for messages.
        device: the execution device.
        merging: a context in which the component's LoRA layers may merge into its weights.
        moves_itself: whether the component has a lifecycle of its own, whose moves pass.
    """

    def __init__(
        self,
        module: nn.Module,
        path: str,
        device: torch.device,
        merging: Callable[[], AbstractContextManager[None]],
        *,
        moves_itself: bool = False,
    ) -> None:
        self._module, self._path, self._device = module, path, device
        self._original_apply = module._apply
        self._ours: dict[str, Any] = {"enable_group_offload": self._refuse_group_offload}
        self._ours["_apply"] = self._apply_around_withheld if moves_itself else self._apply
        for name in MERGING_METHODS:
            if hasattr(type(module), name):
                self._ours[name] = _within(merging, getattr(module, name))
        self._before: dict[str, Any] = {}

    def install(self) -> None:
        """Take the place of the module's own methods."""
        self._before = {
            name: value
            for name, value in vars(self._module).items()
            # Another one's that is there still was left by an interrupt.
            if name in self._ours and not isinstance(getattr(value, "__self__", None), Mediation)
        }
        vars(self._module).update(self._ours)
        cls = type(self._module)
        if isinstance(getattr(cls, "device", None), property) and self._module.device != self._device:
            # A model's `device` is that of its first parameter, which is a streamed one here.
            self._module.__class__ = _running_on(cls, self._device)  # type: ignore[arg-type]

    def remove(self) -> None:
        """Give the module its methods back."""
        for name, ours in self._ours.items():
            if vars(self._module).get(name) == ours:
                del vars(self._module)[name]
        vars(self._module).update(self._before)
        stock = vars(type(self._module)).get("_omni_stock_class")
        if stock is not None:
            self._module.__class__ = stock

    def _apply(self, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        device = self._destination(function)
        if device is None:
            return self._apply_around_withheld(function, recurse)
        if device not in (self._device, torch.device("cpu")):
            raise ValueError(
                f"{self._path} is offloaded to run on {str(self._device)!r} and can't be moved to {str(device)!r}. "
                "Call disable_omni_offload() on the pipeline first."
            )
        dtype = _cast(function)
        if dtype is None:
            return self._module
        return self._apply_around_withheld(lambda t: t.to(dtype) if t.is_floating_point() else t, recurse)

    def _apply_around_withheld(
        self, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> nn.Module:
        """Moves, and casts of what has the dtype already, leave out what isn't here.

        Raises:
            RuntimeError: it would have to be cast; nothing was, and the sentence says how to have it here.
        """
        hollow = [module for module in self._module.modules() if any(map(is_withheld, _own_tensors(module)))]
        dtype = _cast(function)
        for tensor in (tensor for module in hollow for tensor in _own_tensors(module) if is_withheld(tensor)):
            if dtype is not None and tensor.is_floating_point() and tensor.dtype != dtype:
                function(tensor)
        for module in hollow:
            vars(module)["_apply"] = functools.partial(_apply_to_the_rest, module)
        try:
            return self._original_apply(function, recurse)
        finally:
            for module in hollow:
                vars(module).pop("_apply", None)

    def _destination(self, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.device | None:
        """Where `function` moves tensors to; None if it leaves each where it is."""
        for home in (torch.device("cpu"), self._device):
            there = function(torch.empty(0, device=home)).device
            if there != home:
                return there
        return None

    def _refuse_group_offload(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"{self._path} is offloaded by omni offload, and group offload would move the same weights. "
            "Call disable_omni_offload() on the pipeline first."
        )


def _within(merging: Callable[[], AbstractContextManager[None]], method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def within(*args: Any, **kwargs: Any) -> Any:
        with merging():
            return method(*args, **kwargs)

    return within


def _own_tensors(module: nn.Module) -> list[torch.Tensor]:
    return [tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None]


def _apply_to_the_rest(
    module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> nn.Module:
    """`module._apply(function)` for all but its own withheld tensors."""
    for child in module.children() if recurse else ():
        child._apply(function)
    for tensor in _own_tensors(module):
        if not is_withheld(tensor):
            rebind(tensor, lambda tensor=tensor: function(tensor.data))  # type: ignore[misc]
    return module


@functools.cache
def _running_on(cls: type, device: torch.device) -> type:
    """`cls`, under its own name and equal to it, with `device` as its instances' device."""

    class Same(type(cls)):  # type: ignore[misc]
        """`from_pipe` takes a component over if `type(component)` is among the classes that it knows."""

        def __eq__(self, other: object) -> bool:
            return _stock(self) is _stock(other)

        def __hash__(self) -> int:
            return hash(cls)

    own = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    own |= {"device": property(lambda self: device), "_omni_stock_class": cls, "__reduce_ex__": _refuse_pickling}
    return Same(cls.__name__, (cls,), own)


def _refuse_pickling(module: nn.Module, protocol: Any) -> NoReturn:
    # Pickle would stumble over the class before it came to a hook that says this.
    hook = hooks.owned_hook(module, hooks.COMPONENT_HOOK)
    hook.__reduce_ex__(protocol)
    raise AssertionError("a hook of ours refuses to be pickled")


def _stock(cls: object) -> object:
    return vars(cls).get("_omni_stock_class", cls) if isinstance(cls, type) else cls


def _cast(function: Callable[[torch.Tensor], torch.Tensor]) -> torch.dtype | None:
    """The dtype that `function` casts floating-point tensors to; None if it keeps theirs."""
    dtypes = {function(torch.empty(0, dtype=dtype)).dtype for dtype in (torch.float32, torch.bfloat16)}
    return dtypes.pop() if len(dtypes) == 1 else None
