"""Public cases of options that were swallowed or checked too late, and of skipping that offload wasn't made for."""

from __future__ import annotations

import inspect
import logging
import random
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import diffusers_omni_offload
from diffusers_omni_offload import OffloadConfig
from tests.comparing import State, assert_equal, resident_output
from tests.modes import MODES, in_every_mode
from tests.tiny import build_sd3, build_toy, build_wan, run

# ---------------------------------------------------------------------- skipping


@pytest.mark.parametrize(("mode", "slots"), [("layer", 1), ("layer", 2), ("layer", 3), ("module", 2), ("mixed", 2)])
def test_sglang_35858_random_skips_early_ends_and_repeats(
    device: torch.device, sim: ModuleType, mode: str, slots: int
) -> None:
    """Caches skip blocks in the middle, though offload was made for blocks that all run in order."""
    resident, _ = build_toy(6, text_encoder=True, vae=True)
    resident.to(device)
    pipe, _ = build_toy(6, text_encoder=True, vae=True)
    handle = pipe.enable_omni_offload(**MODES[mode], slots=slots)
    held = torch.accelerator.memory_allocated()
    source = random.Random(slots)
    x = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(0)).to(device)
    with torch.no_grad():
        for pattern in range(50):
            order = list(range(6))
            if pattern % 3 == 0:
                order = order[: source.randint(1, 6)]
            elif pattern % 3 == 1:
                order = sorted(source.choices(order, k=7))
            skip = [index for index in range(6) if source.random() < 0.3]
            expected = resident.transformer(x, order=order, skip=skip)
            with handle.call():
                found = pipe.transformer(x, order=order, skip=skip)
            assert torch.equal(found, expected), (order, skip)
            del found, expected
            assert torch.accelerator.memory_allocated() <= held + 2 * 512
    assert sim.hazards() == []


def test_sglang_35858_consecutive_blocks_never_wait_for_a_whole_copy(device: torch.device) -> None:
    """After any jump, the next block in the declared order has been prefetched."""
    pipe, _ = build_toy(6)
    handle = pipe.enable_omni_offload("layer")
    x = torch.randn(1, 4, 8, device=device)
    source, checked = random.Random(0), 0
    with torch.no_grad(), handle.call():
        for _ in range(30):
            start = source.randrange(5)
            pipe.transformer(x, order=[start])
            # Two jumps from one block to the same other one count as its new successor.
            is_next = handle.backend.streamer.order._successor[start] == start + 1
            before = handle.demand_loads
            pipe.transformer(x, order=[start + 1])
            checked += is_next
            assert handle.demand_loads == before or not is_next
    assert checked >= 15


@in_every_mode
def test_vllm_omni_1710_skip_layer_guidance(device: torch.device, mode: str) -> None:
    """SD3's skip-layer guidance leaves blocks out of an extra forward of some steps."""
    arguments = {
        "num_inference_steps": 4,
        "skip_guidance_layers": [1, 2],
        "skip_layer_guidance_stop": 0.8,
        "skip_layer_guidance_start": 0.0,
        "skip_layer_guidance_scale": 2.0,
    }
    resident, call = build_sd3()
    resident.to(device)
    plain = run(resident, call)
    reference = run(resident, lambda: {**call(), **arguments})
    pipe, _ = build_sd3()
    pipe.enable_omni_offload(**MODES[mode])
    for _ in range(2):
        assert_equal(run(pipe, lambda: {**call(), **arguments}), reference)
        assert_equal(run(pipe, call), plain)


# ---------------------------------------------------------------------- options


@pytest.mark.parametrize("keyword", ["keep_block", "slot", "component", "pin", "layers_options"])
def test_nunchaku_675_a_misspelt_keyword_is_an_error(device: torch.device, keyword: str) -> None:
    """An option with a letter too few had no effect, and nobody said so."""
    pipe, _ = build_toy(4)
    before = State.of(pipe)
    with pytest.raises(TypeError, match=f"'{keyword}'"):
        pipe.enable_omni_offload("layer", **{keyword: 3})
    before.assert_same(State.of(pipe))


@pytest.mark.parametrize(
    "arguments",
    [
        {"mode": "module", "layer_options": {"dit": {"resident_layers": 1}}},
        {"components": ["dit"], "layer_options": {"text_encoder": {"weight_transfer": "rank-local"}}},
        {"layer_options": {"dit": {"resident_layers": 2, "weight_transfer": "allgather"}}},
        {"components": ["dit", "text_encoder"], "layer_options": {"text_encoder": {"resident_layers": 1}}},
        {"components": ["image_encoder"]},
        {"slots": 0},
        {"slots": 10_000},
        {"pin_memory": -5},
        {"resident_policy": "first"},
        {"layer_options": {"dit": {"resident_layers": 3}}},
    ],
)
def test_diffusers_11792_bad_combinations_fail_before_anything_moves(
    device: torch.device, sim: ModuleType, arguments: dict[str, Any]
) -> None:
    """They failed at the first forward, or never."""
    pipe, _ = build_toy(4, text_encoder=True, vae=True)
    before, memory = State.of(pipe), (torch.accelerator.memory_allocated(), sim.stats()["pinned_current"])
    allocations = sim.stats()["allocations"]
    with pytest.raises(ValueError, match=r"[a-z]"):
        pipe.enable_omni_offload(**arguments)
    before.assert_same(State.of(pipe))
    assert (torch.accelerator.memory_allocated(), sim.stats()["pinned_current"]) == memory
    assert sim.stats()["allocations"] == allocations


