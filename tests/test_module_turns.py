"""Swapped components take turns: who leaves before something runs, who stays, and when the second expert comes."""

from __future__ import annotations

import gc
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from torch import nn

from diffusers_omni_offload import enable_omni_offload
from diffusers_omni_offload.streaming.stages import Stages
from tests import tiny
from tests.equality import Call, assert_equal_outputs, assert_no_hazards
from tests.occupancy import Occupancy, intruders, roles
from tests.swapped import Need, build_wan, packed_size
from tests.tiny.toy import ToyPipeline

accelerator = torch.accelerator


@pytest.fixture
def exact(sim: ModuleType) -> ModuleType:
    """The simulated device with allocations that take just their bytes, so that sums come out."""
    sim.configure(alloc_round=1)
    return sim


# ---------------------------------------------------------------------- who is on the device


class Beside(ModelMixin, ConfigMixin):
    """Stands for a ControlNet: runs before the DiT in each step."""

    @register_to_config
    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(70)
            self.inner = nn.Linear(channels, channels)

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        return 0.1 * torch.tanh(self.inner(latents))


class TurnsPipeline(ToyPipeline):
    """Everything takes turns: in each step the encoder reads again, then the ControlNet, then a DiT, and the VAE."""

    _resident_modules = ["controlnet"]

    def __init__(self, transformer: Any, transformer_2: Any, text_encoder: Any, vae: Any, controlnet: Any) -> None:
        super().__init__(transformer, transformer_2, text_encoder, vae)
        self.register_modules(controlnet=controlnet)

    @torch.no_grad()
    def __call__(self, steps: int = 4, **unused: Any) -> torch.Tensor:
        device = self._execution_device
        latents = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(0)).to(device)
        for step in range(steps):
            tokens = torch.arange(4, device=device)[None] + step
            latents = latents + self.text_encoder(tokens).mean(dim=-1, keepdim=True)
            for dit in (self.transformer, self.transformer_2, self.transformer):
                latents = latents + self.controlnet(latents)
                latents = 0.8 * latents + 0.5 * dit(latents)
            latents = latents + 0.1 * self.vae.decode(latents).mean()
        return latents


def build_turns() -> tuple[Any, Call]:
    toy, _ = tiny.build_toy(3, two_stage=True, text_encoder=True, vae=True, width=16, sizes=[16, 48])
    return TurnsPipeline(**toy.components, controlnet=Beside()), dict


SELECTIONS: dict[str, dict[str, str]] = {
    "everything": {"dit": "module", "text_encoder": "module", "vae": "module", "controlnet": "module"},
    "dit": {"dit": "module"},
    "second dit": {"transformer_2": "module"},
    "text_encoder": {"text_encoder": "module"},
    "vae": {"vae": "module"},
    "controlnet": {"controlnet": "module"},
    "dit and text_encoder": {"dit": "module", "text_encoder": "module"},
    "dit and vae": {"dit": "module", "vae": "module"},
    "dit and controlnet": {"dit": "module", "controlnet": "module"},
    "one dit of each kind": {"transformer": "module", "transformer_2": "layer", "text_encoder": "module"},
    "all but the dit": {"dit": "layer", "text_encoder": "module", "vae": "module", "controlnet": "module"},
    "resident dit": {"dit": "resident", "text_encoder": "module", "vae": "module"},
}


@pytest.mark.parametrize("selection", SELECTIONS)
def test_mutual_exclusion(selection: str, device: torch.device, sim: ModuleType) -> None:
    resident, call = build_turns()
    expected = [resident.to(device)().cpu().numpy() for _ in range(2)]
    pipe, call = build_turns()
    handle = enable_omni_offload(pipe, components=SELECTIONS[selection])
    with Occupancy(handle) as occupancy:
        found = [pipe(**call()).cpu().numpy() for _ in range(2)]
    assert_equal_outputs(found, expected, selection)
    assert_no_hazards(sim, selection)
    assert set(occupancy.order) == {"transformer", "transformer_2", "text_encoder", "vae", "controlnet"}
    assert intruders(occupancy, roles(handle)) == []
    check_who_stays(occupancy, roles(handle), set(handle.plan.swapped))
    # No tensor of a component is on the device but while it runs.
    assert all(moment.bound <= {moment.path} for moment in occupancy.moments)


def check_who_stays(occupancy: Occupancy, role_of: dict[str, str], swapped: set[str]) -> None:
    """Nobody leaves without a rival: turn after turn, what may stay is still there."""
    banned = {"dit": {"dit", "encoder", "vae"}, "resident": {"encoder", "vae"}, "encoder": {"dit", "resident", "vae"}}
    banned["vae"] = {"dit", "encoder", "resident", "vae"}
    expected: set[str] = set()
    steps = [moment for moment in occupancy.moments]
    for index, moment in enumerate(steps):
        if (not moment.loaded and not expected) or index == len(steps) // 2:
            expected = set(moment.loaded)  # A call begins.
            continue
        role = role_of[moment.path]
        if role != "vae" or moment.path in swapped:
            expected = {path for path in expected if path == moment.path or role_of[path] not in banned[role]}
        expected |= {moment.path} & swapped
        assert moment.loaded == expected, f"at {moment.path}"


