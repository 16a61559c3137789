"""What a recording measures, and a problem with it in the place of what was assumed."""

from __future__ import annotations

import pytest

from diffusers_omni_offload.planning.costs import BlockCost, ComponentCost, Problem, Rates
from diffusers_omni_offload.planning.measured import (
    Measured,
    MeasuredComponent,
    link_rate,
    measure,
    owner,
    with_measured,
)
from diffusers_omni_offload.streaming.recording import Span

BLOCKS = {"transformer": ("transformer.blocks.0", "transformer.blocks.1")}


def forward(number: int, begin: float, wait: float, times: tuple[float, float], outside: float) -> list[Span]:
    """A forward of two blocks, of which the second is waited for."""
    first, second = BLOCKS["transformer"]
    at = [begin, begin + times[0], begin + times[0] + wait, begin + times[0] + wait + times[1]]
    return [
        Span("component", "transformer", begin, at[3] + outside, 0, number),
        Span("compute", first, at[0], at[1], 0, number),
        Span("wait", second, at[1], at[2], 0, number),
        Span("compute", second, at[2], at[3], 0, number),
        Span("copy", second, begin, begin + 0.101, 1000, number),
    ]


SPANS = [
    *forward(0, 0.0, 9.0, (9.0, 9.0), 9.0),
    *forward(1, 40.0, 0.5, (1.0, 2.0), 0.25),
    *forward(2, 50.0, 0.5, (1.0, 2.0), 0.25),
    *forward(3, 60.0, 0.7, (1.4, 2.4), 0.35),
    Span("component", "vae", 70.0, 73.0, 0, 0),
    Span("copy", "vae", 69.0, 69.4, 4000),
]


def problem() -> Problem:
    dit = ComponentCost(
        "transformer",
        "dit",
        "dit",
        4000,
        (BlockCost(1000, 0.0, 1024), BlockCost(2000)),
        1000,
        forwards=50,
        activation_nbytes=7,
    )
    vae = ComponentCost("vae", "vae", "vae", 4000, seconds=1.0)
    unmeasured = ComponentCost("text_encoder", "encoder", "text_encoder", 3000, (BlockCost(3000, 0.5),), seconds=0.1)
    return Problem((dit, vae, unmeasured), Rates(16e9), 10_000)


def test_a_steady_forward_is_the_median_without_the_first() -> None:
    dit = measure(SPANS, BLOCKS).components["transformer"]
    assert dit.forwards == 4 and dit.block_seconds == pytest.approx((1.0, 2.0)) and dit.loads == 4
    assert dit.outside_seconds == pytest.approx(0.25) and dit.wait_seconds == pytest.approx(0.5)
    assert dit.seconds == pytest.approx(3.75) and dit.compute_seconds == pytest.approx(3.25)


def test_one_forward_is_better_than_none() -> None:
    dit = measure(forward(0, 0.0, 9.0, (1.0, 2.0), 0.5), BLOCKS).components["transformer"]
    assert dit.forwards == 1 and dit.block_seconds == (1.0, 2.0) and dit.outside_seconds == pytest.approx(0.5)


def test_a_forward_that_goes_on_has_its_blocks() -> None:
    spans = [span for span in forward(0, 0.0, 9.0, (1.0, 2.0), 0.5) if span.lane != "component"]
    dit = measure(spans, BLOCKS).components["transformer"]
    assert dit.seconds == pytest.approx(12.0) and dit.outside_seconds == 0.0 and dit.block_seconds == (1.0, 2.0)


def test_a_block_that_runs_twice_or_not_in_each_forward() -> None:
    first = BLOCKS["transformer"][0]
    again = [Span("compute", first, 8.0, 8.5, 0, 1), *forward(1, 0.0, 0.0, (1.0, 2.0), 8.0)]
    skipped = [Span("component", "transformer", 20.0, 22.0, 0, 2), Span("compute", first, 20.0, 21.5, 0, 2)]
    begin = [Span("component", "transformer", -9.0, -1.0, 0, 0)]
    assert measure([*begin, *again, *skipped], BLOCKS).components["transformer"].block_seconds == (1.5, 2.0)
    only = [*begin, Span("component", "transformer", 20.0, 22.0, 0, 2), Span("compute", first, 20.0, 21.5, 0, 2)]
    assert measure(only, BLOCKS).components["transformer"].block_seconds == (1.5, 0.0)


