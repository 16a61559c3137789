"""Public cases of asynchronous prefetching that went wrong elsewhere: races, order, and the ring of slots."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.comparing import assert_equal, resident_output
from tests.tiny import ToyDiT, ToyPipeline, build_toy, build_wan, run
from tests.tiny.toy import ToyBlock

#: A link that delivers as late as possible, one that is as fast as the compute, and one that needs no time.
LINKS = [{"h2d_bytes_per_s": 1e5, "copy_latency_s": 1e-2}, {"h2d_bytes_per_s": 1e9}, {"h2d_bytes_per_s": 1e15}]


@pytest.mark.parametrize("link", LINKS, ids=["late", "even", "instant"])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_diffusers_12673_a_slot_is_not_reused_before_its_last_reader_is_done(
    device: torch.device, sim: ModuleType, slots: int, link: dict[str, float]
) -> None:
    """Weights were recorded on the copy stream instead of the compute stream, and recycled while they were read."""
    reference = resident_output(lambda: build_toy(6), device)
    sim.configure(poison=1, race=2, defer=1, **link)
    pipe, call = build_toy(6)
    pipe.enable_omni_offload("layer", slots=slots)
    for _ in range(3):
        assert_equal(run(pipe, lambda: {**call(), "steps": 3}), resident_output(_three_steps, device))
        assert_equal(run(pipe, call), reference)
    assert sim.hazards() == []


def _three_steps() -> tuple[Any, Callable[[], dict[str, Any]]]:
    pipe, call = build_toy(6)
    return pipe, lambda: {**call(), "steps": 3}


@pytest.mark.parametrize("stream", ["default", "another", "alternating"])
def test_comfyui_10501_copies_wait_for_the_stream_that_computes(
    device: torch.device, sim: ModuleType, stream: str
) -> None:
    """A copy overwrote weights that another stream was still reading; here the compute moves between streams."""
    reference = resident_output(lambda: build_toy(5), device)
    sim.configure(**LINKS[1])
    pipe, call = build_toy(5)
    pipe.enable_omni_offload("layer")
    streams = [torch.Stream(device="sim:0") for _ in range(2)]
    for index in range(4):
        if stream == "default" or (stream == "alternating" and index % 2):
            assert_equal(run(pipe, call), reference)
            continue
        with streams[index % 2]:
            output = pipe(**call()).images
            torch.accelerator.synchronize()
        assert_equal(output.cpu().numpy(), reference)
    assert sim.hazards() == []


class CastingBlock(ToyBlock):
    """Stores its weights in one dtype and computes in another."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(nn.functional.linear(hidden_states, self.expand.weight.float(), self.expand.bias.float()))
        change = nn.functional.linear(hidden * self.scale.float(), self.contract.weight.float())
        return torch.tanh(hidden_states + change * self.gate.float() + self.shift.float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_comfyui_10697_a_cast_comes_after_the_copy(device: torch.device, sim: ModuleType, dtype: torch.dtype) -> None:
    """Weights in a small storage dtype were cast before their bytes had landed."""

    def casting() -> tuple[Any, Callable[[], dict[str, Any]]]:
        pipe, call = build_toy(4)
        for block in pipe.transformer.blocks:
            block.__class__ = CastingBlock
            for tensor in [*block.parameters(), *block.buffers()]:
                tensor.data = tensor.data.to(dtype)
        return pipe, call

    reference = resident_output(casting, device)
    sim.configure(**LINKS[0])
    pipe, call = casting()
    pipe.enable_omni_offload("layer")
    for _ in range(3):
        assert_equal(run(pipe, call), reference)


class NormDiT(ToyDiT):
    """With a norm between the blocks and the output, with parameters of its own or without."""

    def __init__(self, affine: bool) -> None:
        super().__init__(4)
        self.norm = nn.LayerNorm(32, elementwise_affine=affine)
        if affine:
            with torch.no_grad():
                self.norm.weight.copy_(torch.linspace(0.5, 2, 32))
                self.norm.bias.copy_(torch.linspace(-1, 1, 32))


@pytest.mark.parametrize("affine", [True, False])
def test_diffusers_11981_leaves_outside_of_blocks_are_there_in_each_forward(
    device: torch.device, sim: ModuleType, affine: bool
) -> None:
    """A norm after the blocks, whose parameters were a group of their own, was read before its copy was done."""
    sim.configure(**LINKS[0])
    resident = NormDiT(affine).eval().to(device)
    pipe = ToyPipeline(NormDiT(affine).eval())
    pipe.enable_omni_offload("layer")
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        x = torch.randn(1, 4, 8, generator=generator).to(device)
        with torch.no_grad():
            assert (pipe.transformer(x) - resident(x)).abs().max().item() == 0


@pytest.mark.parametrize("link", LINKS, ids=["late", "even", "instant"])
def test_diffusers_11041_wan_latents_are_equal_at_every_step(
    device: torch.device, sim: ModuleType, link: dict[str, float]
) -> None:
    """Wan's videos were wrong once streams were on; every step's latents are compared here."""

    def latents(pipe: Any, call: Callable[[], dict[str, Any]]) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []

        def note(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            seen.append(tensors["latents"].cpu())
            return {}

        run(pipe, lambda: {**call(), "num_inference_steps": 4, "callback_on_step_end": note})
        return seen

    resident, call = build_wan()
    expected = latents(resident.to(device), call)
    assert len(expected) == 4 and not any(torch.equal(a, b) for a, b in itertools.pairwise(expected))
    sim.configure(**link)
    pipe, call = build_wan()
    pipe.enable_omni_offload("layer", components=["dit", "text_encoder"])
    for _ in range(2):
        for found, wanted in zip(latents(pipe, call), expected, strict=True):
            assert torch.equal(found, wanted)


def test_diffusers_11307_registration_order_is_not_execution_order(device: torch.device) -> None:
    """Blocks that run in another order than they were registered in were taken for being on the device already."""

    class Reversed(ToyDiT):
        def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            return super().forward(x, order=[3, 1, 2, 0, 4])

    def reversed_toy() -> tuple[Any, Callable[[], dict[str, Any]]]:
        _, call = build_toy(5)
        return ToyPipeline(Reversed(5).eval()), lambda: {**call(), "steps": 6}

    reference = resident_output(reversed_toy, device)
    pipe, call = reversed_toy()
    handle = pipe.enable_omni_offload("layer")
    assert_equal(run(pipe, call), reference)
    # Once the order is learned, only the first block of a call has nobody before it to prefetch it.
    for _ in range(3):
        before = handle.demand_loads
        assert_equal(run(pipe, call), reference)
        assert handle.demand_loads - before == 1


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [2, 3, 4, 5, 6, 7])
def test_vllm_54975_each_block_runs_in_a_slot_that_holds_it(device: torch.device, count: int, slots: int) -> None:
    """A ring overwrote a slot that was still needed when the number of blocks was no multiple of its depth."""
    reference = resident_output(lambda: build_toy(count), device)
    pipe, call = build_toy(count)
    handle = pipe.enable_omni_offload("layer", slots=slots)
    streamer = handle.backend.streamer
    checked: list[int] = []

    def check(index: int) -> Callable[..., None]:
        def look(module: nn.Module, arguments: Any) -> None:
            storage = pipe.transformer.blocks[index].gate.untyped_storage().data_ptr()
            holders = [slot for slot in streamer.slots.slots if slot.buffer.untyped_storage().data_ptr() == storage]
            assert len(holders) == 1 and holders[0].tag == index and holders[0].users == 1
            checked.append(index)

        return look

    for index, block in enumerate(pipe.transformer.blocks):
        block.expand.register_forward_pre_hook(check(index))
    for _ in range(3):
        assert_equal(run(pipe, call), reference)
    assert checked == [*range(count)] * 6


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_sglang_16066_the_second_call_finds_the_first_block(device: torch.device, slots: int) -> None:
    """Block 0 was released at the end of a call, and nobody loaded it for the next; the calls differ in size too."""
    resident, _ = build_toy(4)
    resident.to(device)
    pipe, _ = build_toy(4)
    pipe.enable_omni_offload("layer", slots=slots)
    for steps, tokens in ((2, 4), (5, 4), (1, 9), (2, 4), (3, 2)):
        arguments = {"steps": steps, "x": torch.randn(1, tokens, 8, generator=torch.Generator().manual_seed(tokens))}
        assert_equal(run(pipe, lambda a=arguments: dict(a)), run(resident, lambda a=arguments: dict(a)))


@pytest.mark.parametrize("place", ["block 0", "block 1", "block 2", "block 3", "callback", "vae"])
def test_vllm_omni_7188_a_failed_call_leaves_no_half_moved_ring(device: torch.device, place: str) -> None:
    """After an exception the bookkeeping still named the blocks of the failed call as loaded."""
    reference = resident_output(lambda: build_toy(4, vae=True), device)
    pipe, call = build_toy(4, vae=True)
    pipe.enable_omni_offload("layer")
    assert_equal(run(pipe, call), reference)
    held = torch.accelerator.memory_allocated()

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("injected")

    modules = {f"block {index}": block for index, block in enumerate(pipe.transformer.blocks)}
    hooked = {**modules, "vae": pipe.vae.decoder}.get(place)
    handle = None if hooked is None else hooked.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="injected"):
        pipe(**call(), callback_on_step_end=None if hooked is not None else fail)
    if handle is not None:
        handle.remove()
    assert torch.accelerator.memory_allocated() <= held
    assert_equal(run(pipe, call), reference)
    assert torch.accelerator.memory_allocated() == held


