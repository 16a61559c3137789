"""The table of transformer classes in `adapters/README.md`.

python -m tests.zoo.table            runs each class in layer mode and writes the table
python -m tests.zoo.table --check    runs them and fails if the table says something else
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import diffusers
import torch

from tests import simdevice
from tests.readme_table import between, write_or_check
from tests.zoo.live import live_transformers
from tests.zoo.outcome import EQUAL, Outcome, outcome_of

START, END = "<!-- transformer classes: start -->", "<!-- transformer classes: end -->"
HEADER = ("| class | blocks, in the order in which they run | layer mode |", "| --- | --- | --- |")


def row(class_name: str, outcome: Outcome) -> str:
    """The line of one class."""
    containers = ", ".join(f"`{path}`" for path, _ in outcome.containers)
    result = outcome.result if not outcome.detail else f"{outcome.result}: {outcome.detail}"
    if outcome.inert:
        result += f"; scaling {', '.join(outcome.inert)} doesn't show"
    if outcome.notes:
        result += "; " + " ".join(outcome.notes).replace("transformer.", "", 1).rstrip(".")
    cells = (f"`{class_name}`", containers, " ".join(result.split()).replace("|", "\\|"))
    return f"| {' | '.join(cells)} |"


def table(outcomes: Mapping[str, Outcome]) -> str:
    """What stands between the markers."""
    equal = sum(outcome.result == EQUAL for outcome in outcomes.values())
    heading = f"diffusers {diffusers.__version__}: {len(outcomes)} classes, {equal} of them equal."
    return "\n".join([START, "", heading, "", *HEADER, *(row(*each) for each in outcomes.items()), "", END])


def written() -> str:
    """The table as it stands in the README, with its markers.

    Raises:
        ValueError: a marker isn't there.
    """
    return between(START, END)


def run_all(device: torch.device) -> dict[str, Outcome]:
    """The outcome of each live class."""
    outcomes = {}
    for class_name in live_transformers():
        outcomes[class_name] = outcome_of(class_name, device)
        simdevice.clear_hazards()
        print(row(class_name, outcomes[class_name]), flush=True)
    return outcomes


if __name__ == "__main__":
    write_or_check(sys.argv[1:], "tests.zoo.table", lambda device: table(run_all(device)), written)