@pytest.mark.parametrize(
    ("name", "selected"),
    [
        ("soulx_singer_svc", "dit"),
        ("soulx_singer_svc", "vae"),
        ("soulx_singer_svs", "dit"),
        ("nextstep", "vae"),
        ("minimax_h3_spec_reference", "dit"),
        ("sdxl", "vae"),
    ],
)
def test_an_unselected_component_evicts_a_selected_one(name: str, selected: str, device: torch.device) -> None:
    """By whatever way it is entered: some of these components have no `forward`, or aren't called by it."""
    builders = tiny.BUILDERS | tiny.STANDINS
    resident, call = builders[name]()
    expected = tiny.run(resident.to(device), call)
    pipe, call = builders[name]()
    handle = enable_omni_offload(pipe, components={selected: "module"})
    with Occupancy(handle) as occupancy:
        assert_equal_outputs([tiny.run(pipe, call)], [expected], name)
    assert handle.swaps > 0 and intruders(occupancy, roles(handle)) == []


def test_a_vae_that_stays_has_the_memory_to_itself_if_that_is_short(device: torch.device, sim: ModuleType) -> None:
    pipe, call = build_turns()
    handle = enable_omni_offload(pipe, "module")
    taken = torch.zeros(1 << 20, device=device)  # most of a small device
    for capacity, expected in ((None, {"transformer"}), (accelerator.memory_allocated() + taken.nbytes // 2, set())):
        sim.configure(capacity_bytes=capacity)
        with Occupancy(handle) as occupancy:
            pipe(**call())
        assert {path for moment in occupancy.moments if moment.path == "vae" for path in moment.loaded} == expected


@pytest.mark.parametrize(
    ("mutant", "symptom"),
    [
        ("nobody leaves", "while"),
        ("nobody leaves for an encoder", "while text_encoder runs"),
    ],
)
def test_the_record_notices_who_should_have_left(
    mutant: str, symptom: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Stages.make_room

    def make_room(self: Stages, group: str, *others: Any) -> None:
        if mutant == "nobody leaves for an encoder" and group != "encoder":
            original(self, group, *others)

    monkeypatch.setattr(Stages, "make_room", make_room)
    pipe, call = build_turns()
    handle = enable_omni_offload(pipe, components=SELECTIONS["everything"])
    with Occupancy(handle) as occupancy:
        pipe(**call())
    assert any(symptom in line for line in intruders(occupancy, roles(handle)))


def test_what_fits_is_not_refused(device: torch.device, exact: ModuleType) -> None:
    """Two experts that make way for each other, and what runs beside them: only one of the two is counted."""
    choice = SELECTIONS["everything"]
    need = Need.of(build_turns, device)
    gc.collect()
    pipe, call = build_turns()
    start = accelerator.memory_allocated()
    most = max(packed_size(pipe.transformer), packed_size(pipe.transformer_2)) + packed_size(pipe.controlnet)
    exact.configure(capacity_bytes=start + most + need.activations)
    enable_omni_offload(pipe, components=choice)
    assert np.array_equal(pipe(**call()).cpu(), need.expected)


# ---------------------------------------------------------------------- two experts


def expert_events(occupancy: Occupancy) -> list[str]:
    """ "+" for a DiT that comes, "-" for one that leaves."""
    return [f"{'+' if swap.comes else '-'}{swap.path}" for swap in occupancy.swaps if "transformer" in swap.path]


BOTH = ["+transformer", "-transformer", "+transformer_2", "-transformer_2"]


@pytest.mark.parametrize(
    ("boundary", "missing", "expected"),
    [
        (0.5, "", BOTH),
        pytest.param(0.9, "", BOTH, marks=pytest.mark.slow),
        (0.0, "", ["+transformer", "-transformer"]),
        (1.0, "", ["+transformer_2", "-transformer_2"]),
        pytest.param(0.0, "transformer_2", ["+transformer", "-transformer"], marks=pytest.mark.slow),
        (1.0, "transformer", ["+transformer_2", "-transformer_2"]),
    ],
)
def test_two_experts_are_never_there_together(
    boundary: float, missing: str, expected: list[str], device: torch.device, exact: ModuleType
) -> None:
    def build() -> tuple[Any, Call]:
        return build_wan(boundary, missing=missing)

    need = Need.of(build, device)
    gc.collect()
    pipe, call = build()
    handle = enable_omni_offload(pipe, "module")
    idle = accelerator.memory_allocated()
    sizes = {path: packed_size(handle.plan.component(path).module) for path in handle.plan.swapped}
    for _ in range(2):
        moved = handle.bytes_moved
        with Occupancy(handle) as occupancy:
            assert np.array_equal(tiny.run(pipe, call), need.expected)
        # Exactly one swap each way, and the second expert's bytes don't move before it runs.
        assert expert_events(occupancy) == expected
        assert occupancy.loads[0] == "text_encoder"
        assert handle.bytes_moved - moved == sum(sizes[path] for path in occupancy.loads)
        for swap in occupancy.swaps:
            if swap.comes:
                assert swap.before <= idle + need.activations, f"something else is there when {swap.path} comes"
                assert swap.after - swap.before == sizes[swap.path]
            else:
                assert swap.before - swap.after == sizes[swap.path]
        for moment in occupancy.moments:
            assert not {"transformer", "transformer_2"} <= moment.loaded
            assert moment.allocated <= idle + need.activations + max(sizes.values())


def test_the_second_expert_comes_when_it_runs(device: torch.device) -> None:
    """Nothing of it is copied before the boundary, in module mode and if only one of the two is swapped."""
    for choice in ({"dit": "module"}, {"transformer": "layer", "transformer_2": "module"}):
        pipe, call = build_wan(0.5, 6)
        handle = enable_omni_offload(pipe, components=choice)
        with Occupancy(handle) as occupancy:
            tiny.run(pipe, call)
        order = [moment.path for moment in occupancy.moments if moment.path.startswith("transformer")]
        boundary = order.index("transformer_2")
        assert 0 < boundary and "transformer" not in order[boundary:]
        first = [moment for moment in occupancy.moments if moment.path == "transformer"]
        assert all("transformer_2" not in moment.loaded for moment in first)
