"""The adapters: every pipeline class of their families is covered, and what is declared is really there."""

from __future__ import annotations

import inspect
import re
import typing
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from diffusers import DiffusionPipeline, ModularPipeline
from torch import nn

from diffusers_omni_offload.config import OffloadConfig
from diffusers_omni_offload.declarations import OffloadPlan, SupportsComponentDiscovery
from diffusers_omni_offload.registry import adapter_for, registered_pipelines
from diffusers_omni_offload.topology.plan import ResolvedPlan
from diffusers_omni_offload.topology.resolver import resolve_offload_plan
from tests.resolving import with_role

FAMILIES = {
    "wan": r"Wan\w*Pipeline",
    "flux2": r"Flux2\w*Pipeline",
    "stable_diffusion_3": r"StableDiffusion3\w*Pipeline",
    "qwen_image": r"QwenImage\w*Pipeline",
    "longcat_image": r"LongCatImage\w*Pipeline",
    "ovis_image": r"OvisImage\w*Pipeline",
    "stable_diffusion_xl": r"\w*(StableDiffusionXL|SDXL)\w*",
    "cosmos": r"Cosmos3\w*Pipeline",
    "minimax_h3": r"MiniMaxH3\w*Pipeline",
    "nextstep": r"NextStep\w*Pipeline",
    "soulx_singer": r"(Pipeline)?SoulXSinger\w*",
    "bagel": r"BagelPipeline",
}
# Pipelines that aren't in diffusers; `tests.tiny` has a stand-in for each.
ELSEWHERE = {
    "BagelPipeline",
    "Cosmos3OmniDiffusersPipeline",
    "MiniMaxH3Pipeline",
    "NextStep11Pipeline",
    "PipelineSoulXSingerSVC",
    "PipelineSoulXSingerSVS",
    "SoulXSingerPipeline",
    "SoulXSingerSVCPipeline",
}


@cache
def pipeline_classes() -> dict[str, type]:
    names = [name for name in dir(diffusers) if any(re.fullmatch(family, name) for family in FAMILIES.values())]
    found = {name: getattr(diffusers, name) for name in names}
    kinds = (DiffusionPipeline, ModularPipeline)
    return {name: each for name, each in found.items() if isinstance(each, type) and issubclass(each, kinds)}


@cache
def built_in() -> dict[str, type]:
    package = "diffusers_omni_offload.adapters."
    return {name: each for name, each in registered_pipelines().items() if each.__module__.startswith(package)}


def test_every_pipeline_class_of_the_families_has_an_adapter_and_every_adapter_a_class() -> None:
    assert ELSEWHERE.isdisjoint(pipeline_classes())
    assert sorted({*pipeline_classes(), *ELSEWHERE}) == sorted(built_in())
    assert len(pipeline_classes()) >= 60


@pytest.mark.parametrize("name", sorted(built_in()))
def test_adapter_is_a_declaration_and_nothing_else(name: str) -> None:
    adapter = adapter_for(pipeline_classes().get(name) or type(name, (), {}))
    assert adapter is not None and adapter is built_in()[name]
    assert re.fullmatch(FAMILIES[adapter.__module__.rpartition(".")[2]], name)
    assert isinstance(adapter(), SupportsComponentDiscovery)
    assert isinstance(adapter._offload_plan, OffloadPlan)
    assert set(adapter._offload_plan.resident_dit_paths) == set(adapter._dit_modules)
    attributes = {attribute for base in adapter.__mro__[:-1] for attribute in vars(base)}
    declared = {"_dit_modules", "_encoder_modules", "_vae_modules", "_resident_modules", "_offload_plan"}
    assert {attribute for attribute in attributes if not attribute.startswith("__")} == declared


# Each pipeline class with components of its declared types, on the meta device.

VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "image_size": 32,
}
TEXT = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8,
}  # fmt: skip
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}}