def test_blocks_that_nobody_named_belong_to_the_component_that_they_are_in() -> None:
    dit = measure(SPANS).components["transformer"]
    assert dit.block_seconds == () and dit.outside_seconds == pytest.approx(3.25) and dit.loads == 4
    assert dit.wait_seconds == pytest.approx(0.5)


def test_components_are_told_by_whole_steps_of_a_path() -> None:
    names = ("transformer", "transformer_2", "transformer.connector")
    assert owner("transformer_2.blocks.0", names) == "transformer_2"
    assert owner("transformer.connector.blocks.0", names) == "transformer.connector"
    assert owner("transformer", names) == "transformer" and owner("trans", names) is None
    assert owner("transformer_2.blocks.0", ("transformer",)) is None


def test_the_link_is_what_copies_reached() -> None:
    assert measure(SPANS, BLOCKS).link_bytes_per_s == pytest.approx(8000 / (4 * 0.101 + 0.4 - 5e-5))
    assert link_rate(SPANS, copy_latency_s=0.001) == pytest.approx(8000 / (0.804 - 0.005))
    assert link_rate(SPANS, copy_latency_s=1.0) == pytest.approx(8000 / 0.804)
    assert link_rate([]) == 0.0 and measure([]) == Measured()


def test_what_was_measured_takes_the_place_of_what_was_assumed() -> None:
    measured = measure(SPANS, BLOCKS, activations={"transformer": 99}, peak_nbytes=5, copy_latency_s=1e-3)
    known = with_measured(problem(), measured)
    dit = known.component("transformer")
    assert dit.blocks == (BlockCost(1000, pytest.approx(1.0), 1024), BlockCost(2000, pytest.approx(2.0)))
    assert dit.seconds == pytest.approx(0.25) and dit.activation_nbytes == 99 and dit.forwards == 50
    assert known.component("vae").seconds == pytest.approx(3.0) and known.component("vae").activation_nbytes == 0
    assert known.component("text_encoder") == problem().component("text_encoder")
    assert known.rates == Rates(measured.link_bytes_per_s, 1e-3, "measured")
    assert measured.peak_nbytes == 5 and known.device_nbytes == 10_000


def test_whole_calls_say_how_often_a_component_runs() -> None:
    known = with_measured(problem(), measure(SPANS, BLOCKS), calls=2)
    assert known.component("transformer").forwards == 2 and known.component("vae").forwards == 1


def test_the_compute_of_a_whole_is_divided_by_bytes() -> None:
    measured = Measured(
        {"transformer": MeasuredComponent(forwards=1, seconds=4.0, wait_seconds=1.0, outside_seconds=3.0)}
    )
    known = with_measured(problem(), measured)
    dit = known.component("transformer")
    assert dit.blocks == (BlockCost(1000, pytest.approx(1.0), 1024), BlockCost(2000, pytest.approx(2.0)))
    assert dit.seconds == 0.0 and dit.activation_nbytes == 7 and known.rates == problem().rates


def test_a_block_that_did_not_run_keeps_its_time() -> None:
    measured = Measured({"text_encoder": MeasuredComponent(1, 1.0, outside_seconds=1.0, block_seconds=(0.0,))})
    assert with_measured(problem(), measured).component("text_encoder").seconds == 0.0
    two = ComponentCost("dit", "dit", "dit", 2, (BlockCost(1, 5.0), BlockCost(1, 6.0)))
    measured = Measured({"dit": MeasuredComponent(1, 1.0, block_seconds=(0.0, 2.0))})
    known = with_measured(Problem((two,), Rates(1.0), 1), measured)
    assert known.component("dit").blocks == (BlockCost(1, 5.0), BlockCost(1, 2.0))
