"""The resolver on toy pipelines: components, stacks, residents, ownership, and what is an error or a warning."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from diffusers_omni_offload.config import LayerOptions, OffloadConfig, OffloadStrategy, WeightTransfer
from diffusers_omni_offload.declarations import OffloadPlan
from diffusers_omni_offload.topology import findings, resolver
from diffusers_omni_offload.topology.plan import BlockStack, ResolvedPlan, format_bytes
from diffusers_omni_offload.topology.residents import resident_indices
from diffusers_omni_offload.topology.resolver import resolve_offload_plan


@pytest.fixture(autouse=True)
def _forget_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "_warned", set())


@pytest.fixture(autouse=True)
def _unexpected_warnings_fail() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def blocks(count: int, width: int = 2) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(width, width) for _ in range(count))


class Stack(nn.Module):
    """Lists of blocks by name, and an embedding beside them."""

    def __init__(self, **counts: int) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 2)
        for name, count in counts.items():
            setattr(self, name, blocks(count))


class Pipeline:
    """A plain object with attributes; declarations are given as keyword arguments."""

    def __init__(self, components: dict[str, Any], **declared: Any) -> None:
        for name, value in {**components, **{f"_{key}": value for key, value in declared.items()}}.items():
            setattr(self, name, value)


def pipeline(
    components: dict[str, Any],
    dit: Any = ("transformer",),
    encoder: Any = (),
    vae: Any = (),
    resident: Any = (),
    **plan: Any,
) -> Pipeline:
    return Pipeline(
        components,
        dit_modules=dit,
        encoder_modules=encoder,
        vae_modules=vae,
        resident_modules=resident,
        offload_plan=OffloadPlan(**plan),
    )


def layer(*components: str, residents: int = 0, **options: Any) -> OffloadConfig:
    layer_options = {"dit": {"resident_layers": residents}} if residents else None
    return OffloadConfig.from_options("layer", components=components or None, layer_options=layer_options, **options)


def legacy(distributed: bool = False, residents: int = 0) -> OffloadConfig:
    return OffloadConfig.from_od_config(
        {
            "enable_layerwise_offload": not distributed,
            "enable_distributed_layerwise_offload": distributed,
            "dlo_use_allgather": False,
            "dlo_resident_layers": residents,
        }
    )


def refuses(words: list[str], subject: Any, config: OffloadConfig, error: type[Exception] = ValueError) -> None:
    with pytest.raises(error) as caught:
        resolve_offload_plan(subject, config)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def paths(plan: ResolvedPlan) -> dict[str, tuple[str, ...]]:
    return {stack.component: stack.block_paths for stack in plan.stacks}


BLOCKS = {"transformer": ("blocks",)}


# Components


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
    assert [c.path for c in plan.with_role("resident")] == ["controlnet"]
    with pytest.raises(KeyError, match="controlnet"):
        plan.component("missing")


def test_components_in_lists_dicts_and_nested_pipelines() -> None:
    inner = pipeline({"transformer": Stack(blocks=2), "vae": Stack()}, block_attrs=BLOCKS)
    outer = Pipeline(
        {"pipe": inner, "nets": [Stack(), Stack()], "by_name": {"a": Stack()}},
        dit_modules=["pipe.transformer"],
        offload_plan=OffloadPlan(block_attrs={"pipe.transformer": ("blocks",)}),
    )
    # Classes, not instances, tell a pipeline from other objects.
    Nested = type("Nested", (Pipeline,), {"_dit_modules": ["transformer"]})
    inner.__class__ = Nested
    plan = resolve_offload_plan(outer, layer())
    assert [c.path for c in plan.components] == ["pipe.transformer", "pipe.vae", "nets.0", "nets.1", "by_name.a"]
    assert paths(plan) == {"pipe.transformer": ("blocks.0", "blocks.1")}


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


# Blocks


def test_containers_concatenate_in_declared_order() -> None:
    subject = pipeline(
        {"transformer": Stack(blocks=2, vace_blocks=1)}, block_attrs={"transformer": ("vace_blocks", "blocks")}
    )
    stack = resolve_offload_plan(subject, layer()).stacks[0]
    assert stack.block_paths == ("vace_blocks.0", "blocks.0", "blocks.1")
    assert stack.kind == "dit" and stack.resident == () and stack.streamed == (0, 1, 2)
    assert all(
        found is subject.transformer.get_submodule(path)
        for found, path in zip(stack.blocks, stack.block_paths, strict=True)
    )


def test_plan_comes_before_the_class_attribute() -> None:
    dit = Stack(blocks=2, layers=3)
    dit._layerwise_offload_blocks_attrs = ["layers"]
    assert len(resolve_offload_plan(pipeline({"transformer": dit}), layer()).stacks[0].blocks) == 3
    planned = pipeline({"transformer": dit}, block_attrs=BLOCKS)
    assert len(resolve_offload_plan(planned, layer()).stacks[0].blocks) == 2


def test_deprecated_attribute_still_works_and_warns_once() -> None:
    class Old(Stack):
        _layerwise_offload_blocks_attr = "blocks"

    subject = pipeline({"transformer": Old(blocks=2)})
    with pytest.warns(UserWarning, match=r"_layerwise_offload_blocks_attrs = \['blocks'\]"):
        assert len(resolve_offload_plan(subject, layer()).stacks[0].blocks) == 2
    resolve_offload_plan(subject, layer())


def test_class_attribute_must_be_a_list() -> None:
    dit = Stack(blocks=2)
    dit._layerwise_offload_blocks_attrs = "blocks"
    refuses(["_layerwise_offload_blocks_attrs", "write ['blocks']"], pipeline({"transformer": dit}), layer(), TypeError)


class Odd(nn.Module):
    """Blocks in every kind of container."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Stack(block=2)
        self.by_name = nn.ModuleDict({"a": blocks(2), "b": nn.Linear(2, 2)})
        self.sequence = nn.Sequential(nn.Linear(2, 2), nn.Identity(), nn.Linear(2, 2))
        self.single = Stack()
        self.numbers = [1, 2]
        self.nothing = None
        self.groups = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2)])

    @property
    def layers(self) -> list[nn.Module]:
        return [self.sequence[2], *self.encoder.block]


