"""Where blocks are found that nobody declares, in which order they run, and which of them are used from outside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from diffusers_omni_offload.topology.lists import find_lists
from diffusers_omni_offload.topology.outside_reads import blocks_read_outside
from diffusers_omni_offload.topology.resolver import resolve_offload_plan
from diffusers_omni_offload.topology.source import forward_source
from tests.resolving import layer, paths, strict_warnings  # noqa: F401
from tests.undeclared import Block, DiT, blocks, grouped, holding, undeclared, within

LEAVES = nn.ModuleList(nn.Linear(8, 8) for _ in range(9))
MIXED = nn.ModuleList([nn.Identity(), Block(), nn.Linear(8, 8)])


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (DiT(blocks=3), ("blocks",)),
        (holding(leaves=LEAVES), ()),
        (holding(mixed=MIXED), ()),
        (holding(blocks=nn.ModuleList([nn.Identity(), Block(), Block()])), ("blocks",)),
        (holding(a=blocks(1), b=blocks(3)), ("a", "b")),
        (holding(small=blocks(2, 1), large=blocks(4, 32)), ("large",)),
        (within(DiT(layers=2), blocks=40), ("blocks",)),
        (within(DiT(layers=10), blocks=20), ("blocks", "part.layers")),
        (within(DiT(layers=10)), ("part.layers",)),
        (within(holding(deep=DiT(layers=10))), ("part.deep.layers",)),
        (holding(groups=grouped(2, 3)), ("groups",)),
        (holding(groups=nn.ModuleList([blocks(2), LEAVES])), ("groups.0",)),
        (holding(parts=nn.ModuleDict({"first": blocks(2), "last": blocks(2)})), ("parts.first", "parts.last")),
        (holding(parts=nn.ModuleDict({"first": Block(), "last": Block()})), ("parts",)),
        (holding(parts=nn.ModuleDict({"attention": Block(), "other": DiT(layers=2)})), ("parts.other.layers",)),
        (holding(blocks=nn.Sequential(*blocks(3))), ("blocks",)),
        (holding(mlp=nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))), ()),
        (nn.Linear(2, 2), ()),
        (nn.Identity(), ()),
    ],
)
def test_lists_of_a_dit(model: nn.Module, expected: tuple[str, ...]) -> None:
    assert find_lists(model) == expected


def test_lists_of_an_encoder_lie_in_its_parts() -> None:
    model = holding(visual=DiT(blocks=2), language_model=DiT(layers=40))
    assert find_lists(model, is_encoder=True) == ("visual.blocks", "language_model.layers")
    assert find_lists(holding(model=holding(encoder=DiT(block=2))), is_encoder=True) == ("model.encoder.block",)


def test_blocks_of_a_list_of_lists_are_those_of_the_inner_ones() -> None:
    plan = resolve_offload_plan(undeclared(transformer=holding(groups=grouped(2, 1))), layer())
    assert paths(plan)["transformer"] == ("groups.0.0", "groups.0.1", "groups.1.0")


# ---------------------------------------------------------------------- what the source of forward says


class Ordered(nn.Module):
    """Registers its lists in another order than that in which they run."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.middle, self.first, self.silent = blocks(2), blocks(2), blocks(2), blocks(2)

    @property
    def _last(self) -> nn.ModuleList:
        return self.last

    def _run_middle(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.middle:
            x = block(x)
        return x

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.first[:1]:
            x = block(x)
        x = self._run_middle(x)
        for block in self._last:
            x = block(x)
        return x


def test_lists_run_in_the_order_of_the_source() -> None:
    assert find_lists(Ordered()) == ("first", "middle", "last", "silent")


def test_without_source_the_order_is_that_of_registration() -> None:
    namespace: dict[str, Any] = {"Ordered": Ordered}
    exec("class Hidden(Ordered):\n    def forward(self, x):\n        return self.last, self.first", namespace)
    assert find_lists(namespace["Hidden"]()) == ("last", "middle", "first", "silent")
    assert forward_source(nn.Linear).reads == () and forward_source(nn.Module).mentions == ()


class Reading(nn.Module):
    """Uses parts of its blocks in every way that matters, and in some that don't."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.weight, self.looped, self.named, self.zipped, self.last = (blocks(3) for _ in range(6))
        self.reversed, self.summed, self.named_parts = blocks(2), blocks(2), blocks(2)
        self.harmless, self.other = blocks(3), blocks(3)
        self.harmless[0].processor = object()
        self.parts = nn.ModuleDict({"a": Block(), "b": Block()})

    def forward(self, x: torch.Tensor, index: int = 0) -> Any:
        x = self.called[0].norm(x)
        x = x + self.weight[1].linear.weight.sum()
        for block in self.looped:
            x = block.linear(x)
        block = self.named[2]
        x = x + sum(block.linear(x) for block in self.summed)
        x = x + sum({number: part.norm(x) for number, part in enumerate(self.named_parts) if number}.values())
        x = block.norm(x)
        for number, (block, other) in enumerate(zip(self.zipped, self.other, strict=True)):
            x = other(x) + block.linear.bias + number
        for block in reversed(list(self.reversed)):
            x = block.linear(x)
        x = self.last[-1].linear(x)
        # None of these needs weights.
        x = self.harmless[0](x) + len(self.harmless) + self.harmless[index](x)
        x = self.harmless[1].forward(x.to(self.harmless[0].linear.weight.dtype))
        block = self.harmless[0]
        if block.processor is not None and self.harmless[index].training:
            x = block(x)
        for block in self.harmless:
            block.train(False)
            x = block(x)
        for block, number in self.pairs():
            x = block.linear(x) + number
        block, x = x, self.broken[0].norm(x)
        return block.norm()

    def pairs(self) -> Any:
        return []

    @property
    def broken(self) -> Any:
        raise RuntimeError("a property may fail while nothing runs")


def test_blocks_of_which_a_part_is_used_outside() -> None:
    model = Reading()
    lists = find_lists(model)
    every = [f"{path}.{index}" for path in lists for index in range(len(model.get_submodule(path)))]
    names = {id(module): name for name, module in model.named_modules()}
    found = {names[block]: part for block, part in blocks_read_outside(model, every).items()}
    assert found == {
        "called.0": "norm",
        "weight.1": "linear.weight",
        **{f"looped.{index}": "linear" for index in range(3)},
        "named.2": "norm",
        **{f"zipped.{index}": "linear.bias" for index in range(3)},
        **{f"reversed.{index}": "linear" for index in range(2)},
        **{f"summed.{index}": "linear" for index in range(2)},
        **{f"named_parts.{index}": "norm" for index in range(2)},
        "last.2": "linear",
    }


def test_a_part_that_is_used_by_what_holds_the_list() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = blocks(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[0].norm(x)

    model = holding(part=Holder())
    plan = resolve_offload_plan(undeclared(transformer=model), layer())
    assert paths(plan)["transformer"] == ("part.layers.1", "part.layers.2")
    assert "transformer.part.layers.0 stays on the device: 'norm' of it is used outside of its own forward." in (
        plan.notes
    )
