"""Public cases of weights that were read, saved, pinned or copied while they were offloaded."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from diffusers_omni_offload.platform import Platform
from diffusers_omni_offload.weights import pinning
from tests.comparing import State, assert_equal, resident_output
from tests.modes import MODES, chosen, in_every_mode
from tests.tiny import ToyDiT, ToyPipeline, build_flux2, build_toy, build_wan, reload, run


def full_toy() -> tuple[Any, Callable[[], dict[str, Any]]]:
    return build_toy(4, text_encoder=True, vae=True)


def _state(pipe: Any) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{key}": value
        for name in ("transformer", "text_encoder", "vae")
        for key, value in getattr(pipe, name).state_dict().items()
    }


def _assert_state(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert not value.is_meta and torch.equal(value.cpu(), expected[name]), name


@pytest.mark.parametrize("when", ["at rest", "in a call", "after a call"])
def test_accelerate_2817_state_dict_and_saving(device: torch.device, tmp_path: Path, when: str) -> None:
    """Saving an offloaded model failed, or wrote files in which tensors were missing."""
    fresh, _ = full_toy()
    expected = {name: value.clone() for name, value in _state(fresh).items()}
    reference = resident_output(full_toy, device)
    pipe, call = full_toy()
    handle = pipe.enable_omni_offload("layer", components=["dit", "text_encoder"])
    held = torch.accelerator.memory_allocated()

    def save(pipe: Any, *args: Any) -> dict[str, Any]:
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        _assert_state(_state(pipe), expected)
        pipe.save_pretrained(tmp_path / "saved")
        assert torch.accelerator.max_memory_allocated() - before <= handle.backend.streamer.slot_nbytes
        return {}

    if when == "in a call":
        pipe(**call(), callback_on_step_end=save)
    else:
        if when == "after a call":
            run(pipe, call)
        save(pipe)
    assert torch.accelerator.memory_allocated() <= held
    assert_equal(run(pipe, call), reference)
    saved = ToyDiT.from_pretrained(tmp_path / "saved" / "transformer")
    _assert_state(
        saved.state_dict(), {k.removeprefix("transformer."): v for k, v in expected.items() if k[:11] == "transformer"}
    )
    # And with the slots free and the weights whole, the loaded pipeline gives the same.
    loaded = ToyPipeline.from_pretrained(tmp_path / "saved", local_files_only=True)
    for block, original in zip(loaded.transformer.blocks, fresh.transformer.blocks, strict=True):
        block.scale.copy_(original.scale)
    for layer, original in zip(loaded.text_encoder.layers, fresh.text_encoder.layers, strict=True):
        layer.scale.copy_(original.scale)
    assert_equal(run(loaded.to(device), call), reference)


def test_accelerate_2817_a_stock_pipeline_is_saved_and_loaded(device: torch.device, tmp_path: Path) -> None:
    """As above with a pipeline of diffusers' own, and its text encoder from transformers."""
    reference = resident_output(build_wan, device)
    pipe, call = build_wan()
    pipe.enable_omni_offload("layer", components=["dit", "text_encoder"])
    run(pipe, call)
    loaded = reload(pipe, tmp_path / "saved")
    assert loaded.omni_offload is None
    assert_equal(run(loaded.to(device), call), reference)
    assert_equal(run(pipe, call), reference)


def test_sglang_32743_what_a_parameter_says_of_itself_is_true(device: torch.device) -> None:
    """Other code saw parameters of one element while they were offloaded."""
    pipe, call = build_flux2()
    pipe.transformer.requires_grad_(False)
    before = State.of(pipe)
    count, footprint = pipe.transformer.num_parameters(), pipe.text_encoder.get_memory_footprint()
    dtype = pipe.transformer.dtype
    pipe.enable_omni_offload("layer", components=["dit", "text_encoder"])
    for _ in range(2):
        now = State.of(pipe)
        for name, (identity, _, *geometry) in before.tensors.items():
            assert now.tensors[name][0] == identity and list(now.tensors[name][2:]) == geometry, name
        assert pipe.transformer.num_parameters() == count
        assert pipe.text_encoder.get_memory_footprint() == footprint
        assert pipe.transformer.dtype == dtype
        for parameter in pipe.transformer.parameters():
            assert parameter.untyped_storage().nbytes() >= parameter.nbytes
        run(pipe, call)


