"""Predicted bytes against the simulated device's counters, and calls against its modelled times."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest

from diffusers_omni_offload.planning.choice import Choice
from diffusers_omni_offload.planning.costs import BlockCost, ComponentCost, Problem, Rates
from diffusers_omni_offload.planning.memory import Memory
from diffusers_omni_offload.planning.predicting import predict
from tests.benchmarks.dice import Dice
from tests.benchmarks.problems import Case, carry_out


def peak(problem: Problem, choice: Choice) -> tuple[int, str]:
    return Memory(problem, choice.kinds).peak(choice.residents, choice.slots)


def random_choice(dice: Dice, problem: Problem) -> Choice:
    """Any kind for each component, any number of residents, 2 to 4 slots."""
    kinds, residents = {}, {}
    for component in problem.components:
        possible = ["resident", "module", "layer"] if component.blocks else ["resident", "module"]
        kinds[component.path] = possible[dice.integer(0, len(possible) - 1)]
        if kinds[component.path] == "layer" and component.may_keep_blocks:
            residents[component.path] = dice.integer(0, len(component.blocks) - 2)
    return Choice(kinds, residents, dice.integer(2, 4))


@pytest.mark.parametrize("seed", range(20))
def test_a_call_is_the_engines(sim: ModuleType, seed: int) -> None:
    dice = Dice(seed)
    case = dice.case()
    for _ in range(2):
        choice = random_choice(dice, case.problem())
        prediction, outcome = predict(case.problem(), choice), carry_out(case, choice)
        assert outcome.peak_nbytes <= prediction.peak_nbytes <= 1.02 * outcome.peak_nbytes, choice
        assert prediction.moved_nbytes == outcome.moved_nbytes, choice
        for path, seconds in outcome.steps.items():
            assert prediction.steps[path].seconds == pytest.approx(seconds, rel=0.01)
        # What the first blocks of a stack are copied beside isn't looked at.
        assert prediction.call_seconds == pytest.approx(outcome.call_seconds, rel=0.04), choice


@pytest.mark.parametrize("seed", range(8))
def test_slots_and_swapped_components_leave_before_the_vae_where_memory_is_short(
    sim: ModuleType, taken: int, seed: int
) -> None:
    dice = Dice(100 + seed)
    while "vae" not in (case := dice.case()).parts:
        pass
    # A VAE whose activations set the peak.
    parts = dict(case.parts)
    parts["vae"] = replace(parts["vae"], activation_nbytes=4_000_000)
    case = Case(parts, case.machine)
    # DiTs alike: of two that aren't, the one that runs last decides on what the VAE finds.
    dits = dict.fromkeys(parts.keys() & {"transformer", "transformer_2"}, "module" if seed % 3 else "layer")
    choice = random_choice(dice, case.problem())
    kinds = {**choice.kinds, **dits, "vae": ("resident", "module")[seed % 2]}
    choice = Choice(kinds, choice.residents, choice.slots)
    unlimited, _ = peak(case.problem(), choice)
    for total in (int(1.01 * unlimited), 3 * unlimited):
        sim.configure(capacity_bytes=taken + total)
        outcome = carry_out(case, choice)
        predicted, _ = peak(replace(case.problem(), total_nbytes=total), choice)
        assert outcome.peak_nbytes <= predicted <= 1.02 * outcome.peak_nbytes


def component(path: str, role: str, nbytes: int, count: int = 0, **options: object) -> ComponentCost:
    """One of `count` equal blocks and nothing else, or of one piece."""
    blocks = tuple(BlockCost(nbytes // count) for _ in range(count))
    state = 0 if count else nbytes
    return ComponentCost(path, role, path, nbytes, blocks, state, **options)  # type: ignore[arg-type]


DIT = component("dit", "dit", 512_000, 10, may_keep_blocks=True, activation_nbytes=1_000)
SECOND = replace(DIT, path="second")
CONTROL = component("control", "resident", 51_200)
T5 = component("t5", "encoder", 102_400, 4, activation_nbytes=20_000)
CLIP = component("clip", "encoder", 25_600)
VAE = component("vae", "vae", 10_240, activation_nbytes=50_000)
PROBLEM = Problem((DIT, SECOND, CONTROL, T5, CLIP, VAE), Rates(1e9), 1 << 30)
PATHS = [component.path for component in PROBLEM.components]


def kinds(**others: str) -> dict[str, str]:
    """Everything is resident but `others`."""
    return {path: others.get(path, "resident") for path in PATHS}


def test_everything_resident() -> None:
    assert peak(PROBLEM, Choice(kinds())) == (2 * 512_000 + 51_200 + 102_400 + 25_600 + 10_240 + 50_000, "vae")


def test_dits_make_way_for_each_other_and_encoders_for_them() -> None:
    choice = Choice(kinds(dit="module", second="module", t5="module", clip="module"))
    # A VAE that isn't swapped finds a DiT there.
    assert peak(PROBLEM, choice) == (51_200 + 10_240 + 512_000 + 50_000, "vae")
    choice = Choice(kinds(dit="module", second="module", t5="module", clip="module", vae="module", control="module"))
    assert peak(PROBLEM, choice) == (51_200 + 512_000 + 1_000, "dit")


def test_encoders_are_there_together() -> None:
    small = replace(PROBLEM, components=(T5, CLIP, VAE))
    choice = Choice({"t5": "module", "clip": "module", "vae": "module"})
    assert peak(small, choice) == (102_400 + 25_600 + 20_000, "t5")


def test_a_vae_that_encodes_too_may_find_encoders() -> None:
    choice = Choice(kinds(dit="layer", second="layer", t5="module", clip="module"))
    rest, encoders = 2 * 51_200 + 51_200 + 10_240, 102_400 + 25_600
    assert peak(PROBLEM, choice) == (rest + encoders + 20_000, "t5")
    encodes = replace(PROBLEM, components=(*PROBLEM.components[:-1], replace(VAE, forwards=2)))
    assert peak(encodes, choice) == (rest + encoders + 50_000, "vae")


def test_residents_slots_and_the_host() -> None:
    memory = Memory(PROBLEM, kinds(dit="layer", second="layer", t5="layer", clip="module"))
    residents = {"dit": 4, "second": 10}
    assert memory.slots_nbytes(residents, 3) == 3 * 51_200
    assert memory.slots_nbytes({"dit": 10, "second": 10}, 3) == 3 * 25_600
    assert memory.between_calls(residents, 3) == 14 * 51_200 + 3 * 51_200 + 51_200 + 10_240
    assert memory.host_nbytes(residents) == 6 * 51_200 + 102_400 + 25_600


def test_blocks_that_are_kept_take_what_allocations_take() -> None:
    dit = replace(DIT, blocks=tuple(replace(block, kept_nbytes=60_000) for block in DIT.blocks), activation_nbytes=0)
    problem = replace(PROBLEM, components=(dit,))
    assert peak(problem, Choice({"dit": "layer"}, {"dit": 3})) == (3 * 60_000 + 2 * 51_200, "dit")
    assert peak(problem, Choice({"dit": "resident"})) == (600_000, "dit")


def test_what_never_runs_has_no_activations() -> None:
    idle = replace(VAE, forwards=0)
    assert peak(replace(PROBLEM, components=(DIT, idle)), Choice({"dit": "layer", "vae": "resident"}))[1] == "dit"
