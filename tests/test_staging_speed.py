"""Speed of staging, in real time: reads near a memcpy, and beside compute."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.benchmarks import staging

pytestmark = pytest.mark.timing


@pytest.fixture(scope="module")
def staged() -> Iterator[staging.StagedFile]:
    with staging.staged_file(1 << 29, blocks=32) as staged:
        yield staged


def test_reads_from_the_page_cache_are_near_a_memcpy(staged: staging.StagedFile) -> None:
    """At least 0.8 of its throughput; both are the best of interleaved rounds."""
    shares = []
    while len(shares) < 4 and max(shares, default=0) < 0.8:
        shares.append(1 / staging.reading(staged).ratio)
    assert max(shares) >= 0.8, f"staging ran at {shares} of a memcpy"


def test_reads_overlap_with_compute(staged: staging.StagedFile) -> None:
    """With compute that takes no CPU, as an accelerator's, as well as a memcpy on a thread of its own does.

    The sum would be 1.8 of the longer one; the first read, a 32nd, can't overlap.
    """
    found = staging.beside_compute(staged, staging.sleeping, enough=1.2)
    assert found.sum_ratio > 1.5 and found.ratio_to_machine <= 1.2, found
