"""Pipelines that declare nothing: the part that each component plays by its name, and what stays on the device."""

from __future__ import annotations

import logging
import warnings

import pytest
from torch import nn

from diffusers_omni_offload.config import OffloadConfig
from diffusers_omni_offload.declarations import OffloadPlan
from diffusers_omni_offload.topology import resolver
from diffusers_omni_offload.topology.plan import ResolvedPlan
from diffusers_omni_offload.topology.resolver import resolve_offload_plan
from diffusers_omni_offload.topology.roles import encoder_selector, role_of_name, roles_of
from tests.resolving import layer, paths, refuses, strict_warnings  # noqa: F401
from tests.undeclared import DiT, undeclared, within


def roles(plan: ResolvedPlan) -> dict[str, str]:
    return {component.path: component.role for component in plan.components}


# ---------------------------------------------------------------------- roles by name


@pytest.mark.parametrize(
    ("name", "role"),
    [
        *((name, "dit") for name in ("transformer", "transformer_2", "transformer_ref", "unconditional_transformer")),
        *((name, "dit") for name in ("unet", "text_unet", "prior", "prior_prior", "decoder", "dit", "sr_dit")),
        *((name, "dit") for name in ("super_res_first", "diffusion_decoder")),
        *((name, "encoder") for name in ("text_encoder", "text_encoder_4", "prior_text_encoder", "image_encoder")),
        *((name, "encoder") for name in ("vision_language_encoder", "condition_encoder", "siglip", "prompt_enhancer")),
        *((name, "vae") for name in ("vae", "vqvae", "vqgan", "movq", "audio_vae", "vocoder", "sound_tokenizer")),
        *((name, "resident") for name in ("controlnet", "motion_adapter", "connectors", "latent_upsampler")),
        *((name, "resident") for name in ("prompt_enhancer_head", "safety_checker", "image_normalizer", "text_proj")),
        *((name, "encoder") for name in ("t5", "t5_encoder", "bert")),
        *((name, "dit") for name in ("transformer2", "dit_2")),
        ("language_model", "encoder"),
        ("text_decoder", "resident"),
        ("mystery", None),
    ],
)
def test_role_of_a_name(name: str, role: str | None) -> None:
    assert role_of_name(name) == role


@pytest.mark.slow
def test_names_of_all_stock_pipelines() -> None:
    """Every component whose class is a transformer, a UNet, an autoencoder or an encoder has a name that says so."""
    from tests.zoo.live import constructor_modules, live_pipelines

    expected = {
        "diffusers.models.transformers": {"dit"},
        "diffusers.models.unets": {"dit"},
        "diffusers.models.autoencoders": {"vae", "dit"},
        "diffusers.models.controlnets": {"resident"},
        "transformers.models.clip": {"encoder"},
        "transformers.models.t5": {"encoder"},
        "transformers.models.umt5": {"encoder"},
    }
    # These hold weights of such classes and are neither.
    exceptions = {"safety_checker", "motion_adapter"}
    checked = 0
    for pipeline in live_pipelines():
        for name, cls in constructor_modules(pipeline):
            home = next((home for home in expected if cls.__module__.startswith(home)), None)
            if home is not None and name not in exceptions:
                checked += 1
                assert role_of_name(name) in expected[home], f"{pipeline.__name__}.{name} is a {cls.__name__}"
    assert checked > 400


@pytest.mark.parametrize(
    ("path", "selector"),
    [
        ("image_encoder", "image_encoder"),
        ("pipe.image_encoder.0", "image_encoder"),
        ("prior_image_encoder", "image_encoder"),
        ("vision_encoder", "image_encoder"),
        ("siglip", "image_encoder"),
        ("text_encoder_2", "text_encoder"),
        ("vision_language_encoder", "text_encoder"),
        ("prompt_enhancer", "text_encoder"),
    ],
)
def test_what_an_encoder_reads(path: str, selector: str) -> None:
    assert encoder_selector(path) == selector


def test_the_offload_sequence_helps_with_unknown_names() -> None:
    names = ["vae", "poet", "transformer", "painter", "controlnet", "stranger"]
    sequence = "poet->absent->transformer->controlnet->painter->vae"
    assert roles_of(names, sequence) == {
        "vae": "vae",
        "poet": "encoder",
        "transformer": "dit",
        "painter": "vae",
        "controlnet": "resident",
        "stranger": "resident",
    }
    assert roles_of(["poet", "stranger", "transformer"], "")["poet"] == "resident"


