"""Real times of this machine's CPU: Python per block call, packing, audit. Ratios come from rounds side by side."""

from __future__ import annotations

import gc
import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from diffusers.hooks import apply_group_offloading
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

import diffusers_omni_offload
from diffusers_omni_offload.handle import OffloadHandle
from diffusers_omni_offload.platform import CpuPlatform
from diffusers_omni_offload.weights.leaves import find_leaves
from diffusers_omni_offload.weights.packed import PackedMaster
from diffusers_omni_offload.weights.pinning import PinnedBudget
from tests import simdevice
from tests.benchmarks.stacks import StackPipeline, WanLikeBlock, build

#: Leaves and linear layers of the block whose call is timed.
LEAVES = 26
LINEAR_LAYERS = 10


@dataclass(frozen=True)
class SideBySide:
    """Times of two ways to do the same, in seconds, each the best of several interleaved rounds."""

    ours: float
    other: float
    rounds: tuple[tuple[float, float], ...]

    @property
    def ratio(self) -> float:
        """Ours by the other's."""
        return self.ours / self.other


def alternate(ours: Callable[[], float], other: Callable[[], float], rounds: int) -> SideBySide:
    """Run both in turn: a slow moment of the machine meets both."""
    pairs = tuple((ours(), other()) for _ in range(rounds))
    return SideBySide(min(a for a, _ in pairs), min(b for _, b in pairs), pairs)


# ---------------------------------------------------------------------- Python per block call


