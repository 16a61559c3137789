"""What a user should know about an offloaded pipeline, each said once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from diffusers_omni_offload.messages import format_bytes, logger
from diffusers_omni_offload.planning.times import NOTICEABLE_WAIT
from diffusers_omni_offload.streaming.stages import PackedStage, Stages
from diffusers_omni_offload.streaming.streamer import Streamer
from diffusers_omni_offload.topology.plan import ResolvedPlan
from diffusers_omni_offload.weights.mapped import MappedMaster
from diffusers_omni_offload.weights.master import Master
from diffusers_omni_offload.weights.pinning import PinnedBudget


def warn_of_plain_tensors(plan: ResolvedPlan) -> None:
    """Name the tensors in streamed blocks and in swapped components that nothing moves."""
    paths = _plain_tensor_attributes(plan.streamed_blocks())
    if paths:
        logger.warning(
            "%s: plain tensor attributes, neither parameters nor buffers, stay where they are. "
            "Register them as buffers if the block reads them on the device.",
            _first_few(paths),
        )
    paths = _plain_tensor_attributes((path, plan.component(path).module) for path in plan.swapped)
    if paths:
        # No warning: a model has to move these itself when it is on the device for good, too, and stock models do.
        logger.info(
            "%s: plain tensor attributes of swapped components, neither parameters nor buffers, stay where they are.",
            _first_few(paths),
        )


def warn_of_pageable(masters: Sequence[Master], budget: PinnedBudget) -> None:
    """Say how much could not be pinned, why, and what that costs. What is in files isn't meant to be: it is staged."""
    masters = [master for master in masters if not isinstance(master, MappedMaster)]
    pageable = sum(master.host_nbytes for master in masters if not master.is_pinned)
    if pageable:
        logger.warning(
            "%s of offloaded weights are pinned, %s are pageable (host memory could not be pinned: %s). Pageable ones "
            "are copied at a fraction of the link's speed and don't overlap with the compute. `pin_memory=` takes a "
            "budget in bytes, or False.",
            format_bytes(sum(master.nbytes for master in masters if master.is_pinned)),
            format_bytes(pageable),
            budget.refusal or f"the budget is {format_bytes(budget.limit)}",
        )


def first_call_summary(masters: Sequence[Master], streamer: Streamer, stages: Stages, waited: float) -> str:
    """One line: how much is pinned, how many loads came too late, and what limits the speed.

    Args:
        masters: every master.
        streamer: what was streamed.
        stages: what was swapped.
        waited: the share of the time that the compute waited for weights.
    """
    offloaded = sum(master.nbytes for master in masters)
    in_memory = sum(master.host_nbytes for master in masters)
    pinned = sum(master.host_nbytes for master in masters if master.is_pinned)
    swaps = f"{stages.swaps} swaps of whole components"
    if not streamer.loads:
        return (
            f"{format_bytes(streamer.bytes_moved)} copied to the device in {swaps}; {pinned / in_memory:.0%} of "
            f"{format_bytes(in_memory)} pinned."
        )
    swapped = sum(stage.master.nbytes for stage in stages if isinstance(stage, PackedStage))
    what = f"{format_bytes(offloaded - swapped)} streamed"
    if swapped:
        what += f", {format_bytes(swapped)} swapped"
    if not in_memory:
        what += ", all of it from files"
    elif in_memory < offloaded:
        what += f", {format_bytes(in_memory)} of it in this process's memory, {pinned / in_memory:.0%} of that pinned"
    else:
        what += f", {pinned / in_memory:.0%} of it pinned"
    if not streamer.platform.is_asynchronous:
        limit = "copies don't overlap on the CPU"
    elif pinned < in_memory:
        limit = "transfer-bound (what isn't pinned is copied while the compute stands still)"
    else:
        bound = "transfer" if waited > NOTICEABLE_WAIT else "compute"
        limit = f"{bound}-bound (the compute waited for weights {waited:.0%} of the time)"
    return (
        f"{what}; {streamer.demand_loads} of {streamer.loads} loads on demand; "
        f"{f'{swaps}; ' if swapped else ''}{limit}."
    )


def _first_few(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - 5} more" if len(paths) > 5 else ""
    return ", ".join(paths[:5]) + more


def _plain_tensor_attributes(modules: Iterable[tuple[str, nn.Module]]) -> list[str]:
    """Paths of tensors in these modules that are neither parameters nor buffers, and so are never moved."""
    return [
        f"{module_path}.{name}"
        for path, block in modules
        for module_path, module in block.named_modules(prefix=path)
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    ]