def test_helios_141_original_storages_go_block_by_block(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned copies stood beside the loaded weights: 80 GB of host memory for weights of 40."""
    pipe, _ = build_toy(6, width=64, sizes=[4096])
    blocks = list(pipe.transformer.blocks)
    files = [_Pages(block) for block in blocks]
    originals: list[int] = []
    pack = pinning.HostBuffer.__init__

    def counting(self: Any, *args: Any, **kwargs: Any) -> None:
        pack(self, *args, **kwargs)
        originals.append(sum(file.is_alive for file in files))

    monkeypatch.setattr(pinning.HostBuffer, "__init__", counting)
    pipe.enable_omni_offload("layer")
    # When the buffer of block k is made, the k blocks before it have let go of what they were loaded in.
    assert originals == [6, 5, 4, 3, 2, 1]
    assert not any(file.is_alive for file in files)


class _Pages:
    """Puts a block's weights into pages of their own and knows whether anybody still holds them."""

    def __init__(self, block: torch.nn.Module) -> None:
        import weakref

        class Pages(mmap.mmap):
            pass

        tensors = [*block.parameters(), *block.buffers()]
        memory = Pages(-1, sum(-(-tensor.nbytes // 64) * 64 for tensor in tensors))
        offset = 0
        for tensor in tensors:
            view = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
            tensor.data = view.view(tensor.shape).copy_(tensor.data)
            offset += -(-tensor.nbytes // 64) * 64
        self._reference = weakref.ref(memory)

    @property
    def is_alive(self) -> bool:
        return self._reference() is not None


#: Bytes of one block of published checkpoints in bfloat16, each a thousandth here.
BLOCK_BYTES = {"wan 14B": 702_914, "wan 1.3B": 86_410, "flux": 679_608, "sd 3.5 large": 398_592, "qwen image": 679_610}


@pytest.mark.parametrize("model", BLOCK_BYTES)
def test_sglang_39021_pinned_bytes_are_not_rounded_to_powers_of_two(
    device: torch.device, sim: ModuleType, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool that rounds every allocation up books, and locks, half as much again."""
    width = 64
    hidden = BLOCK_BYTES[model] // 4 // (2 * width)
    pipe, _ = build_toy(6, width=width, sizes=[hidden, hidden, hidden + 3])
    payload = sum(t.nbytes for b in pipe.transformer.blocks for t in [*b.parameters(), *b.buffers()])
    locked: list[int] = []
    register = Platform.register_host_memory

    def spy(self: Platform, pointer: int, nbytes: int) -> None:
        locked.append(nbytes)
        register(self, pointer, nbytes)

    monkeypatch.setattr(Platform, "register_host_memory", spy)
    before = sim.stats()["pinned_current"]
    handle = pipe.enable_omni_offload("layer")
    assert len(locked) == 6 and payload <= sum(locked) <= 1.01 * payload
    # The budget is charged with what is locked.
    assert handle.pinned_bytes == sum(locked) == sim.stats()["pinned_current"] - before


@pytest.mark.parametrize("at", range(6))
def test_vllm_omni_2748_pinning_that_fails_is_said_and_survived(
    device: torch.device, sim: ModuleType, at: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It surfaced as "out of memory" of a device that was empty."""
    reference = resident_output(lambda: build_toy(6), device)
    pinned = sim.stats()["pinned_current"]
    calls: list[int] = []
    register = Platform.register_host_memory

    def fail(self: Platform, pointer: int, nbytes: int) -> None:
        calls.append(nbytes)
        if len(calls) > at:
            raise torch.OutOfMemoryError("CUDA error: out of memory")
        register(self, pointer, nbytes)

    monkeypatch.setattr(Platform, "register_host_memory", fail)
    pipe, call = build_toy(6)
    with caplog.at_level(logging.WARNING, logger="diffusers_omni_offload"):
        handle = pipe.enable_omni_offload("layer")
    assert len(caplog.records) == 1 and "host memory could not be pinned" in caplog.text
    assert len(calls) == at + 1, "it isn't tried again for every block"
    assert handle.pinned_bytes == sum(calls[:at])
    for _ in range(2):
        assert_equal(run(pipe, call), reference)
    pipe.disable_omni_offload()
    assert sim.stats()["pinned_current"] == pinned


def test_sdnext_5092_mapped_weights_are_read_once_and_never_copied_back(
    device: torch.device, sim: ModuleType, tmp_path: Path
) -> None:
    """Copying clean weights back to the host made a second copy of weights that were mapped from a file."""
    source, call = build_toy(4)
    save_file({k: v.contiguous() for k, v in source.transformer.state_dict().items()}, tmp_path / "model.safetensors")

    def build() -> tuple[Any, Callable[[], dict[str, Any]]]:
        pipe, call = build_toy(4)
        pipe.transformer.load_state_dict(load_file(tmp_path / "model.safetensors"), assign=True)
        for tensor in pipe.transformer.parameters():
            if tensor.data_ptr() % 64:
                tensor.data = tensor.data.clone()
        return pipe, call

    reference = resident_output(build, device)
    pipe, _ = build()
    pipe.enable_omni_offload("layer")
    streamed = [tensor for block in pipe.transformer.blocks for tensor in [*block.parameters(), *block.buffers()]]
    addresses = [tensor.data_ptr() for tensor in streamed]
    for _ in range(2):
        sim.reset_clock()
        with torch.no_grad():
            output = pipe(**call()).images
        assert sim.stats()["d2h_bytes"] == 0
        assert [tensor.data_ptr() for tensor in streamed] == addresses
    assert_equal(output.cpu().numpy(), reference)


@pytest.mark.parametrize("options", [*MODES.values(), {"components": ["dit", "text_encoder"]}])
def test_vllm_omni_1686_calls_pin_nothing_and_move_nothing_back(
    device: torch.device, sim: ModuleType, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Most of the cost of a swap was copying clean weights back, and pinning anew."""
    pipe, call = full_toy()
    pipe.enable_omni_offload(**options)
    run(pipe, call)
    made: list[str] = []
    monkeypatch.setattr(Platform, "register_host_memory", lambda *args: made.append("pinned"))
    monkeypatch.setattr(mmap, "mmap", lambda *args: made.append("mapped"))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda *args, **kwargs: made.append("pin_memory"))
    for _ in range(2):
        sim.reset_clock()
        images = pipe(**call()).images
        assert sim.stats()["d2h_bytes"] == 0
    assert made == [] and images.shape == (1, 3, 4)


@in_every_mode
@pytest.mark.parametrize("start", ["on the device", "on the host"])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_vllm_omni_5358_enabling_never_rises_above_where_it_started(
    device: torch.device, start: str, slots: int, mode: str
) -> None:
    """Everything was put on the device before the offloader acted: out of memory on the cards it is meant for."""
    pipe, call = build_toy(6, text_encoder=True, vae=True, width=64)
    if start == "on the device":
        pipe.to(device)
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    handle = pipe.enable_omni_offload(**MODES[mode], slots=slots)
    peak, idle = torch.accelerator.max_memory_allocated(), torch.accelerator.memory_allocated()
    assert (handle.device_bytes == 0) == (mode == "module")
    window = handle.device_bytes + slots * 512
    assert peak <= (before if start == "on the device" else idle) + window
    parts = {"dit": pipe.transformer, "text_encoder": pipe.text_encoder, "vae": pipe.vae}
    offloaded = [pipe.transformer.blocks] if chosen(mode, "dit") == "layer" else []
    offloaded += [part for kind, part in parts.items() if chosen(mode, kind) == "module"]
    on_host = {id(tensor) for part in offloaded for tensor in [*part.parameters(), *part.buffers()]}
    for part in parts.values():
        for tensor in [*part.parameters(), *part.buffers()]:
            assert tensor.device.type == ("cpu" if id(tensor) in on_host else "sim")
    if start == "on the device":
        assert idle < before
    run(pipe, call)
    assert torch.accelerator.memory_allocated() <= idle + 512
