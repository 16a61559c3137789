"""Every family of the table of supported models: its blocks, and the output of the resident run, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from diffusers_omni_offload import disable_omni_offload, enable_omni_offload
from diffusers_omni_offload.topology.plan import ResolvedPlan
from tests import tiny
from tests.comparing import leftovers
from tests.equality import Call, assert_equal_outputs, assert_no_hazards, outputs, scale
from tests.resolving import with_role

DTYPES = (torch.float32, torch.bfloat16)

Containers = dict[str, tuple[str, ...]]

DOUBLE_AND_SINGLE = {"transformer": ("transformer_blocks", "single_transformer_blocks")}
MINIMAX = {"transformer": ("blocks",), "transformer.token_refiner": ("blocks",)}
SOULX = {"cfm_decoder.model.diff_estimator": ("layers",)}

# The DiTs' stacks: component -> its block containers, in the order in which they run.
DITS: dict[str, Containers] = {
    "wan": {"transformer": ("blocks",), "transformer_2": ("blocks",)},
    "wan_i2v": {"transformer": ("blocks",), "transformer_2": ("blocks",)},
    "flux2": DOUBLE_AND_SINGLE,
    "sd3": {"transformer": ("transformer_blocks",)},
    "qwen_image": {"transformer": ("transformer_blocks",)},
    "longcat_image": DOUBLE_AND_SINGLE,
    "ovis_image": DOUBLE_AND_SINGLE,
    "sdxl": {"unet": ("down_blocks", "up_blocks")},
    "cosmos3_omni": {"transformer": ("layers",)},
    "cosmos3_split": {"transformer.language_model": ("layers",), "transformer": ("gen_layers",)},
    "minimax_h3": {"transformer": ("transformer_blocks",), "transformer.token_refiner": ("refiner_blocks",)},
    "minimax_h3_spec": MINIMAX,
    "minimax_h3_spec_reference": {
        **MINIMAX,
        "transformers_ref": ("blocks",),
        "transformers_ref.token_refiner": ("blocks",),
    },
    "nextstep": {"model": ("layers",)},
    "soulx_singer_svs": SOULX,
    "soulx_singer_svc": SOULX,
    "bagel": {"language_model.model": ("layers",)},
}

CLIP_TEXT, QWEN_VL = ("text_model.encoder.layers",), ("model.visual.blocks", "model.language_model.layers")
OF_ITS_OWN = {"text_encoder": ("vision.blocks", "text_model.layers")}

# The text encoders' stacks, for families that have any.
ENCODERS: dict[str, Containers] = {
    "wan": {"text_encoder": ("encoder.block",)},
    "wan_i2v": {"text_encoder": ("encoder.block",)},
    "flux2": {"text_encoder": ("model.vision_tower.transformer.layers", "model.language_model.layers")},
    "sd3": {"text_encoder": CLIP_TEXT, "text_encoder_2": CLIP_TEXT, "text_encoder_3": ("encoder.block",)},
    "qwen_image": {"text_encoder": QWEN_VL},
    "longcat_image": {"text_encoder": QWEN_VL},
    "ovis_image": {"text_encoder": ("layers",)},
    "sdxl": {"text_encoder": ("encoder.layers",), "text_encoder_2": CLIP_TEXT},
    "minimax_h3": {"text_encoder": QWEN_VL},
    "minimax_h3_spec": OF_ITS_OWN,
    "minimax_h3_spec_reference": OF_ITS_OWN,
}

BUILDERS = {
    **tiny.BUILDERS,
    # Four blocks at least, so that two can be resident.
    "minimax_h3": lambda: tiny.build_minimax_h3(num_layers=4),
    **tiny.STANDINS,
}

# What `enable_omni_offload` is called with.
CHOICES: dict[str, dict[str, Any]] = {
    "dit": {"mode": "layer"},
    "dit_and_text_encoder": {"mode": "layer", "components": ["dit", "text_encoder"]},
    "two_resident": {"mode": "layer", "layer_options": {"dit": {"resident_layers": 2}}},
    "module": {"mode": "module"},
    "mixed": {"mode": "layer", "components": {"dit": "layer", "text_encoder": "module", "vae": "module"}},
}

CASES = [
    (name, choice)
    for name in DITS
    for choice, arguments in CHOICES.items()
    if name in ENCODERS or "text_encoder" not in arguments.get("components", ())
]


def build(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Call]:
    pipe, call = BUILDERS[name]()
    return pipe.to(dtype), call


def build_resident(name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[Any, Call]:
    pipe, call = build(name, dtype)
    return pipe.to(device), call


@cache
def resident_outputs(name: str, device: torch.device, dtype: torch.dtype) -> list[np.ndarray]:
    """Three calls of the pipeline that lives on the device."""
    found = outputs(*build_resident(name, device, dtype))
    assert all(np.isfinite(output).all() and output.std() > 0 for output in found)
    return found


def test_every_family_is_here() -> None:
    assert set(DITS) == set(BUILDERS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "choice"), CASES)
def test_equal_to_the_resident_run(
    name: str, choice: str, dtype: torch.dtype, device: torch.device, sim: ModuleType
) -> None:
    pipe, call = build(name, dtype)
    handle = enable_omni_offload(pipe, **CHOICES[choice])
    what = f"{name} in {dtype}, {choice}"
    assert_equal_outputs(outputs(pipe, call), resident_outputs(name, device, dtype), what)
    assert_no_hazards(sim, what)
    assert handle.bytes_moved > 0, what
    disable_omni_offload(pipe)
    assert leftovers(pipe) == [], what
    assert {tensor.device.type for tensor in weights(pipe)} == {"cpu"}, what


def weights(pipe: Any) -> Iterator[torch.Tensor]:
    modules = pipe.children() if isinstance(pipe, nn.Module) else pipe.components.values()
    for module in modules:
        if isinstance(module, nn.Module):
            yield from module.parameters()
            yield from module.buffers()


# ---------------------------------------------------------------------- the blocks


@pytest.mark.parametrize("name", DITS)
def test_the_plan_has_exactly_the_blocks_of_the_table(name: str, device: torch.device) -> None:
    pipe, _ = build(name)
    components = ["dit", "text_encoder"] if name in ENCODERS else ["dit"]
    plan = enable_omni_offload(pipe, "layer", components=components).plan
    expected = {**DITS[name], **ENCODERS.get(name, {})}
    assert {stack.component for stack in plan.stacks} == set(expected)
    for stack in plan.stacks:
        owner = module_at(pipe, stack.component)
        lists = [module_at(owner, container) for container in expected[stack.component]]
        assert [id(block) for block in stack.blocks] == [id(block) for blocks in lists for block in blocks]
        assert stack.kind == ("dit" if stack.component in DITS[name] else "encoder")


@pytest.mark.parametrize("name", DITS)
def test_resident_layers_are_kept_where_the_plan_allows_it(name: str, device: torch.device) -> None:
    pipe, _ = build(name)
    plan = enable_omni_offload(pipe, **CHOICES["two_resident"]).plan
    kept = {stack.component: len(stack.resident) for stack in plan.stacks}
    assert kept == {path: 0 if path.endswith("token_refiner") else 2 for path in DITS[name]}


def module_at(owner: Any, path: str) -> Any:
    for part in path.split("."):
        owner = getattr(owner, part)
    return owner


# ---------------------------------------------------------------------- equality means something


def selected_for_scaling(name: str) -> list[str]:
    # Stock MiniMax-H3 needs 52 layers in its text encoder, which would take minutes; a stand-in has one of few layers.
    return ["dit", "text_encoder"] if name in ENCODERS and name != "minimax_h3" else ["dit"]


@pytest.mark.parametrize(
    "name", [name for name in DITS if name not in ("wan", "wan_i2v", "flux2", "sd3", "qwen_image")]
)
def test_scaling_any_streamed_block_changes_the_output(name: str, device: torch.device) -> None:
    """Scaled in place, at rest: the next call shows it, exactly as a resident pipeline would. `test_exact` has the
    other families."""
    resident, call = build_resident(name, device)
    expected = tiny.run(resident, call)
    pipe, call = build(name)
    plan = enable_omni_offload(pipe, "layer", components=selected_for_scaling(name)).plan
    ran = blocks_that_run(pipe, call, plan)
    for path, block in plan.streamed_blocks():
        restore, restore_twin = scale(block), scale(module_at(resident, path))
        found, reference = tiny.run(pipe, call), tiny.run(resident, call)
        assert np.array_equal(found, reference), f"{path}: scaled, it differs from the scaled resident pipeline"
        changes = not np.array_equal(found, expected)
        assert changes == (path in ran) or is_last_of_an_encoder(path, plan), f"{path}: it runs, and doesn't show"
        restore()
        restore_twin()
    assert np.array_equal(tiny.run(pipe, call), expected)
    # The prompts of stock pipelines have no image, so vision blocks are idle; so is a DiT that another workflow uses.
    other = "transformer." if name == "minimax_h3_spec_reference" else "text_encoder.model.visual"
    idle = {path for path, _ in plan.streamed_blocks()} - ran
    assert all(path.startswith((other, "text_encoder.vision.blocks")) for path in idle)


def is_last_of_an_encoder(path: str, plan: ResolvedPlan) -> bool:
    """Embeddings may be taken before the last layer runs."""
    return any(stack.kind == "encoder" and path == stack.path(len(stack.blocks) - 1) for stack in plan.stacks)


def blocks_that_run(pipe: Any, call: Call, plan: ResolvedPlan) -> set[str]:
    ran: set[str] = set()
    removable = [
        block.register_forward_pre_hook(lambda module, arguments, path=path: ran.add(path))
        for path, block in plan.streamed_blocks()
    ]
    tiny.run(pipe, call)
    for hook in removable:
        hook.remove()
    return ran


# ---------------------------------------------------------------------- what is odd about some of them


def test_a_pass_that_runs_no_layer_moves_nothing(device: torch.device) -> None:
    """BAGEL asks its DiT for embeddings alone, several times a step."""
    pipe, _ = build("bagel")
    handle = enable_omni_offload(pipe, "layer")
    with handle.call():
        embeddings = pipe.language_model.forward(torch.tensor([[1, 2]], device=device), return_embeddings_only=True)
    assert embeddings.device.type == device.type and handle.loads == 0


def test_one_module_by_four_paths_is_one_component(device: torch.device) -> None:
    pipe, _ = build("bagel")
    plan = enable_omni_offload(pipe, "layer").plan
    dit = pipe.language_model.model
    assert pipe.transformer is dit is pipe.bagel.language_model.model
    assert [component.path for component in plan.components if component.module is dit] == ["language_model.model"]
    residents = [path for path in with_role(plan, "resident") if path.startswith("bagel.")]
    assert len(residents) == 7


def test_calling_a_model_without_forward_is_still_an_error(device: torch.device) -> None:
    pipe, _ = build("nextstep")
    enable_omni_offload(pipe, "layer")
    with pytest.raises(NotImplementedError):
        pipe.model(torch.zeros(1))


@pytest.mark.parametrize("name", ["soulx_singer_svs", "soulx_singer_svc"])
def test_the_dtype_of_the_first_parameter_is_that_of_a_streamed_layer(name: str, device: torch.device) -> None:
    pipe, _ = build(name, torch.bfloat16)
    plan = enable_omni_offload(pipe, "layer").plan
    first = next(pipe.transformer.parameters())
    assert any(parameter is first for _, block in plan.streamed_blocks() for parameter in block.parameters())
    assert first.dtype == torch.bfloat16 and pipe.vocoder.out.weight.dtype == torch.float32


def test_the_reasoner_runs_once_a_prompt_and_the_generator_in_each_step(device: torch.device) -> None:
    pipe, call = build("cosmos3_split")
    enable_omni_offload(pipe, "layer")
    order: list[str] = []
    for name, layers in (
        ("reasoner", pipe.transformer.language_model.layers),
        ("generator", pipe.transformer.gen_layers),
    ):
        layers[0].register_forward_pre_hook(lambda module, arguments, name=name: order.append(name))
    tiny.run(pipe, call)
    assert order == ["reasoner", "generator"] * 2 + ["generator"] * 4


def test_one_phase_at_a_time_is_on_the_device(device: torch.device) -> None:
    """Cosmos 3's split form moves its phases itself in module mode."""
    pipe, call = build("cosmos3_split")
    handle = enable_omni_offload(pipe, "module")
    phases = {"reasoner": pipe.transformer.language_model.layers, "generator": pipe.transformer.gen_layers}
    held: list[int] = []
    for name, layers in phases.items():
        others = [layer for other, each in phases.items() if other != name for layer in each]

        def check(module: nn.Module, arguments: Any, output: Any, others: list[nn.Module] = others) -> None:
            assert {tensor.device.type for other in others for tensor in other.parameters()} == {"cpu"}
            held.append(handle.device_bytes)

        layers[-1].register_forward_hook(check)
    tiny.run(pipe, call)
    sizes = [sum(tensor.nbytes for tensor in layers.parameters()) for layers in phases.values()]
    assert len(held) == 8 and max(sizes) <= max(held) < sum(sizes)


def test_phases_can_not_be_selected(device: torch.device) -> None:
    pipe, _ = build("cosmos3_split")
    with pytest.raises(ValueError, match=r"moves its own phases.*leave components out"):
        enable_omni_offload(pipe, "module", components=["dit"])


def test_components_on_demand_go_where_the_pipeline_wants_them(device: torch.device) -> None:
    pipe, _ = build("minimax_h3_spec")
    assert enable_omni_offload(pipe, "layer").plan.on_demand == ("text_encoder", "video_vae", "audio_vae")


@pytest.mark.parametrize("name", tiny.STANDINS)
def test_calls_on_the_cpu_before_and_after(name: str, device: torch.device) -> None:
    """What a model keeps from a call doesn't outlive the move: MiniMax-H3's DiT keeps tensors until it is moved."""
    pipe, call = build(name)
    expected = tiny.run(pipe, call)
    enable_omni_offload(pipe, "layer")
    assert np.array_equal(tiny.run(pipe, call), resident_outputs(name, device, torch.float32)[0])
    disable_omni_offload(pipe)
    assert np.array_equal(tiny.run(pipe, call), expected)
