"""Real times of reading a checkpoint into staging buffers: against a memcpy, and beside compute.

The file is in the page cache, and there is no device: the copies from the staging buffers are made by nobody, as on an
accelerator, whose own engines make them. `python -m tests.benchmarks.staging` prints the figures.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from diffusers_omni_offload.messages import format_bytes
from diffusers_omni_offload.platform import CpuPlatform
from diffusers_omni_offload.streaming.slots import Slot
from diffusers_omni_offload.streaming.staging import Staging
from diffusers_omni_offload.weights.checkpoint import CheckpointFile
from diffusers_omni_offload.weights.pinning import PinnedBudget
from diffusers_omni_offload.weights.sources import BlockSource, LeafSource, Segment
from tests.benchmarks.real import SideBySide, alternate
from tests.benchmarks.tables import format_table

#: Leaves of a block: a few large ones, and small ones between them.
LEAVES = 8
_ALIGNMENT = 256


class _Event:
    """Has always come."""

    def record(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Any) -> float:
        return 0.0


class BesideCpu(CpuPlatform):
    """The CPU as the host of an accelerator that takes no time."""

    is_asynchronous = True

    def event(self, *, enable_timing: bool = False) -> Any:
        return _Event()


class StagedFile:
    """A checkpoint of equal blocks, and a `Staging` that brings them to nowhere.

    Args:
        folder: where the file is written.
        total_bytes: its size, about.
        blocks: how many.
    """

    def __init__(self, folder: Path, total_bytes: int, blocks: int) -> None:
        small, large = 1 << 12, (total_bytes // blocks - (LEAVES // 2 << 12)) // (LEAVES // 2) // 4096 * 4096
        tensors = {
            f"blocks.{block:02}.{leaf}": torch.full((small if leaf % 2 else large,), block + 1, dtype=torch.uint8)
            for block in range(blocks)
            for leaf in range(LEAVES)
        }
        save_file(tensors, folder / "weights.safetensors")
        self.file = CheckpointFile(folder / "weights.safetensors")
        self.blocks = [self._block(block) for block in range(blocks)]
        self.nbytes = sum(block.nbytes for block in self.blocks)
        platform = BesideCpu(torch.device("cpu"))
        self.staging = Staging(platform, PinnedBudget(False))
        self._copies = platform.stream()
        self._slot = Slot(0, platform)
        self._slot.buffer = torch.empty(self.blocks[0].nbytes, dtype=torch.uint8, device="meta")
        self._sources = [torch.full((block.nbytes,), 1, dtype=torch.uint8) for block in self.blocks]
        self._targets = [torch.full((self.blocks[0].nbytes,), 0, dtype=torch.uint8) for _ in range(2)]

    def _block(self, block: int) -> BlockSource:
        leaves, offset = [], 0
        for leaf in range(LEAVES):
            entry = self.file.entries[f"blocks.{block:02}.{leaf}"]
            segment = Segment(self.file, entry.start, entry.nbytes)
            leaves.append((offset, LeafSource((segment,), entry.dtype, entry.dtype, torch.Size(entry.shape))))
            offset += -(-entry.nbytes // _ALIGNMENT) * _ALIGNMENT
        return BlockSource(leaves, offset)

    def run(self, compute: Callable[[], object] = lambda: None) -> float:
        """Seconds to load each block in turn and compute with it, with the next ones expected."""
        begin = time.perf_counter()
        for position, block in enumerate(self.blocks):
            self.staging.load(block, self._slot, self._copies)
            self.staging.expect(self.blocks[position + 1 : position + 3])
            compute()
        seconds = time.perf_counter() - begin
        self.staging.settle()
        return seconds

    def memcpy(self) -> float:
        """Seconds to copy as many bytes from memory into two buffers in turn, all of it touched before."""
        begin = time.perf_counter()
        for position, source in enumerate(self._sources):
            self._targets[position % 2].copy_(source)
        return time.perf_counter() - begin

    def close(self) -> None:
        """Give thread, buffers and file back."""
        self.staging.release()
        self.file.close()


@contextmanager
def staged_file(total_bytes: int = 1 << 30, blocks: int = 16) -> Iterator[StagedFile]:
    """A file in a folder for a while, read once, so that it is in the page cache."""
    with tempfile.TemporaryDirectory() as folder:
        staged = StagedFile(Path(folder), total_bytes, blocks)
        try:
            staged.run()
            staged.memcpy()
            yield staged
        finally:
            staged.close()


def reading(staged: StagedFile, rounds: int = 5) -> SideBySide:
    """Seconds to stage the whole file, against a memcpy of as many bytes."""
    return alternate(staged.run, staged.memcpy, rounds)


def sleeping(seconds: float) -> Callable[[], object]:
    """Compute that takes no CPU, as an accelerator's."""
    return lambda: time.sleep(seconds)


