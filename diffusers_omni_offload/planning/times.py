"""How long forwards and blocks took, and what they waited for, in a recording."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf
from statistics import median

from diffusers_omni_offload.planning.measured import count_loads, owner
from diffusers_omni_offload.streaming.recording import Lane, Span

#: Below this share of waiting, faster transfers would not be felt.
NOTICEABLE_WAIT = 0.05


@dataclass(frozen=True)
class ForwardTimes:
    """One forward of a component, in seconds and bytes.

    Attributes:
        component: its path.
        number: how many of its forwards were recorded before.
        begin: when it began.
        end: when it was over.
        wait_seconds: what the compute waited for blocks.
        copy_seconds: how long there was a copy or a gather meanwhile.
        loads: how often a block, or all of it, was sent to the device in it.
        moved_nbytes: bytes that were copied from this host for that.
    """

    component: str
    number: int
    begin: float
    end: float
    wait_seconds: float
    copy_seconds: float
    loads: int
    moved_nbytes: int

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.begin

    @property
    def compute_seconds(self) -> float:
        """All of it but the waits."""
        return self.seconds - self.wait_seconds


@dataclass(frozen=True)
class BlockTimes:
    """One block over all of the recording; times are medians, in seconds.

    Attributes:
        path: its path.
        runs: how often it computed.
        compute_seconds: one forward.
        wait_seconds: what the compute waited for it.
        loads: how often it came to the device.
        copy_seconds: one load, from the begin of its copy to the end of its gather, if it has one.
        nbytes: bytes that one load brings to the device.
    """

    path: str
    runs: int
    compute_seconds: float
    wait_seconds: float
    loads: int
    copy_seconds: float
    nbytes: int


def in_turn(spans: Iterable[Span]) -> Iterator[Span]:
    """The same spans, less what a gather has waited for the one before it: it is issued when its copy is."""
    until = -inf
    for span in sorted(spans, key=lambda span: span.end):
        if span.lane == "gather":
            span, until = replace(span, begin=max(span.begin, min(until, span.end))), span.end
        yield span


def forward_times(spans: Sequence[Span], components: Collection[str]) -> Iterator[ForwardTimes]:
    """The forwards in a recording, in the order in which they began.

    Args:
        spans: the recording, by begin.
        components: paths of its components.
    """
    owners = {name: owner(name, components) for name in {span.name for span in spans}}
    moves = [span for span in spans if span.lane in ("copy", "gather")]
    waiting, moving = _Windows([span for span in spans if span.lane == "wait"]), _Windows(moves)
    issued: dict[tuple[str | None, int], list[Span]] = {}
    for span in moves:
        issued.setdefault((owners[span.name], span.forward), []).append(span)
    counts: Counter[str] = Counter()
    for whole in spans:
        if whole.lane == "component":
            mine = issued.get((whole.name, whole.forward), [])
            yield ForwardTimes(
                component=whole.name,
                number=counts[whole.name],
                begin=whole.begin,
                end=whole.end,
                wait_seconds=covered(waiting.around(whole), whole),
                copy_seconds=covered(moving.around(whole), whole),
                loads=count_loads(mine),
                moved_nbytes=sum(span.nbytes for span in mine if span.lane == "copy"),
            )
            counts[whole.name] += 1


def block_times(spans: Sequence[Span]) -> tuple[BlockTimes, ...]:
    """The blocks in a recording, in the order in which they first ran.

    Args:
        spans: the recording, by begin.
    """
    by_block: dict[str, list[Span]] = {span.name: [] for span in spans if span.lane == "compute"}
    for span in spans:
        if span.name in by_block:
            by_block[span.name].append(span)
    return tuple(_block_times(path, mine) for path, mine in by_block.items())


def covered(spans: Iterable[Span], within: Span | None = None) -> float:
    """Seconds in which there was at least one of `spans`.

    Args:
        spans: by their begin.
        within: only what lies in this one counts.
    """
    seconds, until = 0.0, -inf if within is None else within.begin
    last = inf if within is None else within.end
    for span in spans:
        begin, end = max(span.begin, until), min(span.end, last)
        if end > begin:
            seconds += end - begin
            until = end
    return seconds


class _Windows:
    """Finds the spans of a window without looking at all of them; `spans` are by their begin."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._begins = [span.begin for span in spans]
        self._last_ends = list(accumulate((span.end for span in spans), max))

    def around(self, window: Span) -> Sequence[Span]:
        """All spans that reach into `window`, and perhaps some that don't."""
        return self._spans[bisect_right(self._last_ends, window.begin) : bisect_left(self._begins, window.end)]


def _block_times(path: str, spans: Sequence[Span]) -> BlockTimes:
    lanes: dict[Lane, list[Span]] = {}
    for span in spans:
        lanes.setdefault(span.lane, []).append(span)
    copies, gathers = lanes.get("copy", []), lanes.get("gather", [])
    # A recording may begin or end between the two.
    are_pairs = len(copies) == len(gathers)
    loads = zip(copies, gathers, strict=True) if are_pairs else zip(copies or gathers, strict=True)
    return BlockTimes(
        path=path,
        runs=len(lanes["compute"]),
        compute_seconds=_median(span.seconds for span in lanes["compute"]),
        wait_seconds=_median(span.seconds for span in lanes.get("wait", [])),
        loads=count_loads(spans),
        copy_seconds=_median(max(span.end for span in load) - min(span.begin for span in load) for load in loads),
        nbytes=max(span.nbytes for span in spans),
    )


def _median(times: Iterable[float]) -> float:
    times = list(times)
    return median(times) if times else 0.0


def bound_by(wait_seconds: float, seconds: float) -> str:
    """What set the time of a forward: "transfer" if the compute waited for more than a little of it, or "compute"."""
    return "transfer" if wait_seconds > NOTICEABLE_WAIT * seconds else "compute"


def format_seconds(seconds: float) -> str:
    """`seconds` in the largest unit (s, ms, µs) that gives at least 1."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.0f} {unit}" if seconds * scale >= 100 else f"{seconds * scale:.3g} {unit}"
    return "0 s"
