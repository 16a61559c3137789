"""The pipelines for several ranks are fit for it: they run in a rank's process, and each prompt has its own output."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests import distributed_cases as cases
from tests import tiny
from tests.equality import outputs
from tests.living import fast_ones
from tests.ranks import RankPool, answers

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module", params=["sim", pytest.param("cpu", marks=pytest.mark.slow)])
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    with RankPool(2, device=request.param) as pool:
        yield pool


def resident(rank: int, size: int, name: str, device: str) -> list[np.ndarray]:
    """Two calls with this rank's prompt, and one of a pipeline that is built anew."""
    pipe, call = cases.build(name, rank)
    return [*outputs(pipe.to(device), call, 2), cases.reference(name, rank, device)]


@pytest.mark.parametrize("name", fast_ones(cases.BUILDS, "wan", "minimax_h3_spec"))
def test_each_rank_has_an_output_of_its_own(name: str, pool: RankPool) -> None:
    found = answers(pool.run(resident, name, pool.device, timeout=200.0))
    for rank, (first, second, anew) in enumerate(found):
        assert np.isfinite(first).all() and first.std() > 0
        assert np.array_equal(first, second) and np.array_equal(first, anew)
        if pool.device == "cpu":
            assert np.array_equal(first, cases.reference(name, rank, "cpu")), "another process gives the same"
    assert found[0][0].shape == found[1][0].shape and not np.array_equal(found[0][0], found[1][0])


@pytest.mark.slow
@pytest.mark.parametrize("name", cases.BUILDS)
def test_every_prompt_has_its_own_output(name: str) -> None:
    found = [cases.reference(name, rank, "cpu") for rank in range(len(cases.PROMPTS))]
    assert all(not np.array_equal(mine, other) for i, mine in enumerate(found) for other in found[:i])
    assert np.array_equal(cases.reference(name, len(cases.PROMPTS), "cpu"), found[0])


@pytest.mark.parametrize("name", fast_ones(cases.SAVED, "wan"))
def test_a_saved_pipeline_is_sharded_and_gives_the_same(name: str, tmp_path: Path) -> None:
    folder = cases.save(name, tmp_path)
    built, _ = cases.build(name, 1)
    for path, dit in cases.dits(built).items():
        index = json.loads((folder / path / "diffusion_pytorch_model.safetensors.index.json").read_text())
        files = {file.name for file in (folder / path).glob("*.safetensors")}
        assert len(files) > 1 and set(index["weight_map"].values()) == files
        assert set(index["weight_map"]) == set(dit.state_dict())
    pipe, call = cases.load(name, folder, 1)
    assert np.array_equal(tiny.run(pipe, call), cases.reference(name, 1, "cpu"))
