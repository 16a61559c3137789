"""What the library says: its logger (one line where a user should know, on stderr, as loud as diffusers is set to be),
and how it writes sizes."""

from __future__ import annotations

import logging
import sys

from diffusers.utils import logging as diffusers_logging

logger = logging.getLogger("diffusers_omni_offload")


class _StderrHandler(logging.Handler):
    """Writes to stderr unless the program handles logs itself, or diffusers' verbosity asks for errors only."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers or record.levelno < _threshold():
            return
        print(f"omni offload: {record.getMessage()}", file=sys.stderr)


def _threshold() -> int:
    # At diffusers' default (warnings) our few lines of information are shown.
    verbosity = diffusers_logging.get_verbosity()
    return logging.INFO if verbosity <= logging.WARNING else verbosity


if not logger.handlers:
    logger.addHandler(_StderrHandler())
    logger.setLevel(logging.INFO)


def format_bytes(nbytes: int) -> str:
    """`nbytes` in the largest unit (B, KiB, MiB, GiB) that gives at least 1."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} B"
