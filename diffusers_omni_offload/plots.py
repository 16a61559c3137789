"""Pictures of what happened: lanes of work over time, and device memory below them."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Any

from diffusers_omni_offload.streaming.recording import Lane, MemorySample, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: What is drawn of a span, from where to where; without a span it stands for several.
_Bar = tuple[Span | None, float, float]


@dataclass(frozen=True)
class _Look:
    """How a lane is drawn. Neighbours differ in brightness, so that two blocks without a gap are told apart, and lanes
    differ in hatches, so that they are told apart without colors."""

    label: str
    legend: str
    colors: tuple[str, str]
    text: str
    hatch: str = ""
    edge: str = "#333333"


_LOOKS: dict[Lane, _Look] = {
    "component": _Look("component", "forward of a component", ("#e4e4e4", "#d2d2d2"), "#000000"),
    "compute": _Look("compute", "block computes (its number)", ("#24527a", "#3f78a8"), "#ffffff"),
    "wait": _Look("wait", "compute waits for a block", ("#ffffff", "#ffffff"), "#8c1c13", "xxxx", "#8c1c13"),
    "copy": _Look("copy", "copy from host memory", ("#f6b65a", "#fbd9a3"), "#000000", "///", "#8a5a12"),
    "gather": _Look("gather", "all-gather from ranks", ("#a9d6a2", "#d3ebcf"), "#000000", "...", "#2f6b2a"),
}
_HEIGHT = 0.76
#: A text of one character takes about this much of the width of the axes.
_CHARACTER = 0.0072
#: So many dots are beside each other, about.
_DOTS = 1000
_MANY = 300


def plot_spans(
    spans: Iterable[Span],
    memory: Iterable[MemorySample] = (),
    *,
    begin: float | None = None,
    end: float | None = None,
    title: str = "",
    figures: str = "measured",
) -> Figure:
    """Lanes of work over time, and below them the device memory that was allocated.

    Args:
        spans: what happened; what lies outside of the window isn't drawn.
        memory: samples of device memory; without any there is no lower part.
        begin: where the window begins, in seconds; where the first span does if None.
        end: where the window ends; where the last span does if None.
        title: a line above.
        figures: what the times are, "measured" or "modelled".

    Returns:
        A figure that no window or notebook has seen yet: notebooks show it, `figure.savefig("step.png")` writes it.

    Raises:
        ImportError: matplotlib isn't installed.
        ValueError: there is nothing in the window.
    """
    spans, memory = list(spans), list(memory)
    begin = min((span.begin for span in spans), default=0.0) if begin is None else begin
    end = max((span.end for span in spans), default=0.0) if end is None else end
    # What took no time, such as waits for bytes that were there, can't be seen.
    seen = [span for span in spans if span.begin < end and span.end > begin and span.seconds > 0]
    if not seen:
        raise ValueError(f"Nothing was recorded between {begin:.6g} s and {end:.6g} s, so there is nothing to draw.")
    figure = _figure_class()(figsize=(11, 4.6 if memory else 3.2), layout="constrained")
    axes = figure.subplots(2 if memory else 1, sharex=True, squeeze=False, height_ratios=[2.6, 1][: 1 + bool(memory)])
    unit, scale = _time_unit(end - begin)
    present: set[Lane] = {"copy", *(span.lane for span in seen)}
    if "compute" in present:
        present.add("wait")  # That nothing waits is worth showing.
    lanes = [lane for lane in _LOOKS if lane in present]
    _draw_lanes(axes[0, 0], lanes, seen, begin, end, scale)
    if memory:
        _draw_memory(axes[1, 0], memory, begin, end, scale)
    last = axes[-1, 0]
    last.set_xlim(0, (end - begin) * scale)
    last.set_xlabel(f"time, {unit} ({figures})")
    if title:
        axes[0, 0].set_title(title, loc="left", fontsize=11)
    figure.legend(handles=_legend(lanes), loc="outside lower center", ncols=len(lanes), frameon=False, fontsize=9)
    return figure


def _draw_lanes(
    axes: Axes, lanes: Sequence[Lane], spans: Sequence[Span], begin: float, end: float, scale: float
) -> None:
    for row, lane in enumerate(reversed(lanes)):
        look = _LOOKS[lane]
        mine = sorted((span for span in spans if span.lane == lane), key=lambda span: span.begin)
        bars = list(_bars(mine, begin, end))
        # Edges of very many bars would be all that is seen.
        edge = 0.5 if len(bars) < _MANY else 0.0
        axes.broken_barh(
            [((left - begin) * scale, (right - left) * scale) for _, left, right in bars],
            (row - _HEIGHT / 2, _HEIGHT),
            facecolors=[look.colors[index % 2] for index in range(len(bars))],
            edgecolor=look.edge,
            hatch=look.hatch,
            linewidth=edge,
        )
        # Hatches, and edges of forwards that have one name, would cross the letters.
        box = (
            {"facecolor": look.colors[0], "edgecolor": "none", "pad": 0.6}
            if look.hatch or lane == "component"
            else None
        )
        style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8, "color": look.text, "bbox": box}
        for span, left, right in _runs(bars) if lane == "component" else bars:
            text = _bar_text(span, (right - left) / (end - begin)) if span is not None else ""
            if text:
                axes.text(((left + right) / 2 - begin) * scale, row, text, **style)
        if not mine:
            axes.text(0.5, row, "none", transform=axes.get_yaxis_transform(), ha="center", va="center", fontsize=8)
    axes.set_yticks(range(len(lanes)), [_LOOKS[lane].label for lane in reversed(lanes)])
    axes.set_ylim(-0.5, len(lanes) - 0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def _bars(spans: Iterable[Span], begin: float, end: float) -> Iterator[_Bar]:
    """Bars of a lane as (span, begin, end), by begin. Those that are too narrow to be told apart are one bar, which has
    no span."""
    too_narrow = (end - begin) / _DOTS
    held: _Bar | None = None
    for span in spans:
        left, right = max(span.begin, begin), min(span.end, end)
        if held is None:
            held = (span, left, right)
        elif (
            right - left < too_narrow
            and left - held[2] < too_narrow
            and (held[0] is None or held[2] - held[1] < too_narrow)
        ):
            held = (None, held[1], max(right, held[2]))
        else:
            yield held
            held = (span, left, right)
    if held is not None:
        yield held


def _runs(bars: Iterable[_Bar]) -> Iterator[_Bar]:
    """Bars of the same name that follow each other, as one that goes from the first to the last."""
    for _, group in groupby(bars, key=lambda bar: bar[0] and bar[0].name):
        same = list(group)
        yield same[0][0], same[0][1], same[-1][2]


def _draw_memory(axes: Axes, memory: Sequence[MemorySample], begin: float, end: float, scale: float) -> None:
    samples = sorted(memory, key=lambda sample: sample.at)
    before = [sample for sample in samples if sample.at < begin][-1:]
    inside = [sample for sample in samples if begin <= sample.at <= end]
    after = [sample for sample in samples if sample.at > end][:1]
    shown = [*before, *inside, *after]
    most = max(sample.nbytes for sample in inside or shown)
    unit, nbytes = _memory_unit(most)
    times, values = [(sample.at - begin) * scale for sample in shown], [sample.nbytes / nbytes for sample in shown]
    axes.fill_between(times, values, color="#c9c9c9", linewidth=0)
    # Between two samples nobody has looked: the dots are what is known.
    axes.plot(times, values, color="#222222", linewidth=1.2, marker="o" if len(shown) < _MANY else "", markersize=3.5)
    label = f"at the most {most / nbytes:.3g} {unit}"
    axes.annotate(label, (1.0, 1.02), xycoords="axes fraction", ha="right", fontsize=8)
    axes.set_ylim(0, max(1.15 * most / nbytes, 1e-3))
    axes.set_ylabel(f"device memory,\n{unit}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def _legend(lanes: Sequence[Lane]) -> list[Any]:
    from matplotlib.patches import Patch

    looks = [_LOOKS[lane] for lane in lanes]
    return [
        Patch(facecolor=look.colors[0], edgecolor=look.edge, hatch=look.hatch, linewidth=0.5, label=look.legend)
        for look in looks
    ]


def _bar_text(span: Span, width: float) -> str:
    """The longest of the span's names that has room in a bar of `width`, a part of the width of the axes."""
    if span.lane == "wait":
        return ""
    last = span.name.rpartition(".")[2]
    for text in (span.name, last):
        if len(text) * _CHARACTER < width - 0.002 and (span.lane == "component" or text is last):
            return text
    return ""


def _time_unit(seconds: float) -> tuple[str, float]:
    """A unit in which `seconds` are at least 1, and how many of them are in a second."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return unit, scale
    return "µs", 1e6


def _memory_unit(nbytes: int) -> tuple[str, int]:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if nbytes >= size:
            return unit, size
    return "KiB", 1 << 10


@lru_cache(maxsize=1)
def _figure_class() -> type[Figure]:
    """A figure that a notebook shows even if pyplot, which keeps figures for good, was never imported."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            'Plots need matplotlib, which isn\'t installed: pip install "diffusers-omni-offload[notebooks]".'
        ) from error

    class NotebookFigure(Figure):
        def _repr_png_(self) -> bytes:
            picture = io.BytesIO()
            self.savefig(picture, format="png", dpi=100)
            return picture.getvalue()

    return NotebookFigure
