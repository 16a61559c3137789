"""Random walks of operations on weights: equal at every step, and nothing is held any more when LoRA is unloaded."""

from __future__ import annotations

import pytest
import torch

from tests.operations.families import FLUX2, QWEN_IMAGE, SD3, WAN, Family
from tests.operations.moves import MOVES
from tests.operations.placements import MIXED, PLACEMENTS
from tests.operations.walk import Held, Walk

ALL = {**PLACEMENTS, **MIXED}


def walk(family: Family, placement: str, steps: int, device: torch.device, seed: int = 0) -> Walk:
    """Walk so far, then unload."""
    made = Walk(family, ALL[placement], device, seed)
    for _ in range(steps):
        made.step()
    made.unload()
    assert Held.of(made.offloaded.pipe) == made.held
    print(f"{family.name}, {placement}: {dict(made.done)}, {len(made.outputs)} outputs, {made.failed} failed")
    return made


def test_a_short_walk(device: torch.device) -> None:
    walk(SD3, "streamed", 25, device)


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["streamed", "module-swapped"])
def test_a_long_walk(placement: str, device: torch.device) -> None:
    made = walk(SD3, placement, 300, device, seed=1)
    assert set(made.done) == {move.__name__ for move in MOVES}
    assert len(made.outputs) >= 100 and made.failed <= 30


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "placement", "steps"),
    [
        (SD3, "resident", 60),
        (SD3, "partly resident", 60),
        (SD3, "resident beside swapped", 60),
        (WAN, "streamed", 80),
        (WAN, "module-swapped", 40),
        (FLUX2, "streamed", 80),
        (FLUX2, "module-swapped", 40),
        (FLUX2, "partly resident", 40),
        (QWEN_IMAGE, "streamed", 50),
        (QWEN_IMAGE, "module-swapped", 30),
    ],
    ids=lambda value: value.name if isinstance(value, Family) else str(value),
)
def test_a_walk(family: Family, placement: str, steps: int, device: torch.device) -> None:
    made = walk(family, placement, steps, device, seed=2)
    assert len(made.outputs) >= steps // 3 and made.failed <= steps // 10
