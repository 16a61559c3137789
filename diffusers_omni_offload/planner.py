"""Plan before you run: what each mode would take of a pipeline, from its configurations or its shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from diffusers_omni_offload.blueprint import build_blueprint
from diffusers_omni_offload.checks import integer, parse_bytes
from diffusers_omni_offload.declarations import a_type
from diffusers_omni_offload.forecast import OffloadForecast, forecast
from diffusers_omni_offload.planning.cautious import device_budget
from diffusers_omni_offload.planning.costs import ASSUMED_RATES, ComponentCost, Problem, Rates
from diffusers_omni_offload.planning.measured import Measured, with_measured
from diffusers_omni_offload.planning.survey import survey_blocks
from diffusers_omni_offload.planning.workload import Call, default_of, tiling_of, with_workload, workload
from diffusers_omni_offload.platform import Platform, platform_for, resolve_device
from diffusers_omni_offload.profile import Profile, default_path, pipeline_key
from diffusers_omni_offload.registry import adapter_for

_UNLIMITED = 1 << 62
"""Device bytes where there is no budget."""


def plan_omni_offload(
    pipe_or_path: Any,
    *,
    memory_budget: int | str | None = None,
    host_memory_budget: int | str | None = None,
    link_gb_per_s: float | None = None,
    tflops: float | None = None,
    height: int | None = None,
    width: int | None = None,
    num_frames: int | None = None,
    num_inference_steps: int | None = None,
    guidance: bool | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | int | None = None,
) -> OffloadForecast:
    """What each mode of `enable_omni_offload` would take of a pipeline: device and host memory, copies, and time.

    Nothing is run, moved or changed. Of a folder or a repository on the hub configurations are read, and no weights.

    >>> print(plan_omni_offload("Wan-AI/Wan2.2-T2V-A14B-Diffusers", memory_budget="24GiB", tflops=150))

    Args:
        pipe_or_path: a pipeline; or the folder of one, or the name of a repository.
        memory_budget: device memory that weights and activations may take together: bytes, or text such as "12GiB".
            None means what is free now on the device, less 5 %, or no budget where there is no device.
        host_memory_budget: host memory that offloaded weights may take; None for no limit.
        link_gb_per_s: the rate of copies from page-locked host memory, in GB (1e9 bytes) a second; None takes what
            was measured on this machine before (by the mode "auto"), or else assumes 16.
        tflops: what the device computes in matrix products, in 1e12 operations a second, at the rate that it reaches in
            practice; None takes what was measured of this pipeline on this machine before, or else leaves computing out
            of the times.
        height: of the output, in pixels; None is the pipeline's default, as it is for the next ones.
        width: of the output, in pixels.
        num_frames: of the output.
        num_inference_steps: denoising steps.
        guidance: whether there is a negative prompt.
        dtype: of the weights, where configurations are read; None means bfloat16.
        device: the device; None takes the current accelerator.

    Returns:
        The forecast.

    Raises:
        FileNotFoundError: there are no configurations at this place.
        TypeError, ValueError: an argument, a configuration or a declaration is wrong.
    """
    budget = None if memory_budget is None else parse_bytes("memory_budget", memory_budget)
    host = None if host_memory_budget is None else parse_bytes("host_memory_budget", host_memory_budget)
    link = None if link_gb_per_s is None else _rate("link_gb_per_s", link_gb_per_s) * 1e9
    operations = None if tflops is None else _rate("tflops", tflops) * 1e12
    sizes = {"height": height, "width": width, "num_frames": num_frames, "num_inference_steps": num_inference_steps}
    for name, value in sizes.items():
        if value is not None:
            integer(name, value, minimum=1)
    pipe, notes = _pipeline(pipe_or_path, dtype)
    platform, total = _platform(device), None
    if budget is None and platform is not None:
        budget, total = device_budget(platform.free_bytes(), None), platform.total_bytes()
        notes += (f"The budget is what is free on {platform.name} now, less 5 %",)
    if budget is None:
        notes += ("What fits isn't said without a device or a memory_budget",)
    rates = _rates(link, platform)
    cls = type(pipe)
    costs, stacks = survey_blocks(pipe, declarations=adapter_for(cls))
    load = workload(pipe, stacks, Call(**sizes, guidance=guidance))
    asked = {**sizes, **tiling_of(getattr(pipe, "vae", None))}
    measured = None if platform is None or tflops is not None else _measured(platform, costs, asked)
    if load is None:
        steps = num_inference_steps or default_of(pipe, "num_inference_steps", 1)
        costs = tuple(replace(cost, forwards=steps) if cost.role == "dit" else cost for cost in costs)
        what = f"What a {cls.__name__} computes isn't known; a call is taken to have {steps} forwards of each DiT"
        notes += (what,)
    else:
        costs = with_workload(costs, load, operations)
    problem = Problem(costs, rates, _UNLIMITED if budget is None else budget, host, total)
    if measured is not None:
        problem = replace(with_measured(problem, measured, calls=1), rates=rates)
    return forecast(
        cls.__name__, problem, memory_budget=budget, workload=load, operations_per_s=operations, notes=notes
    )


def _pipeline(pipe_or_path: Any, dtype: torch.dtype | None) -> tuple[Any, tuple[str, ...]]:
    """A pipeline, and what to say of it."""
    is_place = isinstance(pipe_or_path, (str, Path))
    if isinstance(pipe_or_path, type) or not (is_place or hasattr(pipe_or_path, "__dict__")):
        raise TypeError(
            f"plan_omni_offload takes a pipeline, its folder or the name of a repository, but it was given "
            f"{pipe_or_path!r}."
        )
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype is {dtype!r}, but a torch.dtype is needed, such as torch.bfloat16.")
    if not is_place:
        if dtype is not None:
            raise ValueError("dtype is for configurations, but a pipeline was given, which has dtypes; leave it out.")
        return pipe_or_path, ()
    chosen = torch.bfloat16 if dtype is None else dtype
    name = str(chosen).removeprefix("torch.")
    return build_blueprint(pipe_or_path, dtype=chosen), (f"Sizes are those of weights that are loaded in {name}",)


def _platform(device: torch.device | str | int | None) -> Platform | None:
    """The device that the pipeline would run on, if it has memory of its own."""
    if device is None and not torch.accelerator.is_available():
        return None
    platform = platform_for(resolve_device(device))
    return platform if platform.is_asynchronous else None


def _measured(platform: Platform, costs: tuple[ComponentCost, ...], sizes: Mapping[str, int | None]) -> Measured | None:
    """What the mode "auto" measured of this pipeline, in a call of the same sizes."""
    given = {name: value for name, value in sizes.items() if value is not None}
    return Profile(default_path()).measured(pipeline_key(platform.name, costs, given))


def _rates(link: float | None, platform: Platform | None) -> Rates:
    """The link as it was given, or measured before, or assumed."""
    if link is not None:
        return Rates(link, source="given")
    found = None if platform is None else Profile(default_path()).rates(platform.name)
    return ASSUMED_RATES if found is None else found


def _rate(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r} ({a_type(value)}), but a number is needed.")
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} is {value}, but it must be finite and more than 0.")
    return float(value)
