"""Modelled steps of several ranks: each with all weights in its host memory, or all-gather of a share from each.

The blocks are tiny and stand for ones of `BLOCK_BYTES`: rates and the size of a chunk are scaled down as they are, so
that fixed costs weigh as little as with real ones. Bytes and rates are scaled up again where they are shown.

The model's host link and fabric are apart. Where gathers cross the same PCIe link as the copies, take the link as
shared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from diffusers_omni_offload.backends.distributed import DistributedLayerwiseBackend
from diffusers_omni_offload.streaming.gather import CHUNK_NBYTES
from tests import simdevice
from tests.benchmarks.stacks import StackPipeline, block_nbytes, build
from tests.benchmarks.steps import LONG_BLOCKS, Step, steady_step
from tests.benchmarks.tables import format_table
from tests.ranks import RankPool, answers

#: A block of Wan 2.2 A14B in bfloat16, about; 40 of them.
BLOCK_BYTES = 700e6
NUM_BLOCKS = 40
SIZES = (1, 2, 4, 8)

#: Bytes per second: of a host link, and what a rank receives from the others.
LINK = 16e9
FABRICS: Mapping[str, float] = {"NVLink-like": 50e9, "PCIe-like": 12e9}

#: Time of a rank's copy of a whole block over a link of its own by the block's compute.
RATIOS = (2.0, 1.0, 0.5)

LOCAL, GATHERED = "rank-local", "allgather"
SECONDS = 500.0
"""For all ranks of one run."""


@dataclass(frozen=True)
class Rates:
    """What a run is modelled with.

    Attributes:
        ratio: see `RATIOS`.
        link: a rank's part of its host link, bytes per second.
        fabric: bytes that a rank receives per second.
    """

    ratio: float
    link: float = LINK
    fabric: float = FABRICS["NVLink-like"]

    @property
    def compute(self) -> float:
        """Seconds of a block's compute."""
        return BLOCK_BYTES / LINK / self.ratio

    def ideal(self, transfer: str, size: int) -> float:
        """Seconds of a block if compute, copy and gather overlap fully. Rank-local copies all and gathers nothing."""
        copied = BLOCK_BYTES / size if transfer == GATHERED else BLOCK_BYTES
        gathered = BLOCK_BYTES * (size - 1) / size if transfer == GATHERED else 0.0
        return max(self.compute, copied / self.link, gathered / self.fabric)


@dataclass(frozen=True)
class Found:
    """What one transfer takes.

    Attributes:
        host_bytes: page-locked bytes of a rank.
        link_bytes, fabric_bytes: what a rank gets in a step, from its host memory and from the other ranks.
        steps: a step for each of the rates; in `computes` a resident one.
    """

    host_bytes: float
    link_bytes: float
    fabric_bytes: float
    steps: tuple[Step, ...]
    computes: tuple[float, ...]


def measure(rank: int, size: int, transfer: str, rates: Sequence[Rates], num_blocks: int, width: int) -> Found:
    """A rank's part of a run; each rank has to make it."""
    device = torch.device("sim", 0)
    simdevice.configure(verify_source=0)
    pipe = build("Wan-like", num_blocks, width=width)
    scale = BLOCK_BYTES / block_nbytes(pipe.transformer.blocks()[0])
    flops = _flops_per_s(build("Wan-like", num_blocks, width=width).to(device), rates, num_blocks)
    with mock.patch.object(DistributedLayerwiseBackend, "chunk_nbytes", round(CHUNK_NBYTES / scale)):
        handle = pipe.enable_omni_offload("layer", device=device, layer_options={"dit": {"weight_transfer": transfer}})
    steps, moved = [], (0.0, 0.0)
    with handle.call():
        steady_step(pipe, device, warm=0, measured=1)  # learns the order
        for rate, (flops_per_s, _) in zip(rates, flops, strict=True):
            simdevice.configure(
                flops_per_s=flops_per_s, h2d_bytes_per_s=rate.link / scale, fabric_bytes_per_s=rate.fabric / scale
            )
            before = simdevice.stats()
            seconds = steady_step(pipe, device, warm=1, measured=2)
            after = simdevice.stats()
            moved = tuple((after[name] - before[name]) / 3 * scale for name in ("h2d_bytes", "fabric_bytes"))
            steps.append(Step(seconds, num_blocks * rate.ideal(transfer, size)))
    host_bytes = handle.pinned_bytes * scale
    handle.disable()
    return Found(host_bytes, *moved, tuple(steps), tuple(compute for _, compute in flops))


