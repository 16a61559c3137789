"""Pipelines that move their own phases: they are delegated to, and `PhaseOffload` keeps one phase on the device."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from diffusers_omni_offload import OffloadConfig, PhaseOffload, disable_omni_offload, enable_omni_offload
from diffusers_omni_offload.backends import DelegatedBackend, get_offload_backend
from diffusers_omni_offload.streaming.stages import Stages
from tests import tiny
from tests.comparing import State, assert_equal, leftovers, resident_output
from tests.tiny.standins.cosmos3_split import build_cosmos3_split


class TwoPhases(nn.Module):
    """A think phase of two layers and a draw phase of three, and a projection that belongs to neither."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.think = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.draw = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.project = nn.Linear(8, 8)
        self.phases: PhaseOffload | None = None

    def forward(self, hidden: torch.Tensor, fails: bool = False) -> torch.Tensor:
        assert self.phases is not None
        with self.phases.context("think"):
            for layer in self.think:
                hidden = layer(hidden)
        with self.phases.context("draw"):
            hidden = self.project(hidden)
            if fails:
                raise KeyError("in the middle of a phase")
        for layer in self.draw:  # after its context, as Cosmos 3 does it
            hidden = layer(hidden)
        return hidden


@pytest.fixture
def model(device: torch.device) -> TwoPhases:
    model = TwoPhases()
    model.phases = PhaseOffload(model, {"think": model.think, "draw": model.draw}, device=device)
    return model


@pytest.fixture
def hidden(device: torch.device) -> torch.Tensor:
    return torch.linspace(-1, 1, 16).reshape(2, 8).to(device)


def expected(hidden: torch.Tensor) -> torch.Tensor:
    model = TwoPhases().to(hidden.device)
    model.phases = PhaseOffload(model, {"think": model.think, "draw": model.draw}, device=hidden.device)
    with torch.no_grad():
        return model(hidden)


def loaded(model: TwoPhases) -> set[str]:
    assert model.phases is not None
    return {stage.path for stage in model.phases.backend.stages if stage.is_loaded}


@torch.no_grad()
@pytest.mark.parametrize("names", [("encoder", "decoder"), ("dit", "vae")])
def test_phases_may_be_called_as_roles_are(device: torch.device, hidden: torch.Tensor, names: tuple[str, str]) -> None:
    model = TwoPhases()
    phases = PhaseOffload(model, dict(zip(names, (model.think, model.draw), strict=True)), device=device)
    phases.enable()
    with phases.backend.opened():
        for name, found in zip(names, ("think", "draw"), strict=True):
            with phases.context(name):
                pass
            paths = {stage.path for stage in phases.backend.stages if stage.is_loaded}
            assert paths == {f"{found}.{index}" for index in range(len(getattr(model, found)))}