def test_vllm_omni_5799_every_option_of_the_readme_is_accepted() -> None:
    """A guide named an option that the release didn't have."""
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    accepted = set(inspect.signature(diffusers_omni_offload.enable_omni_offload).parameters)
    named: set[str] = set()
    for arguments in re.findall(r"enable_omni_offload\(([^()]*)\)", readme):
        named.update(re.findall(r"\b(\w+)=", arguments))
    assert named and named <= accepted
    modes = set(re.findall(r"enable_omni_offload\(\"(\w+)\"", readme))
    assert "auto" in modes, "which is no configuration, but chooses one"
    for mode in modes - {"auto"}:
        OffloadConfig.from_options(mode)


@pytest.mark.parametrize(("args", "kwargs"), [(("layer",), {"mode": "module"}), (("layer", "module"), {})])
def test_vllm_omni_guide_two_modes_are_a_conflict(device: torch.device, args: Any, kwargs: Any) -> None:
    """Several flags were set, and one won in silence; there is one argument for the mode here."""
    pipe, _ = build_toy(4)
    with pytest.raises(TypeError):
        pipe.enable_omni_offload(*args, **kwargs)
    assert pipe.omni_offload is None


def test_diffusers_14304_what_was_done_can_be_seen(
    device: torch.device, sim: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    """People couldn't see what was offloaded, how much was copied, or why."""
    pipe, call = build_wan()
    pinned = sim.stats()["pinned_current"]
    before = torch.accelerator.memory_allocated()
    with caplog.at_level(logging.INFO, logger="diffusers_omni_offload"):
        handle = pipe.enable_omni_offload("layer", layer_options={"dit": {"resident_layers": 1}})
        sim.reset_clock()
        run(pipe, call)
    text = str(handle.plan)
    for component in handle.plan.components:
        row = next(line for line in text.splitlines() if line.split()[:1] == [component.path])
        assert type(component.module).__name__ in row and component.role in row and " KiB" in row
        assert ("streamed" in row) == (component.path in ("transformer", "transformer_2"))
    assert "1 resident" in text
    # The sums are the device's own.
    inputs = sim.stats()["h2d_bytes"] - handle.bytes_moved
    assert 0 <= inputs < handle.bytes_moved / handle.loads
    assert handle.pinned_bytes == sim.stats()["pinned_current"] - pinned
    placed = {
        id(tensor): -(-tensor.nbytes // 512) * 512
        for component in handle.plan.components
        for tensor in [*component.module.parameters(), *component.module.buffers()]
        if tensor.device.type == "sim"
    }
    held = torch.accelerator.memory_allocated() - before
    assert 0 <= held - sum(placed.values()) - handle.device_bytes <= 8 * 512
    assert len([record for record in caplog.records if "pinned" in record.getMessage()]) == 1


@pytest.mark.parametrize("mode", ["layer", "mixed"])
def test_diffusers_12749_more_residents_than_blocks_are_all_of_them(device: torch.device, mode: str) -> None:
    """A number that is too large should fill the card, and not fail in the middle of a run."""
    reference: Any = resident_output(lambda: build_toy(4, text_encoder=True, vae=True), device)
    pipe, call = build_toy(4, text_encoder=True, vae=True)
    handle = pipe.enable_omni_offload(**MODES[mode], layer_options={"dit": {"resident_layers": 999}})
    assert any("999" in note for note in handle.plan.notes)
    assert_equal(run(pipe, call), reference)
    assert handle.loads == 0 and handle.swaps == (2 if mode == "mixed" else 0)


def _toy(residents: int) -> Callable[[], dict[str, Any]]:
    return lambda: {"layer_options": {"dit": {"resident_layers": residents}}}


@pytest.mark.parametrize("residents", [0, 1, 2, 3, 4, 6])
def test_sglang_31538_bytes_moved_are_those_of_the_blocks_that_are_not_resident(
    device: torch.device, residents: int
) -> None:
    """Only fewer bytes help where the bus is the limit: each forward moves exactly the streamed blocks."""
    reference = resident_output(lambda: build_toy(6, sizes=[32, 64, 96]), device)
    pipe, call = build_toy(6, sizes=[32, 64, 96])
    handle = pipe.enable_omni_offload("layer", **_toy(residents)())
    run(pipe, call)
    # In the second call it is known after how many forwards the call ends: nothing is copied in vain.
    before = handle.bytes_moved
    assert_equal(run(pipe, call), reference)
    masters = [master for master in handle.backend.streamer.masters if master is not None]
    assert len(masters) == 6 - residents
    # With no more blocks than slots every block stays in its slot for the whole call.
    forwards = 1 if len(masters) <= handle.config.slots else 2
    assert handle.bytes_moved - before == forwards * sum(master.nbytes for master in masters)
