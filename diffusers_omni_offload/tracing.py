"""A trace: what happened on the device while it was recorded."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffusers_omni_offload.messages import format_bytes
from diffusers_omni_offload.planning.measured import Measured, count_loads, link_rate, measure, owner
from diffusers_omni_offload.planning.times import (
    BlockTimes,
    ForwardTimes,
    block_times,
    bound_by,
    covered,
    format_seconds,
    forward_times,
    in_turn,
)
from diffusers_omni_offload.plots import plot_spans
from diffusers_omni_offload.streaming.recording import Lane, MemorySample, Span
from diffusers_omni_offload.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_THREADS: dict[Lane, str] = {
    "component": "components",
    "compute": "compute",
    "wait": "wait for weights",
    "copy": "copy",
    "gather": "gather",
}
"""Lanes as Perfetto shows them, from top to bottom."""


class Trace:
    """What happened while `with handle.trace() as trace:` was open; empty until the body has ended.

    Args:
        device: the name of the device that is recorded.
        is_modelled: whether the device is simulated, so that its times come from a model.

    Attributes:
        device: the name of the device.
        figures: what the times are, "measured" or "modelled".
        spans: stretches of time, by their begin.
        memory: samples of allocated device memory, by time.
        components: paths of the components that ran, in the order in which they began.
    """

    def __init__(self, device: str, *, is_modelled: bool = False) -> None:
        self.device = device
        self.figures = "modelled" if is_modelled else "measured"
        self.spans: tuple[Span, ...] = ()
        self.memory: tuple[MemorySample, ...] = ()
        self.components: tuple[str, ...] = ()
        self._forwards: tuple[ForwardTimes, ...] = ()
        self._owners: Mapping[str, str | None] = {}

    def finish(self, spans: Sequence[Span], memory: Sequence[MemorySample]) -> None:
        """The recording has ended; `handle.trace()` says so.

        Args:
            spans: what was recorded.
            memory: likewise.
        """
        self.spans = tuple(sorted(in_turn(spans), key=lambda span: (span.begin, -span.end)))
        self.memory = tuple(sorted(memory, key=lambda sample: sample.at))
        self.components = tuple(dict.fromkeys(span.name for span in self.spans if span.lane == "component"))
        self._forwards = tuple(forward_times(self.spans, self.components))
        self._owners = {name: owner(name, self.components) for name in {span.name for span in self.spans}}

    @property
    def seconds(self) -> float:
        """From the begin of the first span to the end of the last one."""
        return max((s.end for s in self.spans), default=0.0) - min((s.begin for s in self.spans), default=0.0)

    @property
    def wait_seconds(self) -> float:
        """How long the compute waited for blocks."""
        return sum(span.seconds for span in self.spans if span.lane == "wait")

    @property
    def moved_nbytes(self) -> int:
        """Bytes that were copied from this host."""
        return sum(span.nbytes for span in self.spans if span.lane == "copy")

    @property
    def gathered_nbytes(self) -> int:
        """Bytes of blocks that were gathered from all ranks."""
        return sum(span.nbytes for span in self.spans if span.lane == "gather")

    @property
    def peak_nbytes(self) -> int:
        """Allocated device bytes at the most, as far as there are samples; 0 without any."""
        return max((sample.nbytes for sample in self.memory), default=0)

    @property
    def link_bytes_per_s(self) -> float:
        """Rate of the copies from the host; 0 if there were none."""
        return link_rate(self.spans)

    @property
    def busy(self) -> Mapping[str, float]:
        """Shares of `seconds`: "compute" (forwards without their waits), "copy" and "gather"."""
        if not self.seconds:
            return {"compute": 0.0, "copy": 0.0, "gather": 0.0}
        forwards = covered(span for span in self.spans if span.lane in ("component", "compute", "wait"))
        waits = covered(span for span in self.spans if span.lane == "wait")
        moving = {lane: covered(span for span in self.spans if span.lane == lane) for lane in ("copy", "gather")}
        times = {"compute": forwards - waits, **moving}
        return {name: seconds / self.seconds for name, seconds in times.items()}

    def forwards(self, component: str | None = None) -> tuple[ForwardTimes, ...]:
        """The forwards of one component, or of all, in the order in which they began.

        Args:
            component: its path.
        """
        return tuple(forward for forward in self._forwards if component in (None, forward.component))

    def blocks(self, component: str | None = None) -> tuple[BlockTimes, ...]:
        """The blocks of one component, or of all, in the order in which they first ran.

        Args:
            component: its path.
        """
        return tuple(
            block for block in block_times(self.spans) if component is None or self._owners[block.path] == component
        )

    def steady_forward(self, component: str | None = None) -> ForwardTimes:
        """A forward of ordinary length, not the first one if there are more.

        Args:
            component: its path; the one with the most blocks if None, or without any the one that ran longest.

        Raises:
            ValueError: no forward was recorded.
        """
        if component is None:
            counts = Counter(self._owners[block.path] for block in self.blocks())
            seconds = {path: sum(forward.seconds for forward in self.forwards(path)) for path in self.components}
            component = max(seconds, key=lambda path: (counts[path], seconds[path]), default=None)
        forwards = self.forwards(component) if component is not None else ()
        if not forwards:
            what = f"No forward of {component!r}" if component is not None else "No forward"
            raise ValueError(
                f"{what} was recorded. Recorded are {', '.join(self.components) or 'none'}; run the pipeline inside of "
                "`with handle.trace() as trace:`."
            )
        steady = sorted(forwards[1 if len(forwards) > 1 else 0 :], key=lambda forward: forward.seconds)
        return steady[(len(steady) - 1) // 2]

    def measured(self, blocks: Mapping[str, Sequence[str]] | None = None) -> Measured:
        """The figures that a plan is made of; see `planning.measured.measure`."""
        return measure(self.spans, blocks, peak_nbytes=self.peak_nbytes)

    def summary(self) -> Table:
        """A row for each component that ran, and what the trace comes to below."""
        headers = ("component", "forwards", f"forward ({self.figures})", "compute", "waits", "loads", "copied", "bound")
        rows = []
        moves = [span for span in self.spans if span.lane in ("copy", "gather")]
        for path in self.components:
            steady = self.steady_forward(path)
            loads = [span for span in moves if self._owners[span.name] == path]
            rows.append(
                (
                    path,
                    str(len(self.forwards(path))),
                    *map(format_seconds, (steady.seconds, steady.compute_seconds, steady.wait_seconds)),
                    str(count_loads(loads)),
                    format_bytes(sum(span.nbytes for span in loads if span.lane == "copy")),
                    bound_by(steady.wait_seconds, steady.seconds),
                )
            )
        return Table(f"Trace of {self.device}", headers, rows, self._notes(), left_end=1)

    def block_table(self, component: str | None = None) -> Table:
        """A row for each block; times are medians.

        Args:
            component: path of the component whose blocks are shown; of all if None.
        """
        headers = ("block", "runs", f"compute ({self.figures})", "wait", "loads", "copy", "bytes")
        rows = [
            (
                block.path,
                str(block.runs),
                format_seconds(block.compute_seconds),
                format_seconds(block.wait_seconds),
                str(block.loads),
                format_seconds(block.copy_seconds) if block.loads else "resident",
                format_bytes(block.nbytes) if block.loads else "",
            )
            for block in self.blocks(component)
        ]
        return Table(f"Blocks on {self.device}", headers, rows)

    def plot(
        self,
        component: str | None = None,
        forward: int | None = None,
        *,
        title: str | None = None,
        whole: bool = False,
    ) -> Figure:
        """Lanes of compute, waits, copies and gathers over one forward, and device memory below.

        Args:
            component: path of the component; that of `steady_forward` if None.
            forward: which of its forwards, the first is 0; if None one of ordinary length, or all of a recording that
                has no blocks.
            title: a line above; what the forward took if None.
            whole: draw all of the recording.

        Returns:
            The picture, which notebooks show.

        Raises:
            ImportError: matplotlib isn't installed.
            ValueError: the forward wasn't recorded.
        """
        if whole or (component is None and forward is None and self.spans and not self.blocks()):
            return plot_spans(
                self.spans, self.memory, title=str(self) if title is None else title, figures=self.figures
            )
        chosen = self.steady_forward(component)
        if forward is not None:
            forwards = self.forwards(chosen.component)
            if not 0 <= forward < len(forwards):
                raise ValueError(
                    f"forward={forward} of {chosen.component!r} wasn't recorded; there are those from 0 to "
                    f"{len(forwards) - 1}."
                )
            chosen = forwards[forward]
        if title is None:
            title = (
                f"{chosen.component}, forward {chosen.number} on {self.device}: {format_seconds(chosen.seconds)}, "
                f"{chosen.wait_seconds / max(chosen.seconds, 1e-12):.0%} of it waits for weights"
            )
        return plot_spans(
            self.spans, self.memory, begin=chosen.begin, end=chosen.end, title=title, figures=self.figures
        )

    def save(self, path: str | Path) -> Path:
        """Write the trace as JSON that https://ui.perfetto.dev and chrome://tracing open.

        Args:
            path: the file; it is replaced if it exists.

        Returns:
            The file.
        """
        path = Path(path)
        path.write_text(json.dumps(self.to_dict()), encoding="utf-8")
        return path

    def to_dict(self) -> dict[str, Any]:
        """What `save` writes: trace events, with times in microseconds."""
        name = f"omni offload on {self.device} (times are {self.figures})"
        events: list[dict[str, Any]] = [_note("process_name", 0, {"name": name})]
        threads = {lane: number for number, lane in enumerate(_THREADS, start=1)}
        for lane in dict.fromkeys(span.lane for span in self.spans):
            events.append(_note("thread_name", threads[lane], {"name": _THREADS[lane]}))
            events.append(_note("thread_sort_index", threads[lane], {"sort_index": threads[lane]}))
        for span in self.spans:
            # Whole nanoseconds: ends that are rounded apart from their begins would overlap with what comes next.
            begin, end = round(span.begin * 1e9), round(span.end * 1e9)
            details = {"forward": span.forward, **({"bytes": span.nbytes} if span.nbytes else {})}
            events.append(
                {
                    "ph": "X",
                    "name": span.name,
                    "cat": span.lane,
                    "pid": 0,
                    "tid": threads[span.lane],
                    "ts": begin / 1e3,
                    "dur": (end - begin) / 1e3,
                    "args": details,
                }
            )
        for sample in self.memory:
            at = round(sample.at * 1e9) / 1e3
            counter = {"ph": "C", "name": "device memory", "pid": 0, "tid": 0, "ts": at}
            events.append({**counter, "args": {"allocated bytes": sample.nbytes}})
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def __str__(self) -> str:
        if not self.spans:
            return f"Trace of {self.device}: empty"
        moving = covered(span for span in self.spans if span.lane in ("copy", "gather")) / max(self.seconds, 1e-12)
        return (
            f"Trace of {self.device}: {format_seconds(self.seconds)} ({self.figures}), "
            f"{self.busy['compute']:.0%} of it compute and {moving:.0%} copies, "
            f"{format_seconds(self.wait_seconds)} of waits"
        )

    def __repr__(self) -> str:
        return f"<{self}>"

    def __rich__(self) -> Any:
        return self.summary().__rich__()

    def _repr_html_(self) -> str:
        return self.summary()._repr_html_()

    def _notes(self) -> list[str]:
        notes = [str(self)]
        if self.link_bytes_per_s:
            notes.append(
                f"Link: {self.link_bytes_per_s / 1e9:.3g} GB/s while it copied, {format_bytes(self.moved_nbytes)}"
            )
        if self.gathered_nbytes:
            notes.append(f"Gathered from ranks: {format_bytes(self.gathered_nbytes)}")
        if self.memory:
            notes.append(f"Device memory: {format_bytes(self.peak_nbytes)} at the most where it was looked at")
        return notes


def _note(name: str, thread: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """An event that names what other events are in."""
    return {"ph": "M", "name": name, "pid": 0, "tid": thread, "args": arguments}
