"""`make gpu-check`: the main figures again, on this machine's accelerator, in a few minutes and without downloads.

A synthetic DiT of a few GB is streamed and compared with its resident run: same output, step time against
`max(compute, bytes / link)`, pinned bytes by weights, Python time per block call. Writes `results/<device>.json` and
`.txt`; says so and ends if there is no accelerator.
"""

from __future__ import annotations

import json
import logging
import re
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import diffusers_omni_offload
from tests.benchmarks.real import python_per_block
from tests.benchmarks.stacks import StackPipeline, block_nbytes, build
from tests.benchmarks.tables import format_table

RESULTS = Path(__file__).parent / "results"

#: What a simulated device is called in the results; its times come from a model.
SIMULATED = "simulated device (modelled)"


@dataclass(frozen=True)
class Size:
    """What is run.

    Attributes:
        num_blocks, width, dtype: of the DiT.
        tokens: numbers of tokens; few make a step transfer-bound, many compute-bound.
        forwards: measured ones.
        residents: blocks that are resident in a further run.
    """

    num_blocks: int = 40
    width: int = 1536
    dtype: torch.dtype = torch.bfloat16
    tokens: tuple[int, ...] = (256, 4096, 16384)
    forwards: int = 5
    residents: int = 20


def check(device: torch.device, size: Size) -> dict[str, Any]:
    """Run everything on `device` and return what was found: seconds, bytes, ratios; `modelled` if it is simulated."""
    report: dict[str, Any] = {
        "device": device_name(device),
        "modelled": device.type == "sim",
        "torch": torch.__version__,
        "num_blocks": size.num_blocks,
        "dtype": str(size.dtype).removeprefix("torch."),
        "runs": [],
    }
    with torch.device(device):
        pipe = build("Wan-like", size.num_blocks, width=size.width)
    pipe.to(size.dtype)
    pipe.to(device)
    report["weight_bytes"] = sum(block_nbytes(block) for block in pipe.transformer.blocks())
    resident = {tokens: _measure(pipe, device, tokens, size.forwards) for tokens in size.tokens}
    expected = {tokens: pipe(2, tokens).cpu() for tokens in size.tokens}
    pipe.to("cpu")
    report["link_bytes_per_s"] = link = _link(device, report["weight_bytes"] // size.num_blocks)

    for residents in (0, size.residents):
        options = {"dit": {"resident_layers": residents}} if residents else None
        handle = diffusers_omni_offload.enable_omni_offload(pipe, "layer", layer_options=options, device=device)
        (stack,) = handle.plan.stacks
        if not residents:
            report["pinned_by_weights"] = handle.pinned_bytes / report["weight_bytes"]
        for tokens in size.tokens:
            equal = bool(torch.equal(pipe(2, tokens).cpu(), expected[tokens]))
            with handle.call():
                step = _measure(pipe, device, tokens, size.forwards)
            ideal = max(resident[tokens], stack.streamed_bytes / link)
            report["runs"].append(
                {
                    "tokens": tokens,
                    "residents": residents,
                    "equal": equal,
                    "step_s": step,
                    "resident_step_s": resident[tokens],
                    "ideal_s": ideal,
                    "step_by_ideal": step / ideal,
                }
            )
        handle.disable()
    calls = python_per_block(device)
    report["python_us_per_block"] = calls.ours * 1e6
    report["group_offload_python_us_per_block"] = calls.other * 1e6
    return report


def _measure(pipe: StackPipeline, device: torch.device, tokens: int, forwards: int) -> float:
    """Seconds between the ends of forwards, by the device's events; the median."""
    x, context = pipe.inputs(tokens, device)
    events = [torch.Event(device=device.type, enable_timing=True) for _ in range(forwards + 1)]
    with torch.no_grad():
        for _ in range(2):
            pipe.transformer(x, context)
        events[0].record()
        for event in events[1:]:
            pipe.transformer(x, context)
            event.record()
    torch.accelerator.synchronize(device)
    times = [a.elapsed_time(b) / 1e3 for a, b in pairwise(events)]
    return statistics.median(times)


def _link(device: torch.device, nbytes: int, rounds: int = 8) -> float:
    """Bytes per second of pinned copies of a block's size to the device, one after another; the best."""
    source = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    events = [torch.Event(device=device.type, enable_timing=True) for _ in range(rounds + 1)]
    target.copy_(source, non_blocking=True)
    events[0].record()
    for event in events[1:]:
        target.copy_(source, non_blocking=True)
        event.record()
    torch.accelerator.synchronize(device)
    return nbytes / min(a.elapsed_time(b) / 1e3 for a, b in pairwise(events))


def device_name(device: torch.device) -> str:
    """What the device calls itself."""
    name: Callable[..., str] | None = getattr(torch.get_device_module(device), "get_device_name", None)
    if device.type == "sim":
        return SIMULATED
    return name(device) if name is not None else device.type


def describe(report: dict[str, Any]) -> str:
    """The report as text."""
    modelled = "modelled " if report["modelled"] else ""
    header = ["tokens", "residents", "equal", f"{modelled}step", "resident step", "ideal", "step / ideal"]
    rows = [
        [
            str(run["tokens"]),
            str(run["residents"]),
            "yes" if run["equal"] else "NO",
            *(f"{run[key] * 1e3:.2f} ms" for key in ("step_s", "resident_step_s", "ideal_s")),
            f"{run['step_by_ideal']:.3f}",
        ]
        for run in report["runs"]
    ]
    title = (
        f"{report['device']}, torch {report['torch']}: {report['num_blocks']} blocks, "
        f"{report['weight_bytes'] / 2**30:.2f} GiB in {report['dtype']}, "
        f"{modelled}link {report['link_bytes_per_s'] / 1e9:.1f} GB/s"
    )
    return format_table(title, header, rows) + (
        f"pinned bytes / streamed weights: {report['pinned_by_weights']:.4f}\n"
        f"Python per block call: {report['python_us_per_block']:.1f} us "
        f"(group offload with streams: {report['group_offload_python_us_per_block']:.1f} us)\n"
    )


def write(report: dict[str, Any], folder: Path) -> Path:
    """Write the report as JSON and as text, named after the device; returns the text's path."""
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^a-z0-9]+", "-", report["device"].lower()).strip("-")
    (folder / f"{name}.json").write_text(json.dumps(report, indent=2) + "\n")
    (folder / f"{name}.txt").write_text(describe(report))
    return folder / f"{name}.txt"


def main() -> int:
    """Run on the current accelerator. Returns the exit status: 1 if an output differed."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        print("no accelerator here")
        return 0
    logging.getLogger("diffusers_omni_offload").setLevel(logging.WARNING)
    report = check(torch.device(accelerator.type, torch.accelerator.current_device_index()), Size())
    path = write(report, RESULTS)
    print(path.read_text(), f"written to {path} and {path.with_suffix('.json')}", sep="\n")
    return 0 if all(run["equal"] for run in report["runs"]) else 1


if __name__ == "__main__":
    sys.exit(main())