def run(pool: RankPool, transfer: str, rates: Sequence[Rates], num_blocks: int = NUM_BLOCKS, width: int = 64) -> Found:
    """What all ranks of a pool find: the slowest one's steps."""
    found = answers(pool.run(measure, transfer, tuple(rates), num_blocks, width, timeout=SECONDS, group_timeout=60.0))
    return max(found, key=lambda one: sum(step.seconds for step in one.steps))


def tables(sizes: Sequence[int] = SIZES, **stack: Any) -> Iterator[str]:
    """A table with a host link for each rank, one with a host link for all, and what they say."""
    rows: dict[bool, list[list[str]]] = {False: [], True: []}
    for size in sizes:
        with RankPool(size, device="sim") as pool:
            for is_shared, row in _rows(pool, **stack):
                rows[is_shared].append(row)
    header = ["ranks, transfer, fabric", "host/rank", "link/step", "fabric/step"]
    header += [f"{ratio:g}" for ratio in RATIOS]
    blocks = f"{stack.get('num_blocks', NUM_BLOCKS)} blocks of {_gigabytes(BLOCK_BYTES)}"
    for is_shared, title in {False: "for each rank", True: "that all ranks share"}.items():
        title = f"modelled step / compute (ideal), by copy / compute: {blocks}, a host link of 16 GB/s {title}"
        yield format_table(title, header, rows[is_shared])
    yield NOTES


NOTES = """\
host/rank: page-locked. link/step, fabric/step: what a rank gets from its host memory, and from the others.
Ideal: max(compute, copy, gather), of all bytes (rank-local), or of 1/N over the link and (N-1)/N over the fabric.
How it grows with N: all-gather divides a rank's host memory and copies by N, and its gathers grow to the whole block.
So a step comes to max(compute, block / fabric), whatever the link. Where each rank has a link of its own, that is a
gain if the fabric is faster than the link; with a slower one only while (N-1)/N < fabric / link (2 ranks at 12 by 16
GB/s), and beyond that all that is saved is memory. Over a shared link rank-local takes N times as long, and all-gather
as long as one rank alone (or as its gathers), because all bytes cross the link once for all ranks together.
"""


def _rows(pool: RankPool, **stack: Any) -> Iterator[tuple[bool, list[str]]]:
    """(whether the ranks share a host link, row)."""
    links = {False: LINK, True: LINK / pool.size}
    for transfer in (LOCAL, GATHERED) if pool.size > 1 else (LOCAL,):
        fabrics = FABRICS if transfer == GATHERED else {"": FABRICS["NVLink-like"]}
        cases = [(shared, name) for shared in links for name in fabrics]
        rates = [Rates(ratio, links[shared], fabrics[name]) for shared, name in cases for ratio in RATIOS]
        found = run(pool, transfer, rates, **stack)
        for number, (shared, name) in enumerate(cases):
            part = slice(number * len(RATIOS), (number + 1) * len(RATIOS))
            times = [
                f"{step.seconds / compute:.2f} ({step.ideal / compute:.2f})"
                for step, compute in zip(found.steps[part], found.computes[part], strict=True)
            ]
            moved = map(_gigabytes, (found.host_bytes, found.link_bytes, found.fabric_bytes))
            fabric = f", {name} {fabrics[name] / 1e9:g} GB/s" if name else ""
            yield shared, [f"{pool.size}, {transfer}{fabric}", *moved, *times]


def _flops_per_s(pipe: StackPipeline, rates: Sequence[Rates], num_blocks: int) -> list[tuple[float, float]]:
    """For each of the rates: how many operations per second give its compute, and a resident step's seconds then."""
    device = pipe.transformer.device

    def compute(flops_per_s: float) -> float:
        simdevice.configure(flops_per_s=flops_per_s)
        return steady_step(pipe, device, warm=0, measured=1)

    found, flops_per_s = {}, LONG_BLOCKS
    for wanted in {rate.compute for rate in rates}:
        for _ in range(2):  # once more, because kernels have a fixed cost, too
            flops_per_s *= compute(flops_per_s) / (wanted * num_blocks)
        found[wanted] = flops_per_s, compute(flops_per_s)
    return [found[rate.compute] for rate in rates]


def _gigabytes(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB"
