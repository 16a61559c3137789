"""What kind of master each unit gets: packed in host memory, left in the checkpoint's files, or a share."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from diffusers_omni_offload.backends.masters import Find, Unit
from diffusers_omni_offload.backends.origins import Origins
from diffusers_omni_offload.platform import Platform
from diffusers_omni_offload.weights.mapped import MappedMaster
from diffusers_omni_offload.weights.master import Master
from diffusers_omni_offload.weights.packed import PackedMaster
from diffusers_omni_offload.weights.pinning import PinnedBudget
from diffusers_omni_offload.weights.sharded import ShardedMaster, Sharding


class LocalMaking:
    """Masters with all of a block's bytes on this host.

    Args:
        platform: where the copies go to.
        budget: what may be page-locked.
        origins: what is in files.
    """

    def __init__(self, platform: Platform, budget: PinnedBudget, origins: Origins) -> None:
        self.platform, self.budget, self.origins = platform, budget, origins

    def make(self, unit: Unit, find: Find) -> Master:
        mapped = self.mapped(unit, find)
        if mapped is not None:
            return mapped
        self.origins.realize(find())
        return PackedMaster(find, [unit.module], unit.path, self.platform, self.budget)

    def make_shared(self, find: Find) -> Master:
        self.origins.realize(find())
        return PackedMaster(find, [], "shared leaves", self.platform, self.budget)

    def mapped(self, unit: Unit, find: Find) -> MappedMaster | None:
        """A master whose bytes stay in files; None if none of them are there."""
        origins = self.origins.of(unit)
        return MappedMaster(find, [unit.module], unit.path, origins) if origins else None


class ShardedMaking:
    """Masters of which each rank has a share, for the blocks that are divided; others as they are made locally."""

    def __init__(self, local: LocalMaking, divided: frozenset[nn.Module], share: Callable[[int], Sharding]) -> None:
        self._local, self._divided, self._share = local, divided, share

    def make(self, unit: Unit, find: Find) -> Master:
        if unit.module not in self._divided:
            return self._local.make(unit, find)
        local = self._local
        whole = local.mapped(unit, find)
        if whole is None:
            local.origins.realize(find())
        return ShardedMaster(find, [unit.module], unit.path, local.platform, local.budget, self._share, whole)

    def make_shared(self, find: Find) -> Master:
        return self._local.make_shared(find)
