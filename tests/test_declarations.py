"""What a model says of itself: the protocols and the offload plan."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError
from typing import ClassVar

import pytest
from torch import nn

from diffusers_omni_offload.declarations import (
    OFFLOAD_PLAN_ATTRIBUTE,
    FrozenMapping,
    OffloadPlan,
    Stored,
    SupportsComponentDiscovery,
    SupportsModelCpuOffload,
)


class Declared:
    _dit_modules: ClassVar[list[str]] = ["transformer"]
    _encoder_modules: ClassVar[list[str]] = ["text_encoder"]
    _vae_modules: ClassVar[list[str]] = ["vae"]
    _resident_modules: ClassVar[list[str]] = []


def test_discovery_protocol_is_met_by_attributes_alone() -> None:
    assert isinstance(Declared(), SupportsComponentDiscovery)
    assert not isinstance(nn.Linear(1, 1), SupportsComponentDiscovery)


@pytest.mark.parametrize("protocol_first", [False, True])
def test_discovery_protocol_is_a_mixin_that_keeps_init(protocol_first: bool) -> None:
    bases = (SupportsComponentDiscovery, nn.Module) if protocol_first else (nn.Module, SupportsComponentDiscovery)

    def __init__(self, width: int) -> None:
        super(pipeline_class, self).__init__()
        self.transformer = nn.Linear(width, width)

    lists = {"_dit_modules": ["transformer"], "_encoder_modules": [], "_vae_modules": []}
    pipeline_class = type(SupportsComponentDiscovery)("MyPipeline", bases, {"__init__": __init__, **lists})
    pipeline = pipeline_class(3)
    assert [name for name, _ in pipeline.named_parameters()] == ["transformer.weight", "transformer.bias"]
    assert isinstance(pipeline, SupportsComponentDiscovery)
    assert pipeline._resident_modules == []


def test_mixin_without_init_of_its_own_still_runs_the_pipelines() -> None:
    class Pipeline:
        def __init__(self, name: str) -> None:
            self.name = name

    class Mine(SupportsComponentDiscovery, Pipeline):
        _dit_modules: ClassVar[list[str]] = []
        _encoder_modules: ClassVar[list[str]] = []
        _vae_modules: ClassVar[list[str]] = []

    assert Mine("a").name == "a"


def test_model_cpu_offload_protocol() -> None:
    class Phased:
        def enable_omni_model_cpu_offload(self, **kwargs: object) -> None: ...

        def disable_omni_model_cpu_offload(self) -> None: ...

    assert isinstance(Phased(), SupportsModelCpuOffload)
    assert not isinstance(Declared(), SupportsModelCpuOffload)


def test_plan_attribute_name() -> None:
    assert OFFLOAD_PLAN_ATTRIBUTE == "_offload_plan"


def full_plan() -> OffloadPlan:
    return OffloadPlan(
        block_attrs={"transformer": ["blocks", "tail.layers"]},
        encoder_block_attrs={"text_encoder": ("encoder.block",)},
        on_demand_component_paths=frozenset({"vae"}),
        resident_dit_paths=["transformer"],
        encoder_dlo_weight_replication={"text_encoder": True, "text_encoder_2": False},
        offload_submodules={"context_encoder": "layers"},
        encoder_component_types={"text_encoder": "text_encoder"},
        checkpoint_layouts={"transformer": {"blocks.*.to_q.weight": Stored("blocks.*.qkv.weight", sizes=[1, 1, 1])}},
        post_load={"transformer": "tie_tables"},
    )


def test_plan_turns_sequences_into_tuples() -> None:
    plan = full_plan()
    assert plan.block_attrs["transformer"] == ("blocks", "tail.layers")
    assert plan.on_demand_component_paths == ("vae",)
    assert plan.resident_dit_paths == ("transformer",)
    assert plan.encoder_dlo_weight_replication == ("text_encoder",)
    assert plan.offload_submodules["context_encoder"] == "layers"


def test_plan_is_immutable_and_keeps_no_tie_to_the_callers_dict() -> None:
    mine = {"transformer": ["blocks"]}
    plan = OffloadPlan(block_attrs=mine)
    mine["transformer"].append("more")
    mine["other"] = ["x"]
    assert dict(plan.block_attrs) == {"transformer": ("blocks",)}
    with pytest.raises(TypeError):
        plan.block_attrs["transformer"] = ()  # type: ignore[index]
    with pytest.raises(FrozenInstanceError):
        plan.block_attrs = {}  # type: ignore[misc]
    with pytest.raises(AttributeError, match="read-only"):
        plan.block_attrs._items = {}  # type: ignore[attr-defined]


def test_plan_survives_pickle_and_compares_by_value() -> None:
    plan = full_plan()
    copy = pickle.loads(pickle.dumps(plan))
    assert copy == plan
    assert copy != OffloadPlan()
    assert hash(copy.block_attrs) == hash(plan.block_attrs)
    assert isinstance(copy.block_attrs, FrozenMapping)


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"block_attrs": {"transformer": "blocks"}}, TypeError, ["block_attrs['transformer']", "write ['blocks']"]),
        ({"resident_dit_paths": "transformer"}, TypeError, ["resident_dit_paths", "write ['transformer']"]),
        ({"on_demand_component_paths": "vae"}, TypeError, ["on_demand_component_paths"]),
        ({"encoder_dlo_weight_replication": "text_encoder"}, TypeError, ["encoder_dlo_weight_replication"]),
        ({"block_attrs": ["transformer"]}, TypeError, ["block_attrs", "mapping"]),
        ({"block_attrs": {"transformer": 3}}, TypeError, ["block_attrs['transformer']", "int"]),
        ({"block_attrs": {"transformer": [3]}}, TypeError, ["3", "string"]),
        ({"block_attrs": {3: ["blocks"]}}, TypeError, ["3", "string"]),
        ({"block_attrs": {"transformer": []}}, ValueError, ["block_attrs['transformer']", "empty"]),
        ({"block_attrs": {"transformer": ["blocks..x"]}}, ValueError, ["'blocks..x'", "joined by dots"]),
        ({"block_attrs": {"": ["blocks"]}}, ValueError, ["''"]),
        ({"offload_submodules": {"refiner": ["blocks"]}}, TypeError, ["offload_submodules['refiner']", "list"]),
        ({"encoder_component_types": {"t": "audio"}}, ValueError, ["'audio'", "text_encoder, image_encoder"]),
        ({"post_load": {"transformer": ["tie"]}}, TypeError, ["post_load['transformer']", "list", "a method"]),
        ({"post_load": {"transformer": "a..b"}}, ValueError, ["'a..b'", "joined by dots"]),
        ({"post_load": "transformer"}, TypeError, ["post_load", "mapping"]),
        ({"checkpoint_layouts": {"transformer": Stored("a")}}, TypeError, ["['transformer']", "Stored", "mapping"]),
        ({"checkpoint_layouts": {"transformer": {"a": "b"}}}, TypeError, ["['transformer']['a']", "str", "Stored"]),
        ({"checkpoint_layouts": {"transformer": {"a..b": Stored("a")}}}, ValueError, ["'a..b'"]),
        ({"checkpoint_layouts": {"t": {"*.a": Stored("b")}}}, ValueError, ["'*.a'", "'b'", "1 and 0"]),
        ({"checkpoint_layouts": {"t": {"a": Stored("b.*")}}}, ValueError, ["'a'", "'b.*'", "0 and 1"]),
    ],
)
def test_plan_refuses_wrong_shapes(fields: dict, error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        OffloadPlan(**fields)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_plan_freezes_the_layouts_of_the_checkpoint() -> None:
    plan = full_plan()
    assert plan.checkpoint_layouts["transformer"]["blocks.*.to_q.weight"].sizes == (1, 1, 1)
    assert hash(plan.checkpoint_layouts) == hash(pickle.loads(pickle.dumps(plan)).checkpoint_layouts)
    with pytest.raises(TypeError):
        plan.checkpoint_layouts["transformer"]["a"] = Stored("b")  # type: ignore[index]


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"key": 3}, TypeError, ["Stored.key", "3"]),
        ({"key": ""}, ValueError, ["Stored.key", "''"]),
        ({"groups": 0}, ValueError, ["Stored.groups is 0"]),
        ({"groups": True}, TypeError, ["Stored.groups", "bool"]),
        ({"sizes": 3}, TypeError, ["Stored.sizes", "an int", "sequence"]),
        ({"sizes": "12"}, TypeError, ["Stored.sizes", "a str"]),
        ({"sizes": ()}, ValueError, ["Stored.sizes is ()"]),
        ({"sizes": (1, 0)}, ValueError, ["(1, 0)", "at least 1"]),
        ({"sizes": (1.5,)}, TypeError, ["1.5", "whole numbers"]),
        ({"parts": ()}, ValueError, ["Stored.parts is ()"]),
        ({"parts": (1,)}, ValueError, ["Stored.parts is (1,)", "0 to 0"]),
        ({"sizes": (1, 1), "parts": (0, 0)}, ValueError, ["(0, 0)", "twice"]),
        ({"sizes": (1, 1), "parts": (-1,)}, ValueError, ["(-1,)", "0 to 1"]),
        ({"cast": 1}, TypeError, ["Stored.cast", "1"]),
    ],
)
def test_stored_refuses_what_makes_no_sense(fields: dict, error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        Stored(**{"key": "a", **fields})
    assert all(word in str(caught.value) for word in words), str(caught.value)
