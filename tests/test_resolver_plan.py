"""The plan itself: frozen, checked, and readable."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from diffusers_omni_offload.messages import format_bytes
from diffusers_omni_offload.topology.plan import BlockStack
from diffusers_omni_offload.topology.resolver import resolve_offload_plan
from tests.resolving import BLOCKS, Stack, blocks, layer, pipeline, refuses, strict_warnings  # noqa: F401


def test_plan_is_frozen_and_reads_well() -> None:
    subject = pipeline(
        {"transformer": Stack(blocks=4), "vae": Stack()},
        vae=["vae"],
        block_attrs=BLOCKS,
        resident_dit_paths=["transformer"],
    )
    plan = resolve_offload_plan(subject, layer(residents=2))
    for target in (plan, plan.stacks[0], plan.components[0]):
        with pytest.raises(AttributeError):
            target.notes = ()  # type: ignore[misc, union-attr]
    lines = str(plan).splitlines()
    assert lines[0] == "distributed-layerwise plan: 48 B streamed"
    assert lines[1].split("  ")[1:] == [
        "transformer",
        "Stack",
        "dit",
        "120 B",
        "2 of 4 blocks streamed (48 B), 2 resident (48 B)",
    ]
    assert "tensor" not in repr(plan).lower() and "Linear(" not in repr(plan)
    assert repr(plan.stacks[0]) == "BlockStack('transformer', dit: 2 of 4 blocks streamed (48 B), 2 resident (48 B))"
    assert repr(plan.components[1]) == "ResolvedComponent('vae', Stack, resident)".replace("resident", "vae")


@pytest.mark.parametrize("resident", [(2, 1), (0, 0), (3,), (-1,)])
def test_stack_checks_its_residents(resident: tuple[int, ...]) -> None:
    found = tuple(blocks(3))
    with pytest.raises(ValueError, match="sorted, unique indices below 3"):
        BlockStack("transformer", "dit", ("a", "b", "c"), found, resident, (1, 1, 1))
    with pytest.raises(ValueError, match="2 paths, 3 blocks"):
        BlockStack("transformer", "dit", ("a", "b"), found, (), (1, 1, 1))


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 20, "5.0 MiB"), (3 << 30, "3.0 GiB")]
)
def test_sizes_in_words(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


def test_objects_without_any_module() -> None:
    with pytest.warns(UserWarning, match="declares no components"):
        refuses(["no DiT"], SimpleNamespace(a=1), layer())
