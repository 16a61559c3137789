"""`omni-offload`: plan, run and measure a pipeline, and look at the machine, from the command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]

EXTRA = 'pip install "diffusers-omni-offload[cli]"'


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: of the command line, without the program's name; None takes those of this process.

    Returns:
        The exit status: 0, 1 for what went wrong on the way, 2 for bad input, about which stderr has one sentence.
    """
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        print(f"The command line needs {error.name}, which isn't installed: {EXTRA}", file=sys.stderr)
        return 2
    from diffusers_omni_offload.cli.application import run_command

    return run_command(list(sys.argv[1:] if arguments is None else arguments))
