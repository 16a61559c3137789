"""What a managed component does with requests to move it, or to offload it in another way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn


class Mediation:
    """Stands between a managed component and `.to()`, `.cuda()`, `.half()` ...: casts pass, moves don't.

    Libraries move a component to where it already is as a matter of course, so a move to the execution device or to the
    host leaves every tensor where it is; a move to anywhere else is an error.

    Args:
        module: the component.
        path: its path, for messages.
        device: the execution device.
    """

    def __init__(self, module: nn.Module, path: str, device: torch.device) -> None:
        self._module, self._path, self._device = module, path, device
        self._original_apply = module._apply

    def install(self) -> None:
        """Take the place of the module's own methods."""
        self._module._apply = self._apply  # type: ignore[method-assign]
        self._module.enable_group_offload = self._refuse_group_offload  # type: ignore[assignment]

    def remove(self) -> None:
        """Give the module its methods back."""
        for name, ours in (("_apply", self._apply), ("enable_group_offload", self._refuse_group_offload)):
            if vars(self._module).get(name) == ours:
                del vars(self._module)[name]

    def _apply(self, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        device = self._destination(function)
        if device is None:
            return self._original_apply(function, recurse)
        if device not in (self._device, torch.device("cpu")):
            raise ValueError(
                f"{self._path} is offloaded to run on {str(self._device)!r} and can't be moved to {str(device)!r}. "
                "Call disable_omni_offload() on the pipeline first."
            )
        dtype = _cast(function)
        if dtype is None:
            return self._module
        return self._original_apply(lambda t: t.to(dtype) if t.is_floating_point() else t, recurse)

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


def _cast(function: Callable[[torch.Tensor], torch.Tensor]) -> torch.dtype | None:
    """The dtype that `function` casts floating-point tensors to; None if it keeps theirs."""
    dtypes = {function(torch.empty(0, dtype=dtype)).dtype for dtype in (torch.float32, torch.bfloat16)}
    return dtypes.pop() if len(dtypes) == 1 else None
