"""What the library says: its logger (one line where a user should know, as loud as diffusers is set to be), and how it
writes sizes."""

from __future__ import annotations

import logging
import sys

from diffusers.utils import logging as diffusers_logging
from diffusers.utils.distributed_utils import is_torch_dist_rank_zero

#: Everything in the package says what it has to say here.
logger = logging.getLogger("diffusers_omni_offload")

#: The logger's level as long as nobody has set another: below all of them, so that the filter sees every message.
_AS_DIFFUSERS = 1


def _is_wanted(record: logging.LogRecord) -> bool:
    """Whether diffusers' verbosity lets a message through. A level of the logger's own goes before that."""
    if logger.level != _AS_DIFFUSERS:
        return True
    verbosity = diffusers_logging.get_verbosity()
    # At diffusers' default (warnings) our few lines of information are shown.
    return record.levelno >= (logging.INFO if verbosity == logging.WARNING else verbosity)


class _StderrHandler(logging.Handler):
    """Writes to stderr, unless the program handles logs itself. Of several ranks all warn, but only one informs."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers or (record.levelno < logging.WARNING and not is_torch_dist_rank_zero()):
            return
        print(f"omni offload: {record.getMessage()}", file=sys.stderr)


logger.addFilter(_is_wanted)
if not logger.handlers:
    logger.addHandler(_StderrHandler())
if logger.level == logging.NOTSET:
    logger.setLevel(_AS_DIFFUSERS)


def format_bytes(nbytes: int) -> str:
    """`nbytes` in the largest unit (B, KiB, MiB, GiB) that gives at least 1."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} B"
