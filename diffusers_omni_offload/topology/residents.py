"""Which blocks of a stack stay on the device."""

from __future__ import annotations


def resident_indices(count: int, wanted: int, policy: str) -> tuple[int, ...]:
    """Sorted indices of `wanted` residents among `count` blocks; all of them if more are wanted.

    "spread": evenly around the ring, each in the middle of its share of the blocks. The transfer of a streamed block
    hides behind the computation of the residents before it, so they must not stand together: then the link has nothing
    to do while they run, and too much after.
    "leading": the first `wanted`.
    """
    wanted = min(wanted, count)
    if policy == "leading":
        return tuple(range(wanted))
    return tuple((2 * share + 1) * count // (2 * wanted) for share in range(wanted))
