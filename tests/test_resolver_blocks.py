"""From declared containers to the blocks of a stack; a single block; nothing to stream."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from diffusers_omni_offload.config import OffloadConfig, OffloadStrategy
from diffusers_omni_offload.topology.resolver import resolve_offload_plan
from tests.resolving import BLOCKS, Stack, blocks, layer, legacy, paths, pipeline, refuses, strict_warnings  # noqa: F401


def test_containers_concatenate_in_declared_order() -> None:
    subject = pipeline(
        {"transformer": Stack(blocks=2, vace_blocks=1)}, block_attrs={"transformer": ("vace_blocks", "blocks")}
    )
    stack = resolve_offload_plan(subject, layer()).stacks[0]
    assert stack.block_paths == ("vace_blocks.0", "blocks.0", "blocks.1")
    assert stack.kind == "dit" and stack.resident == () and stack.streamed == (0, 1, 2)
    assert all(
        found is subject.transformer.get_submodule(path)
        for found, path in zip(stack.blocks, stack.block_paths, strict=True)
    )


def test_plan_comes_before_the_class_attribute() -> None:
    dit = Stack(blocks=2, layers=3)
    dit._layerwise_offload_blocks_attrs = ["layers"]
    assert len(resolve_offload_plan(pipeline({"transformer": dit}), layer()).stacks[0].blocks) == 3
    planned = pipeline({"transformer": dit}, block_attrs=BLOCKS)
    assert len(resolve_offload_plan(planned, layer()).stacks[0].blocks) == 2


def test_deprecated_attribute_still_works_and_warns_once() -> None:
    class Old(Stack):
        _layerwise_offload_blocks_attr = "blocks"

    subject = pipeline({"transformer": Old(blocks=2)})
    with pytest.warns(UserWarning, match=r"_layerwise_offload_blocks_attrs = \['blocks'\]"):
        assert len(resolve_offload_plan(subject, layer()).stacks[0].blocks) == 2
    resolve_offload_plan(subject, layer())


def test_class_attribute_must_be_a_list() -> None:
    dit = Stack(blocks=2)
    dit._layerwise_offload_blocks_attrs = "blocks"
    refuses(["_layerwise_offload_blocks_attrs", "write ['blocks']"], pipeline({"transformer": dit}), layer(), TypeError)


class Odd(nn.Module):
    """Blocks in every kind of container."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Stack(block=2)
        self.by_name = nn.ModuleDict({"a": blocks(2), "b": nn.Linear(2, 2)})
        self.sequence = nn.Sequential(nn.Linear(2, 2), nn.Identity(), nn.Linear(2, 2))
        self.single = Stack()
        self.numbers = [1, 2]
        self.nothing = None
        self.groups = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2)])

    @property
    def layers(self) -> list[nn.Module]:
        return [self.sequence[2], *self.encoder.block]


@pytest.mark.parametrize(
    ("container", "expected"),
    [
        ("encoder.block", ("encoder.block.0", "encoder.block.1")),
        ("layers", ("sequence.2", "encoder.block.0", "encoder.block.1")),
        ("by_name", ("by_name.a.0", "by_name.a.1", "by_name.b")),
        ("sequence", ("sequence.0", "sequence.2")),
        ("single", ("single",)),
        ("groups", ("groups.0", "groups.1")),
        ("nothing", ()),
        ("absent|by_name.a", ("by_name.a.0", "by_name.a.1")),
    ],
)
def test_kinds_of_containers(container: str, expected: tuple[str, ...]) -> None:
    containers = (container,) if len(expected) > 1 else (container, "encoder.block")
    subject = pipeline({"transformer": Odd()}, block_attrs={"transformer": containers})
    stack = resolve_offload_plan(subject, layer()).stacks[0]
    assert stack.block_paths[: len(expected)] == expected
    assert len(stack.blocks) == max(len(expected), len(expected) + 2 * (len(expected) < 2))


def test_blocks_without_weights_are_left_out_with_a_note() -> None:
    subject = pipeline({"transformer": Odd()}, block_attrs={"transformer": ("sequence",)})
    plan = resolve_offload_plan(subject, layer())
    assert plan.notes == ("transformer: sequence.1 hold no weights, so there is nothing to stream for them.",)


@pytest.mark.parametrize(
    ("container", "words"),
    [
        ("layer", ["'layer'", "'transformer' (an Odd)", "has no 'layer'"]),
        ("encoder.blocks", ["'encoder.blocks'", "'encoder' (a Stack) has no 'blocks'"]),
        ("numbers", ["'numbers'", "holds an int", "nn.Modules"]),
        ("training", ["'training'", "is a bool"]),
        ("nothing", ["nothing", "no blocks with weights"]),
    ],
)
def test_containers_that_hold_no_blocks(container: str, words: list[str]) -> None:
    subject = pipeline({"transformer": Odd()}, block_attrs={"transformer": (container,)})
    refuses(words, subject, layer())
    with pytest.warns(UserWarning):
        assert resolve_offload_plan(subject, legacy()).skip_reason == "Pipeline has no blocks that can be streamed"


