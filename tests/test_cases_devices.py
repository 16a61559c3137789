"""Public cases of inputs, generators and schedulers that ended up on the wrong device."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from torch import nn
from transformers import BatchFeature
from transformers.tokenization_utils_base import BatchEncoding

from tests.comparing import assert_equal, resident_output
from tests.modes import MODES, in_every_mode
from tests.tiny import ToyPipeline, build_sd3, build_toy, build_wan, run
from tests.tiny.pipelines import unipc_scheduler
from tests.tiny.toy import ToyBlock


@in_every_mode
@pytest.mark.parametrize("kind", ["cpu generator", "device generator", "global seed"])
def test_diffusers_2973_generators(device: torch.device, kind: str, mode: str) -> None:
    """The same seed gave another image, or a generator on `pipe.device` was refused."""

    def output(pipe: Any, call: Callable[[], dict[str, Any]]) -> Any:
        arguments = call()
        if kind == "device generator":
            arguments["generator"] = torch.Generator(device=pipe.device).manual_seed(3)
        elif kind == "global seed":
            arguments["generator"] = None
            torch.manual_seed(3)
            torch.get_device_module("sim").manual_seed_all(3)
        return run(pipe, lambda: arguments)

    resident, call = build_sd3()
    reference = output(resident.to(device), call)
    pipe, call = build_sd3()
    pipe.enable_omni_offload(**MODES[mode])
    assert pipe.device.type == pipe._execution_device.type == "sim"
    for _ in range(2):
        assert_equal(output(pipe, call), reference)
        assert pipe._execution_device == torch.device("sim:0")


class PositionEncoder(ModelMixin, ConfigMixin):
    """Makes its position ids on `self.device`, in its own forward and in its embedding's."""

    @register_to_config
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(50)
            self.embed = nn.Embedding(16, 8)
            self.position = nn.Embedding(16, 8)
            self.layers = nn.ModuleList(ToyBlock(8, 16, seed=index) for index in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1]).to(self.device)
        hidden_states = (self.embed(tokens) + self.position(positions)).to(self.dtype)
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return hidden_states


class BlocksFirstEncoder(PositionEncoder):
    """The same, but a block's parameter is the first that is found."""

    def __init__(self) -> None:
        super().__init__()
        embed, position = self.embed, self.position
        del self.embed, self.position
        self.embed, self.position = embed, position


@pytest.mark.parametrize("encoder", [PositionEncoder, BlocksFirstEncoder])
@pytest.mark.parametrize("options", [*MODES.values(), {"components": ["dit", "text_encoder"]}])
def test_vllm_omni_6125_a_components_device_is_where_it_runs(
    device: torch.device, encoder: type[PositionEncoder], options: dict[str, Any]
) -> None:
    """Position ids, or latents, were put where the component's first parameter lies, on the host."""

    def build() -> tuple[Any, Callable[[], dict[str, Any]]]:
        pipe, call = build_toy(4, text_encoder=True, vae=True)
        pipe.text_encoder = encoder().eval()
        return pipe, call

    reference = resident_output(build, device)
    pipe, call = build()
    pipe.enable_omni_offload(**options)
    components = [pipe.text_encoder, pipe.transformer, pipe.vae]
    for _ in range(2):
        assert {component.device.type for component in components} == {"sim"}
        assert {component.dtype for component in components} == {torch.float32}
        assert_equal(run(pipe, call), reference)
    pipe.disable_omni_offload()
    assert {component.device.type for component in components} == {"cpu"}


@pytest.mark.parametrize("options", [*MODES.values(), {"components": ["dit", "text_encoder"]}])
@pytest.mark.parametrize("steps", [2, pytest.param(6, marks=pytest.mark.slow)])
def test_diffusers_13488_wan_with_unipc_and_flow_sigmas(
    device: torch.device, steps: int, options: dict[str, Any]
) -> None:
    """The scheduler kept its sigmas on the CPU and stacked them with tensors of the device."""

    def build() -> tuple[Any, Callable[[], dict[str, Any]]]:
        pipe, call = build_wan()
        pipe.scheduler = unipc_scheduler()
        return pipe, lambda: {**call(), "num_inference_steps": steps}

    reference = resident_output(build, device)
    pipe, call = build()
    pipe.enable_omni_offload(**options)
    for _ in range(2):
        assert_equal(run(pipe, call), reference)


@dataclasses.dataclass
class Inputs:
    """A dataclass as some models take it."""

    tokens: torch.Tensor
    scale: float = 1.0
    more: tuple[torch.Tensor, ...] = ()


