"""How weights that are on this host get to the device."""

from __future__ import annotations

from collections.abc import Iterator

from diffusers_omni_offload.backends.masters import Masters
from diffusers_omni_offload.backends.origins import Origins
from diffusers_omni_offload.config import OffloadConfig
from diffusers_omni_offload.platform import Platform
from diffusers_omni_offload.streaming.page_cache import Ceiling, FromPageCache, Wanted
from diffusers_omni_offload.streaming.staging import Staging
from diffusers_omni_offload.streaming.transport import HostToDevice, Transport
from diffusers_omni_offload.topology.plan import BlockStack, ResolvedPlan
from diffusers_omni_offload.weights.pinning import PinnedBudget


def local_transports(
    platform: Platform, budget: PinnedBudget, origins: Origins, config: OffloadConfig, wanted: Wanted
) -> list[Transport]:
    """Those of one rank; the first one that serves a master brings it.

    Args:
        platform: the device.
        budget: what may be page-locked, pages of files aside.
        origins: what is in files.
        config: whether pages of files may be page-locked.
        wanted: see `FromPageCache`.
    """
    if not origins.are_used:
        return [HostToDevice()]
    staging = Staging(platform, budget)
    is_limited = any(options.host_registration_limit_gib for options in config.layer_options.values())
    return [FromPageCache(platform, staging, wanted) if is_limited else staging, HostToDevice()]


def blocks_by_ceiling(plan: ResolvedPlan | None, masters: Masters) -> Iterator[Ceiling]:
    """The streamed blocks that may be page-locked in the page cache. Components that have their options from one entry
    of the configuration, as several DiTs have, share its ceiling."""
    stacks: dict[int, list[BlockStack]] = {}
    for stack in () if plan is None else plan.stacks:
        if stack.options.host_registration_limit_gib:
            stacks.setdefault(id(stack.options), []).append(stack)
    for together in stacks.values():
        nbytes = int(together[0].options.host_registration_limit_gib * (1 << 30))
        found = [masters.of(stack.blocks[index]) for stack in together for index in stack.streamed]
        yield Ceiling(nbytes, tuple(master for master in found if master is not None))
