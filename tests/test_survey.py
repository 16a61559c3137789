"""What a survey finds is what offload will take, for every family, and nothing is touched."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from diffusers_omni_offload import (
    OffloadConfig,
    OffloadPlan,
    adapter_for,
    load_omni_pipeline,
    resolve_offload_plan,
)
from diffusers_omni_offload.backends.preflight import DeviceNeed, device_need
from diffusers_omni_offload.planning.costs import ComponentCost
from diffusers_omni_offload.planning.survey import survey
from diffusers_omni_offload.streaming.stages import largest_together
from diffusers_omni_offload.weights.leaves import find_leaves
from tests import tiny
from tests.quantized import ONE_A_LIBRARY
from tests.quantized import build as build_quantized
from tests.resolving import Stack, pipeline
from tests.undeclared import DiT, undeclared

ELSEWHERE = torch.device("meta")
"""Where no weight is, so that a plan needs room for all of them."""

BUILDERS = {**tiny.BUILDERS, **tiny.STANDINS, **tiny.VARIANTS}


def surveyed(pipe: Any) -> dict[str, ComponentCost]:
    return {cost.path: cost for cost in survey(pipe, declarations=adapter_for(type(pipe)))}


def need(pipe: Any, choices: dict[str, str], slots: int = 2, **options: Any) -> DeviceNeed:
    config = OffloadConfig.from_options(None, components=choices, slots=slots, **options)
    return device_need(resolve_offload_plan(pipe, config, declarations=adapter_for(type(pipe))), ELSEWHERE, slots)


@pytest.mark.parametrize("name", BUILDERS)
def test_every_family(name: str) -> None:
    pipe, _ = BUILDERS[name]()
    costs = surveyed(pipe)
    everything = {id(leaf.tensor): leaf for path in costs for leaf in find_leaves(_module(pipe, path), path)}
    assert sum(sum(cost.dtypes.values()) for cost in costs.values()) == sum(x.nbytes for x in everything.values())
    for cost in costs.values():
        assert sum(cost.dtypes.values()) <= cost.nbytes <= cost.state_nbytes + sum(b.nbytes for b in cost.blocks)
        assert all(block.nbytes <= block.resident_nbytes for block in cost.blocks)
    streamed = {path: cost for path, cost in costs.items() if cost.blocks}
    assert {cost.role for cost in streamed.values()} <= {"dit", "encoder"} and any(
        cost.may_keep_blocks for cost in streamed.values()
    )
    found = need(pipe, dict.fromkeys(streamed, "layer"), slots=3)
    assert found.slots == 3 * max(block.nbytes for cost in streamed.values() for block in cost.blocks)
    swapped = {path: cost for path, cost in costs.items() if cost.may_swap}
    if swapped:
        found = need(pipe, dict.fromkeys(swapped, "module"))
        on_demand = getattr(adapter_for(type(pipe)), "_offload_plan", OffloadPlan()).on_demand_component_paths
        stages = [(cost.role, cost.nbytes) for path, cost in swapped.items() if path not in on_demand]
        assert found.swapped == largest_together(stages)


@pytest.mark.parametrize("name", [name for name in BUILDERS if not name.startswith("minimax_h3")])
def test_what_stays_is_the_state(name: str) -> None:
    """With everything streamed that can be, the device holds the state, and the slots."""
    pipe, _ = BUILDERS[name]()
    costs = surveyed(pipe)
    found = need(pipe, {path: "layer" for path, cost in costs.items() if cost.blocks})
    state = sum(cost.state_nbytes for cost in costs.values())
    leaves = sum(len(find_leaves(_module(pipe, path), path)) for path in costs)
    assert found.residents == 0 and state - 512 * leaves < found.state <= state


def test_residents_are_blocks_that_stay() -> None:
    pipe, _ = tiny.build_wan()
    cost = surveyed(pipe)["transformer"]
    found = need(pipe, {"transformer": "layer"}, layer_options={"transformer": {"resident_layers": 2}})
    resident = [module for index in (1, 3) for module in pipe.transformer.blocks[index].parameters()]
    assert sum(-(-weight.nbytes // 512) * 512 for weight in resident) == sum(
        cost.blocks[index].resident_nbytes for index in (1, 3)
    )
    assert found.residents == sum(weight.nbytes for weight in resident)


def test_nothing_is_touched() -> None:
    pipe, _ = tiny.build_sd3()
    modules = {path: _module(pipe, path) for path in surveyed(pipe)}
    before = {path: (dict(vars(module)), list(map(id, module.parameters()))) for path, module in modules.items()}
    survey(pipe, declarations=adapter_for(type(pipe)))
    assert {
        path: (dict(vars(module)), list(map(id, module.parameters()))) for path, module in modules.items()
    } == before


@pytest.mark.parametrize("name", ["wan", "flux2", "qwen_image", "bagel"])
def test_meta_tensors_have_the_same_sizes(name: str) -> None:
    pipe, _ = BUILDERS[name]()
    before = surveyed(pipe)
    seen: dict[int, nn.Parameter] = {}
    for path in before:
        for module in _module(pipe, path).modules():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    made = seen.setdefault(id(parameter), nn.Parameter(parameter.to("meta"), requires_grad=False))
                    seen[id(made)] = module._parameters[key] = made
            for key, buffer in module._buffers.items():
                module._buffers[key] = None if buffer is None else buffer.to("meta")
    assert surveyed(pipe) == before


def test_leaves_that_several_blocks_hold_count_once_and_stay() -> None:
    dit = Stack(blocks=3)
    before = surveyed(pipeline({"transformer": dit}, block_attrs={"transformer": ("blocks",)}))["transformer"]
    assert [block.nbytes for block in before.blocks] == [512] * 3 and before.state_nbytes == 2 * 512
    dit.blocks[0].weight = dit.blocks[2].weight
    dit.blocks[1].bias = dit.embed.bias
    after = surveyed(pipeline({"transformer": dit}, block_attrs={"transformer": ("blocks",)}))["transformer"]
    assert [block.nbytes for block in after.blocks] == [256, 256, 256] and after.state_nbytes == 3 * 512
    assert after.parameters == before.parameters - 4 - 2


def test_different_tensors_over_the_same_bytes_count_once() -> None:
    dit = Stack(blocks=2)
    dit.blocks[0].weight = nn.Parameter(dit.blocks[1].weight.data)
    cost = surveyed(pipeline({"transformer": dit}, block_attrs={"transformer": ("blocks",)}))["transformer"]
    assert [block.nbytes for block in cost.blocks] == [256, 256] and cost.state_nbytes == 3 * 512


def test_a_pipeline_that_declares_nothing() -> None:
    pipe = undeclared(
        transformer=DiT(blocks=3), text_encoder=DiT(layers=2), controlnet=DiT(blocks=2), vae=nn.Linear(4, 4)
    )
    costs = surveyed(pipe)
    assert [(cost.selector, len(cost.blocks), cost.may_keep_blocks) for cost in costs.values()] == [
        ("dit", 3, True),
        ("text_encoder", 2, False),
        ("vae", 0, False),
        ("controlnet", 2, False),
    ]


def test_what_cannot_be_streamed_or_swapped() -> None:
    pipe = undeclared(transformer=DiT(blocks=3), transformer_2=DiT(blocks=1), connector=nn.Identity())
    costs = surveyed(pipe)
    assert not costs["transformer_2"].blocks and costs["transformer_2"].may_swap
    assert not costs["connector"].may_swap and costs["connector"].nbytes == 0


def test_a_component_inside_another_counts_once_and_holds_it_back() -> None:
    inner, outer = Stack(layers=2), Stack(blocks=2)
    outer.language_model = inner
    pipe = pipeline(
        {"transformer": outer},
        dit=("transformer.language_model", "transformer"),
        block_attrs={"transformer.language_model": ("layers",), "transformer": ("blocks",)},
    )
    costs = surveyed(pipe)
    assert {path: (cost.nbytes, cost.parameters, cost.may_swap) for path, cost in costs.items()} == {
        "transformer.language_model": (3 * 512, 18, True),
        "transformer": (3 * 512, 18, False),
    }


@pytest.mark.parametrize("kind", ONE_A_LIBRARY.values())
def test_quantized_weights_count_by_their_own_bytes(kind: str) -> None:
    pipe, _ = build_quantized(kind)
    cost = surveyed(pipe)["transformer"]
    blocks = pipe.transformer.transformer_blocks
    own = [sum(leaf.nbytes for leaf in find_leaves(block, "")) for block in blocks]
    assert [block.nbytes for block in cost.blocks] == [need_of(block) for block in blocks]
    assert all(nbytes <= block.nbytes for nbytes, block in zip(own, cost.blocks, strict=True))
    whole = sum(leaf.nbytes for leaf in find_leaves(pipe.transformer, ""))
    assert sum(cost.dtypes.values()) == whole and {"int8", "uint8", "float8_e4m3fn"} & set(cost.dtypes)


def need_of(block: nn.Module) -> int:
    return sum(-(-leaf.nbytes // 256) * 256 for leaf in find_leaves(block, ""))


def test_weights_that_stay_in_their_files_have_their_sizes(tmp_path: Path) -> None:
    loaded = tiny.reload(tiny.build_wan()[0], tmp_path, torch.bfloat16)
    in_files = load_omni_pipeline(type(loaded), tmp_path, torch_dtype=torch.bfloat16)
    assert surveyed(in_files) == surveyed(loaded)


def test_dtypes_and_quantized_parts() -> None:
    dit = Stack(blocks=2).to(torch.bfloat16)
    dit.blocks[0].scale = nn.Buffer(torch.ones(3, dtype=torch.int8))
    cost = surveyed(pipeline({"transformer": dit}, block_attrs={"transformer": ("blocks",)}))["transformer"]
    assert cost.dtypes == {"bfloat16": 3 * 6 * 2, "int8": 3}
    copied = copy.deepcopy(cost)
    assert copied == cost


def _module(pipe: Any, path: str) -> nn.Module:
    current = pipe
    for step in path.split("."):
        current = getattr(current, step)
    return current
