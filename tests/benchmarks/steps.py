"""Modelled step times against the ideal, `max(compute, streamed bytes / link)`, of us and of other ways to offload."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.hooks import remove_hook_from_module
from diffusers.hooks import apply_group_offloading

import diffusers_omni_offload
from tests import simdevice
from tests.benchmarks.stacks import StackPipeline, block_nbytes, build

#: Modelled operations per second: a block takes 4 to 7 ms, so fixed costs weigh as little as with blocks of real sizes.
LONG_BLOCKS = 2.5e8
#: And 10 times as many, as for small images: fixed costs of each copied tensor weigh more.
SHORT_BLOCKS = 2.5e9

#: Forwards before the measured ones, and measured.
WARM, MEASURED = 2, 3

#: Transfer time of all blocks by compute time of a step.
RATIOS = (0.25, 1.0, 1.5, 2.0, 3.0)
RESIDENT_SHARES = (0.0, 0.25, 0.5, 0.75)


@dataclass(frozen=True)
class Step:
    """A modelled step in seconds, and its ideal: from the configured rates, shapes and dtypes, and a resident run."""

    seconds: float
    ideal: float

    @property
    def ratio(self) -> float:
        """How many times the ideal step it takes."""
        return self.seconds / self.ideal


class Bench:
    """A family's stack on the simulated device; makes steps of it, each from the same weights.

    Args:
        family: a key of `stacks.FAMILIES`.
        num_blocks: blocks in all.
        width: features of the blocks.
        flops_per_s: modelled rate of the compute.

    Attributes:
        compute: modelled seconds of a resident step.
        block_bytes: bytes of each block, in order.
    """

    def __init__(self, family: str, num_blocks: int = 40, width: int = 64, flops_per_s: float = LONG_BLOCKS) -> None:
        self.family, self.num_blocks, self.width, self.flops_per_s = family, num_blocks, width, flops_per_s
        self.device = torch.device("sim", 0)
        self.configure()
        pipe = self._pipe()
        self.block_bytes = [block_nbytes(block) for block in pipe.transformer.blocks()]
        pipe.to(self.device)
        self.compute = steady_step(pipe, self.device)

    def configure(self) -> None:
        """Set the modelled rates; the plugin resets them before every test."""
        simdevice.configure(flops_per_s=self.flops_per_s, verify_source=0)

    def set_ratio(self, ratio: float) -> None:
        """Choose the link so that moving all blocks takes `ratio` times the compute of a step."""
        link = sum(self.block_bytes) / (ratio * self.compute)
        # As far apart as the defaults: a pageable copy has a quarter of the link.
        simdevice.configure(h2d_bytes_per_s=link, d2h_bytes_per_s=link, pageable_bytes_per_s=link / 4)

    def ideal(self, streamed: list[int] | None = None) -> float:
        """The ideal step in seconds, if `streamed` blocks (all, if None) have to be moved in every step."""
        moved = sum(self.block_bytes[i] for i in (range(self.num_blocks) if streamed is None else streamed))
        return max(self.compute, moved / simdevice.get_config("h2d_bytes_per_s"))

    def ours(self, *, residents: float = 0.0, policy: str = "spread", slots: int = 2) -> Step:
        """A step in the steady state of a call, with a share of the blocks resident."""
        pipe = self._pipe()
        count = round(residents * self.num_blocks)
        handle = diffusers_omni_offload.enable_omni_offload(
            pipe,
            "layer",
            layer_options={"dit": {"resident_layers": count}} if count else None,
            slots=slots,
            resident_policy=policy,
        )
        (stack,) = handle.plan.stacks
        assert len(stack.resident) == count
        with handle.call():
            seconds = steady_step(pipe, self.device)
        simdevice.check()
        handle.disable()
        return Step(seconds, self.ideal(list(stack.streamed)))

    def group_offload(self) -> Step:
        """diffusers' group offload of single blocks, with a stream and `record_stream`."""
        with _peer():
            pipe = self._pipe()
            apply_group_offloading(
                pipe.transformer,
                onload_device=self.device,
                offload_device=torch.device("cpu"),
                offload_type="block_level",
                num_blocks_per_group=1,
                use_stream=True,
                record_stream=True,
            )
            return Step(steady_step(pipe, self.device), self.ideal())

    def model_offload(self, steps: int = 8) -> Step:
        """accelerate's offload of whole models: the time of a call with `steps` steps, by steps.

        The whole model is on the device meanwhile, and is moved there and back once a call.
        """
        with _peer():
            pipe = self._pipe()
            pipe.enable_model_cpu_offload(device=self.device)
            pipe(1)
            begin = self._now()
            pipe(steps)
            seconds = (self._now() - begin) / steps
            remove_hook_from_module(pipe.transformer, recurse=True)
            return Step(seconds, self.ideal())

    def _pipe(self) -> StackPipeline:
        return build(self.family, self.num_blocks, width=self.width)

    def _now(self) -> float:
        torch.accelerator.synchronize()
        return simdevice.stats()["host_ns"] / 1e9


def steady_step(pipe: StackPipeline, device: torch.device, warm: int = WARM, measured: int = MEASURED) -> float:
    """Modelled seconds between the ends of forwards, which the host issues without waiting."""
    x, context = pipe.inputs(8, device)
    with torch.no_grad():
        for _ in range(warm):
            pipe.transformer(x, context)
        begin = simdevice.stream_time(torch.accelerator.current_stream())
        for _ in range(measured):
            pipe.transformer(x, context)
        end = simdevice.stream_time(torch.accelerator.current_stream())
    torch.accelerator.synchronize()
    return (end - begin) / measured


@contextmanager
def _peer() -> Iterator[None]:
    """Let others run without the race checker: what they leave unordered is not our business here."""
    with ExitStack() as stack:
        stack.callback(simdevice.configure, race=simdevice.get_config("race"))
        stack.callback(gc.collect)
        simdevice.configure(race=0)
        yield


def family_table(bench: Bench, slots: int = 2) -> list[list[str]]:
    """Rows of step / ideal: by share of residents and policy, a column for each ratio of transfer to compute."""
    rows = []
    for share in RESIDENT_SHARES:
        for policy in ("spread", "leading") if share else ("spread",):
            row = [f"{share:.0%} resident" + (f", {policy}" if share else "")]
            for ratio in RATIOS:
                bench.set_ratio(ratio)
                row.append(f"{bench.ours(residents=share, policy=policy, slots=slots).ratio:.3f}")
            rows.append(row)
    return rows


def peer_table(bench: Bench) -> list[list[str]]:
    """Rows of step / ideal with no resident blocks: us and the others, a column for each ratio."""
    ways: dict[str, Callable[[], Any]] = {
        "ours": bench.ours,
        "group offload (stream, record_stream)": bench.group_offload,
        "model offload, 8 steps a call (*)": bench.model_offload,
    }
    rows = []
    for name, way in ways.items():
        row = [name]
        for ratio in RATIOS:
            bench.set_ratio(ratio)
            row.append(f"{way().ratio:.3f}")
        rows.append(row)
    return rows
