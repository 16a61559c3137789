"""What may be done to weights, beside a resident pipeline: LoRA and edits on streamed, resident and swapped weights."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.living import fast_ones
from tests.operations.cell import ABSENT, BEFORE, EQUAL, FAILS, REFUSED, WRONG, outcome_of, when_in
from tests.operations.families import FAMILIES, SD3, Family
from tests.operations.operation import OPERATIONS
from tests.operations.placements import PLACEMENTS
from tests.operations.table import cell, heading, written, written_cells

QUICK = (
    "`load_lora_weights`",
    "a second adapter, of another rank",
    "a LoRA of layers outside of the blocks, too",
    "a LoRA of text encoders, too",
    "a scale in the call's attention arguments",
    "`unfuse_lora`",
    "`fuse_lora`, then `disable_lora`",
    "`unload_lora_weights`",
    "hotswap, larger rank",
    "`set_lora_device` to the host and back",
    "a name that is taken already",
    "a replaced `Parameter`",
    "a block more in a stack",
    "`pipe.vae =` another one",
    "`fuse_lora`, then `unload_lora_weights`, in bfloat16",
)
"""Operations that between them change weights in every way there is; the rest is slow."""
REFUSED_BY_STOCK = ("a name that is taken already",)


@pytest.mark.parametrize("placement", fast_ones(PLACEMENTS, "streamed", "module-swapped"))
@pytest.mark.parametrize("name", QUICK)
def test_an_operation_comes_to_the_same(name: str, placement: str, device: torch.device) -> None:
    found = outcome_of(OPERATIONS[name], SD3, placement, device)
    assert found.result == (REFUSED if name in REFUSED_BY_STOCK else EQUAL), found.detail


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_is_prepared_before_and_after_enabling(name: str) -> None:
    """On different families and placements."""
    counts = Counter(
        when_in(OPERATIONS[name], family, placement) == BEFORE for family in FAMILIES for placement in PLACEMENTS
    )
    assert counts[True] == counts[False]


def test_the_table_of_the_readme_has_every_operation_and_family() -> None:
    assert list(written_cells()) == [(name, family.name) for name in OPERATIONS for family in FAMILIES]
    assert "\n".join(heading()) in written()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_each_operation_comes_to_the_same(family: Family, device: torch.device) -> None:
    """On streamed, resident and swapped weights; what stock diffusers refuses is refused. And the README says so."""
    cells = written_cells()
    wrong, stale, results = [], [], Counter()
    for name, operation in OPERATIONS.items():
        found = {placement: outcome_of(operation, family, placement, device) for placement in PLACEMENTS}
        results.update(outcome.result for outcome in found.values())
        wrong += [outcome.detail for outcome in found.values() if outcome.result == WRONG]
        if cells.get((name, family.name)) != cell(found):
            stale.append(name)
    print(f"{family.name}: {dict(results)}")
    assert not wrong, "\n".join(wrong)
    assert not stale, "the table isn't what a run says; write it anew with python -m tests.operations.table"
    assert set(results) <= {EQUAL, REFUSED, FAILS, ABSENT}
    assert results[EQUAL] >= 0.85 * results.total()
