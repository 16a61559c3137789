"""The resolver on stock pipelines (tiny ones): what it finds, and that finding changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from diffusers_omni_offload.config import OffloadConfig
from diffusers_omni_offload.registry import adapter_for
from diffusers_omni_offload.topology.plan import ResolvedPlan
from diffusers_omni_offload.topology.resolver import resolve_offload_plan
from tests.tiny import build_flux2, build_qwen_image, build_sd3, build_wan, build_wan_i2v

BUILDERS: dict[str, Callable[..., Any]] = {
    "wan": build_wan,
    "wan_i2v": build_wan_i2v,
    "flux2": build_flux2,
    "sd3": build_sd3,
    "qwen_image": build_qwen_image,
}


def resolve(pipe: Any, *components: str, **options: Any) -> ResolvedPlan:
    config = OffloadConfig.from_options("layer", components=components or None, **options)
    return resolve_offload_plan(pipe, config, declarations=adapter_for(type(pipe)))


@pytest.fixture(scope="module")
def pipes() -> dict[str, Any]:
    return {name: builder()[0] for name, builder in BUILDERS.items()}


@pytest.mark.parametrize(
    ("name", "dits", "encoders"),
    [
        ("wan", {"transformer": 4, "transformer_2": 4}, {"text_encoder": 2}),
        ("wan_i2v", {"transformer": 4, "transformer_2": 4}, {"text_encoder": 2}),
        ("flux2", {"transformer": 7}, {"text_encoder": 5}),
        ("sd3", {"transformer": 4}, {"text_encoder": 3, "text_encoder_2": 3, "text_encoder_3": 2}),
        ("qwen_image", {"transformer": 4}, {"text_encoder": 5}),
    ],
)
def test_stacks(pipes: dict[str, Any], name: str, dits: dict[str, int], encoders: dict[str, int]) -> None:
    pipe = pipes[name]
    assert {stack.component: len(stack.blocks) for stack in resolve(pipe).stacks} == dits
    both = resolve(pipe, "dit", "text_encoder")
    assert {stack.component: len(stack.blocks) for stack in both.stacks} == dits | encoders
    only = resolve(pipe, "text_encoder")
    assert {stack.component: stack.kind for stack in only.stacks} == dict.fromkeys(encoders, "encoder")


@pytest.mark.parametrize("name", list(BUILDERS))
def test_components_are_the_modules_of_the_pipeline(pipes: dict[str, Any], name: str) -> None:
    modules = {path: module for path, module in pipes[name].components.items() if isinstance(module, nn.Module)}
    plan = resolve(pipes[name])
    assert {component.path: component.module for component in plan.components} == modules
    assert all(component.role != "resident" for component in plan.components)


@pytest.mark.parametrize("name", list(BUILDERS))
def test_block_paths_are_the_names_of_saved_weights(pipes: dict[str, Any], name: str) -> None:
    for stack in resolve(pipes[name], "dit", "text_encoder").stacks:
        component = pipes[name].components[stack.component]
        keys = set(component.state_dict())
        for path, block, nbytes in zip(stack.block_paths, stack.blocks, stack.nbytes, strict=True):
            assert component.get_submodule(path) is block
            assert {f"{path}.{key}" for key in block.state_dict()} <= keys
            assert nbytes == sum(p.numel() * p.element_size() for p in block.parameters())


@pytest.mark.parametrize(("policy", "expected"), [("spread", (1, 3)), ("leading", (0, 1))])
def test_residents_of_both_dits(pipes: dict[str, Any], policy: str, expected: tuple[int, ...]) -> None:
    options = {"dit": {"resident_layers": 2}}
    plan = resolve(pipes["wan"], layer_options=options, resident_policy=policy)
    assert [stack.resident for stack in plan.stacks] == [expected, expected]


@pytest.mark.parametrize("absent", ["transformer", "transformer_2"])
def test_wan_with_a_single_dit(absent: str) -> None:
    pipe, _ = build_wan()
    setattr(pipe, absent, None)
    assert [stack.component for stack in resolve(pipe).stacks] == [
        name for name in ("transformer", "transformer_2") if name != absent
    ]
    for name in ("transformer", "transformer_2"):
        setattr(pipe, name, None)
    with pytest.raises(ValueError, match="WanPipeline has no DiT"):
        resolve(pipe)


def test_image_encoder_of_wan_2_1() -> None:
    pipe, _ = build_wan_i2v(image_encoder=True)
    plan = resolve(pipe, "dit", "image_encoder")
    assert [stack.component for stack in plan.stacks] == ["transformer", "image_encoder"]


def test_sd3_without_t5() -> None:
    pipe, _ = build_sd3(t5=False)
    plan = resolve(pipe, "text_encoder")
    assert [stack.component for stack in plan.stacks] == ["text_encoder", "text_encoder_2"]


def test_a_subclass_and_a_user_s_own_declarations() -> None:
    from diffusers import WanPipeline

    from diffusers_omni_offload.declarations import OffloadPlan

    class Mine(WanPipeline):
        pass

    class Declared(WanPipeline):
        _dit_modules = ["transformer_2"]
        _encoder_modules = ["text_encoder"]
        _vae_modules = ["vae"]
        _offload_plan = OffloadPlan(block_attrs={"transformer_2": ("blocks",)})

    pipe, _ = build_wan()
    pipe.__class__ = Mine
    assert [stack.component for stack in resolve(pipe).stacks] == ["transformer", "transformer_2"]
    pipe.__class__ = Declared
    plan = resolve(pipe)
    assert [stack.component for stack in plan.stacks] == ["transformer_2"]
    assert plan.component("transformer").role == "resident"


def test_modules_beside_the_registered_components_are_listed() -> None:
    pipe, _ = build_sd3()
    pipe.upscaler = nn.Linear(2, 2)
    assert resolve(pipe).component("upscaler").role == "resident"


def test_a_pipeline_within_a_pipeline() -> None:
    inner, _ = build_sd3()

    class Wrapper:
        _dit_modules = ["pipe.transformer"]
        _encoder_modules = ["pipe.text_encoder"]
        _vae_modules = ["pipe.vae"]

        def __init__(self) -> None:
            self.pipe = inner

    inner.transformer._layerwise_offload_blocks_attrs = ["transformer_blocks"]
    plan = resolve_offload_plan(Wrapper(), OffloadConfig.from_options("layer"))
    assert [stack.component for stack in plan.stacks] == ["pipe.transformer"]
    assert {component.path for component in plan.components} == {
        f"pipe.{name}" for name, module in inner.components.items() if isinstance(module, nn.Module)
    }


def snapshot(pipe: Any) -> dict[str, Any]:
    """All state that an impure resolver could change: attributes, hooks, classes, tensors with devices and versions."""
    state: dict[str, Any] = {"pipe": (type(pipe), {key: id(value) for key, value in vars(pipe).items()})}
    for name, component in pipe.components.items():
        if not isinstance(component, nn.Module):
            continue
        for path, module in component.named_modules():
            attributes = {key: id(value) for key, value in vars(module).items()}
            hooks = (len(module._forward_pre_hooks), len(module._forward_hooks), "_diffusers_hook" in vars(module))
            state[f"{name}/{path}"] = (type(module), attributes, hooks, module.training)
        for path, tensor in [*component.named_parameters(), *component.named_buffers()]:
            pointer = None if tensor.is_meta else tensor.data_ptr()
            state[f"{name}//{path}"] = (id(tensor), tensor._version, tensor.device, pointer, tensor.requires_grad)
    return state


@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize("name", list(BUILDERS))
def test_resolving_is_pure(pipes: dict[str, Any], name: str, on_meta: bool) -> None:
    pipe = BUILDERS[name]()[0] if on_meta else pipes[name]
    if on_meta:
        for component in pipe.components.values():
            if isinstance(component, nn.Module):
                component.to("meta")
    before, threads = snapshot(pipe), torch.get_num_threads()
    plans = [
        resolve(pipe, "dit", "text_encoder", layer_options={"dit": {"resident_layers": 2}}),
        resolve(pipe, "dit", "text_encoder", layer_options={"dit": {"resident_layers": 2}}),
    ]
    assert str(plans[0])
    assert snapshot(pipe) == before and torch.get_num_threads() == threads
    assert plans[0] == plans[1]
    if on_meta:
        on_cpu = resolve(pipes[name], "dit", "text_encoder", layer_options={"dit": {"resident_layers": 2}})
        # Moving to the meta device unties tied embeddings, which lie beside the blocks; the stacks are the same.
        assert [repr(stack) for stack in on_cpu.stacks] == [repr(stack) for stack in plans[0].stacks]


def test_the_table_of_a_real_pipeline(pipes: dict[str, Any]) -> None:
    text = str(resolve(pipes["wan"], "dit", "text_encoder", layer_options={"dit": {"resident_layers": 2}}))
    lines = text.splitlines()
    assert lines[0].startswith("distributed-layerwise plan: ") and lines[0].endswith("KiB streamed")
    assert "2 of 4 blocks streamed" in lines[1] and "2 resident" in lines[1]
    assert "2 of 2 blocks streamed" in text and "on the device" in text
    assert all(len(line) <= 140 for line in lines)


def test_a_modular_pipeline_has_the_same_declarations() -> None:
    from diffusers import WanModularPipeline

    stock, _ = build_wan(two_stage=False)
    pipe = WanModularPipeline()
    with pytest.raises(ValueError, match="none of transformer, transformer_2 is loaded"):
        resolve(pipe)
    pipe.update_components(transformer=stock.transformer, text_encoder=stock.text_encoder)
    plan = resolve(pipe, "dit", "text_encoder")
    assert {stack.component: len(stack.blocks) for stack in plan.stacks} == {"transformer": 4, "text_encoder": 2}
    assert [component.path for component in plan.components] == ["transformer", "text_encoder"]