@pytest.mark.parametrize(
    ("container", "expected"),
    [
        ("encoder.block", ("encoder.block.0", "encoder.block.1")),
        ("layers", ("sequence.2", "encoder.block.0", "encoder.block.1")),
        ("by_name", ("by_name.a.0", "by_name.a.1", "by_name.b")),
        ("sequence", ("sequence.0", "sequence.2")),
        ("single", ("single",)),
        ("groups", ("groups.0", "groups.1")),
        ("nothing", ()),
        ("absent|by_name.a", ("by_name.a.0", "by_name.a.1")),
    ],
)
def test_kinds_of_containers(container: str, expected: tuple[str, ...]) -> None:
    containers = (container,) if len(expected) > 1 else (container, "encoder.block")
    subject = pipeline({"transformer": Odd()}, block_attrs={"transformer": containers})
    stack = resolve_offload_plan(subject, layer()).stacks[0]
    assert stack.block_paths[: len(expected)] == expected
    assert len(stack.blocks) == max(len(expected), len(expected) + 2 * (len(expected) < 2))


def test_blocks_without_weights_are_left_out_with_a_note() -> None:
    subject = pipeline({"transformer": Odd()}, block_attrs={"transformer": ("sequence",)})
    plan = resolve_offload_plan(subject, layer())
    assert plan.notes == ("transformer: sequence.1 hold no weights, so there is nothing to stream for them.",)


