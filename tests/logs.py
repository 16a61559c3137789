"""What the library says, as tests read it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def log_lines() -> Iterator[list[str]]:
    """The lines that are logged in the body, as they come."""
    lines: list[str] = []
    handler, logger = logging.Handler(logging.INFO), logging.getLogger("diffusers_omni_offload")
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
