"""The ranks that hold a pipeline's weights together, from the parallel state; callers don't choose them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class WeightGroup:
    """The ranks that hold a pipeline's weights together.

    Attributes:
        kind: how they share the work: "data" (each has its own requests), "sequence" (they share one), or "none".
        ranks: their global ranks.
        rank: this process, as an index into `ranks`.
        process_group: of these ranks; None for "none".
    """

    kind: Literal["none", "data", "sequence"]
    ranks: tuple[int, ...]
    rank: int
    process_group: Any = None

    @property
    def size(self) -> int:
        """How many they are."""
        return len(self.ranks)
