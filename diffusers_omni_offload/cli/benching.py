"""`omni-offload bench`: calls of a pipeline in several modes, measured side by side."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from diffusers_omni_offload.cli.errors import BadInput, Failed, arguments_are_to_blame, one_line
from diffusers_omni_offload.cli.models import DTYPES, CallFlags, find_model, one_of
from diffusers_omni_offload.cli.running import device_of
from diffusers_omni_offload.cli.showing import say, show
from diffusers_omni_offload.cli.strategy import AUTO, MODES, Strategy, StrategyFlags, strategy_of
from diffusers_omni_offload.messages import format_bytes
from diffusers_omni_offload.planning.times import format_seconds
from diffusers_omni_offload.platform import Platform, on_device, platform_for
from diffusers_omni_offload.tables import Table


@dataclass(frozen=True)
class BenchRequest:
    """What `bench` was asked for.

    Attributes:
        model: MODEL.
        modes: any of `MODES`, in the order in which they run.
        calls: measured ones in each mode, after one that isn't.
        prompt, device, dtype, call: as of `run`.
        memory_budget, host_memory_budget, profile: for "auto", as of `run`.
        as_json: print JSON.
    """

    model: str
    modes: tuple[str, ...]
    calls: int
    prompt: str
    device: str | None = None
    dtype: str | None = None
    call: CallFlags = field(default_factory=CallFlags)
    memory_budget: str | None = None
    host_memory_budget: str | None = None
    profile: bool = True
    as_json: bool = False


@dataclass(frozen=True)
class Outcome:
    """A mode's figures.

    Attributes:
        mode: the mode.
        call_seconds: of a call, the median.
        peak_nbytes: device bytes at the most, of the whole process; None on the CPU.
        moved_nbytes: bytes that a call has copied for the offload.
        pinned_nbytes: host bytes that are page-locked.
        is_equal: whether the output is that of the first mode, bit for bit.
        refusal: why the mode couldn't run; the rest is None then.
    """

    mode: str
    call_seconds: float | None = None
    peak_nbytes: int | None = None
    moved_nbytes: int | None = None
    pinned_nbytes: int | None = None
    is_equal: bool | None = None
    refusal: str | None = None


def bench(request: BenchRequest) -> None:
    """Measure, and print a table.

    Raises:
        BadInput: the request can't be carried out as it is.
        Failed: no mode could run, or outputs differ.
    """
    strategies = _strategies(request)
    one_of("--dtype", request.dtype, DTYPES)
    model = find_model(request.model)
    arguments = model.arguments(request.call)
    if "output_type" in arguments:
        arguments["output_type"] = "np"
    device = device_of(request.device, model)
    pipe = model.load(request.dtype)
    if hasattr(pipe, "set_progress_bar_config"):
        pipe.set_progress_bar_config(disable=True)

    def call() -> np.ndarray:
        with arguments_are_to_blame():
            result = pipe(**arguments, **model.request_of(request.prompt, 0))
        return np.asarray(result[0] if isinstance(result, tuple) else next(iter(result.values())))

    platform = platform_for(device)
    size = model.size(request.call)
    runs = []
    with on_device(device):
        for mode, strategy in strategies.items():
            runs.append(_run(mode, partial(strategy.enable, pipe, device, size), pipe, platform, call, request.calls))
    outcomes = _compared(runs)
    if request.as_json:
        figures = "modelled" if platform.is_modelled else "measured"
        found = {"device": platform.name, "figures": figures, "modes": [asdict(outcome) for outcome in outcomes]}
        say(json.dumps(found, indent=2))
    else:
        show(_table(request, platform, outcomes))
    if all(outcome.refusal is not None for outcome in outcomes):
        raise Failed("None of the modes could run.")
    if any(outcome.is_equal is False for outcome in outcomes):
        raise Failed("Outputs differ between modes; if the pipeline itself is deterministic, please report this.")


def _strategies(request: BenchRequest) -> dict[str, Strategy]:
    """The modes' strategies. BadInput if a mode is unknown, or a budget is given for none."""
    if not request.modes:
        raise BadInput(f"--modes is empty; choose from {', '.join(MODES)}.")
    has_budget = request.memory_budget is not None or request.host_memory_budget is not None
    if has_budget and AUTO not in request.modes:
        raise BadInput(f"A budget is for the mode {AUTO}, which isn't among --modes {','.join(request.modes)}; add it.")
    auto = StrategyFlags(
        AUTO,
        memory_budget=request.memory_budget,
        host_memory_budget=request.host_memory_budget,
        profile=request.profile,
    )
    return {mode: strategy_of(auto if mode == AUTO else StrategyFlags(mode)) for mode in request.modes}


