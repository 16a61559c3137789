"""What was measured, and a problem with it in the place of what was assumed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from diffusers_omni_offload.planning.costs import ComponentCost, Problem, Rates
from diffusers_omni_offload.streaming.recording import Span


@dataclass(frozen=True)
class MeasuredComponent:
    """What was measured of one component. Times of a forward are those of a steady one: the median without the first,
    if there are more.

    Attributes:
        forwards: how often it ran.
        seconds: one forward, waits included.
        wait_seconds: what the compute waited for blocks in one forward.
        outside_seconds: compute of one forward outside of blocks.
        block_seconds: compute of each block in one forward, in order; 0 for one that didn't run. Empty if none was
            timed apart.
        loads: how often a block of it, or the whole of it, came to the device.
        moved_nbytes: bytes that were copied from this host for that.
        activation_nbytes: device bytes beside weights at the most; 0 if unknown.
    """

    forwards: int
    seconds: float
    wait_seconds: float = 0.0
    outside_seconds: float = 0.0
    block_seconds: tuple[float, ...] = ()
    loads: int = 0
    moved_nbytes: int = 0
    activation_nbytes: int = 0

    @property
    def compute_seconds(self) -> float:
        """One forward without waits."""
        return self.outside_seconds + sum(self.block_seconds)


@dataclass(frozen=True)
class Measured:
    """What was measured of a pipeline.

    Attributes:
        components: path of a component that ran -> what was measured of it.
        link_bytes_per_s: rate of the copies; 0 if there were none.
        copy_latency_s: what a copy was taken to need besides.
        peak_nbytes: device bytes at the most; 0 if unknown.
    """

    components: Mapping[str, MeasuredComponent] = field(default_factory=dict)
    link_bytes_per_s: float = 0.0
    copy_latency_s: float = 1e-5
    peak_nbytes: int = 0


def measure(
    spans: Sequence[Span],
    blocks: Mapping[str, Sequence[str]] | None = None,
    *,
    activations: Mapping[str, int] | None = None,
    peak_nbytes: int = 0,
    copy_latency_s: float = 1e-5,
    since: int = 0,
) -> Measured:
    """The figures that a recording holds.

    Args:
        spans: the recording. A block's wait ends before its compute begins.
        blocks: path of a component -> paths of its blocks, in the order of `ComponentCost.blocks`. Other components are
            known by their own spans, and their blocks aren't timed apart.
        activations: path of a component -> device bytes beside weights at the most, if known.
        peak_nbytes: device bytes at the most, if known.
        copy_latency_s: what a copy needs besides the time of its bytes.
        since: number of the first forward whose times count, where there are any: since then nothing was changed.
    """
    blocks = blocks or {}
    owners = {path: component for component, paths in blocks.items() for path in paths}
    names = {*blocks, *(span.name for span in spans if span.lane == "component")}
    grouped: dict[str, list[Span]] = {}
    for span in spans:
        component = owners.get(span.name) or owner(span.name, names)
        if component is not None:
            grouped.setdefault(component, []).append(span)
    components = {
        component: _measure_component(mine, blocks.get(component, ()), (activations or {}).get(component, 0), since)
        for component, mine in grouped.items()
        if any(span.lane in ("component", "compute") for span in mine)
    }
    return Measured(components, link_rate(spans, copy_latency_s), copy_latency_s, peak_nbytes)


def owner(path: str, components: Iterable[str]) -> str | None:
    """The component that has what is at `path`, or that is there; None if it is in none of them."""
    holders = [name for name in components if path == name or path.startswith(f"{name}.")]
    return max(holders, key=len, default=None)


def link_rate(spans: Iterable[Span], copy_latency_s: float = 0.0) -> float:
    """Bytes a second of the copies from the host, while there was one; 0 if there was none."""
    copies = [span for span in spans if span.lane == "copy" and span.nbytes]
    total = sum(span.seconds for span in copies)
    seconds = total - len(copies) * copy_latency_s
    # A latency that the clock doesn't show isn't there.
    seconds = seconds if seconds > 0 else total
    return sum(span.nbytes for span in copies) / seconds if seconds > 0 else 0.0


def count_loads(spans: Iterable[Span]) -> int:
    """How often something came to the device: what is gathered is copied first, and that is one load."""
    counts = Counter((span.name, span.lane) for span in spans if span.lane in ("copy", "gather"))
    loads: dict[str, int] = {}
    for (name, _), count in counts.items():
        loads[name] = max(loads.get(name, 0), count)
    return sum(loads.values())


def with_measured(problem: Problem, measured: Measured, *, calls: int = 0) -> Problem:
    """`problem` with what was measured in the place of what was assumed. What wasn't measured stays.

    The compute of a component whose blocks weren't timed apart, since it ran as a whole, is divided among them by their
    bytes.

    Args:
        problem: what was assumed.
        measured: what was measured.
        calls: whole calls that were measured; 0 if it was a part of one, which doesn't say how often a component runs.
    """
    components = tuple(
        _with_measured(component, measured.components[component.path], calls)
        if component.path in measured.components
        else component
        for component in problem.components
    )
    rates = problem.rates
    if measured.link_bytes_per_s:
        rates = Rates(measured.link_bytes_per_s, measured.copy_latency_s, "measured")
    return replace(problem, components=components, rates=rates)


def _measure_component(
    spans: Sequence[Span], blocks: Sequence[str], activation_nbytes: int, since: int
) -> MeasuredComponent:
    forwards: dict[int, list[Span]] = {}
    for span in spans:
        if span.lane in ("component", "compute", "wait"):
            forwards.setdefault(span.forward, []).append(span)
    numbers = sorted(forwards)
    timed = [at for at in numbers if any(span.lane == "compute" for span in forwards[at])]
    if blocks and timed:
        # A recording that had enough blocks goes on with whole forwards, which say nothing of blocks and waits.
        numbers = [at for at in numbers if at <= timed[-1]]
    numbers = [at for at in numbers if at >= since] or numbers
    steady = [_Forward.of(forwards[number], blocks) for number in numbers][1 if len(numbers) > 1 else 0 :]
    loads = [span for span in spans if span.lane in ("copy", "gather")]
    return MeasuredComponent(
        forwards=len(forwards),
        seconds=median(forward.seconds for forward in steady),
        wait_seconds=median(forward.waits for forward in steady),
        outside_seconds=median(forward.outside for forward in steady),
        block_seconds=tuple(_median_of_those_that_ran(block, steady) for block in blocks),
        loads=count_loads(loads),
        moved_nbytes=sum(span.nbytes for span in loads if span.lane == "copy"),
        activation_nbytes=activation_nbytes,
    )


@dataclass(frozen=True)
class _Forward:
    """Sums over one forward, in seconds."""

    seconds: float
    waits: float
    outside: float
    blocks: Mapping[str, float]

    @classmethod
    def of(cls, spans: Sequence[Span], timed_apart: Sequence[str]) -> _Forward:
        """What the spans of one forward come to. One that is still going on has lasted as long as its blocks."""
        waits = sum(span.seconds for span in spans if span.lane == "wait")
        blocks: dict[str, float] = {}
        for span in spans:
            if span.lane == "compute" and span.name in timed_apart:
                blocks[span.name] = blocks.get(span.name, 0.0) + span.seconds
        whole = [span for span in spans if span.lane == "component"] or spans
        seconds = max(span.end for span in whole) - min(span.begin for span in whole)
        return cls(seconds, waits, max(seconds - waits - sum(blocks.values()), 0.0), blocks)


def _median_of_those_that_ran(block: str, forwards: Iterable[_Forward]) -> float:
    times = [forward.blocks[block] for forward in forwards if block in forward.blocks]
    return median(times) if times else 0.0


def _with_measured(component: ComponentCost, measured: MeasuredComponent, calls: int) -> ComponentCost:
    blocks, seconds = component.blocks, measured.outside_seconds
    if len(measured.block_seconds) == len(blocks) and any(measured.block_seconds):
        times = zip(blocks, measured.block_seconds, strict=True)
        blocks = tuple(replace(block, seconds=taken or block.seconds) for block, taken in times)
    elif blocks:
        share = measured.compute_seconds / max(sum(block.nbytes for block in blocks), 1)
        blocks, seconds = tuple(replace(block, seconds=block.nbytes * share) for block in blocks), 0.0
    return replace(
        component,
        blocks=blocks,
        seconds=seconds,
        forwards=max(round(measured.forwards / calls), 1) if calls else component.forwards,
        activation_nbytes=measured.activation_nbytes or component.activation_nbytes,
    )
