"""`omni-offload run`: call a pipeline, offloaded, for a prompt or for many."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from diffusers_omni_offload.cli.errors import (
    BadInput,
    Failed,
    arguments_are_to_blame,
    failures_are_sentences,
    input_is_to_blame,
)
from diffusers_omni_offload.cli.models import DTYPES, SOURCES, CallFlags, Model, find_model, one_of
from diffusers_omni_offload.cli.outputs import Output, output_for
from diffusers_omni_offload.cli.processes import Processes, started
from diffusers_omni_offload.cli.showing import say, show
from diffusers_omni_offload.cli.strategy import Strategy, StrategyFlags, strategy_of
from diffusers_omni_offload.demo import pick_device
from diffusers_omni_offload.messages import format_bytes
from diffusers_omni_offload.platform import resolve_device


@dataclass(frozen=True)
class RunRequest:
    """What `run` was asked for.

    Attributes:
        model: MODEL.
        output: the file to write.
        prompt, prompts: a prompt, or a file with one a line; one of the two.
        seed: of the noise; a prompt's index is added to it.
        device: where to run; None is the accelerator, and for the demo the CPU where there is none.
        dtype, source: see `Model.load`.
        fps: frames per second of a video.
        trace: a file for a trace of the first call.
        report: whether to print a report after the last call.
        call: arguments of the calls.
        strategy: how to offload.
    """

    model: str
    output: Path
    prompt: str | None = None
    prompts: Path | None = None
    seed: int = 0
    device: str | None = None
    dtype: str | None = None
    source: str = SOURCES[0]
    fps: int = 16
    trace: Path | None = None
    report: bool = False
    call: CallFlags = field(default_factory=CallFlags)
    strategy: StrategyFlags = field(default_factory=StrategyFlags)


def run(request: RunRequest) -> None:
    """Carry it out.

    Raises:
        BadInput: the request can't be carried out as it is. Nothing was loaded, if that could be known before.
        Failed: something went wrong on the way.
    """
    strategy, prompts = _check(request)
    flags = request.strategy
    with started(flags.data_parallel_size, flags.usp) as processes, failures_are_sentences():
        model = find_model(request.model)
        output = output_for(model, request.output, request.fps)
        arguments = model.arguments(request.call)
        device = device_of(request.device, model)
        pipe = model.load(request.dtype, request.source)
        if not processes.is_first and hasattr(pipe, "set_progress_bar_config"):
            pipe.set_progress_bar_config(disable=True)
        processes.share_tokens(pipe, device.type)
        handle = strategy.enable(pipe, device, model.size(request.call))
        _call_for_each(request, processes, model, pipe, handle, prompts, arguments, output)


def device_of(name: str | None, model: Model) -> torch.device:
    """The execution device; BadInput if it isn't there."""
    with input_is_to_blame():
        if name is None and model.is_demo:
            return pick_device()
        return resolve_device(name)


def _check(request: RunRequest) -> tuple[Strategy, list[str]]:
    """What can be known to be wrong before anything is loaded; the strategy and the prompts."""
    one_of("--dtype", request.dtype, DTYPES)
    one_of("--source", request.source, SOURCES)
    if (request.prompt is None) == (request.prompts is None):
        raise BadInput("Give either --prompt or --prompts, a file with a prompt on each line.")
    strategy = strategy_of(request.strategy)
    if strategy.is_resident and (request.trace is not None or request.report):
        flag = "--report" if request.report else "--trace"
        raise BadInput(f"{flag} is about offload, and with --mode resident there is none; leave one of them out.")
    if request.trace is not None and not request.trace.parent.is_dir():
        raise BadInput(f"--trace is {str(request.trace)!r}, but there is no folder {str(request.trace.parent)!r}.")
    return strategy, [request.prompt] if request.prompt is not None else _read(request.prompts)


def _read(path: Path | None) -> list[str]:
    assert path is not None
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"--prompts is {str(path)!r}, which can't be read: {error}.") from error
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise BadInput(f"--prompts is {str(path)!r}, which has no prompt in it; write one on each line.")
    return prompts


def _call_for_each(
    request: RunRequest,
    processes: Processes,
    model: Model,
    pipe: Any,
    handle: Any,
    prompts: list[str],
    arguments: dict[str, Any],
    output: Output,
) -> None:
    is_single = request.prompt is not None
    trace_to = request.trace
    for index, prompt in processes.share_of(prompts):
        # The noise is that of the prompt, whichever rank it comes to.
        call = {**arguments, **model.request_of(prompt, request.seed + (index or 0))}
        with _traced(handle, trace_to, processes.is_first), arguments_are_to_blame():
            result = pipe(**call)
        trace_to = None
        if index is not None and processes.writes:
            paths = output.write(result, None if is_single else index)
            say(f"wrote {', '.join(map(str, paths))}")
    if handle is None or not processes.is_first:
        return
    if request.report:
        show(handle.report())
    else:
        copied = f"{handle.loads} blocks and {handle.swaps} components were copied, {format_bytes(handle.bytes_moved)}"
        locked = f"{format_bytes(handle.pinned_bytes)} of host memory are page-locked"
        say(f"{copied}; {locked}" if handle.bytes_moved else "nothing was copied: all weights stayed on the device")


@contextmanager
def _traced(handle: Any, path: Path | None, is_first: bool) -> Iterator[None]:
    """Trace the body, and save that, if there is a path; on the first rank."""
    if handle is None or path is None or not is_first:
        yield
        return
    with handle.trace() as trace:
        yield
    try:
        trace.save(path)
    except OSError as error:
        raise Failed(f"{path} can't be written: {error.strerror or error}.") from error
    say(f"wrote {path}, which https://ui.perfetto.dev opens")
