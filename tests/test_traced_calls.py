"""Traces of calls on the simulated device: what they say is what the device did."""

from __future__ import annotations

from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch

from diffusers_omni_offload.topology.plan import ResolvedPlan
from diffusers_omni_offload.tracing import Trace
from tests.ranks import RankPool, answers
from tests.tiny import build_toy, run

LINK = 1e6


def traced(device: torch.device, sim: ModuleType, **arguments: Any) -> tuple[Trace, ResolvedPlan]:
    """The trace of a second call, and the plan."""
    sim.configure(h2d_bytes_per_s=LINK, copy_latency_s=0.0)
    pipe, call = build_toy(6, text_encoder=True, vae=True)
    handle = pipe.enable_omni_offload(**arguments)
    run(pipe, call)
    loads, moved = handle.loads, handle.bytes_moved
    with handle.trace() as trace:
        run(pipe, call)
    assert sum(forward.loads for forward in trace.forwards("transformer")) == handle.loads - loads
    assert trace.moved_nbytes == handle.bytes_moved - moved
    return trace, handle.plan


def test_what_is_streamed_is_in_the_trace(device: torch.device, sim: ModuleType) -> None:
    trace, plan = traced(device, sim, mode="layer", layer_options={"dit": {"resident_layers": 2}})
    (stack,) = plan.stacks
    blocks = trace.blocks("transformer")
    assert [block.path for block in blocks] == [stack.path(index) for index in range(6)]
    assert [block.loads > 0 for block in blocks] == [index not in stack.resident for index in range(6)]
    for block in blocks:
        assert block.runs == len(trace.forwards("transformer"))
        assert block.copy_seconds == pytest.approx(block.nbytes / LINK, rel=1e-3)
    assert trace.link_bytes_per_s == pytest.approx(LINK, rel=1e-3)
    # A slow link: copies are all there is.
    assert trace.busy["copy"] > 0.9 and trace.wait_seconds > 0 and trace.summary().rows[1][-1] == "transfer"
    assert trace.figures == "modelled" and trace.components[0] == "text_encoder"


def test_what_is_swapped_is_in_the_trace(device: torch.device, sim: ModuleType) -> None:
    trace, _ = traced(device, sim, components={"dit": "layer", "text_encoder": "module", "vae": "module"})
    rows = {row[0]: row for row in trace.summary().rows}
    assert list(rows) == ["text_encoder", "transformer", "vae"] and rows["text_encoder"][5] == rows["vae"][5] == "1"
    assert trace.peak_nbytes > 0 and len(trace.memory) >= 3 * len(trace.forwards())


def test_measured_figures_are_those_of_the_device(device: torch.device, sim: ModuleType) -> None:
    trace, plan = traced(device, sim, mode="layer")
    (stack,) = plan.stacks
    dit = trace.measured({"transformer": [stack.path(index) for index in range(6)]}).components["transformer"]
    steady = trace.steady_forward()
    assert (
        dit.forwards == len(trace.forwards("transformer"))
        and len(dit.block_seconds) == 6
        and min(dit.block_seconds) > 0
    )
    assert dit.seconds == pytest.approx(steady.seconds, rel=0.05)
    assert dit.compute_seconds + dit.wait_seconds == pytest.approx(dit.seconds, rel=0.05)


def test_a_call_is_drawn(device: torch.device, sim: ModuleType) -> None:
    pytest.importorskip("matplotlib")
    trace, _ = traced(device, sim, mode="layer")
    lanes, memory = trace.plot().axes
    assert [label.get_text() for label in lanes.get_yticklabels()] == ["copy", "wait", "compute", "component"]
    assert memory.get_xlabel().endswith("(modelled)") and "none" not in [text.get_text() for text in lanes.texts]


def gathered_call(rank: int, size: int) -> Trace:
    """One rank's work: the trace of a call whose blocks are gathered."""
    from tests import simdevice

    # Shares come slowly, so that the fabric's part and the link's can be told apart.
    simdevice.configure(h2d_bytes_per_s=LINK, copy_latency_s=0.0, fabric_bytes_per_s=2 * LINK, fabric_latency_s=0.0)
    pipe, call = build_toy(4)
    handle = pipe.enable_omni_offload(
        "layer", layer_options={"dit": {"weight_transfer": "allgather"}}, device=torch.device("sim", 0)
    )
    with handle.trace() as trace:
        run(pipe, call)
    pipe.disable_omni_offload()
    return trace


@pytest.mark.processes
def test_what_is_gathered_is_in_the_trace_of_each_rank() -> None:
    with RankPool(2, device="sim") as pool:
        traces = answers(pool.run(gathered_call))
    for trace in traces:
        assert {span.lane for span in trace.spans} == {"component", "compute", "wait", "copy", "gather"}
        for block in trace.blocks("transformer"):
            (copy, *_), (gather, *_) = (
                [span for span in trace.spans if span.name == block.path and span.lane == lane]
                for lane in ("copy", "gather")
            )
            assert copy.nbytes < 0.6 * gather.nbytes == 0.6 * block.nbytes and block.copy_seconds > copy.seconds
            # What is gathered is there when the block computes.
            first = next(span for span in trace.spans if span.name == block.path and span.lane == "compute")
            assert gather.end <= first.begin + 1e-9 and copy.end < gather.end
        gathers = [span for span in trace.spans if span.lane == "gather"]
        assert all(before.end <= after.begin + 1e-9 for before, after in pairwise(gathers))
        assert trace.busy["gather"] > 0 and "Gathered from ranks" in str(trace.summary())
        assert trace.moved_nbytes < trace.gathered_nbytes
