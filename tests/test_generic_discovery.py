"""Pipelines that declare nothing: their parts by name, their blocks by their lists, and what stays on the device."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from torch import nn

from diffusers_omni_offload.config import OffloadConfig
from diffusers_omni_offload.declarations import OffloadPlan
from diffusers_omni_offload.topology import resolver
from diffusers_omni_offload.topology.lists import blocks_read_outside, find_lists
from diffusers_omni_offload.topology.plan import ResolvedPlan
from diffusers_omni_offload.topology.resolver import resolve_offload_plan
from diffusers_omni_offload.topology.roles import encoder_kind, role_of_name, roles_of
from diffusers_omni_offload.topology.source import forward_source
from tests.resolving import layer, paths, refuses, strict_warnings  # noqa: F401


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x))


def blocks(count: int, width: int = 8) -> nn.ModuleList:
    return nn.ModuleList(Block(width) for _ in range(count))


class DiT(nn.Module):
    """Lists of blocks by name, and a projection that is small beside them."""

    def __init__(self, **counts: int) -> None:
        super().__init__()
        self.proj_in = nn.Linear(2, 2)
        for name, count in counts.items():
            setattr(self, name, blocks(count))


def undeclared(name: str = "Undeclared", sequence: str | None = None, **components: Any) -> DiffusionPipeline:
    """A diffusers pipeline, of a class of its own, that declares nothing."""
    pipe_class = type(name, (DiffusionPipeline,), {"model_cpu_offload_seq": sequence, "__module__": __name__})
    pipe = pipe_class()
    pipe.register_modules(**components)
    return pipe


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
    ("name", "kind"),
    [
        ("image_encoder", "image_encoder"),
        ("prior_image_encoder", "image_encoder"),
        ("vision_encoder", "image_encoder"),
        ("siglip", "image_encoder"),
        ("text_encoder_2", "text_encoder"),
        ("vision_language_encoder", "text_encoder"),
        ("prompt_enhancer", "text_encoder"),
    ],
)
def test_what_an_encoder_reads(name: str, kind: str) -> None:
    assert encoder_kind(name) == kind


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


# ---------------------------------------------------------------------- lists of blocks


def within(part: nn.Module, **counts: int) -> nn.Module:
    model = DiT(**counts)
    model.part = part
    return model


def holding(**members: nn.Module) -> nn.Module:
    model = nn.Module()
    for name, member in members.items():
        setattr(model, name, member)
    return model


def grouped(*sizes: int) -> nn.ModuleList:
    return nn.ModuleList(blocks(size) for size in sizes)


LEAVES = nn.ModuleList(nn.Linear(8, 8) for _ in range(9))
MIXED = nn.ModuleList([nn.Identity(), Block(), nn.Linear(8, 8)])


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (DiT(blocks=3), ("blocks",)),
        (holding(leaves=LEAVES), ()),
        (holding(mixed=MIXED), ()),
        (holding(blocks=nn.ModuleList([nn.Identity(), Block(), Block()])), ("blocks",)),
        (holding(a=blocks(1), b=blocks(3)), ("a", "b")),
        (holding(small=blocks(2, 1), large=blocks(4, 32)), ("large",)),
        (within(DiT(layers=2), blocks=40), ("blocks",)),
        (within(DiT(layers=10), blocks=20), ("blocks", "part.layers")),
        (within(DiT(layers=10)), ("part.layers",)),
        (within(holding(deep=DiT(layers=10))), ("part.deep.layers",)),
        (holding(groups=grouped(2, 3)), ("groups",)),
        (holding(groups=nn.ModuleList([blocks(2), LEAVES])), ("groups.0",)),
        (holding(parts=nn.ModuleDict({"first": blocks(2), "last": blocks(2)})), ("parts.first", "parts.last")),
        (holding(parts=nn.ModuleDict({"first": Block(), "last": Block()})), ("parts",)),
        (holding(parts=nn.ModuleDict({"attention": Block(), "other": DiT(layers=2)})), ("parts.other.layers",)),
        (holding(blocks=nn.Sequential(*blocks(3))), ("blocks",)),
        (holding(mlp=nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))), ()),
        (nn.Linear(2, 2), ()),
        (nn.Identity(), ()),
    ],
)
def test_lists_of_a_dit(model: nn.Module, expected: tuple[str, ...]) -> None:
    assert find_lists(model) == expected


def test_lists_of_an_encoder_lie_in_its_parts() -> None:
    model = holding(visual=DiT(blocks=2), language_model=DiT(layers=40))
    assert find_lists(model, is_encoder=True) == ("visual.blocks", "language_model.layers")
    assert find_lists(holding(model=holding(encoder=DiT(block=2))), is_encoder=True) == ("model.encoder.block",)


def test_blocks_of_a_list_of_lists_are_those_of_the_inner_ones() -> None:
    plan = resolve_offload_plan(undeclared(transformer=holding(groups=grouped(2, 1))), layer())
    assert paths(plan)["transformer"] == ("groups.0.0", "groups.0.1", "groups.1.0")


# ---------------------------------------------------------------------- what the source of forward says


class Ordered(nn.Module):
    """Registers its lists in another order than that in which they run."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.middle, self.first, self.silent = blocks(2), blocks(2), blocks(2), blocks(2)

    @property
    def _last(self) -> nn.ModuleList:
        return self.last

    def _run_middle(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.middle:
            x = block(x)
        return x

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.first[:1]:
            x = block(x)
        x = self._run_middle(x)
        for block in self._last:
            x = block(x)
        return x


def test_lists_run_in_the_order_of_the_source() -> None:
    assert find_lists(Ordered()) == ("first", "middle", "last", "silent")


def test_without_source_the_order_is_that_of_registration() -> None:
    namespace: dict[str, Any] = {"Ordered": Ordered}
    exec("class Hidden(Ordered):\n    def forward(self, x):\n        return self.last, self.first", namespace)
    assert find_lists(namespace["Hidden"]()) == ("last", "middle", "first", "silent")
    assert forward_source(nn.Linear).reads == () and forward_source(nn.Module).mentions == ()


class Reading(nn.Module):
    """Uses parts of its blocks in every way that matters, and in some that don't."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.weight, self.looped, self.named, self.zipped, self.last = (blocks(3) for _ in range(6))
        self.reversed = blocks(2)
        self.harmless, self.other = blocks(3), blocks(3)
        self.harmless[0].processor = object()
        self.parts = nn.ModuleDict({"a": Block(), "b": Block()})

    def forward(self, x: torch.Tensor, index: int = 0) -> Any:
        x = self.called[0].norm(x)
        x = x + self.weight[1].linear.weight.sum()
        for block in self.looped:
            x = block.linear(x)
        block = self.named[2]
        x = block.norm(x)
        for number, (block, other) in enumerate(zip(self.zipped, self.other, strict=True)):
            x = other(x) + block.linear.bias + number
        for block in reversed(list(self.reversed)):
            x = block.linear(x)
        x = self.last[-1].linear(x)
        # None of these needs weights.
        x = self.harmless[0](x) + len(self.harmless) + self.harmless[index](x)
        x = self.harmless[1].forward(x.to(self.harmless[0].linear.weight.dtype))
        block = self.harmless[0]
        if block.processor is not None and self.harmless[index].training:
            x = block(x)
        for block in self.harmless:
            block.train(False)
            x = block(x)
        for block, number in self.pairs():
            x = block.linear(x) + number
        block, x = x, self.broken[0].norm(x)
        return block.norm()

    def pairs(self) -> Any:
        return []

    @property
    def broken(self) -> Any:
        raise RuntimeError("a property may fail while nothing runs")


def test_blocks_of_which_a_part_is_used_outside() -> None:
    model = Reading()
    lists = find_lists(model)
    every = [f"{path}.{index}" for path in lists for index in range(len(model.get_submodule(path)))]
    names = {id(module): name for name, module in model.named_modules()}
    found = {names[block]: part for block, part in blocks_read_outside(model, every).items()}
    assert found == {
        "called.0": "norm",
        "weight.1": "linear.weight",
        **{f"looped.{index}": "linear" for index in range(3)},
        "named.2": "norm",
        **{f"zipped.{index}": "linear.bias" for index in range(3)},
        **{f"reversed.{index}": "linear" for index in range(2)},
        "last.2": "linear",
    }


def test_a_part_that_is_used_by_what_holds_the_list() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = blocks(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[0].norm(x)

    model = holding(part=Holder())
    plan = resolve_offload_plan(undeclared(transformer=model), layer())
    assert paths(plan)["transformer"] == ("part.layers.1", "part.layers.2")
    assert "transformer.part.layers.0 stays on the device: 'norm' of it is used outside of its own forward." in (
        plan.notes
    )