class TrivialBlock(WanLikeBlock):
    """A block of 26 leaves whose forward does nothing, so that a call takes what its hooks take."""

    def forward(self, hidden_states: torch.Tensor, context: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden_states, context


def trivial_pipeline(num_blocks: int, width: int = 8) -> StackPipeline:
    """A pipeline of `TrivialBlock`s, narrow, so that no time goes into moving bytes."""
    pipe = build("Wan-like", num_blocks, width=width)
    pipe.transformer.transformer_blocks = nn.ModuleList(TrivialBlock(width) for _ in range(num_blocks)).eval()
    assert all(len(find_leaves(block, "")) == LEAVES for block in pipe.transformer.blocks())
    return pipe


def python_per_block(device: torch.device, num_blocks: int = 12, rounds: int = 7) -> SideBySide:
    """CPU time of a block call: ours against diffusers' group offload with streams.

    Both issue their copies, events and waits to the device. On the simulated one its own cost is in both figures.
    """
    if device.type == "sim":
        simdevice.configure(race=0, verify_source=0, defer=0)
    ours = trivial_pipeline(num_blocks)
    handle = diffusers_omni_offload.enable_omni_offload(ours, "layer", device=device)
    theirs = trivial_pipeline(num_blocks)
    apply_group_offloading(
        theirs.transformer,
        onload_device=device,
        offload_device=torch.device("cpu"),
        offload_type="block_level",
        num_blocks_per_group=1,
        use_stream=True,
        record_stream=True,
    )
    try:
        _first_calls(ours, handle, device)
        with torch.no_grad(), handle.call():
            return alternate(_block_timer(ours, device), _block_timer(theirs, device), rounds)
    finally:
        handle.disable()


def python_per_block_with_lora(device: torch.device, num_blocks: int = 12, rounds: int = 7) -> tuple[SideBySide, int]:
    """CPU time of a block call: with a LoRA on every linear layer against without, and the leaves of such a block."""
    if device.type == "sim":
        simdevice.configure(race=0, verify_source=0, defer=0)
    with_lora, without = trivial_pipeline(num_blocks), trivial_pipeline(num_blocks)
    add_lora(with_lora)
    enable = diffusers_omni_offload.enable_omni_offload
    handles = [enable(pipe, "layer", device=device) for pipe in (with_lora, without)]
    leaves = len(find_leaves(with_lora.transformer.blocks()[0], ""))
    try:
        for pipe, handle in zip((with_lora, without), handles, strict=True):
            _first_calls(pipe, handle, device)
        with torch.no_grad(), handles[0].call(), handles[1].call():
            return alternate(_block_timer(with_lora, device), _block_timer(without, device), rounds), leaves
    finally:
        for handle in handles:
            handle.disable()


def add_lora(pipe: StackPipeline) -> None:
    """Put a LoRA of rank 1 on every linear layer of every block."""
    for block in pipe.transformer.blocks():
        names = [path for path, module in block.named_modules() if isinstance(module, nn.Linear)]
        inject_adapter_in_model(LoraConfig(r=1, target_modules=names), block)


def _first_calls(pipe: StackPipeline, handle: OffloadHandle, device: torch.device) -> None:
    """In a pipeline's first call its blocks are recorded, for the line that says what the copies did."""
    for _ in range(2):
        with torch.no_grad(), handle.call():
            pipe.transformer(*pipe.inputs(8, device))


def _block_timer(pipe: StackPipeline, device: torch.device) -> Callable[[], float]:
    x, context = pipe.inputs(8, device)
    transformer, count = pipe.transformer, len(pipe.transformer.blocks())

    def timed() -> float:
        transformer(x, context)
        # Of this thread alone: what else runs on the machine doesn't count.
        begin = time.thread_time()
        for _ in range(5):
            transformer(x, context)
        seconds = time.thread_time() - begin
        torch.accelerator.synchronize()
        return seconds / (5 * count)

    return timed


# ---------------------------------------------------------------------- packing


def packing(total_bytes: int = 1 << 30, blocks: int = 8, rounds: int = 3) -> SideBySide:
    """Seconds to pack blocks of `total_bytes` in all, against a memcpy of as many into freshly mapped memory.

    Each block is packed and then copied once, so that both meet the same moments of the machine.
    """
    width = _width_for(total_bytes // blocks)
    pairs = []
    for _ in range(rounds):
        packed, copied = [], []
        for index in range(blocks):
            ours, other = _pack_and_copy(width, index)
            packed.append(ours)
            copied.append(other)
        pairs.append((sum(packed), sum(copied)))
    best = min(pairs, key=lambda pair: pair[0] / pair[1])
    return SideBySide(*best, tuple(pairs))


def _width_for(nbytes: int) -> int:
    """The width at which a `WanLikeBlock` has about `nbytes`: 16 weights of width x width, as float32."""
    return int((nbytes / 4 / 16) ** 0.5) // 64 * 64


def _pack_and_copy(width: int, index: int) -> tuple[float, float]:
    with torch.device("meta"):
        block = WanLikeBlock(width)
    block.to_empty(device="cpu")
    for leaf in find_leaves(block, ""):
        leaf.tensor.data.fill_(index + 1.0)
    gc.collect()
    platform, budget = CpuPlatform(torch.device("cpu")), PinnedBudget(False)

    def pack() -> tuple[float, PackedMaster]:
        begin = time.perf_counter()
        master = PackedMaster(lambda: find_leaves(block, "block"), [block], "block", platform, budget)
        master.pack()
        return time.perf_counter() - begin, master

    def copy(source: torch.Tensor) -> float:
        begin = time.perf_counter()
        memory = mmap.mmap(-1, source.numel())
        torch.frombuffer(memory, dtype=torch.uint8).copy_(source)
        return time.perf_counter() - begin

    # The packing comes second in every other block, and so isn't always the one with the warmer source.
    if index % 2:
        source = torch.full((sum(leaf.tensor.nbytes for leaf in find_leaves(block, "")),), 1, dtype=torch.uint8)
        seconds = copy(source)
        return pack()[0], seconds
    ours, master = pack()
    return ours, copy(master.host)


def packing_profile(total_bytes: int = 1 << 28) -> dict[str, float]:
    """Milliseconds of the parts of packing one block of `total_bytes`."""
    from diffusers_omni_offload.weights.leaves import Layout
    from diffusers_omni_offload.weights.pinning import HostBuffer

    width = _width_for(total_bytes)
    with torch.device("meta"):
        block = WanLikeBlock(width)
    block.to_empty(device="cpu")
    for leaf in find_leaves(block, ""):
        leaf.tensor.data.fill_(1.0)
    marks = [("", time.perf_counter())]

    def mark(name: str) -> None:
        marks.append((name, time.perf_counter()))

    leaves = find_leaves(block, "")
    mark("find the leaves")
    layout = Layout([leaf.tensor for leaf in leaves])
    mark("lay them out")
    buffer = HostBuffer(layout.nbytes, CpuPlatform(torch.device("cpu")), PinnedBudget(False))
    mark("map the buffer")
    layout.copy_to(buffer.bytes)
    mark("copy")
    return {name: 1e3 * (now - before) for (_, before), (name, now) in pairwise(marks)}


# ---------------------------------------------------------------------- audit


@dataclass(frozen=True)
class Audit:
    """What one audit takes, and what bare Python takes on the same machine to read the same leaves."""

    seconds: float
    bare: float
    leaves: int
    modules: int

    @property
    def ms_per_1000_leaves(self) -> float:
        """Milliseconds for 1,000 leaves."""
        return 1e3 * self.seconds / self.leaves * 1000

    @property
    def ratio(self) -> float:
        """By the bare reading: the same on a slow machine and on a fast one."""
        return self.seconds / self.bare


def audit(num_blocks: int = 40, rounds: int = 400, lora: bool = False) -> Audit:
    """The CPU time of the best of several audits, as at the start of a call, of blocks with 26 leaves each.

    Args:
        num_blocks: blocks of the stack.
        rounds: audits, each beside a bare reading.
        lora: whether every linear layer of them has a LoRA, and so two leaves more.
    """
    pipe = build("Wan-like", num_blocks, width=8)
    if lora:
        add_lora(pipe)
    handle = diffusers_omni_offload.enable_omni_offload(pipe, "layer", device="cpu")
    blocks = pipe.transformer.blocks()
    leaves = [leaf.tensor for block in blocks for leaf in find_leaves(block, "")]
    modules = sum(1 for block in blocks for _ in block.modules())
    both = alternate(lambda: _cpu_time(handle.backend.audit), lambda: _cpu_time(lambda: _read(leaves)), rounds)
    handle.disable()
    return Audit(both.ours, both.other, len(leaves), modules)


def _read(leaves: list[torch.Tensor]) -> None:
    """What no audit can do without: where each leaf's bytes are, and of what kind."""
    for leaf in leaves:
        _ = leaf.data_ptr(), leaf.dtype, leaf.shape, leaf.stride()


def _cpu_time(work: Callable[[], object]) -> float:
    begin = time.thread_time()
    work()
    return time.thread_time() - begin