def test_diffusers_11966_the_first_block_of_a_step_is_copied_during_the_last_of_the_one_before(
    device: torch.device, sim: ModuleType
) -> None:
    """Each step began with a copy that nothing overlapped; the prefetch goes round the end of a forward here."""
    pipe, call = build_toy(4, width=64, sizes=[512])
    sim.configure(h2d_bytes_per_s=64e9, copy_latency_s=0, flops_per_s=1e12)
    handle = pipe.enable_omni_offload("layer")
    arguments = lambda: {**call(), "steps": 5}  # noqa: E731
    run(pipe, arguments)
    before = handle.demand_loads
    sim.configure(trace=1)
    sim.reset_clock()
    run(pipe, arguments)
    assert handle.demand_loads - before == 1
    block = handle.backend.streamer.slot_nbytes
    rows = sim.trace()
    copies = sorted((begin, end) for _, stream, begin, end in rows if stream != 0 and end - begin > 0.5 * block / 64)
    compute = sorted((begin, end) for _, stream, begin, end in rows if stream == 0)
    assert len(copies) == 20, [row[0] for row in rows][:10]
    # Copy 4k is the first block of step k. While it runs the compute stream works on the last block of step k - 1.
    for begin, end in copies[4::4]:
        assert any(start < end and stop > begin for start, stop in compute)


@pytest.mark.slow
def test_vllm_omni_2992_ten_steps_twice_with_unipc(device: torch.device) -> None:
    """Wan with its UniPC scheduler crashed in the warm-up, or at the first step."""
    resident, call = build_wan()
    resident.to(device)
    ten = lambda: {**call(), "num_inference_steps": 10}  # noqa: E731
    reference = run(resident, ten)
    pipe, _ = build_wan()
    pipe.enable_omni_offload("layer")
    for _ in range(2):
        output = run(pipe, ten)
        assert np.isfinite(output).all()
        assert_equal(output, reference)
