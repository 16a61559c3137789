"""What a trace says of a recording, and the file that Perfetto opens."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from diffusers_omni_offload.planning.times import covered, format_seconds
from diffusers_omni_offload.streaming.recording import MemorySample, Span
from diffusers_omni_offload.tracing import Trace
from tests.recordings import recording

BLOCKS = [f"transformer.blocks.{block}" for block in range(4)]


def traced(*, is_modelled: bool = False, **arguments: Any) -> Trace:
    trace = Trace("cuda:0", is_modelled=is_modelled)
    spans, samples = recording(**arguments)
    trace.finish(spans[::-1], samples[::-1])
    return trace


def test_spans_and_samples_are_in_order() -> None:
    trace = traced()
    assert [span.begin for span in trace.spans] == sorted(span.begin for span in trace.spans)
    assert [sample.at for sample in trace.memory] == sorted(sample.at for sample in trace.memory)
    assert trace.components == ("text_encoder", "transformer", "vae") and trace.peak_nbytes == 5 << 20


def test_forwards_add_up() -> None:
    trace = traced()
    forwards = trace.forwards("transformer")
    assert [forward.number for forward in forwards] == [0, 1, 2] and len(trace.forwards()) == 5
    for forward in forwards:
        assert forward.compute_seconds == pytest.approx(0.049) and forward.loads == 4 and forward.moved_nbytes == 56_000
        assert forward.seconds == pytest.approx(forward.compute_seconds + forward.wait_seconds)
    first, _, last = forwards
    # Four copies one after another, of 14 ms each; later the first two are there, and 4 ms are missing twice.
    assert first.begin == pytest.approx(0.030) and first.end == pytest.approx(0.025 + 4 * 0.014 + 0.010 + 0.004)
    assert last.seconds == pytest.approx(0.057) and last.copy_seconds <= last.seconds + 1e-9
    assert trace.wait_seconds == pytest.approx(sum(forward.wait_seconds for forward in forwards))
    assert trace.seconds == pytest.approx(forwards[-1].end + 0.001 + 0.060)


def test_blocks_are_medians() -> None:
    blocks = traced(resident=(2,)).blocks("transformer")
    assert [block.path for block in blocks] == BLOCKS and {block.runs for block in blocks} == {3}
    assert all(block.compute_seconds == pytest.approx(0.010) for block in blocks)
    assert [block.loads for block in blocks] == [3, 3, 0, 3] and [block.nbytes for block in blocks] == [
        14e3,
        14e3,
        0,
        14e3,
    ]
    assert blocks[2].wait_seconds == 0.0 and blocks[1].copy_seconds == pytest.approx(0.014)
    assert traced().blocks("vae") == ()


def test_a_block_that_is_copied_and_gathered_is_loaded_once() -> None:
    trace = traced(gather=3.0)
    assert [block.loads for block in trace.blocks()] == [3] * 4
    assert trace.blocks()[0].copy_seconds == pytest.approx(0.017) and trace.blocks()[0].nbytes == 14_000
    assert [forward.loads for forward in trace.forwards("transformer")] == [4] * 3
    assert trace.moved_nbytes == 12 * 14_000 + 25_000 and trace.gathered_nbytes == 12 * 3_000
    assert "Gathered from ranks: 35.2 KiB" in str(trace.summary())
    assert (
        trace.summary().rows[1][5:7] == ("12", "164.1 KiB") and trace.measured().components["transformer"].loads == 12
    )


def test_gathers_take_turns() -> None:
    trace = Trace("cuda:0")
    spans = [
        Span("gather", "dit.0", 0.0, 3.0, 8),
        Span("gather", "dit.1", 1.0, 5.0, 8),
        Span("gather", "dit.2", 7.0, 8.0, 8),
    ]
    trace.finish([*spans[::-1], Span("copy", "dit.1", 1.0, 2.0, 4)], [])
    assert [(span.begin, span.end) for span in trace.spans if span.lane == "gather"] == [
        (0.0, 3.0),
        (3.0, 5.0),
        (7.0, 8.0),
    ]


def test_times_in_a_forward_count_what_reaches_into_it() -> None:
    random = Random(0)
    begins = [random.uniform(0, 100) for _ in range(300)]
    copies = [Span("copy", "dit.0", begin, begin + random.choice([0.1, 1.0, 30.0]), 1) for begin in begins]
    forwards = [Span("component", "dit", 10.0 * index, 10.0 * index + 9.0, 0, index) for index in range(10)]
    trace = Trace("cuda:0")
    trace.finish([*copies[::30], *forwards], [])
    for forward, span in zip(trace.forwards(), forwards, strict=True):
        expected = covered([other for other in trace.spans if other.lane == "copy"], span)
        assert forward.copy_seconds == pytest.approx(expected)
    assert any(0 < forward.copy_seconds < 8.9 for forward in trace.forwards())


def test_shares_of_time_count_what_overlaps_once() -> None:
    trace = Trace("cuda:0")
    trace.finish(
        [
            Span("component", "dit", 0.0, 8.0),
            Span("compute", "dit.0", 0.0, 3.0),
            Span("wait", "dit.1", 3.0, 5.0),
            Span("copy", "dit.1", 1.0, 5.0, 8),
            Span("copy", "dit.0", 4.0, 6.0, 4),
            Span("copy", "vae", 10.0, 10.0, 0),
        ],
        [],
    )
    assert trace.busy == {"compute": pytest.approx(0.6), "copy": pytest.approx(0.5), "gather": 0.0}
    assert trace.link_bytes_per_s == pytest.approx(2.0) and trace.moved_nbytes == 12


def test_covered_time() -> None:
    spans = [Span("copy", "a", 0.0, 2.0), Span("copy", "b", 1.0, 1.5), Span("copy", "c", 3.0, 5.0)]
    assert covered(spans) == 4.0 and covered(spans, Span("component", "x", 1.0, 4.0)) == 2.0 and covered([]) == 0.0


def test_the_steady_forward_is_one_of_ordinary_length() -> None:
    trace = Trace("cuda:0")
    lengths = [9.0, 1.0, 3.0, 2.0]
    trace.finish([Span("component", "dit", 10.0 * i, 10.0 * i + length, 0, i) for i, length in enumerate(lengths)], [])
    assert trace.steady_forward().number == 3
    assert traced().steady_forward().component == "transformer" and traced().steady_forward("vae").number == 0
    assert traced(forwards=1).steady_forward().number == 0
    # Without blocks, the one that takes longest.
    whole = Trace("cuda:0")
    whole.finish([Span("component", "text_encoder", 0.0, 1.0), Span("component", "dit", 1.0, 4.0, 0, 1)], [])
    assert whole.steady_forward().component == "dit"


def test_what_was_not_recorded_is_said() -> None:
    with pytest.raises(ValueError, match=r"No forward of 'controlnet' was recorded\. Recorded are text_encoder, trans"):
        traced().steady_forward("controlnet")
    with pytest.raises(ValueError, match=r"No forward was recorded\. Recorded are none; run the pipeline"):
        Trace("cpu").plot()
    with pytest.raises(ValueError, match=r"forward=3 of 'transformer' wasn't recorded; there are those from 0 to 2"):
        traced().plot(forward=3)
    assert str(Trace("cpu")) == "Trace of cpu: empty" and Trace("cpu").busy["copy"] == 0.0
    assert Trace("cpu").summary().rows == [] and Trace("cpu").to_dict()["traceEvents"][0]["name"] == "process_name"


def test_the_summary_has_a_row_for_each_component() -> None:
    trace = traced()
    rows = {row[0]: row[1:] for row in trace.summary().rows}
    assert rows["transformer"] == ("3", "57 ms", "49 ms", "8 ms", "12", "164.1 KiB", "transfer")
    assert rows["vae"] == ("1", "60 ms", "60 ms", "0 s", "0", "0 B", "compute")
    assert rows["text_encoder"][4:] == ("1", "24.4 KiB", "compute")
    text = str(trace.summary())
    assert str(trace) in text and "Link: 0.001 GB/s while it copied" in text and "Device memory: 5.0 MiB" in text
    assert trace._repr_html_() == trace.summary()._repr_html_() and "<table" in trace._repr_html_()
    assert repr(trace) == f"<{trace}>"


def test_the_table_of_blocks() -> None:
    rows = traced(resident=(2,)).block_table("transformer").rows
    assert rows[1] == (BLOCKS[1], "3", "10 ms", "4 ms", "3", "14 ms", "13.7 KiB")
    assert rows[2] == (BLOCKS[2], "3", "10 ms", "0 s", "0", "resident", "")


def test_modelled_times_are_called_modelled() -> None:
    trace = traced(is_modelled=True)
    shown = [str(trace), *trace.summary().headers, *trace.block_table().headers, json.dumps(trace.to_dict())]
    assert sum("modelled" in text for text in shown) == 4 and not any("measured" in text for text in shown)


def test_the_file_has_the_form_of_trace_events(tmp_path: Path) -> None:
    trace = traced(gather=2.0)
    path = trace.save(tmp_path / "trace.json")
    written = json.loads(path.read_text())
    assert written == trace.to_dict() and written["displayTimeUnit"] == "ms"
    events = written["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert sorted(names.values()) == ["components", "compute", "copy", "gather", "wait for weights"]
    order = {event["tid"]: event["args"]["sort_index"] for event in events if event["name"] == "thread_sort_index"}
    assert [names[tid] for tid in sorted(order, key=lambda tid: order[tid])][:2] == ["components", "compute"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == len(trace.spans)
    for event, span in zip(slices, trace.spans, strict=True):
        assert event["name"] == span.name and event["cat"] == span.lane and event["args"]["forward"] == span.forward
        assert event["ts"] == pytest.approx(span.begin * 1e6) and event["dur"] == pytest.approx(span.seconds * 1e6)
        assert event["args"].get("bytes", 0) == span.nbytes
    counters = [(event["ts"], event["args"]["allocated bytes"]) for event in events if event["ph"] == "C"]
    assert counters == [(pytest.approx(sample.at * 1e6), sample.nbytes) for sample in trace.memory]


def test_slices_of_a_thread_that_touch_do_not_overlap() -> None:
    """Perfetto drops a slice that begins before the end of another that it isn't in."""
    trace = Trace("cuda:0")
    ends = [index / 3e6 for index in range(1, 50)]
    trace.finish([Span("copy", "a", begin, end) for begin, end in pairwise(ends)], [])
    slices = [event for event in trace.to_dict()["traceEvents"] if event["ph"] == "X"]
    for before, after in pairwise(slices):
        assert round((before["ts"] + before["dur"]) * 1e3) == round(after["ts"] * 1e3)


def test_measured_figures_of_a_trace() -> None:
    trace = traced()
    measured = trace.measured({"transformer": BLOCKS})
    assert measured.components["transformer"].block_seconds == pytest.approx((0.010,) * 4)
    assert measured.components["transformer"].outside_seconds == pytest.approx(0.009)
    assert measured.peak_nbytes == 5 << 20


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (2e-7, "0 s"),
        (1.5e-6, "1.5 µs"),
        (0.99951e-3, "1000 µs"),
        (0.0123456, "12.3 ms"),
        (75.3, "75.3 s"),
        (3600, "3600 s"),
    ],
)
def test_seconds_in_words(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_filling_again_forgets_what_was_there() -> None:
    trace = traced()
    assert len(trace.forwards()) == 5
    trace.finish([Span("component", "vae", 0.0, 1.0)], [MemorySample(0.0, 7)])
    assert len(trace.forwards()) == 1 and trace.peak_nbytes == 7
