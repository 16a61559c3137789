"""What may be done to weights, beside a resident pipeline: LoRA and edits on streamed, resident and swapped weights."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.operations.cell import ABSENT, BEFORE, EQUAL, FAILS, REFUSED, Outcome, outcome_of, when_in
from tests.operations.families import FAMILIES, SD3, Family
from tests.operations.operation import OPERATIONS
from tests.operations.placements import PLACEMENTS

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

_outcomes: dict[tuple[str, str, str], Outcome] = {}


def outcome(name: str, family: Family, placement: str, device: torch.device) -> Outcome:
    key = (name, family.name, placement)
    if key not in _outcomes:
        _outcomes[key] = outcome_of(OPERATIONS[name], family, placement, device)
    return _outcomes[key]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", QUICK)
def test_an_operation_comes_to_the_same(name: str, placement: str, device: torch.device) -> None:
    found = outcome(name, SD3, placement, device)
    assert found.result in (EQUAL, REFUSED), found.detail


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_each_operation_comes_to_the_same_on_each_family(family: Family, name: str, device: torch.device) -> None:
    """On streamed, resident and swapped weights; what stock diffusers refuses or fails at is refused and fails."""
    found = {placement: outcome(name, family, placement, device) for placement in PLACEMENTS}
    wrong = [each.detail for each in found.values() if each.result not in (EQUAL, REFUSED, FAILS, ABSENT)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_is_prepared_before_and_after_enabling(name: str) -> None:
    """On different families and placements."""
    counts = Counter(
        when_in(OPERATIONS[name], family, placement) == BEFORE for family in FAMILIES for placement in PLACEMENTS
    )
    assert counts[True] == counts[False]


@pytest.mark.slow
def test_the_table_of_the_readme_is_up_to_date(device: torch.device) -> None:
    """It says what a run says, and most of it is equal."""
    from tests.operations.table import table, written

    found = table(
        lambda operation, family: {
            placement: outcome(operation.name, family, placement, device) for placement in PLACEMENTS
        }
    )
    assert written() == found, "write it anew with python -m tests.operations.table"
    results = Counter(each.result for each in _outcomes.values())
    print(f"{len(OPERATIONS)} operations: {dict(results)}")
    assert set(results) <= {EQUAL, REFUSED, FAILS, ABSENT}
    assert results[EQUAL] >= 0.85 * len(_outcomes)