def test_what_stands_between_encoder_and_vae_is_the_dit_if_no_name_says_so() -> None:
    names = ["text_encoder", "net", "late", "vae", "controlnet"]
    found = roles_of(names, "text_encoder->net->late->vae")
    assert found == {"text_encoder": "encoder", "net": "dit", "late": "vae", "vae": "vae", "controlnet": "resident"}
    assert roles_of(["text_encoder", "model"], None)["model"] == "dit"
    assert roles_of(["language_model"], None)["language_model"] == "dit"
    assert set(roles_of(["text_encoder", "net"], None).values()) == {"encoder", "resident"}


# ---------------------------------------------------------------------- pipelines


def test_components_and_blocks_of_a_pipeline_that_declares_nothing(caplog: pytest.LogCaptureFixture) -> None:
    encoder = nn.Module()
    encoder.model = DiT(layers=3)
    pipe = undeclared(
        "FirstUndeclared",
        vae=DiT(layers=2),
        text_encoder=encoder,
        image_encoder=DiT(layers=2),
        transformer=DiT(transformer_blocks=3, single_transformer_blocks=2),
        controlnet=DiT(blocks=2),
    )
    with caplog.at_level(logging.INFO, logger="diffusers_omni_offload"):
        plan = resolve_offload_plan(pipe, layer())
        again = resolve_offload_plan(pipe, layer("dit", "text_encoder"))
    assert roles(plan) == {
        "transformer": "dit",
        "text_encoder": "encoder",
        "image_encoder": "encoder",
        "vae": "vae",
        "controlnet": "resident",
    }
    assert list(paths(plan)["transformer"]) == [
        *(f"transformer_blocks.{index}" for index in range(3)),
        *(f"single_transformer_blocks.{index}" for index in range(2)),
    ]
    assert paths(again)["text_encoder"] == ("model.layers.0", "model.layers.1", "model.layers.2")
    assert set(paths(resolve_offload_plan(pipe, layer("image_encoder")))) == {"image_encoder"}
    said = [record.message for record in caplog.records]
    assert said == [
        "FirstUndeclared declares no components, so they were found by their names: DiT transformer "
        "(transformer_blocks, single_transformer_blocks); encoder text_encoder (model.layers), image_encoder (layers); "
        "VAE vae; others controlnet."
    ]
    assert said[0] in plan.notes and said[0] in again.notes


def test_found_dits_may_keep_blocks_on_the_device() -> None:
    pipe = undeclared(transformer=DiT(blocks=6))
    assert resolve_offload_plan(pipe, layer(residents=2)).stacks[0].resident == (1, 4)


