"""Every transformer class in layer mode, alone in a pipeline that declares nothing: equal, and each block matters."""

from __future__ import annotations

from collections import Counter
from types import ModuleType

import pytest
import torch

from diffusers_omni_offload.topology.lists import find_lists
from diffusers_omni_offload.topology.sizes import module_nbytes
from tests.zoo import TRANSFORMERS
from tests.zoo.outcome import EQUAL, NOT_CONSTRUCTIBLE, REFUSED, Outcome, outcome_of

QUICK = (
    "BriaFiboTransformer2DModel",
    "ConsisIDTransformer3DModel",
    "DiTTransformer2DModel",
    "Krea2Transformer2DModel",
    "LatteTransformer3DModel",
    "Lumina2Transformer2DModel",
    "WanAnimateTransformer3DModel",
    "WanVACETransformer3DModel",
)
"""Those whose blocks run in an order of their own, lie within parts, or are used from outside: the traps."""

_outcomes: dict[str, Outcome] = {}


def outcome(class_name: str, device: torch.device) -> Outcome:
    if class_name not in _outcomes:
        _outcomes[class_name] = outcome_of(class_name, device)
    return _outcomes[class_name]


@pytest.mark.parametrize(
    "class_name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in sorted(TRANSFORMERS)]
)
def test_layer_mode_is_equal_and_each_block_matters(class_name: str, device: torch.device, sim: ModuleType) -> None:
    found = outcome(class_name, device)
    assert found.result == EQUAL, found.detail
    assert found.inert == ()
    assert found.demand_loads == 1, "the first block of a call comes late, and no other"
    assert sum(count for _, count in found.containers) >= 2
    assert sim.hazards() == []


@pytest.mark.parametrize(
    ("class_name", "containers"),
    [
        ("BriaFiboTransformer2DModel", ["caption_projection", "transformer_blocks", "single_transformer_blocks"]),
        ("Lumina2Transformer2DModel", ["context_refiner", "noise_refiner", "layers"]),
        ("WanVACETransformer3DModel", ["vace_blocks", "blocks"]),
        ("WanAnimateTransformer3DModel", ["blocks", "face_adapter"]),
    ],
)
def test_containers_come_in_the_order_in_which_they_run(
    class_name: str, containers: list[str], device: torch.device
) -> None:
    """Which isn't the order of their registration."""
    assert [path for path, _ in outcome(class_name, device).containers] == containers


def test_the_block_that_is_used_from_outside_stays_on_the_device(device: torch.device) -> None:
    found = outcome("DiTTransformer2DModel", device)
    assert found.containers == (("transformer_blocks", 3),)
    assert found.notes == (
        "transformer.transformer_blocks.0 stays on the device: 'norm1.emb' of it is used outside of its own forward.",
    )


@pytest.mark.slow
def test_only_one_class_uses_blocks_from_outside(device: torch.device) -> None:
    assert [name for name in sorted(TRANSFORMERS) if outcome(name, device).notes] == ["DiTTransformer2DModel"]


@pytest.mark.slow
def test_lists_hold_most_of_the_weights_at_real_sizes() -> None:
    """With the configurations that the classes have by default, on the meta device: at least 88 %, in small blocks."""
    from tests.zoo.live import constructor_modules, live_pipelines

    classes = {cls for pipeline in live_pipelines() for _, cls in constructor_modules(pipeline)}
    measured = 0
    for cls in sorted(classes, key=lambda cls: cls.__name__):
        if not cls.__module__.startswith("diffusers.models.transformers"):
            continue
        try:
            with torch.device("meta"):
                model = cls()
        except TypeError:
            continue  # it has no sizes by default
        total = module_nbytes(model)
        blocks = [block for path in find_lists(model) for block in model.get_submodule(path)]
        assert sum(map(module_nbytes, blocks)) >= 0.88 * total, cls.__name__
        assert max(map(module_nbytes, blocks)) <= 0.07 * total, cls.__name__
        measured += 1
    print(f"{measured} classes at their default sizes")
    assert measured >= 55


@pytest.mark.slow
def test_the_table_of_the_readme_is_up_to_date(device: torch.device) -> None:
    """It has a row for each live class and says what a run says: at most four that can't be built, three refused."""
    from tests.zoo.live import live_transformers
    from tests.zoo.table import table, written

    outcomes = {name: outcome(name, device) for name in live_transformers()}
    assert written() == table(outcomes), "write it anew with python -m tests.zoo.table"
    results = Counter(found.result for found in outcomes.values())
    print(f"{len(outcomes)} live transformer classes: {dict(results)}")
    assert len(outcomes) >= 65
    assert results[NOT_CONSTRUCTIBLE] <= 4 and results[REFUSED] <= 3
    assert set(results) <= {EQUAL, NOT_CONSTRUCTIBLE, REFUSED}
