"""LoRA layers that merge into offloaded weights do it on the device, one layer at a time.

PEFT computes what it adds in another precision on the CPU than elsewhere, so only there the sums are, bit for bit,
those of a pipeline whose weights are all on the device.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from diffusers_omni_offload.backends.masters import Masters
from diffusers_omni_offload.weights.leaves import find_leaves, move_tensors
from diffusers_omni_offload.weights.master import Master

_METHODS = ("merge", "unmerge")


class Merging:
    """The LoRA layers of offloaded modules.

    Args:
        masters: of the offloaded modules.
        device: the execution device.
    """

    def __init__(self, masters: Masters, device: torch.device) -> None:
        self._masters, self._device = masters, device
        self._layers: list[Any] = []

    def look(self) -> None:
        """Find the layers that are there now."""
        tuners = sys.modules.get("peft.tuners.tuners_utils")
        if tuners is not None:
            modules = dict.fromkeys(self._masters.modules())
            self._layers = [module for module in modules if isinstance(module, tuners.BaseTunerLayer)]

    def unmerge_disabled(self) -> bool:
        """Between forwards: unmerge what is disabled, which PEFT would do in the middle of a forward.

        Returns:
            Whether there was anything to unmerge.
        """
        disabled = [layer for layer in self._layers if layer.disable_adapters and layer.merged]
        if disabled:
            homes = self._homes()
            for layer in disabled:
                self._run(homes, layer, layer.unmerge)
        return bool(disabled)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Between forwards: layers that merge or unmerge in the body do it on the device."""
        self.look()
        homes, layers = self._homes(), self._layers
        for layer in layers:
            for name in _METHODS:
                vars(layer)[name] = functools.wraps(getattr(layer, name))(
                    functools.partial(self._run, homes, layer, getattr(layer, name))
                )
        try:
            yield
        finally:
            for layer in layers:
                for name in _METHODS:
                    vars(layer).pop(name, None)

    def _homes(self) -> dict[int, Master]:
        return {id(tensor): master for master in self._masters for tensor in master.tensors}

    def _run(
        self, homes: dict[int, Master], layer: Any, method: Callable[..., None], *args: Any, **kwargs: Any
    ) -> None:
        away = [leaf.tensor for leaf in find_leaves(layer, "") if id(leaf.tensor) in homes]
        move_tensors(away, self._device)
        try:
            method(*args, **kwargs)
        finally:
            for leaf in find_leaves(layer, "") if away else ():
                master = homes.get(id(leaf.tensor))
                is_home = master is not None and master.take_home(leaf.tensor)
                if not is_home and leaf.tensor.device == self._device:
                    # A new weight, as a quantized one gets: the next audit packs it.
                    move_tensors([leaf.tensor], torch.device("cpu"))