def test_a_large_part_without_blocks_stays_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused where blocks are declared, as its author can declare what it is; here nobody can."""
    monkeypatch.setattr(resolver, "LARGE_SUBMODULE_BYTES", 40)
    pipe = undeclared(transformer=within(nn.Linear(8, 8), blocks=6))
    assert len(resolve_offload_plan(pipe, layer(residents=2)).stacks[0].streamed) == 4


@pytest.mark.parametrize("name", ["controlnet", "vae"])
def test_a_component_of_another_kind_is_streamed_by_its_lists_if_it_is_chosen(name: str) -> None:
    pipe = undeclared(transformer=DiT(blocks=2), **{name: DiT(down_blocks=3)})
    config = OffloadConfig.from_options("layer", components={"dit": "layer", name: "layer"})
    assert len(paths(resolve_offload_plan(pipe, config))[name]) == 3


def test_no_dit_that_could_be_recognised() -> None:
    pipe = undeclared("Strange", net=DiT(blocks=3), vae=DiT(blocks=2))
    refuses(
        ["Strange has no DiT", "vae (DiT), net (DiT)", "_dit_modules", "register_adapter"], pipe, layer(), ValueError
    )


def test_a_dit_without_blocks() -> None:
    pipe = undeclared(transformer=nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    refuses(["'transformer' (a Sequential)", "declares no blocks", "block_attrs"], pipe, layer())
    single = undeclared(transformer=DiT(blocks=1))
    refuses(["'transformer' (a DiT)", "declares no blocks"], single, layer())


def test_a_dit_without_blocks_beside_one_that_has_some() -> None:
    pipe = undeclared(prior=nn.Linear(2, 2), transformer=DiT(blocks=2))
    plan = resolve_offload_plan(pipe, layer())
    assert list(paths(plan)) == ["transformer"]
    assert any("'prior' declares no blocks" in note for note in plan.notes)


def test_an_encoder_that_isnt_there_or_has_no_blocks() -> None:
    pipe = undeclared(transformer=DiT(blocks=2), text_encoder=nn.Linear(2, 2))
    refuses(["text_encoder (Linear)", "declares blocks"], pipe, layer("dit", "text_encoder"))
    refuses(["'image_encoder'", "declares no such encoder"], pipe, layer("dit", "image_encoder"))
    assert list(paths(resolve_offload_plan(pipe, layer()))) == ["transformer"]


def test_a_pipeline_within_a_pipeline() -> None:
    outer = undeclared("Outer")
    outer.inner = undeclared("Inner", transformer=DiT(blocks=3), text_encoder=DiT(layers=2), vae=nn.Linear(2, 2))
    outer.nets = [DiT(blocks=2)]
    plan = resolve_offload_plan(outer, layer("dit", "text_encoder"))
    assert roles(plan) == {
        "inner.transformer": "dit",
        "inner.text_encoder": "encoder",
        "inner.vae": "vae",
        "nets.0": "resident",
    }
    assert list(paths(plan)) == ["inner.transformer", "inner.text_encoder"]


def test_a_plan_without_component_lists_goes_before_what_is_found() -> None:
    pipe = undeclared(transformer=DiT(blocks=2), text_encoder=DiT(layers=3), painter=DiT(blocks=2, layers=3))
    type(pipe)._offload_plan = OffloadPlan(block_attrs={"painter": ("layers",)})
    plan = resolve_offload_plan(pipe, layer("dit", "text_encoder"))
    assert {path: len(found) for path, found in paths(plan).items()} == {"painter": 3, "text_encoder": 3}
    assert roles(plan)["transformer"] == "resident"


def test_blocks_that_the_class_of_the_dit_declares_go_first() -> None:
    class Declared(DiT):
        _layerwise_offload_blocks_attrs = ["single_blocks"]

    pipe = undeclared(transformer=Declared(blocks=3, single_blocks=2))
    assert paths(resolve_offload_plan(pipe, layer()))["transformer"] == ("single_blocks.0", "single_blocks.1")


def test_blocks_shared_with_another_component_stay_on_the_device() -> None:
    """A ControlNet that was made from the transformer runs some of its blocks."""
    dit, controlnet = DiT(refiner=2, blocks=3), DiT(blocks=2)
    controlnet.refiner = dit.refiner
    plan = resolve_offload_plan(undeclared(transformer=dit, controlnet=controlnet), layer())
    assert paths(plan)["transformer"] == ("blocks.0", "blocks.1", "blocks.2")
    note = "transformer.refiner.0 stays on the device: it is a part of 'transformer' and of 'controlnet'."
    assert note in plan.notes


def test_a_component_that_contains_another_as_a_whole_shares_nothing() -> None:
    inner = DiT(blocks=3)
    outer = nn.Module()
    outer.model = inner
    plan = resolve_offload_plan(undeclared(transformer=inner, controlnet=outer), layer())
    assert len(paths(plan)["transformer"]) == 3


def test_a_block_that_is_declared_resident_stays_on_the_device() -> None:
    pipe = undeclared(transformer=DiT(blocks=4))
    declared = {"_dit_modules": ["transformer"], "_resident_modules": ["transformer.blocks.0"]}
    plan_of_blocks = OffloadPlan(block_attrs={"transformer": ("blocks",)})
    adapter = type("Adapter", (), {**declared, "_offload_plan": plan_of_blocks})
    plan = resolve_offload_plan(pipe, layer(), declarations=adapter)
    assert paths(plan)["transformer"] == ("blocks.1", "blocks.2", "blocks.3")
    assert roles(plan)["transformer.blocks.0"] == "resident"
    assert any("transformer.blocks.0 stays on the device: Adapter declares it" in note for note in plan.notes)


def test_resolving_changes_nothing() -> None:
    pipe = undeclared(transformer=DiT(blocks=3, layers=2), text_encoder=DiT(layers=2))
    before = [(name, id(module), sorted(vars(module))) for name, module in pipe.transformer.named_modules()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolve_offload_plan(pipe, layer("dit", "text_encoder"))
    assert [(name, id(module), sorted(vars(module))) for name, module in pipe.transformer.named_modules()] == before