@torch.no_grad()
def test_one_phase_at_a_time(model: TwoPhases, hidden: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    assert model.phases is not None
    model.phases.enable()
    assert model.project.weight.device == hidden.device and model.think[0].weight.device.type == "cpu"
    seen: list[set[str]] = []
    bring = Stages.bring

    def watched(self: Stages, stage: Any) -> None:
        bring(self, stage)
        seen.append({path.split(".")[0] for path in loaded(model)})

    monkeypatch.setattr(Stages, "bring", watched)
    assert torch.equal(model(hidden), expected(hidden))
    assert {"think"} in seen and {"draw"} in seen
    assert all(len(phases) == 1 for phases in seen)
    assert loaded(model) == set(), "outside of a pipeline's call the phases leave with the forward"
    assert model.phases.backend.counters().swaps == 5, "each layer once: the draw phase stays when its context is left"


@torch.no_grad()
def test_an_error_gives_the_phase_up(model: TwoPhases, hidden: torch.Tensor) -> None:
    assert model.phases is not None
    model.phases.enable()
    with model.phases.backend.opened():
        with pytest.raises(KeyError):
            model(hidden, fails=True)
        assert loaded(model) == set()
        assert torch.equal(model(hidden), expected(hidden))
        assert loaded(model) == {"draw.0", "draw.1", "draw.2"}


@torch.no_grad()
def test_a_layer_whose_phase_was_never_entered(model: TwoPhases, hidden: torch.Tensor) -> None:
    assert model.phases is not None
    model.phases.enable()
    reference = TwoPhases().to(hidden.device)
    with model.phases.context("think"):
        assert torch.equal(model.draw[1](hidden), reference.draw[1](hidden))
        assert loaded(model) == {"draw.1"}


def test_disabled_phases_are_ordinary(model: TwoPhases, hidden: torch.Tensor) -> None:
    assert model.phases is not None
    gc.collect()
    held = torch.accelerator.memory_allocated()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with model.phases.context("think"):
        pass  # passes while it is off
    model.phases.enable()
    model.phases.enable()
    assert model.phases.is_enabled()
    model.phases.disable()
    assert not model.phases.is_enabled()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any("forward" in vars(module) or "_hf_hook" in vars(module) for module in model.modules())
    assert torch.accelerator.memory_allocated() == held


def test_phases_have_to_be_apart(device: torch.device) -> None:
    model = TwoPhases()
    with pytest.raises(ValueError, match=r"phase 'b' has a Linear that is no part .* in another phase"):
        PhaseOffload(model, {"a": model.think, "b": [model.think[1]]}, device=device)
    with pytest.raises(ValueError, match="phase 'a' has a Linear that is no part of the TwoPhases"):
        PhaseOffload(model, {"a": [nn.Linear(2, 2)]}, device=device)
    with pytest.raises(ValueError, match="no phase 'sing'; choose from think, draw"):
        PhaseOffload(model, {"think": model.think, "draw": model.draw}, device=device).context("sing").__enter__()


# ---------------------------------------------------------------------- pipelines


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cosmos3_swaps_its_reasoner_and_its_generator(device: torch.device, sim: ModuleType, dtype: Any) -> None:
    def build() -> tuple[Any, Callable[[], dict[str, Any]]]:
        pipe, call = build_cosmos3_split()
        return pipe.to(dtype), call

    reference = resident_output(build, device)
    pipe, call = build()
    handle = enable_omni_offload(pipe, "module")
    assert isinstance(handle.backend, DelegatedBackend) and handle.is_enabled()
    assert enable_omni_offload(pipe, "module") is handle
    before = sim.stats()["d2h_bytes"]
    for _ in range(3):
        swaps = handle.swaps
        output = tiny.run(pipe, call)
        assert_equal(output, reference)
        # Reasoner, generator, reasoner, generator in the first step, for the two branches; then the generator stays.
        assert handle.swaps - swaps == 4 * 4
        assert handle.device_bytes == 0
    assert sim.stats()["d2h_bytes"] - before <= 3 * 4 * output.size, "only the results come back"
    disable_omni_offload(pipe)
    assert leftovers(pipe) == []
    assert_equal(resident_output(lambda: (pipe, call), device), reference)


def test_a_selection_is_honoured_or_refused(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, _ = build_cosmos3_split()
    enable = type(pipe).enable_omni_model_cpu_offload
    received: list[Any] = []

    def selecting(self: Any, *, device: torch.device, offload_components: list[str] | None = None) -> None:
        received.append(offload_components)
        enable(self, device=device)

    monkeypatch.setattr(type(pipe), "enable_omni_model_cpu_offload", selecting)
    enable_omni_offload(pipe, "module", components=["dit"])
    disable_omni_offload(pipe)
    enable_omni_offload(pipe, components={"transformer": "module"})
    disable_omni_offload(pipe)
    enable_omni_offload(pipe, "module")
    disable_omni_offload(pipe)
    assert received == [["dit"], ["transformer"], None]

    def taking_nothing(self: Any, *, device: torch.device) -> None:
        enable(self, device=device)

    monkeypatch.setattr(type(pipe), "enable_omni_model_cpu_offload", taking_nothing)
    before = State.of(pipe)
    with pytest.raises(ValueError, match=r"moves its own phases.*takes no offload_components"):
        enable_omni_offload(pipe, "module", components=["dit"])
    before.assert_same(State.of(pipe))


def test_a_failure_of_the_pipelines_own_is_undone(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, _ = build_cosmos3_split()
    enable, disabled = type(pipe).enable_omni_model_cpu_offload, []

    def failing(self: Any, **arguments: Any) -> None:
        enable(self, **arguments)
        raise MemoryError("half-way")

    disable = type(pipe).disable_omni_model_cpu_offload
    monkeypatch.setattr(type(pipe), "enable_omni_model_cpu_offload", failing)
    monkeypatch.setattr(
        type(pipe), "disable_omni_model_cpu_offload", lambda self: (disabled.append(True), disable(self))
    )
    with pytest.raises(MemoryError, match="half-way"):
        enable_omni_offload(pipe, "module")
    assert disabled and leftovers(pipe) == []


def test_switching_between_its_own_phases_and_layers(device: torch.device, sim: ModuleType) -> None:
    reference = resident_output(build_cosmos3_split, device)
    pipe, call = build_cosmos3_split()
    for mode in ("module", "layer", "module", "layer"):
        handle = enable_omni_offload(pipe, mode)
        assert_equal(tiny.run(pipe, call), reference)
        assert handle.loads + handle.swaps > 0
    disable_omni_offload(pipe)
    assert leftovers(pipe) == [] and sim.hazards() == []


def test_the_factory_delegates_in_module_mode_only(device: torch.device) -> None:
    pipe, _ = build_cosmos3_split()
    modes = {mode: get_offload_backend(OffloadConfig.from_options(mode), device, pipe) for mode in ("module", "layer")}
    assert isinstance(modes["module"], DelegatedBackend) and not isinstance(modes["layer"], DelegatedBackend)
