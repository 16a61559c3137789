"""Mode "auto" on 200 random problems, against the simulated device and an exhaustive search. All times are modelled.

A problem is a pipeline, a machine and a budget. What a block takes, what kernels take besides, and that the link is
faster or slower before each block, nobody tells: it has to be measured in the first call.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import diffusers_omni_offload
from diffusers_omni_offload import DoesNotFit
from diffusers_omni_offload.planning.choice import Choice
from diffusers_omni_offload.planning.costs import Problem
from diffusers_omni_offload.planning.memory import Memory
from diffusers_omni_offload.planning.predicting import Part, predict
from diffusers_omni_offload.planning.prediction import Prediction
from diffusers_omni_offload.planning.search import choices
from diffusers_omni_offload.profile import PROFILE_VARIABLE
from tests import simdevice
from tests.benchmarks.dice import Dice, with_budget
from tests.benchmarks.problems import Case, CasePipeline, build, carry_out, steady_steps

PROBLEMS, BATCH = 200, 20
#: The link is slower or faster by up to this share, anew before every block.
DRIFT = 0.03

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("taken")]


@pytest.fixture(autouse=True)
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A profile of its own for each test."""
    path = tmp_path / "profile.json"
    monkeypatch.setenv(PROFILE_VARIABLE, str(path))
    return path


# ---------------------------------------------------------------------- problems


def least_and_most(problem: Problem) -> tuple[int, int]:
    """Device bytes that the smallest choice needs, and those of everything on the device."""
    everything = {component.path: "resident" for component in problem.components}
    least = min(Memory(problem, choice.kinds).needed(choice.residents, 2) for choice in smallest(problem))
    return least, Memory(problem, everything).peak({}, 2)[0]


def smallest(problem: Problem) -> Iterator[Choice]:
    """Choices among which is the one that needs the least."""
    yield from (choice for choice in choices(problem) if choice.slots == 2)


def random_case(seed: int) -> Case:
    """A DiT alone for even seeds; for odd ones there may be a second DiT, a text encoder and a VAE."""
    dice = Dice(seed)
    case = dice.case(
        is_single=seed % 2 == 0,
        launch_overhead_s=dice.uniform(2e-6, 30e-6),
        kernel_overhead_s=dice.uniform(1e-6, 10e-6),
        drift=DRIFT,
    )
    least, most = least_and_most(case.problem())
    return with_budget(case, int(least + dice.uniform(0.05, 1) * (most - least)))


def truth(case: Case) -> Problem:
    """The problem as it is: every block is timed in a resident run, over a steady link and without any limit."""
    limit = simdevice.get_config("capacity_bytes")
    simdevice.configure(capacity_bytes=None)
    steady = replace(case, machine=replace(case.machine, drift=0.0))
    outcome = carry_out(steady, Choice(dict.fromkeys(case.parts, "resident")), steps=3, is_timed=True)
    simdevice.configure(capacity_bytes=limit)
    components = [
        replace(
            component,
            blocks=tuple(
                replace(block, seconds=seconds)
                for block, seconds in zip(component.blocks, outcome.blocks[component.path], strict=True)
            ),
        )
        if component.path in outcome.blocks
        else component
        for component in case.problem().components
    ]
    return replace(case.problem(), components=tuple(components), total_nbytes=int(limit) if limit > 0 else None)


def best_of_all(problem: Problem, kinds: Mapping[str, str] | None = None) -> Prediction:
    """The fastest call of every choice that fits, by looking at each."""
    times: dict[Any, float] = {}
    memories: dict[Any, Memory] = {}
    best: tuple[float, Choice] | None = None
    for choice in choices(problem, kinds):
        memory = memories.setdefault(tuple(choice.kinds.items()), Memory(problem, choice.kinds))
        if not memory.fits(choice.residents, choice.slots):
            continue
        seconds = 0.0
        for component in problem.components:
            kind, residents = choice.kinds[component.path], choice.residents.get(component.path, 0)
            key = component.path, kind, residents, choice.slots
            if key not in times:
                times[key] = Part(component, kind, residents, choice.slots, problem.rates).call_seconds
            seconds += times[key]
        if best is None or seconds < best[0]:
            best = seconds, choice
    assert best is not None
    return predict(problem, best[1])


# ---------------------------------------------------------------------- sessions


@dataclass(frozen=True)
class Session:
    """A pipeline that was enabled with "auto" and called: to be measured, until nothing is changed any more, and to be
    compared.

    Attributes:
        prediction: what is predicted after the first call.
        steps: path of a DiT -> seconds of a steady forward in the second call.
        peak_nbytes: device bytes at the most in any call.
    """

    prediction: Prediction
    steps: dict[str, float]
    peak_nbytes: int

    @property
    def largest_error(self) -> float:
        """By which share the predicted step is off."""
        return max(abs(self.prediction.steps[path].seconds / seconds - 1) for path, seconds in self.steps.items())

    def slowdown(self, best: Prediction) -> float:
        """How many times the steps of the best choice the device takes."""
        return sum(self.steps.values()) / sum(best.steps[path].seconds for path in self.steps)


