"""The table of operations in `adapters/README.md`.

python -m tests.operations.table            tries each operation and writes the table
python -m tests.operations.table --check    tries them and fails if the table says something else
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import diffusers
import peft
import torch
import transformers

from tests import simdevice
from tests.operations.cell import Outcome, outcome_of
from tests.operations.families import FAMILIES, Family
from tests.operations.operation import OPERATIONS, Operation
from tests.operations.placements import PLACEMENTS

README = Path(__file__).resolve().parent.parent.parent / "adapters" / "README.md"
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
    text = README.read_text()
    return text[text.index(START) : text.index(END) + len(END)]


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


def main(arguments: list[str]) -> None:
    """Write the table, or check it.

    Raises:
        SystemExit: an argument is unknown, or the table isn't up to date.
    """
    if arguments not in ([], ["--check"]):
        raise SystemExit(f"The only argument is --check; got {' '.join(arguments)}.")
    torch.set_num_threads(1)
    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
    logging.getLogger("diffusers_omni_offload").setLevel(logging.ERROR)
    new, old = table(try_all(simdevice.install())), written()
    if not arguments:
        README.write_text(README.read_text().replace(old, new))
    elif new != old:
        raise SystemExit(
            "The table in adapters/README.md is out of date; write it with python -m tests.operations.table."
        )


if __name__ == "__main__":
    main(sys.argv[1:])
