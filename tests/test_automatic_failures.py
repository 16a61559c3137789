"""Mode "auto" where something goes wrong: memory that runs out, guesses that were, files that hold nonsense."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, DiffusionPipeline
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin

from diffusers_omni_offload import DoesNotFit
from diffusers_omni_offload.profile import PROFILE_VARIABLE
from tests import tiny
from tests.benchmarks.stacks import StackPipeline
from tests.equality import Call, assert_equal_outputs, outputs
from tests.test_automatic import BUDGET, STEPS, free_bytes, resident, residents, stack

TRANSFER_BOUND = {"flops_per_s": 1e9, "h2d_bytes_per_s": 5e7}


@pytest.fixture
def slow_link(sim: ModuleType, device: torch.device) -> torch.device:
    sim.configure(**TRANSFER_BOUND)
    return device


def short_of_memory(sim: ModuleType, pipe: StackPipeline, device: torch.device) -> torch.Tensor:
    """`pipe` with blocks that stay, and too little room for its activations; what takes the room."""
    sim.configure(capacity_bytes=torch.accelerator.memory_allocated() + BUDGET)
    handle = pipe.enable_omni_offload("auto", memory_budget=BUDGET, activation_memory=1)
    assert residents(handle) == [6]
    return torch.empty(free_bytes(sim) - 8192, dtype=torch.uint8, device=device)


def noisy() -> StackPipeline:
    pipe = stack()

    def disturb(_: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return args[0] + torch.randn(args[0].shape).to(args[0].device), *args[1:]

    pipe.transformer.transformer_blocks[0].register_forward_pre_hook(disturb)
    return pipe


def test_random_numbers_of_a_failed_attempt_are_drawn_again(slow_link: torch.device, sim: ModuleType) -> None:
    torch.manual_seed(0)
    expected = noisy().to(slow_link)(steps=STEPS).cpu()
    pipe = noisy()
    taken = short_of_memory(sim, pipe, slow_link)
    torch.manual_seed(0)
    assert torch.equal(pipe(steps=STEPS).cpu(), expected)
    del taken


def test_a_forward_that_wrote_to_its_arguments_is_not_run_again(slow_link: torch.device, sim: ModuleType) -> None:
    pipe = stack()
    forward = pipe.transformer.forward
    pipe.transformer.forward = lambda x, context: forward(x.add_(1.0), context)
    taken = short_of_memory(sim, pipe, slow_link)
    with pytest.raises(torch.OutOfMemoryError):
        pipe(steps=STEPS)
    del taken


@pytest.mark.parametrize(("build", "budget"), [(tiny.build_sd3, 1_000_000), (tiny.build_flux2, 700_000)])
def test_kinds_that_do_not_fit_after_all_are_changed(
    slow_link: torch.device, sim: ModuleType, build: Callable[[], tuple[Any, Call]], budget: int
) -> None:
    pipe, call = build()
    expected = outputs(pipe.to(slow_link), call, 1)
    pipe, call = build()
    handle = pipe.enable_omni_offload("auto", memory_budget=budget)
    for _ in range(3):
        assert_equal_outputs(outputs(pipe, call, 1), expected, str(budget))
    assert handle.automatic.prediction.peak_nbytes <= budget


def test_a_call_that_failed_for_want_of_memory_is_followed_by_one_that_does_not(
    slow_link: torch.device, sim: ModuleType
) -> None:
    """All components were to be swapped, and none could leave."""
    pipe, call = tiny.build_sd3()
    expected = outputs(pipe.to(slow_link), call, 1)
    pipe, call = tiny.build_sd3()
    sim.configure(capacity_bytes=torch.accelerator.memory_allocated() + 1_000_000)
    pipe.enable_omni_offload("auto", memory_budget=1_000_000)
    failed = 0
    for _ in range(4):
        try:
            assert_equal_outputs(outputs(pipe, call, 1), expected, "short of memory")
        except torch.OutOfMemoryError:
            failed += 1
    assert failed < 3
    assert_equal_outputs(outputs(pipe, call, 1), expected, "short of memory")


def test_what_is_only_assumed_refuses_nothing(slow_link: torch.device) -> None:
    budget = 100_000
    with pytest.raises(DoesNotFit) as refused:
        stack().enable_omni_offload("auto", memory_budget=budget)
    handle = stack().enable_omni_offload("auto", memory_budget=budget + refused.value.missing_nbytes)
    assert "with assumed activations" not in str(refused.value) and handle.automatic.is_assumed


class Net(ModelMixin, ConfigMixin):
    @register_to_config
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class OneNet(DiffusionPipeline):
    def __init__(self, net: Net) -> None:
        super().__init__()
        self.register_modules(net=net)


class NoNet(DiffusionPipeline):
    def __init__(self, scheduler: Any) -> None:
        super().__init__()
        self.register_modules(scheduler=scheduler)


def test_what_is_said_is_what_is_on(device: torch.device) -> None:
    pipe = OneNet(Net())
    handle = pipe.enable_omni_offload("auto")
    assert handle.automatic.prediction.choice.kinds == {"net": "module"} and "swapped" in str(handle)
    assert "components={'net': 'module'}" in str(handle.report())


def test_a_pipeline_of_which_nothing_moves_is_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="Nothing of this NoNet can be offloaded"):
        NoNet(DDIMScheduler()).enable_omni_offload("auto")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("link_bytes_per_s", 0),
        ("link_bytes_per_s", float("nan")),
        ("link_bytes_per_s", "fast"),
        ("activation_nbytes", "x"),
        ("activation_nbytes", -1_000_000_000),
        ("block_seconds", ["x"] * 12),
        ("forwards", None),
        ("unheard_of", 1),
        ("components", []),
    ],
)
def test_figures_that_are_none_are_measured_anew(
    slow_link: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, value: Any
) -> None:
    path = tmp_path / "profile.json"
    monkeypatch.setenv(PROFILE_VARIABLE, str(path))
    pipe = stack()
    pipe.enable_omni_offload("auto", memory_budget=BUDGET)
    pipe(steps=STEPS)
    content = json.loads(path.read_text())
    (device,), (pipeline,) = content["devices"].values(), content["pipelines"].values()
    if place == "link_bytes_per_s":
        device[place] = value
    elif place == "components":
        pipeline[place] = value
    else:
        pipeline["components"]["transformer"][place] = value
    path.write_text(json.dumps(content))
    again = stack()
    handle = again.enable_omni_offload("auto", memory_budget=BUDGET)
    assert residents(handle) == [6 if place == "link_bytes_per_s" else 0]
    assert torch.equal(again(steps=STEPS).cpu(), resident(slow_link))
    assert residents(handle) == [6]


def test_a_profile_that_cannot_be_written_leaves_nothing(
    slow_link: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "profile.json").mkdir()
    monkeypatch.setenv(PROFILE_VARIABLE, str(tmp_path / "profile.json"))
    pipe = stack()
    pipe.enable_omni_offload("auto", memory_budget=BUDGET)
    pipe(steps=STEPS)
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]