class RecordingEncoder(nn.Module):
    """Takes anything and remembers it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.seen: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = args, kwargs
        return kwargs.get("result", self.weight * 2)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = vars(value)
    if hasattr(value, "items"):
        value = [item for _, item in value.items()]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (list, tuple)) else []


@in_every_mode
@torch.no_grad()
def test_diffusers_11162_inputs_of_any_kind_reach_the_device(device: torch.device, mode: str) -> None:
    """A processor's output stayed on the CPU, since only positional tensors were moved."""
    pipe, _ = build_toy(4, vae=True)
    pipe.text_encoder = RecordingEncoder()
    pipe.enable_omni_offload(**MODES[mode])
    ids, mask, half = torch.arange(4), torch.ones(4, dtype=torch.bool), torch.ones(2, dtype=torch.bfloat16)
    marker, untouched = object(), {"no": ["tensor", 1, None]}
    there = torch.ones(3, device=device)
    kwargs = {
        "features": BatchFeature({"pixel_values": half, "size": [1, 2]}),
        "encoding": BatchEncoding({"input_ids": ids}),
        "nested": {"list": [ids, (mask, {"deep": half})], "scalar": 2.5},
        "inputs": Inputs(ids, 0.5, (mask, half)),
        "nothing": None,
        "flag": True,
        "marker": marker,
        "untouched": untouched,
        "there": there,
    }
    assert torch.equal(pipe.text_encoder(ids, **kwargs).detach().cpu(), torch.full((2,), 2.0))
    (first,), seen = pipe.text_encoder.seen
    found = _tensors([first, *seen.values()])
    assert len(found) == 10 and {tensor.device.type for tensor in found} == {"sim"}
    assert {tensor.dtype for tensor in found} == {torch.int64, torch.bool, torch.bfloat16, torch.float32}
    assert seen["marker"] is marker and seen["untouched"] is untouched and seen["there"] is there
    assert seen["nothing"] is None and seen["flag"] is True and seen["inputs"].scale == 0.5
    assert type(seen["features"]) is BatchFeature and type(seen["encoding"]) is BatchEncoding
    assert seen["features"]["size"] == [1, 2] and seen["nested"]["scalar"] == 2.5
    # The caller's own containers are as they were.
    assert {tensor.device.type for tensor in _tensors(list(kwargs.values()))} == {"cpu", "sim"}
    assert kwargs["inputs"].tokens is ids and kwargs["nested"]["list"][0] is ids
    # Outputs stay where they were computed.
    assert pipe.text_encoder(result=there) is there


def test_fitdit_5_cuda_functions_are_never_touched(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines without CUDA failed in code that was written for it."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a function of torch.cuda was called")

    for name in ("synchronize", "current_stream", "Stream", "Event", "mem_get_info", "empty_cache", "current_device",
                 "set_device", "memory_allocated", "memory_reserved", "cudart", "is_current_stream_capturing",
                 "stream", "device", "host_memory_stats", "get_device_properties"):  # fmt: skip
        if hasattr(torch.cuda, name):
            monkeypatch.setattr(torch.cuda, name, refuse)
    reference = resident_output(lambda: build_toy(4, text_encoder=True, vae=True), device)
    for arguments in ({}, {"device": "cpu"}):
        pipe, call = build_toy(4, text_encoder=True, vae=True)
        pipe.enable_omni_offload("layer", **arguments)
        output = run(pipe, call)
        if not arguments:
            assert_equal(output, reference)
        pipe.disable_omni_offload()


@pytest.mark.processes
def test_dashai_565_a_machine_without_an_accelerator() -> None:
    """A clear sentence instead of an error from a library for a device that isn't there."""
    program = """
import diffusers_omni_offload
import torch
from tests.tiny import build_toy, run
assert torch.accelerator.current_accelerator(check_available=True) is None
pipe, call = build_toy(4)
reference = run(pipe, call)
try:
    pipe.enable_omni_offload("layer")
except ValueError as error:
    print(error)
try:
    pipe.enable_omni_offload("layer", device="cuda")
except ValueError as error:
    print(error)
assert pipe.omni_offload is None
pipe.enable_omni_offload("layer", device="cpu")
assert (run(pipe, call) == reference).all()
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    first, second = result.stdout.splitlines()
    assert "No accelerator was found" in first and 'device="cpu"' in first
    assert "cuda" in second and "none" in second


@in_every_mode
def test_diffusers_9896_the_blocks_own_device_is_never_asked(device: torch.device, sim: ModuleType, mode: str) -> None:
    """A pipeline that places its tensors by `_execution_device` alone works as it does without offload."""

    class ByExecutionDevice(ToyPipeline):
        def __call__(self, **kwargs: Any) -> Any:
            x = torch.linspace(-1, 1, 32, device=self._execution_device).reshape(1, 4, 8)
            return super().__call__(x=x, **kwargs)

    def build() -> tuple[Any, Callable[[], dict[str, Any]]]:
        pipe, call = build_toy(4, text_encoder=True, vae=True)
        return ByExecutionDevice(**pipe.components), call

    reference = resident_output(build, device)
    pipe, call = build()
    pipe.enable_omni_offload(**MODES[mode])
    assert_equal(run(pipe, call), reference)