def session(case: Case) -> Session:
    """Enable, call, disable."""
    gc.collect()
    base = torch.accelerator.memory_allocated()
    pipe = build(case)
    case.machine.configure()
    steps = case.steps * (1 + ("transformer_2" in case.parts))
    handle = diffusers_omni_offload.enable_omni_offload(
        pipe, "auto", memory_budget=case.budget_nbytes, num_inference_steps=steps
    )
    assert handle.automatic is not None
    pipe(case.steps)
    first = pipe.peak_nbytes
    for _ in range(3):
        if handle.automatic.better is None:
            break
        first = max(first, call_again(pipe, case))  # Which begins with a change of kinds.
    prediction = handle.automatic.prediction
    second = call_again(pipe, case)
    found = Session(prediction, steady_steps(pipe), max(first, second) - base)
    assert second - base <= prediction.peak_nbytes * 1.0005 and prediction.peak_nbytes <= 1.02 * (second - base)
    simdevice.check()
    diffusers_omni_offload.disable_omni_offload(pipe)
    return found


def call_again(pipe: CasePipeline, case: Case) -> int:
    """Device bytes at the most in one more call."""
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    pipe.peak_nbytes = 0
    pipe(case.steps)
    torch.accelerator.synchronize()
    return pipe.peak_nbytes


# ---------------------------------------------------------------------- tests


@pytest.mark.parametrize("batch", range(PROBLEMS // BATCH))
def test_predictions_and_choices(sim: ModuleType, profile: Path, batch: int) -> None:
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        sim.start_afresh()
        profile.unlink(missing_ok=True)
        case = random_case(seed)
        if seed < 100:
            sim.configure(capacity_bytes=torch.accelerator.memory_allocated() + case.budget_nbytes)
        failures = torch.accelerator.memory_stats().get("num_ooms", 0)
        problem = truth(case)
        first = last = session(case)
        kinds_before: Mapping[str, str] = {}
        # What was measured is known to the next session, which may choose other kinds, and so measure something else.
        for _ in range(2):
            if last.prediction.choice.kinds != kinds_before:
                kinds_before = last.prediction.choice.kinds
                last = session(case)
        assert torch.accelerator.memory_stats().get("num_ooms", 0) == failures, seed
        # Of several components the first call has the kinds that were chosen before anything was measured.
        given = first.prediction.choice.kinds if len(case.parts) > 1 else None
        for found, kinds in ((first, given), (last, None)):
            assert found.largest_error <= 0.05, seed
            assert found.peak_nbytes <= case.budget_nbytes, seed
            best = best_of_all(problem, kinds)
            assert predict(problem, found.prediction.choice).call_seconds <= 1.03 * best.call_seconds, seed
            if len(case.parts) == 1:
                # Otherwise a call may be as fast with slower steps, since another component needn't be copied.
                assert found.slowdown(best) <= 1.03, seed


@pytest.mark.parametrize("seed", range(1000, 1012))
def test_the_device_itself_knows_nothing_faster(sim: ModuleType, seed: int) -> None:
    case = random_case(2 * seed)
    found = session(case)
    problem = truth(case)
    fastest = min(
        carry_out(case, choice, steps=6).steps["transformer"]
        for choice in choices(problem)
        if Memory(problem, choice.kinds).fits(choice.residents, choice.slots)
    )
    assert found.steps["transformer"] <= 1.03 * fastest


@pytest.mark.parametrize("seed", range(10))
def test_a_budget_that_nothing_fits(sim: ModuleType, seed: int) -> None:
    case = random_case(seed)
    case.machine.configure()
    least = sum(work.packed_nbytes for part in case.parts.values() for work in [part.outside])
    pipe, before = build(case), torch.accelerator.memory_allocated()
    with pytest.raises(DoesNotFit, match=r"are missing at the least.*What would help: .*") as error:
        diffusers_omni_offload.enable_omni_offload(pipe, "auto", memory_budget=least // 2)
    assert error.value.missing_nbytes > least // 2 and error.value.component in case.parts
    assert torch.accelerator.memory_allocated() == before


def test_problems_are_different() -> None:
    """They take all roads: by what sets the time, by slots, by residents, by kinds."""
    found = [predict(case.problem(), best.choice) for case in map(random_case, range(30)) for best in [fast(case)]]
    assert {prediction.steps["transformer"].bound for prediction in found} == {"compute", "transfer"}
    assert len({prediction.choice.slots for prediction in found}) > 1
    kinds = {(path, kind) for prediction in found for path, kind in prediction.choice.kinds.items()}
    assert kinds >= set(product(["text_encoder"], ["layer", "resident"])) | {("vae", "module"), ("vae", "resident")}


def fast(case: Case) -> Prediction:
    """The best choice if nothing is hidden."""
    return best_of_all(case.problem())
