"""Host memory of processes that run a pipeline from a checkpoint of 1 GB, whose weights stay in the files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import big_checkpoint
from tests.big_checkpoint import BLOCKS, Increase, Share, Way
from tests.ranks import answers, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(1800)]

MB = 10**6
RANKS = 4


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    """The pipeline's folder, and the size of its DiT's files."""
    folder = tmp_path_factory.mktemp("big")
    nbytes = big_checkpoint.save(folder)
    assert 0.95e9 < nbytes < 1.15e9 and len(list((folder / "transformer").glob("*.safetensors"))) > 2
    yield folder, nbytes
    for file in folder.rglob("*.safetensors"):
        file.unlink()


def run(function: Any, size: int, folder: Path, way: Way) -> list[Any]:
    """In processes that share nothing with this one."""
    found = run_ranks(function, size, folder, way, device="sim", start="spawn", timeout=560.0, group_timeout=540.0)
    return answers(found)


@pytest.mark.parametrize("way", ["mapped", "page cache"])
def test_one_process_has_two_staging_buffers_and_no_weights_of_blocks(saved: tuple[Path, int], way: Way) -> None:
    folder, nbytes = saved
    (found,) = run(big_checkpoint.measure_one, 1, folder, way)
    assert isinstance(found, Increase)
    allowed = found.apart + found.staging + 64 * MB
    peaks = ", ".join(f"{phase} {peak / MB:.1f}" for phase, peak in found.peaks.items())
    print(
        f"\n{way}: checkpoint {nbytes / MB:.0f} MB; anonymous memory over the imports, the device's own aside, "
        f"in MB: {peaks}; allowed {allowed / MB:.1f} (other weights {found.apart / MB:.1f}, "
        f"staging {found.staging / MB:.1f}, 64)"
    )
    assert found.own == 0 and len(set(found.digests)) == 1
    assert found.staging < 3 * nbytes / BLOCKS
    assert max(found.peaks.values()) <= allowed


def test_four_processes_share_one_copy(saved: tuple[Path, int]) -> None:
    folder, nbytes = saved
    copies: dict[str, float] = {}
    digests = set()
    for way in ("mapped", "page cache", "ordinary"):
        shares: list[Share] = run(big_checkpoint.measure_together, RANKS, folder, way)
        total, device = sum(share.proportional for share in shares), sum(share.device for share in shares)
        copies[way] = (total - device) / nbytes
        digests.update(share.digest for share in shares)
        assert all((share.straight >= 2 * BLOCKS) == (way == "page cache") for share in shares)
        print(
            f"\n{way}: {RANKS} processes have {total / MB:.0f} MB (PSS) over {RANKS} idle ones, {total / nbytes:.2f} "
            f"copies of the checkpoint ({nbytes / MB:.0f} MB); {copies[way]:.2f} without the simulated device's memory "
            f"({device / MB:.0f} MB)"
        )
    assert len(digests) == 1
    assert copies["mapped"] <= 1.2 and copies["page cache"] <= 1.2
    assert copies["ordinary"] > RANKS - 0.5, "the way of measuring sees copies"
