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
from diffusers_omni_offload.weights.wrappers import move_wrappers

_METHODS = ("merge", "unmerge")


class Merging:
    """The LoRA layers of offloaded modules.

    Args:
        masters: of the offloaded modules.
        device: the execution device.
    """

    def __init__(self, masters: Masters, device: torch.device) -> None:
        self._masters, self._device = masters, device
        self._layers: dict[Any, list[Master]] = {}
        self._pending: dict[Master, list[Any]] = {}

    def look(self) -> None:
        """Find the layers that are there now."""
        tuners = sys.modules.get("peft.tuners.tuners_utils")
        if tuners is not None:
            self._layers = {}
            for module, master in self._masters.modules():
                if isinstance(module, tuners.BaseTunerLayer):
                    self._layers.setdefault(module, []).append(master)

    def expect_unmerging(self) -> None:
        """Note the layers that are merged and disabled: PEFT will unmerge them in their next forward."""
        self._pending = {}
        for layer, masters in self._layers.items():
            if layer.disable_adapters and layer.merged:
                for master in masters:
                    self._pending.setdefault(master, []).append(layer)

    def unmerged(self, master: Master) -> list[torch.Tensor]:
        """The leaves of a master that a forward, which is over now, has changed for good by unmerging."""
        if master not in self._pending:
            return []
        done = [layer for layer in self._pending[master] if not layer.merged]
        if not done:
            return []
        self._pending[master] = [layer for layer in self._pending[master] if layer.merged]
        held = set(map(id, master.tensors))
        return [leaf.tensor for layer in done for leaf in find_leaves(layer, "") if id(leaf.tensor) in held]

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Between forwards: layers that merge or unmerge in the body do it on the device.

        Methods of pipelines call those of models, so it may be entered again inside.
        """
        self.look()
        for master in {master for masters in self._layers.values() for master in masters}:
            master.realize()
        ours = []
        for layer in self._layers:
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
        if not away:
            method(*args, **kwargs)
            return
        move_tensors(away, self._device)
        try:
            method(*args, **kwargs)
        finally:
            self._take_home(layer, host)

    def _take_home(self, layer: Any, host: torch.device) -> None:
        masters = [*self._layers.get(layer, ()), *filter(None, [self._masters.shared])]
        # New weights, as quantized ones get, go home by themselves; the next audit packs them.
        move_wrappers(layer.modules(), host, {id(tensor) for master in masters for tensor in master.tensors})
        for leaf in find_leaves(layer, ""):
            is_home = any([master.take_home(leaf.tensor) for master in masters])
            if not is_home and leaf.tensor.device == self._device:
                move_tensors([leaf.tensor], host)