def multiplying(seconds: float, width: int = 256) -> Callable[[], object]:
    """Compute on this CPU, about so long: products of matrices, without the GIL."""
    matrix, product = torch.full((width, width), 1 / width), torch.empty(width, width)

    def compute(count: int) -> None:
        for _ in range(count):
            torch.mm(matrix, matrix, out=product)

    compute(10)
    begin = time.perf_counter()
    compute(100)
    count = max(1, round(seconds / ((time.perf_counter() - begin) / 100)))
    return lambda: compute(count)


@dataclass(frozen=True)
class Overlap:
    """Seconds of a run with compute, of the compute alone, of the reads alone, and of what the machine can do at once.

    The last one is the same compute beside memcpys of as many bytes, on a thread that never waits.
    """

    total: float
    compute: float
    reads: float
    at_once: float

    @property
    def ratio(self) -> float:
        """The total by the longer of the two: 1 if they overlap fully, up to 2 if they don't."""
        return self.total / max(self.compute, self.reads)

    @property
    def ratio_to_machine(self) -> float:
        """The total by the time of compute and memcpys at once, which is all that a busy machine can do."""
        return self.total / max(self.compute, self.reads, self.at_once)

    @property
    def sum_ratio(self) -> float:
        """What the ratio would be without any overlap."""
        return (self.compute + self.reads) / max(self.compute, self.reads)


def beside_compute(
    staged: StagedFile,
    make: Callable[[float], Callable[[], object]],
    rounds: int = 5,
    enough: float = 0.0,
    patience: float = 20.0,
) -> Overlap:
    """The best time of each in several rounds.

    Args:
        staged: the file.
        make: makes a block's compute, given how many seconds it is to take; here a quarter more than a block's read.
        rounds: how many at least.
        enough: go on, for `patience` seconds at most, until a ratio was as low as this.
        patience: see `enough`.
    """
    blocks = len(staged.blocks)
    compute = make(1.25 * min(staged.run() for _ in range(3)) / blocks)

    def compute_alone() -> float:
        begin = time.perf_counter()
        for _ in range(blocks):
            compute()
        return time.perf_counter() - begin

    def at_once() -> float:
        begin = time.perf_counter()
        thread = threading.Thread(target=staged.memcpy)
        thread.start()
        compute_alone()
        thread.join()
        return time.perf_counter() - begin

    measures = (lambda: staged.run(compute), compute_alone, staged.run, at_once)
    best, done, deadline = Overlap(*[float("inf")] * 4), 0, time.monotonic() + patience
    while done < rounds or (best.ratio_to_machine > enough > 0 and time.monotonic() < deadline):
        best = Overlap(*(min(before, measure()) for before, measure in zip(astuple(best), measures, strict=True)))
        done += 1
    return best


def table(total_bytes: int = 1 << 30) -> str:
    """The figures."""
    with staged_file(total_bytes) as staged:
        read = reading(staged)
        rows = [
            [f"staging {format_bytes(staged.nbytes)} from the page cache", f"{read.ours:.3f} s"],
            ["memcpy of as many bytes", f"{read.other:.3f} s"],
            ["staging throughput / memcpy", f"{1 / read.ratio:.2f}"],
        ]
        for name, make in (("sleeps", sleeping), ("multiplies matrices", multiplying)):
            overlap = beside_compute(staged, make)
            rows += [
                [f"beside compute that {name}: total", f"{overlap.total:.3f} s"],
                ["  compute alone, reads alone", f"{overlap.compute:.3f} s, {overlap.reads:.3f} s"],
                ["  total / the longer one", f"{overlap.ratio:.2f}"],
                ["  total / the longer one, memcpys in the place of reads at once", f"{overlap.ratio_to_machine:.2f}"],
                ["  without any overlap", f"{overlap.sum_ratio:.2f}"],
            ]
    return format_table(f"real, CPU host only: a checkpoint's bytes, torch {torch.__version__}", ["what", "time"], rows)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(table())
