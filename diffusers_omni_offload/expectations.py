"""What an offload that is on is expected to take."""

from __future__ import annotations

from typing import Any

import torch

from diffusers_omni_offload.config import OffloadConfig
from diffusers_omni_offload.planning.choice import Choice
from diffusers_omni_offload.planning.costs import ASSUMED_RATES, Problem
from diffusers_omni_offload.planning.predicting import predict
from diffusers_omni_offload.planning.prediction import Prediction
from diffusers_omni_offload.planning.survey import survey
from diffusers_omni_offload.platform import Platform, resolve_device
from diffusers_omni_offload.profile import Profile, default_path
from diffusers_omni_offload.registry import adapter_for
from diffusers_omni_offload.topology.plan import ResolvedPlan


def expectation(pipe: Any, plan: ResolvedPlan, config: OffloadConfig, platform: Platform) -> tuple[Problem, Prediction]:
    """What a plan takes by sizes, and by the link's rate in this machine's profile, or an assumed one. The compute's
    time isn't known.

    Args:
        pipe: the pipeline.
        plan: its plan.
        config: its configuration.
        platform: the device.
    """
    rates = Profile(default_path()).rates(platform.name) or ASSUMED_RATES
    costs = survey(pipe, declarations=adapter_for(type(pipe)))
    problem = Problem(costs, rates, platform.total_bytes(), total_nbytes=platform.total_bytes())
    return problem, predict(problem, choice_of(problem, plan, config))


def choice_of(problem: Problem, plan: ResolvedPlan, config: OffloadConfig) -> Choice:
    """What a plan comes to, for the components of a problem."""
    stacks = {stack.component: stack for stack in plan.stacks}

    def kind(path: str) -> str:
        return "layer" if path in stacks else "module" if path in plan.swapped else "resident"

    residents = {path: len(stack.resident) for path, stack in stacks.items() if stack.resident}
    return Choice({cost.path: kind(cost.path) for cost in problem.components}, residents, config.slots)


def other_arguments(config: OffloadConfig, device: torch.device) -> dict[str, Any]:
    """Arguments of `enable_omni_offload` that a choice doesn't have, where they aren't the defaults."""
    found: dict[str, Any] = {}
    if config.pin_memory is not True:
        found["pin_memory"] = config.pin_memory
    if config.resident_policy != "spread":
        found["resident_policy"] = config.resident_policy
    if torch.accelerator.current_accelerator() is None or device != resolve_device(None):
        found["device"] = str(device)
    return found
