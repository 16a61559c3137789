"""Which block runs next: as declared at first, as learned later."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Sequence


class Order:
    """A successor for each block.

    A declared stack runs from its first block to its last and starts again. A deviation that is seen twice running
    replaces a block's successor; one that comes and goes, as when every second step skips most blocks, doesn't.

    A call that has as many forwards as the one before it is known to end there, and nothing is expected after.
    """

    def __init__(self) -> None:
        self._declared: list[int] = []
        self._successor: list[int] = []
        self._deviation: list[int | None] = []
        self._previous: int | None = None
        self._position = 0
        self._length = 0

    def add_stack(self, blocks: Sequence[int]) -> None:
        """Declare that `blocks`, the next unused numbers, run in this order, over and over."""
        self._declared += [*blocks[1:], *blocks[:1]]
        self._successor += [*blocks[1:], *blocks[:1]]
        self._deviation += [None] * len(blocks)

    def begin(self) -> None:
        """A call begins: what ran last says nothing about what runs first."""
        self._previous = None
        self._position = 0

    def end(self) -> None:
        """A call has ended; remember how many forwards it took."""
        if self._position:
            self._length = self._position
        self._previous = None

    def unlearn(self) -> None:
        """Go back to what was declared."""
        self._successor = list(self._declared)
        self._deviation = [None] * len(self._declared)
        self._length = 0

    @property
    def digest(self) -> str:
        """Tells whether two orders expect the same from now on, and learn alike."""
        state = (self._successor, self._deviation, self._previous, self._position, self._length)
        return hashlib.sha256(repr(state).encode()).hexdigest()[:16]

    def note(self, block: int) -> None:
        """`block` runs now."""
        previous, self._previous = self._previous, block
        self._position += 1
        if previous is None or previous == block:
            # A block that repeats is in its slot already, so there is nothing to learn for a prefetch.
            return
        if self._successor[previous] == block:
            self._deviation[previous] = None
        elif self._deviation[previous] == block:
            self._successor[previous] = block
            self._deviation[previous] = None
        else:
            self._deviation[previous] = block

    def upcoming(self, block: int, count: int, resident: Container[int]) -> list[int]:
        """The next blocks after `block`, at most `count`, without residents and without repeats."""
        remaining = self._length - self._position
        if remaining < 0:
            remaining = len(self._successor)
        found: list[int] = []
        current = block
        for _ in range(min(remaining, len(self._successor))):
            if len(found) == count:
                break
            current = self._successor[current]
            if current == block or current in found:
                break
            if current not in resident:
                found.append(current)
        return found
