"""Which modules the resolver finds, and what part each plays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn

from diffusers_omni_offload.declarations import OffloadPlan
from diffusers_omni_offload.topology.resolver import resolve_offload_plan
from tests.resolving import (  # noqa: F401
    BLOCKS,
    Pipeline,
    Stack,
    layer,
    legacy,
    paths,
    pipeline,
    refuses,
    strict_warnings,
    with_role,
)


def test_each_module_is_listed_once_with_its_role() -> None:
    dit, encoder, vae, controlnet = Stack(blocks=3), Stack(), Stack(), Stack()
    subject = pipeline(
        {"transformer": dit, "text_encoder": encoder, "vae": vae, "controlnet": controlnet, "alias": dit, "name": "x"},
        encoder=["text_encoder"],
        vae=["vae"],
        block_attrs=BLOCKS,
    )
    plan = resolve_offload_plan(subject, layer())
    assert [(c.path, c.role) for c in plan.components] == [
        ("transformer", "dit"),
        ("text_encoder", "encoder"),
        ("vae", "vae"),
        ("controlnet", "resident"),
    ]
    assert [c.module for c in plan.components] == [dit, encoder, vae, controlnet]
    assert plan.component("vae").module is vae
    assert with_role(plan, "resident") == ["controlnet"]
    with pytest.raises(KeyError, match="controlnet"):
        plan.component("missing")


def test_components_in_lists_dicts_and_nested_pipelines() -> None:
    inner = pipeline({"transformer": Stack(blocks=2), "vae": Stack()}, block_attrs=BLOCKS)
    outer = Pipeline(
        {"pipe": inner, "nets": [Stack(), Stack()], "by_name": {"a": Stack()}},
        dit_modules=["pipe.transformer"],
        offload_plan=OffloadPlan(block_attrs={"pipe.transformer": ("blocks",)}),
    )
    plan = resolve_offload_plan(outer, layer())
    assert [c.path for c in plan.components] == ["pipe.transformer", "pipe.vae", "nets.0", "nets.1", "by_name.a"]
    assert paths(plan) == {"pipe.transformer": ("blocks.0", "blocks.1")}


def test_declared_paths_lead_through_plain_objects() -> None:
    holder = SimpleNamespace(dit=Stack(blocks=2), connector=Stack())
    subject = pipeline({"engine": holder}, dit=["engine.dit"], block_attrs={"engine.dit": ("blocks",)})
    plan = resolve_offload_plan(subject, layer())
    assert [(c.path, c.role) for c in plan.components] == [("engine.dit", "dit"), ("engine.connector", "resident")]


def test_a_module_as_the_pipeline_counts_its_own_tensors() -> None:
    class ModulePipeline(nn.Module):
        _dit_modules: ClassVar[list[str]] = ["transformer"]
        _offload_plan = OffloadPlan(block_attrs=BLOCKS)

        def __init__(self) -> None:
            super().__init__()
            self.transformer = Stack(blocks=2)
            self.projector = nn.Linear(2, 2)
            self.scale = nn.Parameter(torch.ones(1))

    subject = ModulePipeline()
    plan = resolve_offload_plan(subject, layer())
    assert [(c.path, c.role) for c in plan.components] == [
        ("transformer", "dit"),
        ("projector", "resident"),
        ("", "resident"),
    ]
    assert plan.component("").module is subject
    assert "(pipeline)" in str(plan)


def test_declarations_of_an_adapter_serve_a_pipeline_without_its_own() -> None:
    class Adapter:
        _dit_modules: ClassVar[list[str]] = ["transformer"]
        _encoder_modules: ClassVar[list[str]] = ["text_encoder"]
        _vae_modules: ClassVar[list[str]] = ["vae"]
        _offload_plan = OffloadPlan(block_attrs=BLOCKS)

    bare = Pipeline({"transformer": Stack(blocks=2, layers=3), "text_encoder": None})
    assert paths(resolve_offload_plan(bare, layer(), declarations=Adapter)) == {"transformer": ("blocks.0", "blocks.1")}
    own = pipeline(vars(bare), block_attrs={"transformer": ("layers",)})
    assert len(resolve_offload_plan(own, layer(), declarations=Adapter).stacks[0].blocks) == 3


def test_scan_of_well_known_names_warns_once_a_class() -> None:
    class Undeclared(Pipeline):
        pass

    dit = Stack(blocks=2)
    dit._layerwise_offload_blocks_attrs = ["blocks"]
    subject = Undeclared({"transformer": dit, "sr_dit": Stack(), "text_encoder_3": Stack(), "audio_vae": Stack()})
    with pytest.warns(UserWarning, match="Undeclared declares no components"):
        plan = resolve_offload_plan(subject, layer())
    assert {c.path: c.role for c in plan.components} == {
        "transformer": "dit",
        "sr_dit": "dit",
        "text_encoder_3": "encoder",
        "audio_vae": "vae",
    }
    assert paths(plan) == {"transformer": ("blocks.0", "blocks.1")}
    assert any("'sr_dit' declares no blocks" in note for note in plan.notes)
    resolve_offload_plan(subject, layer())  # no second warning: it would be an error here


def test_plan_without_component_lists_names_the_components() -> None:
    class PlanOnly(Pipeline):
        _offload_plan = OffloadPlan(block_attrs={"denoiser": ("blocks",)}, encoder_block_attrs={"reader": ("blocks",)})

    subject = PlanOnly({"denoiser": Stack(blocks=2), "reader": Stack(blocks=3), "transformer": Stack()})
    with pytest.warns(UserWarning, match="declares no components"):
        plan = resolve_offload_plan(subject, layer("dit", "text_encoder"))
    assert {path: len(found) for path, found in paths(plan).items()} == {"denoiser": 2, "reader": 3}


@pytest.mark.parametrize("missing", ["text_encoder", "vae"])
def test_missing_component_that_isnt_selected_is_warned_about(missing: str) -> None:
    subject = pipeline({"transformer": Stack(blocks=2)}, encoder=["text_encoder"], vae=["vae"], block_attrs=BLOCKS)
    setattr(subject, {"text_encoder": "vae", "vae": "text_encoder"}[missing], None)
    with pytest.warns(UserWarning, match=f"declares '{missing}'.*has no '{missing}'"):
        plan = resolve_offload_plan(subject, layer())
    assert len(plan.stacks) == 1


def test_selected_component_that_is_missing() -> None:
    subject = pipeline({"transformer": Stack(blocks=2)}, dit=["transformer", "pipe.dit"], block_attrs=BLOCKS)
    refuses(["'pipe.dit'", "has no 'pipe'"], subject, layer())
    with pytest.warns(UserWarning, match="pipe.dit"):
        assert paths(resolve_offload_plan(subject, legacy())) == {"transformer": ("blocks.0", "blocks.1")}


def test_component_that_isnt_a_module() -> None:
    subject = pipeline(
        {"transformer": Stack(blocks=2), "other": "text"}, dit=["transformer", "other"], block_attrs=BLOCKS
    )
    refuses(["'other'", "str", "nn.Module"], subject, layer())


def test_declared_lists_must_be_lists_and_the_plan_a_plan() -> None:
    refuses(["_dit_modules", "write ['transformer']"], pipeline({}, dit="transformer"), layer(), TypeError)
    broken = Pipeline({"transformer": Stack()}, dit_modules=["transformer"], offload_plan={"transformer": ["blocks"]})
    refuses(["_offload_plan", "dict"], broken, layer(), TypeError)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"block_attrs": {"dit": ["blocks"]}}, ["'dit'", "block_attrs", "_dit_modules"]),
        ({"resident_dit_paths": ["dit"]}, ["'dit'", "resident_dit_paths"]),
        ({"encoder_block_attrs": {"clip": ["blocks"]}}, ["'clip'", "encoder_block_attrs", "_encoder_modules"]),
        ({"encoder_dlo_weight_replication": ["clip"]}, ["'clip'", "encoder_dlo_weight_replication"]),
    ],
)
def test_plan_paths_that_no_list_has(plan: dict, words: list[str]) -> None:
    subject = pipeline({"transformer": Stack(blocks=2)}, **{"block_attrs": BLOCKS, **plan})
    refuses(words, subject, layer())