@pytest.mark.parametrize(
    ("container", "words"),
    [
        ("layer", ["'layer'", "'transformer' (a Odd)", "has no 'layer'"]),
        ("encoder.blocks", ["'encoder.blocks'", "'encoder' (a Stack) has no 'blocks'"]),
        ("numbers", ["'numbers'", "holds a int", "nn.Modules"]),
        ("training", ["'training'", "is a bool"]),
        ("nothing", ["nothing", "no blocks with weights"]),
    ],
)
def test_containers_that_hold_no_blocks(container: str, words: list[str]) -> None:
    subject = pipeline({"transformer": Odd()}, block_attrs={"transformer": (container,)})
    refuses(words, subject, layer())
    with pytest.warns(UserWarning):
        assert resolve_offload_plan(subject, legacy()).skip_reason == "Pipeline has no blocks that can be streamed"


def test_dit_without_declared_blocks() -> None:
    subject = pipeline({"transformer": Stack(blocks=2)})
    refuses(["'transformer' (a Stack)", "block_attrs", "_layerwise_offload_blocks_attrs"], subject, layer())
    with pytest.warns(UserWarning, match="declares no blocks"):
        plan = resolve_offload_plan(subject, legacy())
    assert plan.stacks == () and plan.skip_reason


def test_a_block_that_is_declared_twice_is_one_block() -> None:
    subject = pipeline({"transformer": Stack(blocks=2)}, block_attrs={"transformer": ("blocks", "blocks")})
    plan = resolve_offload_plan(subject, layer())
    assert plan.stacks[0].block_paths == ("blocks.0", "blocks.1")
    assert any("more than once" in note for note in plan.notes)


def test_sizes_come_from_shapes_and_count_a_tied_tensor_once() -> None:
    dit = Stack(blocks=2)
    dit.blocks[0].tied = dit.blocks[0].weight
    dit.blocks[1].register_buffer("table", torch.zeros(3, dtype=torch.float64), persistent=False)
    dit.blocks[1].to(torch.bfloat16)
    subject = pipeline({"transformer": dit}, block_attrs=BLOCKS)
    assert resolve_offload_plan(subject, layer()).stacks[0].nbytes == (6 * 4, 6 * 2 + 3 * 2)
    with torch.device("meta"):
        on_meta = pipeline({"transformer": Stack(blocks=2)}, block_attrs=BLOCKS)
    plan = resolve_offload_plan(on_meta, layer())
    assert plan.streamed_bytes == 48 and plan.largest_streamed_block == 24


# One streamed block, no blocks, no DiT


def test_a_single_block() -> None:
    subject = pipeline({"transformer": Stack(blocks=1), "vae": Stack()}, vae=["vae"], block_attrs=BLOCKS)
    refuses(["'transformer' (a Stack)", "single block"], subject, layer())
    with pytest.warns(UserWarning, match="single block"):
        skipped = resolve_offload_plan(subject, legacy())
    assert skipped.stacks == () and skipped.skip_reason == "Pipeline has no blocks that can be streamed"
    resident = resolve_offload_plan(subject, legacy(distributed=True))
    assert resident.stacks[0].resident == (0,) and resident.stacks[0].streamed == () and resident.skip_reason is None


def test_a_single_block_beside_a_dit_that_can_be_streamed() -> None:
    two = {"transformer": ("blocks",), "transformer_2": ("blocks",)}
    subject = pipeline(
        {"transformer": Stack(blocks=1), "transformer_2": Stack(blocks=2)}, dit=list(two), block_attrs=two
    )
    with pytest.warns(UserWarning, match="'transformer' has a single block"):
        plan = resolve_offload_plan(subject, legacy())
    assert paths(plan) == {"transformer_2": ("blocks.0", "blocks.1")} and plan.skip_reason is None


def test_residents_that_leave_a_single_block() -> None:
    subject = pipeline({"transformer": Stack(blocks=4)}, block_attrs=BLOCKS, resident_dit_paths=["transformer"])
    refuses(["resident_layers=3", "one of the 4 blocks", "at most 2, or 4"], subject, layer(residents=3))
    assert resolve_offload_plan(subject, legacy(True, residents=3)).stacks[0].resident == (0, 1, 2, 3)


