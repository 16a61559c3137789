"""Tables in `adapters/README.md` that a run writes, and can check."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import diffusers
import torch
import transformers

from tests import simdevice

README = Path(__file__).resolve().parent.parent / "adapters" / "README.md"


def between(start: str, end: str) -> str:
    """What stands in the README from one marker to the other, markers included.

    Raises:
        ValueError: a marker isn't there.
    """
    text = README.read_text()
    return text[text.index(start) : text.index(end) + len(end)]


def write_or_check(
    arguments: list[str], name: str, make: Callable[[torch.device], str], written: Callable[[], str]
) -> None:
    """Make a table on the simulated device, and write it or, with `--check`, compare it with what is written.

    Args:
        arguments: of the command line.
        name: the module that is run, for the message.
        make: gives the new table, with its markers.
        written: gives the one that stands in the README.

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
    new, old = make(simdevice.install()), written()
    if not arguments:
        README.write_text(README.read_text().replace(old, new))
    elif new != old:
        raise SystemExit(f"The table in adapters/README.md is out of date; write it with python -m {name}.")
