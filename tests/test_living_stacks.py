"""Blocks that are added to a stack, taken out of it or replaced beside offload: right in the next call."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests import tiny
from tests.equality import Build, assert_equal_outputs, build_as, build_resident, outputs
from tests.living import Feature, denoisers, enable, fast_ones, ours_left
from tests.modes import MODES, chosen

PIPES: dict[str, tuple[Build, str]] = {
    "sd3": (lambda: tiny.build_sd3(4, t5=False), "transformer_blocks"),
    "flux2": (lambda: tiny.build_flux2(2, 3), "single_transformer_blocks"),
    "wan": (lambda: tiny.build_wan(num_layers=3), "blocks"),
}
"""A pipeline, and the list of its DiTs' blocks that is changed."""


def other(name: str, index: int = 1) -> nn.Module:
    """A block of the same shape with other weights, where a user puts a new one: on the device of a resident pipeline,
    on the host of an offloaded one."""
    twin, _ = PIPES[name][0]()
    block = getattr(denoisers(twin)[0], PIPES[name][1])[index]
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.mul_(1.2)
    return block


def put_in(stack: nn.ModuleList, name: str) -> None:
    stack.insert(1, other(name))


def put_in_several(stack: nn.ModuleList, name: str) -> None:
    for index in (0, 1, 2):
        stack.insert(1, other(name, index % len(stack)))


def append_last(stack: nn.ModuleList, name: str) -> None:
    """The last block of Stable Diffusion 3 has another shape: it stays the last one."""
    last = stack.pop(len(stack) - 1)
    stack.append(other(name))
    stack.append(last)


def take_out(stack: nn.ModuleList, name: str) -> None:
    stack.pop(1)


def take_out_the_first(stack: nn.ModuleList, name: str) -> None:
    del stack[0]


def replace(stack: nn.ModuleList, name: str) -> None:
    stack[1] = other(name)


def replace_the_first(stack: nn.ModuleList, name: str) -> None:
    stack[0] = other(name, 0)


def swap_two(stack: nn.ModuleList, name: str) -> None:
    stack[0], stack[1] = stack[1], stack[0]


def run_twice(stack: nn.ModuleList, name: str) -> None:
    """The same block stands at two places."""
    stack.insert(1, stack[0])


CHANGES: dict[str, Callable[[nn.ModuleList, str], None]] = {
    change.__name__.replace("_", " "): change
    for change in (
        put_in, put_in_several, append_last, take_out, take_out_the_first, replace, replace_the_first, swap_two,
        run_twice,
    )
}  # fmt: skip
FAST = (("sd3", "append last", "after"),)


def change_stacks(name: str, change: str, pipe: Any) -> None:
    for dit in denoisers(pipe):
        CHANGES[change](getattr(dit, PIPES[name][1]), name)
    if pipe.omni_offload is None:
        for dit in denoisers(pipe):
            dit.to(dit.device)


@functools.cache
def feature(name: str, change: str) -> Feature:
    return Feature(PIPES[name][0], functools.partial(change_stacks, name, change))


CASES = [
    *[("sd3", change, "after") for change in CHANGES],
    *[("sd3", change, "before") for change in ("put in", "replace", "run twice")],
    *[("flux2", change, "after") for change in CHANGES if change != "run twice"],
    *[("wan", change, "after") for change in ("put in", "take out", "replace")],
]


@pytest.mark.parametrize(("name", "change", "when"), fast_ones(CASES, *FAST))
@pytest.mark.parametrize("mode", ["layer", "module"])
def test_a_changed_stack(mode: str, name: str, change: str, when: str, device: torch.device) -> None:
    feature(name, change).check(mode, when, device)


@pytest.mark.parametrize("mode", fast_ones(MODES, "mixed"))
def test_a_list_of_its_own_in_the_place_of_the_old_one(mode: str, device: torch.device) -> None:
    """Shorter, in another order, with a new block."""
    build = PIPES["sd3"][0]

    def change(pipe: Any) -> None:
        first, second, _, last = pipe.transformer.transformer_blocks
        new = other("sd3", 2)
        if pipe.omni_offload is None:
            new.to(pipe.device)
        pipe.transformer.transformer_blocks = nn.ModuleList([second, new, first, last])

    resident, call = build_resident(build, device)
    plain = tiny.run(resident, call)
    change(resident)
    expected = outputs(resident, call, 2)
    assert not np.array_equal(plain, expected[0])
    pipe, call = build_as(build)
    enable(pipe, mode)
    assert np.array_equal(tiny.run(pipe, call), plain)
    change(pipe)
    assert_equal_outputs(outputs(pipe, call, 2), expected, mode)
    pipe.disable_omni_offload()
    assert ours_left(pipe) == []


@pytest.mark.parametrize("mode", fast_ones(MODES, "mixed"))
def test_what_was_taken_out_is_as_before(mode: str, device: torch.device) -> None:
    """A block that left holds nothing of ours once offload is off, and may be copied."""
    pipe, call = build_as(PIPES["sd3"][0])
    enable(pipe, mode)
    tiny.run(pipe, call)
    block = pipe.transformer.transformer_blocks.pop(1)
    tiny.run(pipe, call)
    pipe.disable_omni_offload()
    for part in block.modules():
        assert not {"_hf_hook", "_apply", "forward"} & vars(part).keys()
        assert not any(name.startswith("omni") for name in getattr(vars(part).get("_diffusers_hook"), "hooks", ()))
    assert {tensor.device.type for tensor in block.parameters()} == {"cpu"}
    copied = copy.deepcopy(block)
    assert all(torch.equal(mine, its) for mine, its in zip(copied.parameters(), block.parameters(), strict=True))


@pytest.mark.parametrize("mode", fast_ones(MODES, "mixed"))
def test_an_added_block_lives_where_what_isnt_streamed_does(mode: str, device: torch.device) -> None:
    """Wherever it was: on the device beside streamed blocks, and with its component if that is swapped."""
    for given in ("cpu", device):
        pipe, call = build_as(PIPES["sd3"][0])
        handle = enable(pipe, mode)
        tiny.run(pipe, call)
        pinned, stack = handle.pinned_bytes, pipe.transformer.transformer_blocks
        stack.insert(1, other("sd3").to(given))
        tiny.run(pipe, call)
        is_swapped = chosen(mode, "dit") == "module"
        assert {tensor.device.type for tensor in stack[1].parameters()} == {"cpu" if is_swapped else "sim"}
        size = sum(tensor.nbytes for tensor in stack[1].parameters())
        assert handle.pinned_bytes >= pinned + size if is_swapped else handle.pinned_bytes == pinned
        pipe.enable_omni_offload("module")
        pipe.enable_omni_offload("layer")
        assert {tensor.device.type for tensor in stack[1].parameters()} == {"cpu"}, "enabled anew, it is streamed"
        pipe.disable_omni_offload()
        assert ours_left(pipe) == []