@pytest.mark.parametrize("absent", [0, 1])
def test_either_of_two_dits_may_be_none(absent: int) -> None:
    names = ["transformer", "transformer_2"]
    components = {name: None if index == absent else Stack(blocks=2) for index, name in enumerate(names)}
    subject = pipeline(components, dit=names, block_attrs={name: ("blocks",) for name in names})
    assert list(paths(resolve_offload_plan(subject, layer()))) == [names[1 - absent]]


def test_no_dit_at_all() -> None:
    subject = pipeline({"transformer": None, "text_encoder": Stack()}, encoder=["text_encoder"], block_attrs=BLOCKS)
    refuses(["no DiT", "transformer", "_dit_modules"], subject, layer())
    for config in (legacy(), legacy(distributed=True)):
        with pytest.warns(UserWarning, match="no DiT"):
            plan = resolve_offload_plan(subject, config)
        assert plan.skip_reason == "Pipeline has no DiT"


def test_switched_off() -> None:
    plan = resolve_offload_plan(object(), OffloadConfig.from_od_config({}))
    assert plan.strategy is OffloadStrategy.NONE and plan.skip_reason and not plan.components


# Residents


@pytest.mark.parametrize(
    ("count", "wanted", "spread"),
    [
        (4, 0, ()),
        (4, 1, (0,)),
        (4, 2, (0, 2)),
        (4, 3, (0, 2, 3)),
        (4, 4, (0, 1, 2, 3)),
        (4, 9, (0, 1, 2, 3)),
        (0, 3, ()),
        (6, 2, (0, 3)),
        (40, 20, tuple(range(0, 40, 2))),
    ],
)
def test_spread(count: int, wanted: int, spread: tuple[int, ...]) -> None:
    assert resident_indices(count, wanted, "spread") == spread
    assert resident_indices(count, wanted, "leading") == tuple(range(min(count, wanted)))


@pytest.mark.parametrize("count", range(1, 42))
def test_spread_is_even_all_around_the_ring(count: int) -> None:
    for wanted in range(1, count + 1):
        kept = resident_indices(count, wanted, "spread")
        assert len(kept) == wanted
        gaps = {(after - before) % count or count for before, after in zip(kept, kept[1:] + kept[:1], strict=True)}
        assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize(("policy", "expected"), [("spread", (0, 2, 4)), ("leading", (0, 1, 2))])
def test_residents_of_a_stack(policy: str, expected: tuple[int, ...]) -> None:
    subject = pipeline({"transformer": Stack(blocks=6)}, block_attrs=BLOCKS, resident_dit_paths=["transformer"])
    config = layer(residents=3, resident_policy=policy)
    assert config.strategy is OffloadStrategy.DISTRIBUTED_LAYERWISE
    stack = resolve_offload_plan(subject, config).stacks[0]
    assert stack.resident == expected
    assert stack.streamed_bytes == stack.resident_bytes == 3 * 24
    assert set(stack.streamed) | set(stack.resident) == set(range(6))


def test_legacy_residents_lead() -> None:
    subject = pipeline({"transformer": Stack(blocks=6)}, block_attrs=BLOCKS, resident_dit_paths=["transformer"])
    assert resolve_offload_plan(subject, legacy(True, residents=2)).stacks[0].resident == (0, 1)


def test_residents_need_a_declared_dit() -> None:
    subject = pipeline({"transformer": Stack(blocks=4)}, block_attrs=BLOCKS)
    refuses(["resident_layers=2", "resident_dit_paths", "transformer"], subject, layer(residents=2))
    with pytest.warns(UserWarning, match="resident_dit_paths"):
        assert resolve_offload_plan(subject, legacy(True, residents=2)).stacks[0].resident == ()


