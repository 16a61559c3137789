"""What lives on the device for good: resident blocks, non-block state, and components that aren't streamed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import ExitStack

import torch
from torch import nn

from diffusers_omni_offload.topology.fsdp import fsdp_parts, without_fsdp
from diffusers_omni_offload.weights.bitsandbytes import put_in_order
from diffusers_omni_offload.weights.leaves import (
    Leaf,
    allocated_nbytes,
    distinct_leaves,
    is_plain,
    move_back,
    move_tensors,
    require_plain,
)
from diffusers_omni_offload.weights.snapshot import Snapshot
from diffusers_omni_offload.weights.wrappers import move_wrappers, move_wrappers_back


class Residency:
    """Places, by tensor identity, all that no master holds.

    Args:
        device: the execution device.

    Attributes:
        nbytes: device bytes of it, as allocators count them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.nbytes = 0
        self._roots: dict[int, tuple[str, nn.Module]] = {}
        self._streamed: list[nn.Module] = []
        self._snapshot: Snapshot | None = None

    def leave_out(self, block: nn.Module) -> None:
        """Leave `block` and what is below it to its master."""
        if block not in self._streamed:
            self._streamed.append(block)
            self._snapshot = None

    def take_back(self, block: nn.Module) -> None:
        """Undo `leave_out`."""
        if block in self._streamed:
            self._streamed.remove(block)
            self._snapshot = None

    def add(self, path: str, module: nn.Module) -> None:
        """Take care of a component's state, but for what FSDP has taken of it."""
        self._roots[id(module)] = (path, module)
        for part in fsdp_parts(module):
            self.leave_out(part)
        self._snapshot = None

    def remove(self, module: nn.Module) -> None:
        """Leave a component's state where it is from now on."""
        self._roots.pop(id(module), None)
        self._snapshot = None

    def leaves(self) -> list[Leaf]:
        """Every leaf outside of streamed blocks, each once; those of masters included."""
        return distinct_leaves(self._modules())

    def is_current(self) -> bool:
        """Whether nothing was added, replaced or moved since `place`."""
        return self._snapshot is not None and self._snapshot.is_current()

    def place(self, held: AbstractSet[int], undo: ExitStack | None = None) -> None:
        """Move what isn't on the device there.

        Args:
            held: `id` of the tensors that are in a master.
            undo: gets the way back first.

        Raises:
            TypeError: a weight of a kind that isn't known would have to be moved.
            ValueError: a tensor is on the meta device.
        """
        for _, root in self._roots.values():
            put_in_order(root)
        homes = move_wrappers([module for _, module in self._modules()], self.device, held)
        if undo is not None:
            undo.callback(move_wrappers_back, homes)
        leaves = [leaf for leaf in self.leaves() if id(leaf.tensor) not in held]
        require_placeable(leaves, self.device)
        # One of an unknown kind may have no storage of its own to look at; its identity is watched all the same.
        plain = [leaf for leaf in leaves if is_plain(leaf)]
        tensors = [leaf.tensor for leaf in plain]
        if undo is not None:
            undo.callback(move_back, [(tensor, tensor.device) for tensor in tensors])
        move_tensors(tensors, self.device)
        self.nbytes = sum(allocated_nbytes(leaf.nbytes) for leaf in plain)
        self._snapshot = Snapshot([module for _, module in self._modules()], plain)

    def move_to_host(self) -> None:
        """Move everything to the CPU."""
        move_wrappers([module for _, module in self._modules()], torch.device("cpu"))
        move_tensors([leaf.tensor for leaf in self.leaves() if is_plain(leaf)], torch.device("cpu"))
        self._snapshot = None

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        seen = {id(module) for block in self._streamed for module in block.modules()}
        for path, root in self._roots.values():
            for child_path, module in root.named_modules(prefix=path):
                if id(module) not in seen:
                    seen.add(id(module))
                    yield child_path, module


def tell_of_move(modules: Iterable[nn.Module]) -> None:
    """Tell modules that override `_apply`, to keep state of their own in step with moves, that their tensors moved."""
    for module in without_fsdp(modules):
        override = type(module)._apply
        if override is not nn.Module._apply and override is not nn.RNNBase._apply:
            override(module, _same)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def require_placeable(leaves: list[Leaf], device: torch.device) -> None:
    """Refuse state that would have to be moved and can't be.

    Raises:
        TypeError: a weight of a kind that isn't known, and that isn't on `device`.
        ValueError: a tensor on the meta device.
    """
    for leaf in leaves:
        if leaf.tensor.is_meta or (leaf.tensor.device != device and not is_plain(leaf)):
            require_plain(leaf)
