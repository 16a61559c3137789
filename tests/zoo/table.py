"""The table of transformer classes in `adapters/README.md`.

python -m tests.zoo.table            runs each class in layer mode and writes the table
python -m tests.zoo.table --check    runs them and fails if the table says something else
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path

import diffusers
import torch

from tests import simdevice
from tests.zoo.live import live_transformers
from tests.zoo.outcome import EQUAL, Outcome, outcome_of

README = Path(__file__).resolve().parent.parent.parent / "adapters" / "README.md"
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
    text = README.read_text()
    return text[text.index(START) : text.index(END) + len(END)]


def run_all(device: torch.device) -> dict[str, Outcome]:
    """The outcome of each live class."""
    outcomes = {}
    for class_name in live_transformers():
        outcomes[class_name] = outcome_of(class_name, device)
        simdevice.clear_hazards()
        print(row(class_name, outcomes[class_name]), flush=True)
    return outcomes


def main(arguments: list[str]) -> None:
    """Write the table, or check it.

    Raises:
        SystemExit: an argument is unknown, or the table isn't up to date.
    """
    if arguments not in ([], ["--check"]):
        raise SystemExit(f"The only argument is --check; got {' '.join(arguments)}.")
    torch.set_num_threads(1)
    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
    logging.getLogger("diffusers_omni_offload").setLevel(logging.ERROR)
    new, old = table(run_all(simdevice.install())), written()
    if not arguments:
        README.write_text(README.read_text().replace(old, new))
    elif new != old:
        raise SystemExit("The table in adapters/README.md is out of date; write it with python -m tests.zoo.table.")


if __name__ == "__main__":
    main(sys.argv[1:])