def build(cls: type) -> nn.Module:
    """A small module of class `cls`; most of them are made from their defaults with two or three layers."""
    t = transformers
    t5 = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2}
    clip_text = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    vl_vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    encoders: dict[str, Any] = {
        "UMT5EncoderModel": lambda: t.UMT5Config(**t5),
        "T5EncoderModel": lambda: t.T5Config(**t5),
        "CLIPTextModel": lambda: t.CLIPTextConfig(**clip_text),
        "CLIPTextModelWithProjection": lambda: t.CLIPTextConfig(**clip_text),
        "CLIPVisionModel": lambda: t.CLIPVisionConfig(**VISION, patch_size=16),
        "CLIPVisionModelWithProjection": lambda: t.CLIPVisionConfig(**VISION, patch_size=16),
        "SiglipVisionModel": lambda: t.SiglipVisionConfig(**VISION, patch_size=16),
        "SiglipModel": lambda: t.SiglipConfig(text_config=clip_text, vision_config={**VISION, "patch_size": 16}),
        "Qwen3ForCausalLM": lambda: t.Qwen3Config(**TEXT),
        "Qwen3Model": lambda: t.Qwen3Config(**TEXT),
        "Mistral3ForConditionalGeneration": lambda: t.Mistral3Config(
            text_config={"model_type": "mistral", **TEXT},
            vision_config={**VISION, "model_type": "pixtral", "patch_size": 8},
        ),
        "Qwen2_5_VLForConditionalGeneration": lambda: t.Qwen2_5_VLConfig(
            text_config={**TEXT, **ROPE}, vision_config={**vl_vision, "fullatt_block_indexes": [1]}
        ),
        "Qwen3VLForConditionalGeneration": lambda: t.Qwen3VLConfig(
            text_config={**TEXT, **ROPE}, vision_config={**vl_vision, "deepstack_visual_indexes": [0]}
        ),
    }
    if cls.__name__ in encoders:
        return cls(encoders[cls.__name__]())
    if re.search("AutoencoderKL|AudioTokenizer|ControlNet|Adapter", cls.__name__):
        return nn.Linear(2, 2)  # no blocks are looked for in it
    counts = {"num_layers": 3, "num_single_layers": 2, "num_hidden_layers": 3, "num_refiner_layers": 2}
    layers: dict[str, Any] = {key: value for key, value in counts.items() if key in signature(cls)}
    if "vace_layers" in signature(cls):
        layers["vace_layers"] = [0, 2]
    return cls(**layers)


def signature(cls: type) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(cls.__init__).parameters)


def module_types(name: str) -> dict[str, type]:
    """Component name -> its module class, from the constructor's annotations or from the modular specifications."""
    cls = pipeline_classes()[name]
    if issubclass(cls, ModularPipeline):
        found = {key: spec.type_hint for key, spec in cls()._component_specs.items()}
    else:
        found = {key: parameter.annotation for key, parameter in signature(cls).items()}
    return {key: chosen for key, hint in found.items() if (chosen := module_class(hint)) is not None}


def module_class(hint: Any) -> type | None:
    choices = [hint, *typing.get_args(hint)]
    return next((each for each in choices if isinstance(each, type) and issubclass(each, nn.Module)), None)


#: The class of a modular pipeline doesn't say which blocks it is made of: those of Wan 2.2 have a second DiT.
OF_OTHER_BLOCKS = {"WanModularPipeline": {"transformer_2"}, "WanImage2VideoModularPipeline": {"transformer_2"}}


@cache
def resolved(name: str) -> tuple[ResolvedPlan, type]:
    """The plan that streams all that can be, and the adapter."""
    adapter = built_in()[name]
    holder = type(name, (), {})()
    with torch.device("meta"):
        for key, cls in module_types(name).items():
            setattr(holder, key, build(cls))
    kinds = ["dit"] + [kind for kind in ("text_encoder", "image_encoder") if kind in adapter._encoder_modules]
    config = OffloadConfig.from_options("layer", components=kinds)
    return resolve_offload_plan(holder, config, declarations=adapter), adapter