def test_residents_only_where_they_are_declared() -> None:
    names = ["transformer", "transformer_2"]
    subject = pipeline(
        {name: Stack(blocks=4) for name in names},
        dit=names,
        block_attrs={name: ("blocks",) for name in names},
        resident_dit_paths=["transformer_2"],
    )
    plan = resolve_offload_plan(subject, layer(residents=2))
    assert [stack.resident for stack in plan.stacks] == [(), (0, 2)]
    assert any("'transformer' isn't in resident_dit_paths" in note for note in plan.notes)


@pytest.mark.parametrize("residents", [4, 9])
def test_all_blocks_may_be_resident(residents: int) -> None:
    subject = pipeline({"transformer": Stack(blocks=4)}, block_attrs=BLOCKS, resident_dit_paths=["transformer"])
    plan = resolve_offload_plan(subject, layer(residents=residents))
    assert plan.stacks[0].streamed == () and plan.streamed_bytes == 0 and plan.largest_streamed_block == 0
    assert any("more than the 4 blocks" in note for note in plan.notes) == (residents == 9)


# Encoders


def with_encoders(**plan: Any) -> Pipeline:
    return pipeline(
        {
            "transformer": Stack(blocks=2),
            "text_encoder": Stack(layers=2),
            "text_encoder_2": Stack(layers=3),
            "image_encoder": Stack(layers=2),
            "vision_model": Stack(layers=2),
        },
        encoder=["text_encoder", "text_encoder_2", "image_encoder", "vision_model"],
        block_attrs=BLOCKS,
        **plan,
    )


LAYERS = ("layers",)


def test_encoders_are_streamed_only_if_selected() -> None:
    names = ("text_encoder", "text_encoder_2", "image_encoder", "vision_model")
    subject = with_encoders(encoder_block_attrs={name: LAYERS for name in names})
    assert list(paths(resolve_offload_plan(subject, layer()))) == ["transformer"]
    both = resolve_offload_plan(subject, layer("dit", "text_encoder"))
    assert list(paths(both)) == ["transformer", "text_encoder", "text_encoder_2"]
    assert [stack.kind for stack in both.stacks] == ["dit", "encoder", "encoder"]
    assert list(paths(resolve_offload_plan(subject, layer("text_encoder")))) == ["text_encoder", "text_encoder_2"]
    assert list(paths(resolve_offload_plan(subject, layer("image_encoder")))) == ["image_encoder", "vision_model"]


def test_encoder_types_can_be_declared() -> None:
    subject = with_encoders(
        encoder_block_attrs={"vision_model": LAYERS, "text_encoder": LAYERS},
        encoder_component_types={"vision_model": "text_encoder", "text_encoder": "image_encoder"},
    )
    plan = resolve_offload_plan(subject, layer("text_encoder"))
    assert list(paths(plan)) == ["vision_model"]
    assert any("'text_encoder_2' declares no blocks" in note for note in plan.notes)


def test_no_encoder_declares_blocks() -> None:
    refuses(
        ["'text_encoder'", "text_encoder (Stack)", "text_encoder_2 (Stack)", "encoder_block_attrs"],
        with_encoders(),
        layer("dit", "text_encoder"),
    )


def test_no_encoder_of_the_kind() -> None:
    subject = pipeline({"transformer": Stack(blocks=2)}, block_attrs=BLOCKS)
    refuses(["components has 'image_encoder'", "no encoders"], subject, layer("dit", "image_encoder"))


@pytest.mark.parametrize("stub", [None, nn.Identity()])
def test_encoder_that_isnt_loaded_is_left_alone(stub: nn.Module | None) -> None:
    subject = pipeline(
        {"transformer": Stack(blocks=2), "text_encoder": stub},
        encoder=["text_encoder"],
        block_attrs=BLOCKS,
        encoder_block_attrs={"text_encoder": LAYERS},
    )
    plan = resolve_offload_plan(subject, layer("dit", "text_encoder"))
    assert list(paths(plan)) == ["transformer"]
    assert resolve_offload_plan(subject, layer("text_encoder")).stacks == ()