def _run(
    mode: str,
    enable: Callable[[], Any],
    pipe: Any,
    platform: Platform,
    call: Callable[[], np.ndarray],
    calls: int,
) -> tuple[Outcome, np.ndarray | None]:
    """Run one mode; its figures and its output. The pipeline is on the CPU before and after."""
    try:
        try:
            handle = enable()
        except BadInput as error:
            return Outcome(mode, refusal=one_line(error)), None
        call()  # buffers are allocated then, and "auto" measures
        before = 0 if handle is None else handle.bytes_moved
        if platform.is_asynchronous:
            platform.restart_peak()
        timed = [_timed(platform, call) for _ in range(calls)]
        outcome = Outcome(
            mode,
            call_seconds=statistics.median(seconds for seconds, _ in timed),
            peak_nbytes=platform.peak_bytes() if platform.is_asynchronous else None,
            moved_nbytes=0 if handle is None else (handle.bytes_moved - before) // calls,
            pinned_nbytes=0 if handle is None else handle.pinned_bytes,
        )
        return outcome, timed[-1][1]
    except torch.OutOfMemoryError as error:
        return Outcome(mode, refusal=f"Out of device memory: {one_line(error)}"), None
    finally:
        pipe.disable_omni_offload()
        pipe.to("cpu")
        platform.return_freed_memory()


def _timed(platform: Platform, call: Callable[[], np.ndarray]) -> tuple[float, np.ndarray]:
    """Seconds of a call, by the device's clock where it has one, and its output."""
    if not platform.is_asynchronous:
        begun = time.perf_counter()
        output = call()
        return time.perf_counter() - begun, output
    begin, end = platform.event(enable_timing=True), platform.event(enable_timing=True)
    begin.record(platform.current_stream())
    output = call()
    end.record(platform.current_stream())
    platform.synchronize()
    return begin.elapsed_time(end) / 1e3, output


def _compared(runs: Sequence[tuple[Outcome, np.ndarray | None]]) -> list[Outcome]:
    """The figures, with whether the output is that of the first mode that ran."""
    first = next((output for _, output in runs if output is not None), None)
    return [
        outcome if output is None or first is None else replace(outcome, is_equal=np.array_equal(output, first))
        for outcome, output in runs
    ]


def _table(request: BenchRequest, platform: Platform, outcomes: Sequence[Outcome]) -> Table:
    modelled = "modelled " if platform.is_modelled else ""
    ran = [outcome for outcome in outcomes if outcome.refusal is None]
    fastest = min((outcome.call_seconds or 0.0 for outcome in ran), default=0.0)
    headers = ("mode", f"{modelled}call", "/ fastest", "peak on device", "copied a call", "page-locked", "output")
    rows = [
        (
            outcome.mode,
            format_seconds(outcome.call_seconds or 0.0),
            f"{(outcome.call_seconds or 0.0) / fastest:.2f}" if fastest else "-",
            "-" if outcome.peak_nbytes is None else format_bytes(outcome.peak_nbytes),
            format_bytes(outcome.moved_nbytes or 0),
            format_bytes(outcome.pinned_nbytes or 0),
            "equal" if outcome.is_equal else "DIFFERS",
        )
        for outcome in ran
    ]
    notes = [f"{outcome.mode}: {outcome.refusal}" for outcome in outcomes if outcome.refusal is not None]
    title = f"{request.model} on {platform.name}: the median of {request.calls} calls after the first one"
    return Table(title, headers, rows, notes, left_end=1)
