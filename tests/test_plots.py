"""Pictures of a recording: what is drawn, and where."""

from __future__ import annotations

import builtins
import subprocess
import sys
from typing import Any

import pytest

from diffusers_omni_offload import plots
from diffusers_omni_offload.plots import plot_spans
from diffusers_omni_offload.streaming.recording import MemorySample, Span
from diffusers_omni_offload.tracing import Trace
from tests.recordings import recording

pytest.importorskip("matplotlib")


def bars(axes: Any) -> dict[str, list[tuple[float, float]]]:
    """lane -> (begin, end) of each of its bars, in the axes' unit."""
    labels = [label.get_text() for label in axes.get_yticklabels()]
    return {
        label: [tuple(path.vertices[:, 0][[0, 2]]) for path in collection.get_paths()]
        for label, collection in zip(labels, axes.collections, strict=True)
    }


def texts(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_lanes_of_one_forward_have_labels_units_and_a_legend() -> None:
    trace = Trace("sim:0", is_modelled=True)
    trace.finish(*recording())
    figure = trace.plot(forward=1)
    lanes, memory = figure.axes
    drawn = bars(lanes)
    assert list(drawn) == ["copy", "wait", "compute", "component"]
    assert len(drawn["compute"]) == 4 and drawn["component"] == [(0.0, pytest.approx(57.0))]
    assert drawn["compute"][0][1] - drawn["compute"][0][0] == pytest.approx(10.0)
    assert memory.get_xlabel() == "time, ms (modelled)" and memory.get_ylabel() == "device memory,\nMiB"
    assert memory.get_xlim() == (0.0, pytest.approx(57.0))
    assert lanes.get_title(loc="left") == "transformer, forward 1 on sim:0: 57 ms, 14% of it waits for weights"
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert len(legend) == 4 and "copy from host memory" in legend
    assert "transformer" in texts(lanes) and {"0", "1", "2", "3"} <= set(texts(lanes))


def test_lanes_differ_without_colors() -> None:
    spans, _ = recording(gather=3.0)
    lanes = plot_spans(spans).axes[0]
    looks = set()
    for collection in lanes.collections:
        red, green, blue = collection.get_facecolor()[0][:3]
        looks.add((round(0.3 * red + 0.6 * green + 0.1 * blue, 1), collection.get_hatch()))
    assert len(looks) == 5
    # Two blocks without a gap are told apart.
    compute = lanes.collections[[label.get_text() for label in lanes.get_yticklabels()].index("compute")]
    brightness = [color[:3].sum() for color in compute.get_facecolor()]
    assert abs(brightness[0] - brightness[1]) > 0.3


def test_gathers_have_a_lane_where_there_are_some() -> None:
    assert list(bars(plot_spans(recording(gather=3.0)[0]).axes[0])) == [
        "gather",
        "copy",
        "wait",
        "compute",
        "component",
    ]
    assert "gather" not in bars(plot_spans(recording()[0]).axes[0])


def test_forwards_that_follow_each_other_have_one_name() -> None:
    spans = [Span("component", "transformer", 0.06 * index, 0.06 * index + 0.05) for index in range(10)]
    lanes = plot_spans([*spans, Span("component", "vae", 0.6, 1.0)]).axes[0]
    named = {text.get_text(): text.get_position()[0] for text in lanes.texts if text.get_text() != "none"}
    assert named == {"transformer": pytest.approx(0.295), "vae": pytest.approx(0.8)}


def test_without_blocks_all_of_the_recording_is_drawn() -> None:
    trace = Trace("cuda:0")
    trace.finish(
        [Span("copy", "dit", 0.0, 1.0, 8), Span("component", "dit", 1.0, 4.0), Span("component", "vae", 5.0, 6.0)], []
    )
    lanes = trace.plot().axes[0]
    assert list(bars(lanes)) == ["copy", "component"] and len(bars(lanes)["component"]) == 2
    assert lanes.get_title(loc="left") == str(trace)
    assert len(bars(trace.plot("vae").axes[0])["component"]) == 1


def test_bars_that_cannot_be_told_apart_are_one() -> None:
    narrow = [Span("copy", f"dit.{index}", index * 1e-4, index * 1e-4 + 5e-5, 8) for index in range(1000)]
    spans = [*narrow, Span("copy", "dit.wide", 0.2, 0.5, 8), Span("copy", "dit.last", 0.9, 1.0, 8)]
    drawn = bars(plot_spans(spans).axes[0])["copy"]
    assert drawn == [(0.0, pytest.approx(0.09995)), (0.2, 0.5), (0.9, 1.0)]
    assert len(bars(plot_spans(spans, begin=0.0, end=0.001).axes[0])["copy"]) == 10


def test_a_lane_without_work_says_so() -> None:
    axes = plot_spans([Span("compute", "dit.blocks.0", 0.0, 1.0)]).axes
    assert len(axes) == 1 and texts(axes[0]).count("none") == 2 and axes[0].get_xlabel() == "time, s (measured)"


def test_what_begins_or_ends_outside_of_the_window_is_cut() -> None:
    spans = [
        Span("copy", "dit.0", 0.0, 4.0, 8),
        Span("copy", "dit.1", 4.0, 9.0, 8),
        Span("copy", "dit.2", 9.0, 10.0, 8),
    ]
    assert bars(plot_spans(spans, begin=2.0, end=6.0).axes[0])["copy"] == [(0.0, 2.0), (2.0, 4.0)]


def test_memory_is_a_line_through_what_was_sampled() -> None:
    samples = [
        MemorySample(at, nbytes << 30) for at, nbytes in ((0.0, 9), (1.0, 2), (3.0, 5), (4.0, 1), (6.0, 7), (8.0, 8))
    ]
    axes = plot_spans([Span("compute", "dit.0", 2.0, 4.0)], samples[::-1]).axes[1]
    (line,) = axes.lines
    # Those beside the window say where the line comes from and where it goes.
    assert list(line.get_xdata()) == [-1.0, 1.0, 2.0, 4.0] and list(line.get_ydata()) == [2.0, 5.0, 1.0, 7.0]
    assert line.get_marker() == "o" and axes.get_xlim() == (0.0, 2.0) and axes.get_ylim() == (0.0, 1.15 * 5)
    assert axes.get_ylabel() == "device memory,\nGiB" and texts(axes) == ["at the most 5 GiB"]
    outside = plot_spans([Span("compute", "dit.0", 1.5, 2.5)], samples).axes[1]
    assert texts(outside) == ["at the most 5 GiB"]


@pytest.mark.processes
def test_a_picture_is_made_without_a_display_and_without_pyplot() -> None:
    program = """
import sys
from diffusers_omni_offload.tracing import Trace
from tests.recordings import recording
assert "matplotlib" not in sys.modules
trace = Trace("cuda:0")
trace.finish(*recording())
figure = trace.plot(whole=True)
assert figure._repr_png_()[:4] == b"\\x89PNG"
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, env={"PATH": "", "MPLBACKEND": "", "HOME": "/tmp"})


def test_nothing_to_draw_is_said() -> None:
    with pytest.raises(ValueError, match="Nothing was recorded between 5 s and 6 s"):
        plot_spans([Span("compute", "dit.0", 0.0, 1.0)], begin=5.0, end=6.0)


def test_a_missing_matplotlib_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = builtins.__import__

    def without_matplotlib(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return found(name, *rest, **more)

    plots._figure_class.cache_clear()
    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    with pytest.raises(ImportError, match=r'pip install "diffusers-omni-offload\[notebooks\]"'):
        plot_spans(recording()[0])
