"""An operation: what is done to a pipeline's weights, after what, and whether its output shows it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tests.operations.subject import Change


@dataclass(frozen=True)
class Operation:
    """A row of the table.

    Args:
        name: what the table calls it.
        change: does it.
        prepare: what has to be done before.
        shows: whether the output differs by it; None if that depends.
        dtype: what the pipeline is cast to at first.
        families: names of those that have it; empty for all.
    """

    name: str
    change: Change
    prepare: tuple[Change, ...] = ()
    shows: bool | None = True
    dtype: torch.dtype | None = None
    families: tuple[str, ...] = ()


OPERATIONS: dict[str, Operation] = {}
"""All of them by name, in the order of the table."""

_before: dict[Change, tuple[Change, ...]] = {}


def operation(
    name: str, *prepare: Change, shows: bool | None = True, families: tuple[str, ...] = ()
) -> Callable[[Change], Change]:
    """Make a function an operation, which is done after `prepare`, and after what those are done after."""

    def add(change: Change) -> Change:
        steps = [step for last in prepare for step in (*_before.get(last, ()), last)]
        _before[change] = tuple(dict.fromkeys(steps))
        OPERATIONS[name] = Operation(name, change, _before[change], shows, None, families)
        return change

    return add


def also_in_bfloat16(*names: str) -> None:
    """Let operations be rows for bfloat16 as well."""
    for name in names:
        row = dataclasses.replace(OPERATIONS[name], name=f"{name}, in bfloat16", dtype=torch.bfloat16)
        OPERATIONS[row.name] = row
