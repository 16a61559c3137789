"""What a command prints: tables for a terminal or as plain text, and notices."""

from __future__ import annotations

import sys
from typing import Any


def show(thing: Any) -> None:
    """Print something with `__rich__` as rich does on a terminal, else as text."""
    if sys.stdout.isatty():
        from rich.console import Console

        Console().print(thing)
    else:
        print(thing)


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)
