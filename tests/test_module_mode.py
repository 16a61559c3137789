"""Module mode and a choice for each component: the outputs are equal, and what was chosen is what happens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from torch import nn

from diffusers_omni_offload import disable_omni_offload, enable_omni_offload
from tests import simdevice, tiny
from tests.comparing import State, leftovers, modules
from tests.equality import Build, Call, assert_equal_outputs, assert_no_hazards, outputs
from tests.occupancy import Occupancy, intruders, roles
from tests.swapped import AtRest, build_large_toy, leaves_of, packed_size

DTYPES = (torch.float32, torch.bfloat16)

PIPELINES: dict[str, Build] = {**tiny.BUILDERS, **tiny.VARIANTS, **tiny.STANDINS}

# ---------------------------------------------------------------------- every tiny pipeline, every choice

DIT_ONLY = {"cosmos3_omni", "cosmos3_t2i", "cosmos3_split", "nextstep", "bagel"}
"""They have a VAE, but no encoder."""
UNSTREAMED_ENCODERS = {"soulx_singer_svs", "soulx_singer_svc"}
ON_DEMAND = {"minimax_h3_spec", "minimax_h3_spec_reference"}
"""Their pipeline loads the encoder and the VAEs, by their own methods, whatever is chosen for them."""
OWN_PHASES = {"cosmos3_split"}
"""Module mode is left to the pipeline itself."""
TWO_DITS = {"wan", "wan_i2v"}


LAYER_AND_MODULE = [
    {"dit": "layer", "vae": "module"},
    {"dit": "resident", "vae": "module"},
    {"dit": "module", "vae": "module"},
    {"dit": "module", "vae": "resident"},
]
WITH_ENCODERS = [
    {"dit": "layer", "text_encoder": "module", "vae": "module"},
    {"dit": "module", "vae": "module"},
    {"dit": "layer", "text_encoder": "module"},
    {"dit": "resident", "text_encoder": "module", "vae": "module"},
    {"dit": "module", "text_encoder": "layer"},
]
OF_TWO_DITS = [
    {"transformer": "layer", "transformer_2": "module"},
    {"transformer": "module", "transformer_2": "layer", "text_encoder": "module"},
]
#: Its reasoner lies inside its generator.
OF_PHASES = [
    {"dit": "layer", "vae": "module"},
    {"transformer": "layer", "transformer.language_model": "module"},
    {"transformer": "module", "transformer.language_model": "layer"},
    {"transformer": "resident", "transformer.language_model": "layer", "vae": "module"},
    {"transformer": "module", "transformer.language_model": "layer", "vae": "module", "_sound_tokenizer": "module"},
]


def mixed_choices(name: str) -> list[dict[str, str]]:
    """The choices by component that a pipeline has the components for."""
    if name in OWN_PHASES:
        return OF_PHASES
    if name in DIT_ONLY:
        return LAYER_AND_MODULE
    if name in ON_DEMAND:
        # Encoder and VAEs do as they like, so these differ in the DiT alone.
        return [choice for choice in WITH_ENCODERS if choice["dit"] != "resident"]
    if name in UNSTREAMED_ENCODERS:
        return [*WITH_ENCODERS[:4], {"dit": "module", "text_encoder": "resident"}]
    return WITH_ENCODERS + (OF_TWO_DITS if name in TWO_DITS else [])


def choices_of(name: str) -> dict[str, dict[str, Any]]:
    """Arguments of `enable_omni_offload`, by a short name: module mode, and mixed choices, five at least."""
    found: dict[str, dict[str, Any]] = {"module": {"mode": "module"}}
    for choice in mixed_choices(name):
        found[", ".join(f"{key}: {value}" for key, value in choice.items())] = {"components": choice}
    # Where there is less to choose from, other options join in.
    layered = next(choice for choice in mixed_choices(name) if choice.get("dit", choice.get("transformer")) == "layer")
    found["one slot"] = {"components": layered, "slots": 1}
    if len(found) < 6:
        found["a resident block"] = {"components": layered, "layer_options": {"dit": {"resident_layers": 1}}}
    assert len(found) >= 6, name
    return found


def cases() -> Iterator[Any]:
    """Every pipeline with every choice and both dtypes. One of each pipeline is fast, in turns of everything else."""
    turn = 0
    for name in PIPELINES:
        options = list(itertools.product(choices_of(name), DTYPES))
        fast, turn = turn % len(options), turn + 3
        for index, (choice, dtype) in enumerate(options):
            is_slow = index != fast or name == "longcat_rewrite"
            yield pytest.param(
                name,
                choice,
                dtype,
                marks=[pytest.mark.slow] if is_slow else [],
                id=f"{name}-{choice}-{str(dtype).removeprefix('torch.')}",
            )


@dataclass(frozen=True)
class Resident:
    """Three calls with everything on the device.

    Attributes:
        outputs: of each call.
        to_host: bytes that the last one brought to the host.
        attributes: names of the attributes of every module after them.
    """

    outputs: list[np.ndarray]
    to_host: int
    attributes: dict[str, tuple[str, ...]]


@cache
def resident_run(name: str, device: torch.device, dtype: torch.dtype) -> Resident:
    pipe, call = on(device, name, dtype)
    found = outputs(pipe, call, 2)
    before = simdevice.stats()["d2h_bytes"]
    found += outputs(pipe, call, 1)
    assert all(np.isfinite(output).all() and output.std() > 0 for output in found)
    return Resident(found, simdevice.stats()["d2h_bytes"] - before, attributes(pipe))


def attributes(pipe: Any) -> dict[str, tuple[str, ...]]:
    return {path: tuple(sorted(vars(module))) for path, module in modules(pipe)}


def on(device: torch.device | None, name: str, dtype: torch.dtype) -> tuple[Any, Call]:
    pipe, call = PIPELINES[name]()
    pipe = pipe.to(dtype)
    return (pipe if device is None else pipe.to(device)), call


@pytest.mark.parametrize(("name", "choice", "dtype"), list(cases()))
def test_equal_to_the_resident_run(
    name: str, choice: str, dtype: torch.dtype, device: torch.device, sim: ModuleType
) -> None:
    resident = resident_run(name, device, dtype)
    what = f"{name} in {dtype}, {choice}"
    pipe, call = on(None, name, dtype)
    before, to_host = State.of(pipe), sim.stats()["d2h_bytes"]
    handle = enable_omni_offload(pipe, **choices_of(name)[choice])
    assert sim.stats()["d2h_bytes"] == to_host, f"{what}: enabling copied something to the host"
    at_rest = AtRest(handle)
    with Occupancy(handle) as occupancy:
        for expected in resident.outputs:
            to_host = sim.stats()["d2h_bytes"]
            assert_equal_outputs([tiny.run(pipe, call)], [expected], what)
            at_rest.check()
            came_back = sim.stats()["d2h_bytes"] - to_host - resident.to_host
            # What moves itself takes its weights back, if it isn't streamed.
            assert came_back <= 0 if name in ON_DEMAND else came_back == 0, f"{what}: weights came back"
            assert handle.device_bytes == slot_bytes(handle), what
    assert_no_hazards(sim, what)
    check_that_it_happened(handle, occupancy, choices_of(name)[choice], name, what)
    disable_omni_offload(pipe)
    assert leftovers(pipe) == [], what
    after = State.of(pipe)
    # A resident run may leave more: diffusers' empty registry of hooks, which we take away.
    assert all(set(names) <= set(resident.attributes[path]) for path, names in after.attributes.items()), what
    replace(before, attributes=after.attributes).assert_same(after)


def slot_bytes(handle: Any) -> int:
    """Device bytes that are held between calls: slots, and leaves that belong to several owners."""
    shared = handle.backend.shared
    return handle.backend.streamer.slots.nbytes + (0 if shared is None else shared.nbytes)


def check_that_it_happened(handle: Any, occupancy: Occupancy, options: dict[str, Any], name: str, what: str) -> None:
    """What was chosen to be swapped came and went in each call, what was chosen to be streamed was streamed."""
    choice = options.get("components") or {"dit": "module", "text_encoder": "module", "image_encoder": "module"}
    if name in OWN_PHASES and "module" in choice.values() and "mode" in options:
        assert handle.swaps > 0 and handle.plan.swapped == (), what
        return
    role_of, selector = roles(handle), {"dit": "dit", "encoder": "text_encoder", "vae": "vae", "resident": ""}
    on_demand = set(handle.plan.on_demand)
    for path, role in role_of.items():
        kind = "image_encoder" if path == "image_encoder" else selector[role]
        chosen = choice.get(path) or choice.get(kind, "resident")
        if path in on_demand:
            assert path not in handle.plan.swapped, what
        elif "." not in path or role == "dit":
            assert (path in handle.plan.swapped) == (chosen == "module"), f"{what}: {path}"
    ran = {moment.path for moment in occupancy.moments}
    assert on_demand <= ran and all(
        tensor.device.type == "cpu" for path in on_demand for tensor in leaves_of(handle.plan.component(path).module)
    ), what
    loads = {path: occupancy.loads.count(path) for path in handle.plan.swapped}
    for path, count in loads.items():
        # Every component that works came three times at least, once a call; one that is idle never did.
        assert count >= 3 if path in ran else count == 0, f"{what}: {path} came {count} times"
        assert count % 3 == 0, f"{what}: {path}"
        left = sum(swap.path == path and not swap.comes for swap in occupancy.swaps)
        assert left == count, f"{what}: {path} came {count} times and left {left} times"
    assert sum(loads.values()) == handle.swaps, what
    assert (handle.loads > 0) == any(stack.streamed for stack in handle.plan.stacks), what
    if not handle.loads:
        swapped = sum(count * packed_size(handle.plan.component(path).module) for path, count in loads.items())
        assert handle.bytes_moved == swapped > 0, f"{what}: a load is one copy of all of the component"
    assert intruders(occupancy, role_of) == [], what


# ---------------------------------------------------------------------- which stages come, in stock pipelines

EXPECTED_LOADS: dict[str, list[str]] = {
    "wan": ["text_encoder", "transformer", "transformer_2"],
    "wan_i2v": ["text_encoder", "transformer", "transformer_2"],
    "wan_single": ["text_encoder", "transformer"],
    "wan_i2v_clip": ["text_encoder", "image_encoder", "transformer"],
    "flux2": ["text_encoder", "transformer"],
    "sd3": ["text_encoder", "text_encoder_2", "text_encoder_3", "transformer"],
    "sdxl": ["text_encoder", "text_encoder_2", "unet"],
    "qwen_image": ["text_encoder", "transformer"],
    "cosmos3_omni": ["transformer"],
    "bagel": ["language_model.model"],
    "minimax_h3": ["text_encoder", "transformer"],
    "minimax_h3_spec": ["transformer"],
    # Two segments: their encoders, the DiT, and again.
    "soulx_singer_svc": [
        "mel", "whisper_encoder", "f0_encoder", "cfm_decoder.model.diff_estimator",
        "whisper_encoder", "f0_encoder", "cfm_decoder.model.diff_estimator",
    ],
}  # fmt: skip
QUICK_LOADS = ("wan", "sd3", "sdxl", "bagel", "minimax_h3_spec", "soulx_singer_svc")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK_LOADS else [pytest.mark.slow]) for name in EXPECTED_LOADS],
)
def test_each_component_comes_once_a_turn(name: str, device: torch.device) -> None:
    """In module mode, however many steps and guidance branches there are; encoders stay together."""
    pipe, call = on(None, name, torch.float32)
    handle = enable_omni_offload(pipe, "module")
    with Occupancy(handle) as occupancy:
        tiny.run(pipe, call)
        first = list(occupancy.loads)
        tiny.run(pipe, call)
    assert first == EXPECTED_LOADS[name] and occupancy.loads == 2 * first


# ---------------------------------------------------------------------- odd tensors, and ties


class OddEncoder(ModelMixin, ConfigMixin):
    """Tokens to `[batch, tokens, width]`, through tensors of every kind."""

    @register_to_config
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(80)
            self.embed = nn.Embedding(16, width)
            self.head = nn.Linear(width, 16, bias=False)
            self.head.weight = self.embed.weight
            self.conv = nn.Conv2d(4, width, 3, padding=1).to(memory_format=torch.channels_last)
            self.transposed = nn.Parameter(torch.randn(width, 4).t())
            self.low = nn.Parameter(torch.randn(width).to(torch.bfloat16))
            self.high = nn.Parameter(torch.randn(width, dtype=torch.float64), requires_grad=False)
            self.empty = nn.Parameter(torch.zeros(0, width))
            self.scalar = nn.Parameter(torch.tensor(0.7))
            self.register_buffer("table", torch.randn(16, width), persistent=False)
            self.register_buffer("counts", torch.arange(16))
            self.register_buffer("expanded", torch.randn(1, width).expand(4, width))
            self.register_buffer("mask", torch.tensor([True, False] * 8))
        self.seen: dict[str, tuple[Any, ...]] = {}

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        named = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        self.seen = {name: (t.dtype, t.shape, t.stride(), t.device.type) for name, t in named.items()}
        assert self.head.weight is self.embed.weight
        hidden = self.embed(tokens) + self.table[tokens] * self.mask[tokens][..., None]
        hidden = hidden + self.head(hidden).softmax(dim=-1) @ self.embed.weight
        image = (hidden @ self.transposed.t()).mean(dim=1)[..., None, None].expand(-1, -1, 3, 3)
        assert self.conv.weight.is_contiguous(memory_format=torch.channels_last)
        hidden = hidden + self.conv(image.contiguous(memory_format=torch.channels_last)).mean(dim=(2, 3))[:, None]
        hidden = hidden * self.low.float() + self.high.float() * self.scalar + self.empty.sum()
        return torch.tanh(hidden + self.expanded.sum(dim=0) + self.counts.sum() / 120)


def build_odd() -> tuple[Any, Call]:
    pipe, call = tiny.build_toy(3, text_encoder=True, vae=True, two_stage=True)
    pipe.text_encoder = OddEncoder().eval()
    return pipe, call


def test_strides_dtypes_ties_and_buffers_are_kept(device: torch.device, sim: ModuleType) -> None:
    resident, call = build_odd()
    expected = outputs(resident.to(device), call)
    pipe, call = build_odd()
    state, encoder = State.of(pipe), pipe.text_encoder
    geometry = {name: (t.dtype, t.shape, t.stride()) for name, t in
                (*encoder.named_parameters(), *encoder.named_buffers())}  # fmt: skip
    pinned = sim.stats()["pinned_current"]
    handle = enable_omni_offload(pipe, "module")
    assert handle.pinned_bytes == sim.stats()["pinned_current"] - pinned
    at_rest = AtRest(handle)
    for output in expected:
        assert_equal_outputs([tiny.run(pipe, call)], [output], "odd tensors")
        at_rest.check()
        assert {name: seen[:3] for name, seen in encoder.seen.items()} == geometry
        assert {seen[3] for seen in encoder.seen.values()} == {device.type}
    assert encoder.head.weight is encoder.embed.weight
    assert encoder.table.dtype is torch.float32 and "table" not in encoder.state_dict()
    handle.disable()
    after = State.of(pipe)
    replace(state, attributes=after.attributes).assert_same(after)


def tie(pipe: Any, between: str) -> None:
    """One parameter in two places."""
    encoder, first, second = pipe.text_encoder, pipe.transformer, pipe.transformer_2
    if between == "two swapped components":
        first.norm.weight = nn.Parameter(torch.randn(32))
        second.norm.weight = first.norm.weight
    elif between == "an encoder and a DiT":
        encoder.embed.weight = nn.Parameter(torch.randn(16, 8))
        first.proj_out.weight = nn.Parameter(torch.randn(8, 32))
        first.proj_out.bias = nn.Parameter(encoder.embed.weight.data[0])  # another tensor over the same memory
    elif between == "a swapped component and a resident one":
        encoder.layers[0].gate = nn.Parameter(torch.randn(3))
        encoder.layers[0].gate = nn.Parameter(torch.randn(8))
        pipe.vae.decoder.bias = nn.Parameter(encoder.layers[0].gate.data[:3])
    elif between == "a swapped component and a block":
        encoder.layers[1].gate = nn.Parameter(torch.randn(8))
        first.blocks[1].register_parameter("extra", encoder.layers[1].gate)
    elif between == "two tensors of one component":
        first.blocks[0].contract.bias = first.blocks[2].contract.bias


TIES = (
    "two swapped components",
    "an encoder and a DiT",
    "a swapped component and a resident one",
    "a swapped component and a block",
    "two tensors of one component",
)
TIED_CHOICES: tuple[dict[str, str], ...] = (
    {"dit": "module", "text_encoder": "module"},
    {"dit": "module", "text_encoder": "module", "vae": "module"},
    {"dit": "layer", "text_encoder": "module"},
    {"transformer": "layer", "transformer_2": "module", "text_encoder": "module", "vae": "module"},
    {"dit": "module", "text_encoder": "layer"},
)


@pytest.mark.parametrize("between", TIES)
def test_ties(between: str, device: torch.device, sim: ModuleType) -> None:
    def build() -> tuple[Any, Call]:
        torch.manual_seed(90)
        pipe, call = tiny.build_toy(3, two_stage=True, text_encoder=True, vae=True)
        tie(pipe, between)
        return pipe, call

    resident, call = build()
    expected = outputs(resident.to(device), call)
    for choice in TIED_CHOICES:
        what = f"{between}, {choice}"
        pipe, call = build()
        handle = enable_omni_offload(pipe, components=choice)
        before = State.of(pipe)
        assert_equal_outputs(outputs(pipe, call), expected, what)
        assert_no_hazards(sim, what)
        before.assert_same(State.of(pipe))
        # An edit of one of the two is an edit of the other.
        edited = edit_tied(pipe, between)
        twin, _ = build()
        edit_tied(twin, between)
        assert_equal_outputs([tiny.run(pipe, call)], [tiny.run(twin.to(device), call)], f"{what}, edited")
        assert not edited.is_meta
        handle.disable()
        assert_equal_outputs([tiny.run(pipe.to(device), call)], [tiny.run(twin, call)], f"{what}, edited and disabled")


def edit_tied(pipe: Any, between: str) -> torch.Tensor:
    """Change the tied parameter in place, at rest."""
    tensor = {
        "two swapped components": pipe.transformer.norm.weight,
        "an encoder and a DiT": pipe.text_encoder.embed.weight,
        "a swapped component and a resident one": pipe.text_encoder.layers[0].gate,
        "a swapped component and a block": pipe.text_encoder.layers[1].gate,
        "two tensors of one component": pipe.transformer.blocks[2].contract.bias,
    }[between]
    tensor.data.mul_(1.5)
    return tensor


@pytest.mark.parametrize("choice", ["module", "everything", "layer"])
def test_edits_between_calls_count(choice: str, device: torch.device) -> None:
    """In place, replaced, cast and back: the next call shows it as a resident pipeline does."""
    options: dict[str, Any] = {"mode": choice}
    if choice == "everything":
        options = {"components": {"dit": "module", "text_encoder": "module", "vae": "module"}}
    resident, call = build_large_toy()
    resident.to(device)
    pipe, call = build_large_toy()
    handle = enable_omni_offload(pipe, **options)

    def in_place(pipe: Any) -> None:
        pipe.text_encoder.embed.weight.data.mul_(1.5)
        pipe.transformer.proj_in.bias.data.add_(0.25)

    def replaced(pipe: Any) -> None:
        for module in (pipe.text_encoder, pipe.transformer_2, pipe.vae):
            for parameter in module.parameters():
                parameter.data = 0.9 * parameter.data

    def new_parameter(pipe: Any) -> None:
        pipe.transformer.norm.weight = nn.Parameter(1.25 * pipe.transformer.norm.weight.detach())

    def new_module(pipe: Any) -> None:
        linear = nn.Linear(8, 64)
        nn.init.constant_(linear.weight, 0.2)
        nn.init.constant_(linear.bias, 0.1)
        pipe.transformer_2.proj_in = linear.to(pipe.transformer_2.proj_in.weight.device)

    def cast(pipe: Any) -> None:
        pipe.vae.to(torch.bfloat16)
        pipe.text_encoder.to(torch.float64)

    before = tiny.run(resident, call)
    for edit in (in_place, replaced, new_parameter, new_module, cast):
        edit(pipe)
        edit(resident)
        expected = tiny.run(resident, call)
        assert not np.array_equal(expected, before), edit.__name__
        for _ in range(2):
            assert_equal_outputs([tiny.run(pipe, call)], [expected], f"{choice}: {edit.__name__}")
        before = expected
    assert handle.is_enabled()