def test_encoder_gathered_over_ranks_must_be_declared_replicated() -> None:
    config = OffloadConfig(
        OffloadStrategy.DISTRIBUTED_LAYERWISE,
        components=("dit", "text_encoder"),
        layer_options={"text_encoder": LayerOptions(WeightTransfer.ALLGATHER)},
        data_parallel_size=2,
    )
    for stub in (None, Stack(layers=2)):
        components = {"transformer": Stack(blocks=2), "text_encoder": stub}
        declared: dict[str, Any] = {
            "encoder": ["text_encoder"],
            "block_attrs": BLOCKS,
            "encoder_block_attrs": {"text_encoder": LAYERS},
        }
        refuses(["'text_encoder'", "encoder_dlo_weight_replication"], pipeline(components, **declared), config)
        replicated = pipeline(components, encoder_dlo_weight_replication=["text_encoder"], **declared)
        assert "transformer" in paths(resolve_offload_plan(replicated, config))


# Who owns a block


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


# Submodules of a DiT, and components that load themselves


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


# Model-level


def test_model_level_has_components_but_no_stacks() -> None:
    subject = with_encoders()
    plan = resolve_offload_plan(subject, OffloadConfig.from_options("module", components=["dit", "text_encoder"]))
    assert plan.stacks == () and plan.skip_reason is None
    assert len(plan.with_role("encoder")) == 4 and "swapped as a whole" in str(plan)


def test_model_level_from_flags_needs_both_sides() -> None:
    subject = pipeline({"transformer": Stack(blocks=2)})
    with pytest.warns(UserWarning, match="no encoders to swap"):
        plan = resolve_offload_plan(subject, OffloadConfig.from_od_config({"enable_cpu_offload": True}))
    assert plan.skip_reason == "Pipeline has no encoders"


# The plan itself


def test_plan_is_frozen_and_reads_well() -> None:
    subject = pipeline(
        {"transformer": Stack(blocks=4), "vae": Stack()},
        vae=["vae"],
        block_attrs=BLOCKS,
        resident_dit_paths=["transformer"],
    )
    plan = resolve_offload_plan(subject, layer(residents=2))
    for target in (plan, plan.stacks[0], plan.components[0]):
        with pytest.raises(AttributeError):
            target.notes = ()  # type: ignore[misc, union-attr]
    lines = str(plan).splitlines()
    assert lines[0] == "distributed-layerwise plan: 48 B streamed"
    assert lines[1].split("  ")[1:] == [
        "transformer",
        "Stack",
        "dit",
        "120 B",
        "2 of 4 blocks streamed (48 B), 2 resident (48 B)",
    ]
    assert "tensor" not in repr(plan).lower() and "Linear(" not in repr(plan)
    assert repr(plan.stacks[0]) == "BlockStack('transformer', dit: 2 of 4 blocks streamed (48 B), 2 resident (48 B))"
    assert repr(plan.components[1]) == "ResolvedComponent('vae', Stack, resident)".replace("resident", "vae")


@pytest.mark.parametrize("resident", [(2, 1), (0, 0), (3,), (-1,)])
def test_stack_checks_its_residents(resident: tuple[int, ...]) -> None:
    found = tuple(blocks(3))
    with pytest.raises(ValueError, match="sorted, unique indices below 3"):
        BlockStack("transformer", "dit", ("a", "b", "c"), found, resident, (1, 1, 1))
    with pytest.raises(ValueError, match="2 paths, 3 blocks"):
        BlockStack("transformer", "dit", ("a", "b"), found, (), (1, 1, 1))


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 20, "5.0 MiB"), (3 << 30, "3.0 GiB")]
)
def test_sizes_in_words(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


def test_objects_without_any_module() -> None:
    with pytest.warns(UserWarning, match="declares no components"):
        refuses(["no DiT"], SimpleNamespace(a=1), layer())
