"""A pipeline resident on the simulated device beside its offloaded twin, and bit-for-bit comparison of their calls."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from tests import tiny

Call = Callable[[], dict[str, Any]]
Build = Callable[[], tuple[Any, Call]]


def build_as(build: Build, dtype: torch.dtype | None = None) -> tuple[Any, Call]:
    """A pipeline that is still on the CPU, cast to `dtype` if one is given."""
    pipe, call = build()
    pipe.set_progress_bar_config(disable=True)
    return (pipe if dtype is None else pipe.to(dtype)), call


def build_resident(build: Build, device: torch.device, dtype: torch.dtype | None = None) -> tuple[Any, Call]:
    """The reference: the same pipeline, moved to the device as stock diffusers does it."""
    pipe, call = build_as(build, dtype)
    return pipe.to(device), call


def outputs(pipe: Any, call: Call, calls: int = 3) -> list[np.ndarray]:
    """The outputs of so many calls, each with fresh arguments."""
    return [tiny.run(pipe, call) for _ in range(calls)]


def assert_equal_outputs(found: Sequence[np.ndarray], expected: Sequence[np.ndarray], what: str) -> None:
    """Each call's output is the same as the reference's, bit for bit."""
    assert len(found) == len(expected)
    for number, (mine, reference) in enumerate(zip(found, expected, strict=True), start=1):
        assert mine.dtype == reference.dtype and mine.shape == reference.shape, what
        if not np.array_equal(mine, reference):
            wrong = int((mine != reference).sum())
            raise AssertionError(
                f"{what}: call {number} differs from the resident run in {wrong} of {mine.size} values"
            )


def assert_no_hazards(sim: Any, what: str) -> None:
    """The race checker has nothing to say; `what` names the configuration if it has."""
    found = sim.hazards()
    assert not found, f"{what}: {found[:3]}"


def scale(block: nn.Module, factor: float = 1.5) -> Callable[[], None]:
    """Multiply every parameter of `block` in place; returns what puts the old values back, in place as well."""
    saved = [(parameter, parameter.detach().clone()) for parameter in block.parameters()]
    for parameter in block.parameters():
        parameter.data.mul_(factor)

    def restore() -> None:
        for parameter, before in saved:
            parameter.data.copy_(before)

    return restore


def pairwise(factors: Mapping[str, Sequence[Any]], seed: int = 0, attempts: int = 40) -> list[dict[str, Any]]:
    """Rows in which every two values of every two factors meet at least once.

    Greedy: each row is the best of a few random ones that start from a pair that is still missing.

    Args:
        factors: the values of each factor.
        seed: seed of the choices, so that the rows are the same every time.
        attempts: whole covers that are tried; the shortest is returned.
    """
    names = list(factors)
    rng = random.Random(seed)
    best: list[dict[str, Any]] | None = None
    for _ in range(attempts):
        rows = _one_cover(names, factors, rng)
        if best is None or len(rows) < len(best):
            best = rows
    assert best is not None
    return best


def pairs_of(row: Mapping[str, Any], names: Sequence[str]) -> set[tuple[str, Any, str, Any]]:
    """The pairs of values that meet in a row."""
    return {(a, row[a], b, row[b]) for i, a in enumerate(names) for b in names[i + 1 :]}


def _one_cover(names: Sequence[str], factors: Mapping[str, Sequence[Any]], rng: random.Random) -> list[dict[str, Any]]:
    missing = {
        (a, x, b, y) for i, a in enumerate(names) for b in names[i + 1 :] for x in factors[a] for y in factors[b]
    }
    rows: list[dict[str, Any]] = []
    while missing:
        candidates = []
        for a, x, b, y in rng.sample(sorted(missing, key=repr), min(8, len(missing))):
            row = {a: x, b: y}
            for name in rng.sample(names, len(names)):
                if name not in row:
                    row[name] = max(
                        rng.sample(list(factors[name]), len(factors[name])),
                        key=lambda value, name=name, row=row: _gain(row, name, value, names, missing),
                    )
            candidates.append({name: row[name] for name in names})
        chosen = max(candidates, key=lambda row: len(pairs_of(row, names) & missing))
        rows.append(chosen)
        missing -= pairs_of(chosen, names)
    return rows


def _gain(
    row: Mapping[str, Any], name: str, value: Any, names: Sequence[str], missing: set[tuple[str, Any, str, Any]]
) -> int:
    """How many missing pairs `value` of `name` would meet in the row so far."""
    index = names.index(name)
    return sum(
        ((other, known, name, value) if names.index(other) < index else (name, value, other, known)) in missing
        for other, known in row.items()
    )
