"""A block has one owner; DiTs and submodules within a DiT; components that load themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from diffusers_omni_offload.topology import resolver
from diffusers_omni_offload.topology.resolver import resolve_offload_plan
from tests.resolving import BLOCKS, LAYERS, Pipeline, Stack, layer, legacy, paths, pipeline, refuses, strict_warnings  # noqa: F401


def nested_dits() -> Pipeline:
    dit = Stack(gen_layers=2)
    dit.language_model = Stack(layers=3)
    return pipeline(
        {"transformer": dit},
        dit=["transformer.language_model", "transformer"],
        block_attrs={"transformer.language_model": ("layers",), "transformer": ("gen_layers",)},
    )


def test_a_dit_within_a_dit_has_a_stack_of_its_own() -> None:
    plan = resolve_offload_plan(nested_dits(), layer())
    assert paths(plan) == {
        "transformer.language_model": ("layers.0", "layers.1", "layers.2"),
        "transformer": ("gen_layers.0", "gen_layers.1"),
    }


def test_one_module_under_four_names() -> None:
    model = Stack(layers=2)
    language_model = nn.Module()
    language_model.model = model
    holder = nn.Module()
    holder.language_model, holder.embedder = language_model, nn.Linear(2, 2)
    subject = pipeline(
        {"language_model": language_model, "transformer": model, "bagel": holder},
        dit=["language_model.model"],
        resident=["bagel.embedder"],
        block_attrs={"language_model.model": LAYERS},
    )
    plan = resolve_offload_plan(subject, layer())
    assert [(c.path, c.role) for c in plan.components] == [
        ("language_model.model", "dit"),
        ("bagel.embedder", "resident"),
        ("language_model", "resident"),
        ("bagel", "resident"),
    ]
    assert list(paths(plan)) == ["language_model.model"]


def test_second_name_for_a_part_of_the_dit_is_fine() -> None:
    dit = Stack(blocks=3)
    subject = pipeline({"transformer": dit, "all_blocks": dit.blocks, "first": dit.blocks[0]}, block_attrs=BLOCKS)
    assert len(resolve_offload_plan(subject, layer()).stacks[0].blocks) == 3


def test_block_in_two_stacks() -> None:
    subject = nested_dits()
    subject.transformer.gen_layers[1] = subject.transformer.language_model.layers[0]
    for config in (layer(), legacy()):
        refuses(["transformer.language_model.layers.0", "transformer", "one stack only"], subject, config)


def test_block_within_a_block() -> None:
    subject = nested_dits()
    subject.transformer.gen_layers[1].inner = subject.transformer.language_model.layers[0]
    refuses(["'transformer.language_model.layers.0' lies inside", "transformer.gen_layers.1"], subject, layer())


@pytest.mark.parametrize("role", ["encoder", "vae", "resident", "undeclared"])
def test_block_shared_with_another_component(role: str) -> None:
    dit, other = Stack(blocks=3), Stack(blocks=1)
    other.blocks[0] = dit.blocks[1]
    lists = {} if role == "undeclared" else {role: ["other"]}
    subject = pipeline({"transformer": dit, "other": other}, block_attrs=BLOCKS, **lists)
    shown = "resident" if role == "undeclared" else role
    refuses(["'transformer.blocks.1'", f"'other' ({shown})"], subject, layer())


def test_component_declared_within_a_streamed_block() -> None:
    dit = Stack(blocks=3)
    dit.blocks[1].norm = nn.Linear(2, 2)
    subject = pipeline({"transformer": dit}, resident=["transformer.blocks.1.norm"], block_attrs=BLOCKS)
    refuses(["'transformer.blocks.1.norm'", "'transformer.blocks.1'"], subject, layer())


def test_submodule_shared_by_blocks_is_a_tie_and_not_an_error() -> None:
    dit = Stack(blocks=3)
    dit.blocks[0].norm = dit.blocks[2].norm = nn.Linear(2, 2)
    assert len(resolve_offload_plan(pipeline({"transformer": dit}, block_attrs=BLOCKS), layer()).stacks[0].blocks) == 3


class SelfLoading(nn.Linear):
    def load_to_device(self) -> None: ...

    def offload_to_cpu(self) -> None: ...


def test_declared_submodule_has_a_stack_of_its_own() -> None:
    dit = Stack(blocks=2)
    dit.refiner = Stack(layers=3)
    subject = pipeline({"transformer": dit}, block_attrs=BLOCKS, offload_submodules={"refiner": "layers"})
    for config in (layer(), legacy(), legacy(distributed=True)):
        plan = resolve_offload_plan(subject, config)
        assert paths(plan)["transformer.refiner"] == ("layers.0", "layers.1", "layers.2")
        assert plan.component("transformer.refiner").module is dit.refiner
    wrong = pipeline({"transformer": dit}, block_attrs=BLOCKS, offload_submodules={"refinery": "layers"})
    refuses(["'refinery'", "offload_submodules"], wrong, layer())


def test_submodule_that_is_a_component_already_keeps_its_name_and_its_stack() -> None:
    dit = Stack(blocks=2)
    dit.refiner = Stack(layers=3)
    declared: dict[str, Any] = {"block_attrs": BLOCKS, "offload_submodules": {"refiner": "layers"}}
    named = pipeline({"transformer": dit, "refiner": dit.refiner}, resident=["refiner"], **declared)
    assert list(paths(resolve_offload_plan(named, layer()))) == ["transformer", "refiner"]
    both = {"transformer": ("blocks",), "transformer.refiner": ("layers",)}
    declared["block_attrs"] = both
    nested = resolve_offload_plan(pipeline({"transformer": dit}, dit=list(both), **declared), layer())
    assert [stack.component for stack in nested.stacks] == list(both)


def large(monkeypatch: pytest.MonkeyPatch, child: nn.Module, **lists: Any) -> Pipeline:
    monkeypatch.setattr(resolver, "LARGE_SUBMODULE_BYTES", 40)  # more than the embedding beside the blocks
    dit = Stack(blocks=4)
    dit.child = child
    return pipeline({"transformer": dit}, block_attrs=BLOCKS, resident_dit_paths=["transformer"], **lists)


def test_large_undeclared_submodule_is_streamed_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = large(monkeypatch, Stack(layers=2))
    assert "transformer.child" not in paths(resolve_offload_plan(subject, layer()))
    with pytest.warns(UserWarning, match="'transformer.child' .* isn't declared"):
        plan = resolve_offload_plan(subject, layer(residents=2))
    assert paths(plan)["transformer.child"] == ("layers.0", "layers.1")
    resolve_offload_plan(subject, legacy(distributed=True))  # warned once for the class


def test_large_undeclared_submodule_without_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for config in (layer(residents=2), legacy(distributed=True)):
        refuses(["'transformer.child' (a Linear)", "load_to_device"], large(monkeypatch, nn.Linear(4, 4)), config)
    loading = resolve_offload_plan(large(monkeypatch, SelfLoading(4, 4)), layer(residents=2))
    assert loading.on_demand == ("transformer.child",)
    declared = large(monkeypatch, nn.Linear(4, 4), resident=["transformer.child"])
    assert resolve_offload_plan(declared, layer(residents=2)).on_demand == ()


def test_size_of_a_large_submodule_comes_from_shapes() -> None:
    dit = Stack(blocks=4)
    dit.child = nn.Linear(1 << 15, 1 << 14, bias=False, device="meta", dtype=torch.bfloat16)
    subject = pipeline({"transformer": dit}, block_attrs=BLOCKS)
    resolve_offload_plan(subject, legacy(distributed=True))  # exactly 1 GiB
    dit.child = nn.Linear(1 << 15, (1 << 14) + 1, bias=False, device="meta", dtype=torch.bfloat16)
    refuses(["'transformer.child'", "1.0 GiB"], subject, legacy(distributed=True))


def test_components_that_load_themselves() -> None:
    components = {"transformer": Stack(blocks=2), "vae": SelfLoading(2, 2), "audio_vae": None}
    declared: dict[str, Any] = {"vae": ["vae", "audio_vae"], "block_attrs": BLOCKS}
    subject = pipeline(components, on_demand_component_paths=["vae", "audio_vae"], **declared)
    plan = resolve_offload_plan(subject, layer())
    assert plan.on_demand == ("vae",)
    assert "loads itself on demand" in str(plan)
    components["vae"] = nn.Linear(2, 2)
    plain = pipeline(components, on_demand_component_paths=["vae", "audio_vae"], **declared)
    for config in (layer(), legacy()):
        refuses(["'vae' (a Linear)", "load_to_device", "offload_to_cpu"], plain, config)
    missing = pipeline(components, on_demand_component_paths=["vocoder"], **declared)
    refuses(["'vocoder'", "on_demand_component_paths"], missing, layer())
