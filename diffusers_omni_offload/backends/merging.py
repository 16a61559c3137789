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
        self._layers: list[tuple[Any, Master]] = []
        self._pending: dict[Master, list[Any]] = {}
        self._homes: dict[int, Master] = {}

    def look(self) -> None:
        """Find the layers that are there now."""
        tuners = sys.modules.get("peft.tuners.tuners_utils")
        if tuners is not None:
            found = self._masters.modules()
            self._layers = [(module, master) for module, master in found if isinstance(module, tuners.BaseTunerLayer)]

    def expect_unmerging(self) -> None:
        """Note the layers that are merged and disabled: PEFT will unmerge them in their next forward."""
        self._pending = {}
        for layer, master in self._layers:
            if layer.disable_adapters and layer.merged:
                self._pending.setdefault(master, []).append(layer)

    def unmerged(self, master: Master) -> list[torch.Tensor]:
        """The leaves of a master that a forward, which is over now, has changed for good by unmerging."""
        if master not in self._pending:
            return []
        done = [layer for layer in self._pending[master] if not layer.merged]
        self._pending[master] = [layer for layer in self._pending[master] if layer.merged]
        held = set(map(id, master.tensors))
        return [leaf.tensor for layer in done for leaf in find_leaves(layer, "") if id(leaf.tensor) in held]

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Between forwards: layers that merge or unmerge in the body do it on the device.

        Methods of pipelines call those of models, so it may be entered again inside.
        """
        self.look()
        self._homes = {id(tensor): master for master in self._masters for tensor in master.tensors}
        ours = []
        for layer in dict.fromkeys(layer for layer, _ in self._layers):
            for name in _METHODS:
                if name not in vars(layer):
                    method = getattr(layer, name)
                    vars(layer)[name] = functools.wraps(method)(functools.partial(self._run, layer, method))
                    ours.append((layer, name))
        try:
            yield
        finally:
            for layer, name in ours:
                vars(layer).pop(name, None)

    def _run(self, layer: Any, method: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        # All of it, since a layer that is being loaded has leaves that no master has yet.
        host = torch.device("cpu")
        away = [leaf.tensor for leaf in find_leaves(layer, "") if leaf.tensor.device == host]
        move_tensors(away, self._device)
        try:
            method(*args, **kwargs)
        finally:
            for leaf in find_leaves(layer, "") if away else ():
                master = self._homes.get(id(leaf.tensor))
                is_home = master is not None and master.take_home(leaf.tensor)
                if not is_home and leaf.tensor.device == self._device:
                    # A new weight, as a quantized one gets: the next audit packs it.
                    move_tensors([leaf.tensor], host)
