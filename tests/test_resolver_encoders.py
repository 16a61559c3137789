"""Encoders as stacks, and the model-level strategy, which swaps them."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from diffusers_omni_offload.config import LayerOptions, OffloadConfig, OffloadStrategy, WeightTransfer
from diffusers_omni_offload.topology.resolver import resolve_offload_plan
from tests.resolving import (  # noqa: F401
    BLOCKS,
    LAYERS,
    Pipeline,
    Stack,
    layer,
    paths,
    pipeline,
    refuses,
    strict_warnings,
    with_role,
)


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


def test_encoders_are_streamed_only_if_selected() -> None:
    names = ("text_encoder", "text_encoder_2", "image_encoder", "vision_model")
    subject = with_encoders(encoder_block_attrs={name: LAYERS for name in names})
    assert list(paths(resolve_offload_plan(subject, layer()))) == ["transformer"]
    both = resolve_offload_plan(subject, layer("dit", "text_encoder"))
    assert list(paths(both)) == ["transformer", "text_encoder", "text_encoder_2"]
    assert [stack.kind for stack in both.stacks] == ["dit", "encoder", "encoder"]
    assert list(paths(resolve_offload_plan(subject, layer("text_encoder")))) == ["text_encoder", "text_encoder_2"]
    assert list(paths(resolve_offload_plan(subject, layer("image_encoder")))) == ["image_encoder", "vision_model"]


@pytest.mark.parametrize(
    ("name", "selector"),
    [
        ("siglip", "image_encoder"),
        ("prior_image_encoder", "image_encoder"),
        ("clip_vision", "image_encoder"),
        ("vision_language_encoder", "text_encoder"),
        ("prompt_enhancer", "text_encoder"),
    ],
)
def test_what_a_declared_encoder_reads_is_told_by_its_name(name: str, selector: str) -> None:
    subject = pipeline(
        {"transformer": Stack(blocks=2), name: Stack(layers=2)},
        encoder=[name],
        block_attrs=BLOCKS,
        encoder_block_attrs={name: LAYERS},
    )
    assert list(paths(resolve_offload_plan(subject, layer(selector)))) == [name]
    (other,) = {"text_encoder", "image_encoder"} - {selector}
    refuses([f"components has {other!r}", name], subject, layer(other))


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


@pytest.mark.parametrize("container", ["layer", "embed.nothing", "empty"])
def test_encoder_whose_declared_blocks_arent_there(container: str) -> None:
    subject = with_encoders(encoder_block_attrs={"text_encoder": (container,), "text_encoder_2": LAYERS})
    subject.text_encoder.empty = nn.ModuleList()
    refuses(["'text_encoder' (a Stack)", container], subject, layer("dit", "text_encoder"))


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


def test_model_level_has_components_but_no_stacks() -> None:
    subject = with_encoders()
    plan = resolve_offload_plan(subject, OffloadConfig.from_options("module", components=["dit", "text_encoder"]))
    assert plan.stacks == () and plan.skip_reason is None
    assert len(with_role(plan, "encoder")) == 4 and "swapped as a whole" in str(plan)


def test_model_level_from_flags_needs_both_sides() -> None:
    subject = pipeline({"transformer": Stack(blocks=2)})
    with pytest.warns(UserWarning, match="no encoders to swap"):
        plan = resolve_offload_plan(subject, OffloadConfig.from_od_config({"enable_cpu_offload": True}))
    assert plan.skip_reason == "Pipeline has no encoders"
