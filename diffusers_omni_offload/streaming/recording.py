"""What happened on the device and when, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Lane = Literal["component", "compute", "wait", "copy", "gather"]
"""A component's forward; a block's forward; the compute stream waiting for a block's bytes; a copy from the host; an
all-gather of a block."""


@dataclass(frozen=True)
class Span:
    """A stretch of time in one lane.

    Attributes:
        lane: what kind of work it is.
        name: path of the block or component.
        begin: seconds since the recording began, on the device's clock.
        end: likewise.
        nbytes: bytes that a copy or gather moved to this device; 0 for others.
        forward: number of the outermost component's forward that it belongs to, counting all components' from 0 on;
            copies belong to the one in which they were issued. -1 before the first.
    """

    lane: Lane
    name: str
    begin: float
    end: float
    nbytes: int = 0
    forward: int = -1

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.begin


@dataclass(frozen=True)
class MemorySample:
    """Device bytes that torch had allocated, when the device got to this point.

    Attributes:
        at: seconds since the recording began.
        nbytes: allocated bytes, of the whole process.
    """

    at: float
    nbytes: int
