"""The table of operations in `adapters/README.md`.

python -m tests.operations.table            tries each operation and writes the table
python -m tests.operations.table --check    tries them and fails if the table says something else
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

import diffusers
import peft
import torch

from tests import simdevice
from tests.operations.cell import Outcome, outcome_of
from tests.operations.families import FAMILIES, Family
from tests.operations.operation import OPERATIONS, Operation
from tests.operations.placements import PLACEMENTS
from tests.readme_table import between, write_or_check

START, END = "<!-- operations: start -->", "<!-- operations: end -->"

Outcomes = Mapping[str, Outcome]
"""Of an operation on a family, by placement."""


def cell(outcomes: Outcomes) -> str:
    """One result if it is that of all placements, else each placement's."""
    results = {placement: outcome.result for placement, outcome in outcomes.items()}
    if len(set(results.values())) == 1:
        return next(iter(results.values()))
    return "; ".join(f"{placement}: {result}" for placement, result in results.items())


def heading() -> list[str]:
    """The lines above the rows."""
    sentence = (
        f"diffusers {diffusers.__version__}, peft {peft.__version__}: {len(OPERATIONS)} operations. A cell stands for "
        f"three placements of the weights, {', '.join(PLACEMENTS)}, and names them where they differ."
    )
    names = ("operation", *(family.name for family in FAMILIES))
    return [sentence, "", f"| {' | '.join(names)} |", f"|{' --- |' * len(names)}"]


def table(outcomes_of: Callable[[Operation, Family], Outcomes]) -> str:
    """What stands between the markers."""
    rows = [
        f"| {' | '.join((each.name, *(cell(outcomes_of(each, family)) for family in FAMILIES)))} |"
        for each in OPERATIONS.values()
    ]
    return "\n".join([START, "", *heading(), *rows, "", END])


def written() -> str:
    """The table as it stands in the README, with its markers.

    Raises:
        ValueError: a marker isn't there.
    """
    return between(START, END)


def written_cells() -> dict[tuple[str, str], str]:
    """The cells of the table in the README, by operation and family, without those of the heading."""
    lines = [line for line in written().splitlines() if line.startswith("|")]
    names, *rows = ([part.strip() for part in line.strip("|").split("|")] for line in lines)
    return {(name, family): text for name, *texts in rows[1:] for family, text in zip(names[1:], texts, strict=True)}


def try_all(device: torch.device) -> Callable[[Operation, Family], Outcomes]:
    """Tries each operation when its row is made, and prints what is wrong."""

    def outcomes(operation: Operation, family: Family) -> Outcomes:
        found = {placement: outcome_of(operation, family, placement, device) for placement in PLACEMENTS}
        simdevice.clear_hazards()
        for placement, outcome in found.items():
            print(f"{operation.name}, {family.name}, {placement}: {outcome.detail or outcome.result}", flush=True)
        return found

    return outcomes


if __name__ == "__main__":
    write_or_check(sys.argv[1:], "tests.operations.table", lambda device: table(try_all(device)), written)
