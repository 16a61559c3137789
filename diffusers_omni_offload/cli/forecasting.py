"""`omni-offload plan`: what each mode would take of a pipeline, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass, field

from diffusers_omni_offload.cli.errors import input_is_to_blame
from diffusers_omni_offload.cli.models import DTYPES, CallFlags, find_model, one_of
from diffusers_omni_offload.cli.showing import say, show
from diffusers_omni_offload.planner import plan_omni_offload


@dataclass(frozen=True)
class PlanRequest:
    """What `plan` was asked for.

    Attributes:
        model: MODEL.
        memory_budget, host_memory_budget: sizes as text.
        link_gb_per_s: of copies from page-locked host memory, in 1e9 bytes a second.
        tflops: of the device in matrix products, in 1e12 operations a second.
        call: size and steps of a call.
        dtype, device: as of `run`.
        as_json: print JSON.
    """

    model: str
    memory_budget: str | None = None
    host_memory_budget: str | None = None
    link_gb_per_s: float | None = None
    tflops: float | None = None
    call: CallFlags = field(default_factory=CallFlags)
    dtype: str | None = None
    device: str | None = None
    as_json: bool = False


def plan(request: PlanRequest) -> None:
    """Print the plan.

    Raises:
        BadInput: a value is wrong, or there is no such pipeline.
    """
    one_of("--dtype", request.dtype, DTYPES)
    model = find_model(request.model)
    pipe = model.load(request.dtype) if model.is_demo else model.name
    with input_is_to_blame():
        forecast = plan_omni_offload(
            pipe,
            memory_budget=request.memory_budget,
            host_memory_budget=request.host_memory_budget,
            link_gb_per_s=request.link_gb_per_s,
            tflops=request.tflops,
            dtype=None if model.is_demo or request.dtype is None else DTYPES[request.dtype],
            device=request.device,
            **model.size(request.call),
        )
    if request.as_json:
        say(forecast.to_json())
    else:
        show(forecast)
