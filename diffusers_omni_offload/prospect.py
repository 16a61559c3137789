"""What the mode "auto" knows of a pipeline and of the machine before anything has run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from diffusers_omni_offload.measuring import measure_link
from diffusers_omni_offload.messages import format_bytes, logger
from diffusers_omni_offload.planning.assumptions import assumed
from diffusers_omni_offload.planning.cautious import device_budget
from diffusers_omni_offload.planning.costs import Problem, Rates
from diffusers_omni_offload.planning.measured import Measured, with_measured
from diffusers_omni_offload.planning.request import Request
from diffusers_omni_offload.planning.survey import nbytes_on, survey_blocks
from diffusers_omni_offload.planning.workload import tiling_of, with_workload, workload
from diffusers_omni_offload.platform import Platform, platform_for
from diffusers_omni_offload.profile import Profile, default_path, pipeline_key


@dataclass(frozen=True)
class Prospect:
    """What is known.

    Attributes:
        problem: sizes, the link's rates, budgets; times and activations, as far as they are known.
        platform: the device.
        profile: what is kept on this machine.
        key: the pipeline's, in the profile.
        is_measured: whether times and activations were measured before.
    """

    problem: Problem
    platform: Platform
    profile: Profile
    key: str
    is_measured: bool

    def keep(self, measured: Measured) -> None:
        """Keep what a whole call has shown for the next time."""
        self.profile.keep_measured(self.key, measured)


def look_at(pipe: Any, request: Request, device: torch.device, *, declarations: type | None, spare: int) -> Prospect:
    """Look at the pipeline and the machine; nothing is touched.

    Args:
        pipe: the pipeline.
        request: what was asked for.
        device: the execution device.
        declarations: a class with component declarations, used if the pipeline has none of its own.
        spare: device bytes that are taken by an offload of this pipeline, and that will be free.

    Raises:
        ValueError: nothing of the pipeline can be offloaded.
    """
    platform = platform_for(device)
    profile = Profile(default_path() if request.keeps_profile else None)
    rates = _rates(profile, platform)
    budget = _budget(request, platform.free_bytes() + spare + nbytes_on(pipe, device))
    costs, stacks = survey_blocks(pipe, declarations=declarations)
    if not any(cost.may_swap or cost.blocks for cost in costs):
        raise ValueError(f"Nothing of this {type(pipe).__name__} can be offloaded: none of its components can move.")
    components = assumed(costs, budget, request.workload.get("num_inference_steps"), request.activation_memory)
    if {"height", "width", "num_frames"} & set(request.workload) and not request.activation_memory:
        found = workload(pipe, stacks, request.call)
        components = components if found is None else with_workload(components, found, None)
    problem = Problem(
        components=components,
        rates=rates,
        device_nbytes=budget,
        host_nbytes=request.host_memory_budget,
        total_nbytes=platform.total_bytes(),
    )
    key = pipeline_key(platform.name, costs, {**request.workload, **tiling_of(getattr(pipe, "vae", None))})
    measured = profile.measured(key)
    if measured is not None:
        problem = replace(with_measured(problem, measured, calls=1), rates=rates)
    return Prospect(problem, platform, profile, key, is_measured=measured is not None)


def _rates(profile: Profile, platform: Platform) -> Rates:
    rates = profile.rates(platform.name)
    if rates is None:
        rates = measure_link(platform)
        profile.keep_rates(platform.name, rates)
    return rates


def _budget(request: Request, free: int) -> int:
    budget = device_budget(free, request.memory_budget)
    if request.memory_budget is not None and budget < request.memory_budget:
        logger.warning(
            "memory_budget is %s, but %s are free: that is the budget.",
            format_bytes(request.memory_budget),
            format_bytes(budget),
        )
    return budget
