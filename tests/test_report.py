"""Measured figures beside predicted ones."""

from __future__ import annotations

import json

import pytest

from diffusers_omni_offload.backends.base import Counters
from diffusers_omni_offload.planning.choice import Choice
from diffusers_omni_offload.planning.costs import BlockCost, ComponentCost, Problem, Rates
from diffusers_omni_offload.planning.measured import Measured, measure
from diffusers_omni_offload.planning.prediction import Prediction, StepPrediction
from diffusers_omni_offload.report import OffloadReport, make_report
from tests.recordings import recording

MIB = 1 << 20
COUNTERS = Counters(loads=12, demand_loads=1, swaps=1, bytes_moved=193_000, device_bytes=2 * MIB, pinned_bytes=9 * MIB)
BLOCKS = {"transformer": [f"transformer.blocks.{block}" for block in range(4)]}


def problem(seconds: float = 0.010, activations: int = MIB) -> Problem:
    blocks = tuple(BlockCost(2 * MIB, seconds) for _ in range(4))
    return Problem(
        (
            ComponentCost("text_encoder", "encoder", "text_encoder", 5 * MIB),
            ComponentCost("transformer", "dit", "dit", 9 * MIB, blocks, MIB, activation_nbytes=activations),
            ComponentCost("vae", "vae", "vae", 3 * MIB),
            ComponentCost("safety_checker", "resident", "safety_checker", 7 * MIB),
        ),
        Rates(2e6, source="profile"),
        30 * MIB,
    )


def prediction(compute: float = 0.049) -> Prediction:
    steps = {
        "text_encoder": StepPrediction(0.0, 0.0, 0.0),
        "transformer": StepPrediction(max(compute, 0.042), compute, 0.042),
        "vae": StepPrediction(0.0, 0.0, 0.0),
    }
    kinds = {"text_encoder": "module", "transformer": "layer", "vae": "resident", "safety_checker": "resident"}
    choice = Choice(kinds, {"transformer": 1})
    return Prediction(choice, steps, 1.0, 12 * MIB, "transformer", 11 * MIB, 11 * MIB, 18 * MIB)


def report(*, is_modelled: bool = False) -> OffloadReport:
    measured = measure(recording(resident=(2,))[0], BLOCKS, peak_nbytes=13 * MIB)
    return make_report(
        measured, COUNTERS, device="cuda:0", is_modelled=is_modelled, problem=problem(), prediction=prediction()
    )


def rows(shown: OffloadReport) -> dict[str, list[str]]:
    return {row[0]: list(row[1:]) for row in shown.table().rows}


def test_measured_figures_stand_beside_predicted_ones() -> None:
    dit = report().components[1]
    assert dit.path == "transformer" and dit.mode == "layer" and dit.forwards == 3 and dit.loads == 9
    assert (dit.nbytes, dit.resident_nbytes, dit.offloaded_nbytes) == (9 * MIB, 3 * MIB, 6 * MIB)
    assert dit.seconds == pytest.approx(0.049) and dit.predicted_seconds == 0.049 and dit.wait_seconds == 0.0
    assert dit.bound == dit.predicted_bound == "compute" and dit.moved_nbytes == 9 * 14_000
    shown = rows(report())
    assert shown["transformer"][:5] == ["layer", "9.0 MiB", "3.0 MiB", "6.0 MiB", "3"]
    assert shown["transformer"][5:] == ["49 ms", "49 ms", "0 s", "9", "123.0 KiB", "compute"]
    assert shown["text_encoder"][:8] == ["module", "5.0 MiB", "0 B", "5.0 MiB", "1", "30 ms", "-", "0 s"]
    assert shown["vae"][:4] == ["resident", "3.0 MiB", "3.0 MiB", "0 B"]
    assert shown["safety_checker"][4:] == ["-"] * 7
    assert list(shown) == [cost.path for cost in problem().components]


def test_what_concerns_all_of_it_stands_below() -> None:
    text = str(report())
    for note in (
        "Loads: 12 of blocks, 1 of them on demand; 1 of whole components; 188.5 KiB copied since offload was enabled",
        "Device memory: 13.0 MiB at the most (predicted 12.0 MiB, while transformer runs; slots and swapped components "
        "take 2.0 MiB now)",
        "Host memory: 9.0 MiB page-locked (predicted 11.0 MiB)",
        "Link: 0.001 GB/s while it copied (predicted with 0.002 GB/s, profile)",
        "By hand: pipe.enable_omni_offload(components={'text_encoder': 'module', 'transformer': 'layer'}, "
        "layer_options={'transformer': {'resident_layers': 1}})",
    ):
        assert note in text, text
    assert "No forward was recorded" not in text and "≥" not in text


def test_a_bound_that_was_not_predicted_is_shown() -> None:
    measured = measure(recording()[0], BLOCKS)
    shown = rows(make_report(measured, COUNTERS, device="cuda:0", problem=problem(), prediction=prediction()))
    assert shown["transformer"][-1] == "transfer\n(predicted: compute)" and shown["transformer"][7] == "8 ms"


def test_without_a_prediction_there_are_measured_figures_alone() -> None:
    made = make_report(measure(recording()[0]), COUNTERS, device="cuda:0")
    assert [component.path for component in made.components] == ["text_encoder", "transformer", "vae"]
    assert made.components[1].mode is None and made.components[1].bound == "transfer" and made.call is None
    assert rows(made)["transformer"] == [*"----", "3", "57 ms", "-", "8 ms", "12", "164.1 KiB", "transfer"]
    text = str(made)
    assert "predicted " not in text.replace("\npredicted", "") and "By hand" not in text


def test_without_a_recording_there_are_predicted_figures_and_what_to_do() -> None:
    made = make_report(Measured(), Counters(), device="cuda:0", problem=problem(), prediction=prediction())
    assert rows(made)["transformer"][4:] == ["-", "-", "49 ms", "-", "-", "-", "compute"]
    assert "No forward was recorded: run the pipeline inside of `with handle.trace():`" in str(made)
    assert "Device memory: not measured (predicted 12.0 MiB" in str(made) and "Link: not measured" in str(made)


def test_unknown_compute_leaves_a_lower_limit() -> None:
    made = make_report(Measured(), Counters(), device="cuda:0", problem=problem(0.0), prediction=prediction(0.0))
    assert rows(made)["transformer"][6] == "≥ 42 ms" and rows(made)["transformer"][-1] == "-"
    assert "Predictions with ≥ have copies only" in str(made)


def test_unknown_activations_leave_the_weights() -> None:
    known = problem(activations=0)
    made = make_report(Measured(), Counters(), device="cuda:0", problem=known, prediction=prediction())
    assert "(predicted 12.0 MiB of weights, while transformer runs" in str(made) and not made.are_activations_known
    assert report().are_activations_known


def test_modelled_times_are_called_modelled() -> None:
    made = report(is_modelled=True)
    assert "modelled" in str(made) and "measured" not in str(made) and made.to_dict()["figures"] == "modelled"


def test_it_is_shown_as_text_for_rich_in_notebooks_and_as_json() -> None:
    from rich.console import Console

    made = report()
    console = Console(width=200)
    with console.capture() as captured:
        console.print(made)
    assert "transformer" in captured.get() and "Link: 0.001 GB/s" in captured.get()
    assert "<table" in made._repr_html_() and "By hand" in made._repr_html_()
    read = json.loads(made.to_json())
    assert read == json.loads(json.dumps(made.to_dict()))
    assert read["components"][1]["predicted_seconds"] == 0.049 and read["counters"]["loads"] == 12
    assert read["peak_nbytes"] == 13 * MIB and read["components"][3]["seconds"] is None
