"""What kind of master each unit gets: packed in host memory, or left in the checkpoint's files."""

from __future__ import annotations

from diffusers_omni_offload.backends.masters import Find, Unit
from diffusers_omni_offload.backends.origins import Origins
from diffusers_omni_offload.platform import Platform
from diffusers_omni_offload.weights.mapped import MappedMaster
from diffusers_omni_offload.weights.master import Master
from diffusers_omni_offload.weights.packed import PackedMaster
from diffusers_omni_offload.weights.pinning import PinnedBudget


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
