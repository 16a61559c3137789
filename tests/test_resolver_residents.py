"""Which blocks stay on the device."""

from __future__ import annotations

import pytest

from diffusers_omni_offload.config import OffloadStrategy
from diffusers_omni_offload.topology.residents import resident_indices
from diffusers_omni_offload.topology.resolver import resolve_offload_plan
from tests.resolving import BLOCKS, Stack, layer, legacy, pipeline, refuses, strict_warnings  # noqa: F401


@pytest.mark.parametrize(
    ("count", "wanted", "spread"),
    [
        (4, 0, ()),
        (4, 1, (2,)),
        (4, 2, (1, 3)),
        (4, 3, (0, 2, 3)),
        (4, 4, (0, 1, 2, 3)),
        (4, 9, (0, 1, 2, 3)),
        (0, 3, ()),
        (6, 2, (1, 4)),
        (40, 20, tuple(range(1, 40, 2))),
    ],
)
def test_spread(count: int, wanted: int, spread: tuple[int, ...]) -> None:
    assert resident_indices(count, wanted, "spread") == spread
    assert resident_indices(count, wanted, "leading") == tuple(range(min(count, wanted)))


@pytest.mark.parametrize("count", range(1, 42))
def test_spread_is_even_all_around_the_ring(count: int) -> None:
    for wanted in range(1, count + 1):
        kept = resident_indices(count, wanted, "spread")
        assert len(kept) == wanted
        gaps = {(after - before) % count or count for before, after in zip(kept, kept[1:] + kept[:1], strict=True)}
        assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize(("policy", "expected"), [("spread", (1, 3, 5)), ("leading", (0, 1, 2))])
def test_residents_of_a_stack(policy: str, expected: tuple[int, ...]) -> None:
    subject = pipeline({"transformer": Stack(blocks=6)}, block_attrs=BLOCKS, resident_dit_paths=["transformer"])
    config = layer(residents=3, resident_policy=policy)
    assert config.strategy is OffloadStrategy.DISTRIBUTED_LAYERWISE
    stack = resolve_offload_plan(subject, config).stacks[0]
    assert stack.resident == expected
    assert stack.streamed_bytes == stack.resident_bytes == 3 * 24
    assert set(stack.streamed) | set(stack.resident) == set(range(6))


def test_legacy_residents_lead() -> None:
    subject = pipeline({"transformer": Stack(blocks=6)}, block_attrs=BLOCKS, resident_dit_paths=["transformer"])
    assert resolve_offload_plan(subject, legacy(True, residents=2)).stacks[0].resident == (0, 1)


def test_residents_need_a_declared_dit() -> None:
    subject = pipeline({"transformer": Stack(blocks=4)}, block_attrs=BLOCKS)
    refuses(["resident_layers=2", "resident_dit_paths", "transformer"], subject, layer(residents=2))
    with pytest.warns(UserWarning, match="resident_dit_paths"):
        assert resolve_offload_plan(subject, legacy(True, residents=2)).stacks[0].resident == ()


def test_residents_only_where_they_are_declared() -> None:
    names = ["transformer", "transformer_2"]
    subject = pipeline(
        {name: Stack(blocks=4) for name in names},
        dit=names,
        block_attrs={name: ("blocks",) for name in names},
        resident_dit_paths=["transformer_2"],
    )
    plan = resolve_offload_plan(subject, layer(residents=2))
    assert [stack.resident for stack in plan.stacks] == [(), (1, 3)]
    assert any("'transformer' isn't in resident_dit_paths" in note for note in plan.notes)


@pytest.mark.parametrize("residents", [4, 9])
def test_all_blocks_may_be_resident(residents: int) -> None:
    subject = pipeline({"transformer": Stack(blocks=4)}, block_attrs=BLOCKS, resident_dit_paths=["transformer"])
    plan = resolve_offload_plan(subject, layer(residents=residents))
    assert plan.stacks[0].streamed == () and plan.streamed_bytes == 0
    assert any("more than the 4 blocks" in note for note in plan.notes) == (residents == 9)