def test_dit_without_declared_blocks() -> None:
    subject = pipeline({"transformer": Stack(blocks=2)})
    refuses(["'transformer' (a Stack)", "block_attrs", "_layerwise_offload_blocks_attrs"], subject, layer())
    with pytest.warns(UserWarning, match="declares no blocks"):
        plan = resolve_offload_plan(subject, legacy())
    assert plan.stacks == () and plan.skip_reason


def test_a_block_that_is_declared_twice_is_one_block() -> None:
    subject = pipeline({"transformer": Stack(blocks=2)}, block_attrs={"transformer": ("blocks", "blocks")})
    plan = resolve_offload_plan(subject, layer())
    assert plan.stacks[0].block_paths == ("blocks.0", "blocks.1")
    assert any("more than once" in note for note in plan.notes)


def test_sizes_come_from_shapes_and_count_a_tied_tensor_once() -> None:
    dit = Stack(blocks=2)
    dit.blocks[0].tied = dit.blocks[0].weight
    dit.blocks[1].register_buffer("table", torch.zeros(3, dtype=torch.float64), persistent=False)
    dit.blocks[1].to(torch.bfloat16)
    subject = pipeline({"transformer": dit}, block_attrs=BLOCKS)
    assert resolve_offload_plan(subject, layer()).stacks[0].nbytes == (6 * 4, 6 * 2 + 3 * 2)
    with torch.device("meta"):
        on_meta = pipeline({"transformer": Stack(blocks=2)}, block_attrs=BLOCKS)
    plan = resolve_offload_plan(on_meta, layer())
    assert plan.streamed_bytes == 48 and plan.stacks[0].nbytes == (24, 24)


def test_a_single_block() -> None:
    subject = pipeline({"transformer": Stack(blocks=1), "vae": Stack()}, vae=["vae"], block_attrs=BLOCKS)
    refuses(["'transformer' (a Stack)", "single block"], subject, layer())
    with pytest.warns(UserWarning, match="single block"):
        skipped = resolve_offload_plan(subject, legacy())
    assert skipped.stacks == () and skipped.skip_reason == "Pipeline has no blocks that can be streamed"
    resident = resolve_offload_plan(subject, legacy(distributed=True))
    assert resident.stacks[0].resident == (0,) and resident.stacks[0].streamed == () and resident.skip_reason is None


def test_a_single_block_beside_a_dit_that_can_be_streamed() -> None:
    two = {"transformer": ("blocks",), "transformer_2": ("blocks",)}
    subject = pipeline(
        {"transformer": Stack(blocks=1), "transformer_2": Stack(blocks=2)}, dit=list(two), block_attrs=two
    )
    with pytest.warns(UserWarning, match="'transformer' has a single block"):
        plan = resolve_offload_plan(subject, legacy())
    assert paths(plan) == {"transformer_2": ("blocks.0", "blocks.1")} and plan.skip_reason is None


def test_residents_that_leave_a_single_block() -> None:
    subject = pipeline({"transformer": Stack(blocks=4)}, block_attrs=BLOCKS, resident_dit_paths=["transformer"])
    refuses(["resident_layers=3", "one of the 4 blocks", "at most 2, or 4"], subject, layer(residents=3))
    assert resolve_offload_plan(subject, legacy(True, residents=3)).stacks[0].resident == (0, 1, 2, 3)


@pytest.mark.parametrize("absent", [0, 1])
def test_either_of_two_dits_may_be_none(absent: int) -> None:
    names = ["transformer", "transformer_2"]
    components = {name: None if index == absent else Stack(blocks=2) for index, name in enumerate(names)}
    subject = pipeline(components, dit=names, block_attrs={name: ("blocks",) for name in names})
    assert list(paths(resolve_offload_plan(subject, layer()))) == [names[1 - absent]]


def test_no_dit_at_all() -> None:
    subject = pipeline({"transformer": None, "text_encoder": Stack()}, encoder=["text_encoder"], block_attrs=BLOCKS)
    refuses(["no DiT", "transformer", "_dit_modules"], subject, layer())
    for config in (legacy(), legacy(distributed=True)):
        with pytest.warns(UserWarning, match="no DiT"):
            plan = resolve_offload_plan(subject, config)
        assert plan.skip_reason == "Pipeline has no DiT"


def test_switched_off() -> None:
    plan = resolve_offload_plan(object(), OffloadConfig.from_od_config({}))
    assert plan.strategy is OffloadStrategy.NONE and plan.skip_reason and not plan.components
