"""Pipelines whose blocks have any size and any modelled time, and choices of modes carried out on them.

Everything runs on the simulated device: times are modelled.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from diffusers import DiffusionPipeline
from diffusers.configuration_utils import ConfigMixin
from diffusers.models.modeling_utils import ModelMixin
from torch import nn

import diffusers_omni_offload
from diffusers_omni_offload.declarations import OffloadPlan
from diffusers_omni_offload.planning.choice import Choice
from diffusers_omni_offload.planning.costs import BlockCost, ComponentCost, Problem, Rates
from diffusers_omni_offload.weights.leaves import ALIGNMENT
from tests import simdevice

#: Modelled operations per second: few enough that a block of any modelled time is quick to compute.
OPERATIONS_PER_S = 1e7
#: Elements of what the components hand on.
_WIDTH = 16
#: So many of them there are at the most.
_SMALL_TENSORS = 6
#: The simulated device counts allocations in multiples of this, as torch's allocators do.
ALLOCATION = 512


def round_up(nbytes: int, unit: int) -> int:
    """The next multiple of `unit`."""
    return -(-nbytes // unit) * unit


@dataclass(frozen=True)
class Work:
    """Weights and modelled compute of a block, or of what a component does outside of blocks.

    Attributes:
        leaves: bytes of each weight, multiples of 4 and at least 64.
        seconds: modelled compute.
    """

    leaves: tuple[int, ...]
    seconds: float

    @property
    def packed_nbytes(self) -> int:
        """Bytes of the weights in one buffer."""
        return sum(round_up(nbytes, ALIGNMENT) for nbytes in self.leaves)

    @property
    def allocated_nbytes(self) -> int:
        """Device bytes of the weights, each on its own."""
        return sum(round_up(nbytes, ALLOCATION) for nbytes in self.leaves)


@dataclass(frozen=True)
class Part:
    """One component.

    Attributes:
        blocks: in order; empty for a VAE.
        outside: what comes after the blocks.
        activation_nbytes: device bytes beside weights while it runs, but for a few small tensors.
    """

    blocks: tuple[Work, ...]
    outside: Work
    activation_nbytes: int


@dataclass(frozen=True)
class Machine:
    """The modelled rates.

    Attributes:
        link_bytes_per_s: copies.
        copy_latency_s: a copy, besides.
        launch_overhead_s: host time of each kernel and copy.
        kernel_overhead_s: device time of each kernel.
        drift: the link is slower or faster by up to this share, and changes before every block.
    """

    link_bytes_per_s: float
    copy_latency_s: float = 1e-5
    launch_overhead_s: float = 2e-6
    kernel_overhead_s: float = 1e-6
    drift: float = 0.0

    def configure(self) -> None:
        """Make the simulated device such a machine."""
        simdevice.configure(
            h2d_bytes_per_s=self.link_bytes_per_s,
            d2h_bytes_per_s=self.link_bytes_per_s,
            pageable_bytes_per_s=self.link_bytes_per_s / 4,
            copy_latency_s=self.copy_latency_s,
            launch_overhead_s=self.launch_overhead_s,
            kernel_overhead_s=self.kernel_overhead_s,
            flops_per_s=OPERATIONS_PER_S,
            mem_bytes_per_s=1e15,
            verify_source=0,
        )


@dataclass(frozen=True)
class Case:
    """A pipeline and a machine, as they are: what a planner is told may be something else.

    Attributes:
        parts: by path: "transformer", and "transformer_2", "text_encoder", "vae" where there are such.
        machine: the rates.
        steps: forwards of each DiT in a call.
        budget_nbytes: device bytes that the pipeline may take.
        seed: of the drift.
    """

    parts: dict[str, Part]
    machine: Machine
    steps: int = 8
    budget_nbytes: int = 1 << 40
    seed: int = 0

    def problem(self, factor: Callable[[], float] = lambda: 1.0) -> Problem:
        """What a planner is told.

        Args:
            factor: what each block's seconds are multiplied with.
        """
        components = tuple(self._cost(path, part, factor) for path, part in self.parts.items())
        rates = Rates(self.machine.link_bytes_per_s, self.machine.copy_latency_s, "given")
        return Problem(components, rates, self.budget_nbytes)

    def _cost(self, path: str, part: Part, factor: Callable[[], float]) -> ComponentCost:
        selector = {"text_encoder": "text_encoder", "vae": "vae"}.get(path, "dit")
        return ComponentCost(
            path=path,
            role="encoder" if selector == "text_encoder" else selector,  # type: ignore[arg-type]
            selector=selector,
            nbytes=sum(work.packed_nbytes for work in (*part.blocks, part.outside)),
            blocks=tuple(
                BlockCost(work.packed_nbytes, work.seconds * factor(), work.allocated_nbytes) for work in part.blocks
            ),
            state_nbytes=part.outside.allocated_nbytes,
            may_keep_blocks=selector == "dit",
            seconds=part.outside.seconds,
            forwards=self.steps if selector == "dit" else 1,
            activation_nbytes=round_up(part.activation_nbytes, ALLOCATION) + _SMALL_TENSORS * ALLOCATION,
            class_name=f"{selector} of {len(part.blocks)}",
        )


@dataclass(frozen=True)
class Outcome:
    """What a call took, modelled.

    Attributes:
        steps: path of a DiT -> seconds of a steady forward, where there were several.
        blocks: path of a DiT -> seconds of each block's compute.
        call_seconds: the call.
        peak_nbytes: device bytes at the most, of the pipeline alone.
        moved_nbytes: bytes of weights that were copied to the device.
    """

    steps: dict[str, float]
    blocks: dict[str, list[float]]
    call_seconds: float
    peak_nbytes: int
    moved_nbytes: int


class WorkModule(nn.Module):
    """Weights of given sizes and compute of a given modelled time, `[16]` to the same shape."""

    def __init__(self, work: Work, activation_nbytes: int) -> None:
        super().__init__()
        self.leaves = nn.ParameterList(torch.full((nbytes // 4,), 0.01) for nbytes in work.leaves)
        # What the additions take is a part of it.
        self._operations = max(1, round(work.seconds * OPERATIONS_PER_S) - _WIDTH * len(work.leaves))
        self._activation_nbytes = max(activation_nbytes, self._operations)
        self.before: Callable[[], None] = lambda: None
        self.times: list[tuple[torch.Event, torch.Event]] = []
        self.is_timed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.before()
        if self.is_timed:
            begin, end = (torch.Event(device=x.device.type, enable_timing=True) for _ in range(2))
            begin.record()
        scratch = torch.empty(self._activation_nbytes, dtype=torch.uint8, device=x.device)
        scratch[: self._operations].fill_(1)
        for leaf in self.leaves:
            x = x + leaf[:_WIDTH]
        if self.is_timed:
            end.record()
            self.times.append((begin, end))
        return x


class WorkModel(ModelMixin, ConfigMixin):
    """A component: blocks, and a module after them."""

    config_name = "config.json"
    _no_split_modules: list[str] = []

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(WorkModule(work, part.activation_nbytes) for work in part.blocks)
        self.outside = WorkModule(part.outside, part.activation_nbytes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.outside(x)


class CasePipeline(DiffusionPipeline):
    """A `Case`'s pipeline: encode once, forwards of each DiT in turn, decode once."""

    model_cpu_offload_seq = "text_encoder->transformer->transformer_2->vae"
    _optional_components = ["transformer_2", "text_encoder", "vae"]
    _dit_modules = ["transformer", "transformer_2"]
    _encoder_modules = ["text_encoder"]
    _vae_modules = ["vae"]
    _offload_plan = OffloadPlan(
        block_attrs={"transformer": ("blocks",), "transformer_2": ("blocks",)},
        encoder_block_attrs={"text_encoder": ("blocks",)},
        resident_dit_paths=("transformer", "transformer_2"),
    )

    def __init__(
        self,
        transformer: WorkModel,
        transformer_2: WorkModel | None = None,
        text_encoder: WorkModel | None = None,
        vae: WorkModel | None = None,
    ) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, transformer_2=transformer_2, text_encoder=text_encoder, vae=vae)
        self.ends: dict[str, list[float]] = {}
        self.peak_nbytes = 0

    @torch.no_grad()
    def __call__(self, steps: int) -> torch.Tensor:
        """`[16]` on the device."""
        x = torch.zeros(_WIDTH, device=self._execution_device)
        if self.text_encoder is not None:
            x = self._run(self.text_encoder, x)
        self.ends = {}
        for path in ("transformer", "transformer_2"):
            dit = getattr(self, path)
            if dit is not None:
                for _ in range(steps):
                    x = self._run(dit, x)
                    self.ends.setdefault(path, []).append(simdevice.stream_time(torch.accelerator.current_stream()))
        if self.vae is not None:
            x = self._run(self.vae, x)
        self.maybe_free_model_hooks()
        return x

    def _run(self, component: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = component(x)
        # Whoever records may start torch's count anew at each component.
        self.peak_nbytes = max(self.peak_nbytes, torch.accelerator.max_memory_allocated())
        return x


def build(case: Case) -> CasePipeline:
    """The pipeline of a case, on the CPU."""
    pipe = CasePipeline(**{path: WorkModel(part).eval() for path, part in case.parts.items()})
    if case.machine.drift:
        drift = random.Random(case.seed)

        def change() -> None:
            share = 1 + case.machine.drift * drift.uniform(-1, 1)
            simdevice.configure(h2d_bytes_per_s=case.machine.link_bytes_per_s * share)

        for path in case.parts:
            for block in getattr(pipe, path).blocks:
                block.before = change
    return pipe


def carry_out(case: Case, choice: Choice, *, steps: int | None = None, is_timed: bool = False) -> Outcome:
    """Run a choice by hand and take its figures in the second call.

    Args:
        case: what to run.
        choice: how.
        steps: forwards of each DiT; the case's, if None.
        is_timed: whether to time blocks.

    Raises:
        torch.OutOfMemoryError: a capacity was set, and it doesn't do.
    """
    steps = case.steps if steps is None else steps
    device = torch.device("sim", 0)
    gc.collect()
    base = torch.accelerator.memory_allocated()
    pipe = build(case)
    case.machine.configure()
    arguments = choice.arguments()
    if arguments:
        diffusers_omni_offload.enable_omni_offload(pipe, **arguments)
    else:
        pipe.to(device)
    try:
        pipe(steps)
        timed = [block for path in case.parts for block in getattr(pipe, path).blocks] if is_timed else []
        for block in timed:
            block.is_timed = True
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        pipe.peak_nbytes = 0
        moved = pipe.omni_offload.bytes_moved if arguments else 0
        begin = simdevice.stats()["host_ns"]
        pipe(steps)
        torch.accelerator.synchronize()
        call_seconds = (simdevice.stats()["host_ns"] - begin) / 1e9
        peak = pipe.peak_nbytes - base
        blocks = {path: [_mean_seconds(block) for block in getattr(pipe, path).blocks] for path in pipe.ends}
        steady = steady_steps(pipe)
        moved = pipe.omni_offload.bytes_moved - moved if arguments else 0
        return Outcome(steady, blocks, call_seconds, peak, moved)
    finally:
        simdevice.check()
        if arguments:
            diffusers_omni_offload.disable_omni_offload(pipe)


def steady_steps(pipe: CasePipeline) -> dict[str, float]:
    """Path of a DiT -> seconds of a forward in the last call, without the first third of them."""
    found = {}
    for path, ends in pipe.ends.items():
        first = len(ends) // 3
        if len(ends) > 1:
            found[path] = (ends[-1] - ends[first]) / (len(ends) - 1 - first)
    return found


def _mean_seconds(block: WorkModule) -> float:
    times = [begin.elapsed_time(end) / 1e3 for begin, end in block.times[1:]]
    return sum(times) / len(times) if times else 0.0