@pytest.mark.parametrize("name", sorted(pipeline_classes()))
def test_declared_components_and_blocks_are_there(name: str) -> None:
    plan, adapter = resolved(name)
    types = module_types(name)
    declared = {*adapter._dit_modules, *adapter._encoder_modules, *adapter._vae_modules}
    top_level_residents = {path for path in adapter._resident_modules if "." not in path}
    others = OF_OTHER_BLOCKS.get(name, set())
    assert declared | top_level_residents == set(types) | others, "each module is declared, and nothing else"
    submodules = {f"{dit}.{name}" for dit in adapter._dit_modules for name in adapter._offload_plan.offload_submodules}
    paths = {component.path for component in plan.components}
    assert paths == {*types, *adapter._resident_modules, *submodules}
    streamed = {*adapter._dit_modules, *adapter._encoder_modules, *submodules} - others
    assert {stack.component for stack in plan.stacks} == streamed
    for stack in plan.stacks:
        # What is left beside the blocks is small: embeddings, norms, heads. (Tiny ones, so compare counts of modules.)
        lists = [
            found for found in plan.component(stack.component).module.modules() if isinstance(found, nn.ModuleList)
        ]
        assert all(any(block is each for found in lists for each in found) for block in stack.blocks)
        assert len(stack.blocks) == len(set(stack.block_paths)) >= 2


@pytest.mark.parametrize(
    ("name", "containers"),
    [
        ("WanPipeline", ["blocks"]),
        ("WanVACEPipeline", ["vace_blocks", "blocks"]),
        ("WanAnimatePipeline", ["blocks"]),
        ("Flux2Pipeline", ["transformer_blocks", "single_transformer_blocks"]),
        ("Flux2KleinPipeline", ["transformer_blocks", "single_transformer_blocks"]),
        ("StableDiffusion3ControlNetPipeline", ["transformer_blocks"]),
        ("QwenImageEditPlusPipeline", ["transformer_blocks"]),
        ("LongCatImageEditPipeline", ["transformer_blocks", "single_transformer_blocks"]),
        ("OvisImagePipeline", ["transformer_blocks", "single_transformer_blocks"]),
        ("AnimateDiffSDXLPipeline", ["down_blocks", "up_blocks"]),
        ("Cosmos3OmniPipeline", ["layers"]),
        ("MiniMaxH3ModularPipeline", ["transformer_blocks"]),
    ],
)
def test_order_of_the_containers_is_the_order_of_execution(name: str, containers: list[str]) -> None:
    plan, adapter = resolved(name)
    stack = next(stack for stack in plan.stacks if stack.component == adapter._dit_modules[0])
    assert list(dict.fromkeys(path.rpartition(".")[0] for path in stack.block_paths)) == containers


def test_side_modules_of_animate_stay_on_the_device() -> None:
    plan, _ = resolved("WanAnimatePipeline")
    residents = set(with_role(plan, "resident"))
    assert residents == {"transformer.face_adapter", "transformer.motion_encoder"}


@pytest.mark.parametrize(
    ("name", "component"),
    [
        ("StableDiffusion3ControlNetPipeline", "controlnet"),
        ("QwenImageControlNetPipeline", "controlnet"),
        ("StableDiffusionXLControlNetUnionPipeline", "controlnet"),
        ("StableDiffusionXLAdapterPipeline", "adapter"),
        ("AnimateDiffSDXLPipeline", "motion_adapter"),
    ],
)
def test_what_runs_beside_the_dit_stays_on_the_device(name: str, component: str) -> None:
    plan, _ = resolved(name)
    assert plan.component(component).role == "resident"


def test_the_middle_of_a_unet_stays_on_the_device() -> None:
    plan, _ = resolved("StableDiffusionXLPipeline")
    streamed = {id(module) for _, block in plan.streamed_blocks() for module in block.modules()}
    unet = plan.component("unet").module
    assert not any(id(module) in streamed for module in unet.mid_block.modules())


def test_the_token_refiner_is_a_stack_of_its_own() -> None:
    plan, _ = resolved("MiniMaxH3ModularPipeline")
    counts = {stack.component: len(stack.blocks) for stack in plan.stacks if stack.kind == "dit"}
    assert counts == {
        "transformer": 3,
        "transformer_ref": 3,
        "transformer.token_refiner": 2,
        "transformer_ref.token_refiner": 2,
    }


def test_each_file_has_its_row() -> None:
    folder = Path(__file__).resolve().parent.parent / "adapters"
    rows = re.findall(r"^\| `(\w+)\.py` \|", (folder / "README.md").read_text(), flags=re.MULTILINE)
    files = [path.stem for path in folder.glob("*.py") if path.stem != "__init__"]
    assert sorted(rows) == sorted(files) == sorted(FAMILIES)
