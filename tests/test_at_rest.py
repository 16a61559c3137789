"""At rest an offloaded pipeline is an ordinary one: its weights can be read, saved, cast, edited and shared."""

from __future__ import annotations

import filecmp
import gc
import io
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import diffusers_omni_offload  # noqa: F401  (adds the methods to pipelines)
from tests import tiny

NAMES = ["wan", "sd3", "qwen_image"]

#: The DiT whose weights are edited (for Wan the one of the late steps, so that a callback's edit still counts) and
#: its stack.
DIT = {"wan": "transformer_2", "sd3": "transformer", "qwen_image": "transformer"}
STACK = {"wan": "blocks", "sd3": "transformer_blocks", "qwen_image": "transformer_blocks"}

TARGETS = ["streamed", "resident", "non-block", "text encoder", "vae"]


def offloaded(name: str, **arguments: Any) -> tuple[Any, Any]:
    """A tiny pipeline with streamed and resident blocks in each DiT."""
    pipe, call = tiny.BUILDERS[name]()
    arguments.setdefault("layer_options", {"dit": {"resident_layers": 1}})
    pipe.enable_omni_offload("layer", **arguments)
    return pipe, call


def resident(name: str, device: torch.device) -> Any:
    return tiny.BUILDERS[name]()[0].to(device)


def modules_of(pipe: Any) -> dict[str, nn.Module]:
    return {name: module for name, module in pipe.components.items() if isinstance(module, nn.Module)}


def placed_indices(pipe: Any, name: str) -> tuple[int, int]:
    """A streamed and a resident block of the DiT that is edited."""
    stack = next(stack for stack in pipe.omni_offload.plan.stacks if stack.component == DIT[name])
    return stack.streamed[-1], stack.resident[0]


def parameter_of(pipe: Any, name: str, target: str, indices: tuple[int, int]) -> tuple[nn.Module, str]:
    """The component of a weight of that kind, and the weight's name in it: a matrix that the output depends on."""
    dit, stack = getattr(pipe, DIT[name]), STACK[name]
    if target in ("streamed", "resident"):
        index = indices[0] if target == "streamed" else indices[1]
        block = getattr(dit, stack)[index]
        found = next(key for key, p in block.named_parameters() if p.dim() == 2 and key.endswith("to_v.weight"))
        return dit, f"{stack}.{index}.{found}"
    if target == "non-block":
        return dit, "proj_out.weight"
    if target == "text encoder":
        encoder = pipe.text_encoder
        return encoder, next(key for key, p in encoder.named_parameters() if p.dim() == 2 and "layer" in key)
    vae = pipe.vae
    return vae, next(key for key, p in vae.named_parameters() if "decoder" in key and p.dim() > 2)


def delta_for(parameter: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    noise = 0.1 * torch.randn(parameter.shape, generator=generator)
    return noise.to(parameter.device, parameter.dtype)


# Edits: each takes the component and the parameter's name.


def add_to_data(component: nn.Module, key: str) -> None:
    parameter = component.get_parameter(key)
    parameter.data += delta_for(parameter)


def replace_data(component: nn.Module, key: str) -> None:
    parameter = component.get_parameter(key)
    parameter.data = parameter.data + delta_for(parameter)


def replace_data_from_host(component: nn.Module, key: str) -> None:
    parameter = component.get_parameter(key)
    where = parameter.device if getattr(component, "_hf_hook", None) is None else "cpu"
    parameter.data = (parameter.data + delta_for(parameter)).to(where)


def replace_data_from_device(component: nn.Module, key: str) -> None:
    parameter = component.get_parameter(key)
    parameter.data = (parameter.data + delta_for(parameter)).to("sim")


def in_place(component: nn.Module, key: str) -> None:
    with torch.no_grad():
        parameter = component.get_parameter(key)
        parameter.add_(delta_for(parameter)).mul_(1.5)


def in_place_in_inference_mode(component: nn.Module, key: str) -> None:
    with torch.inference_mode():
        parameter = component.get_parameter(key)
        parameter.add_(delta_for(parameter))


def copy_into(component: nn.Module, key: str) -> None:
    with torch.no_grad():
        parameter = component.get_parameter(key)
        parameter.copy_(parameter.cpu() * 1.25)


def load(component: nn.Module, key: str) -> None:
    state = {name: value.cpu() for name, value in component.state_dict().items()}
    state[key] = state[key] * 1.5
    component.load_state_dict(state)


def load_and_assign(component: nn.Module, key: str) -> None:
    state = {name: value.clone() for name, value in component.state_dict().items()}
    state[key] = state[key] * 1.5
    component.load_state_dict(state, assign=True)


def new_parameter(component: nn.Module, key: str) -> None:
    owner, _, name = key.rpartition(".")
    parameter = component.get_parameter(key)
    setattr(component.get_submodule(owner), name, nn.Parameter(parameter.data * 1.5))


def swap_with_transpose(component: nn.Module, key: str) -> None:
    parameter = component.get_parameter(key)
    flipped = (parameter.data + delta_for(parameter)).transpose(0, 1).contiguous().transpose(0, 1)
    parameter.data = flipped


EDITS = [
    add_to_data,
    replace_data,
    replace_data_from_host,
    replace_data_from_device,
    in_place,
    in_place_in_inference_mode,
    copy_into,
    load,
    load_and_assign,
    new_parameter,
    swap_with_transpose,
]
edits = pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
names = pytest.mark.parametrize("name", NAMES)


# Reading


@names
def test_parameters_are_true_and_keep_their_identity(device: torch.device, name: str) -> None:
    twin, _ = tiny.BUILDERS[name]()
    pipe, call = tiny.BUILDERS[name]()
    before = {
        path: [(key, id(p), p.requires_grad) for key, p in module.named_parameters()]
        for path, module in modules_of(pipe).items()
    }
    pipe.enable_omni_offload("layer", layer_options={"dit": {"resident_layers": 1}})
    for _ in range(2):
        for path, module in modules_of(pipe).items():
            other = modules_of(twin)[path]
            assert [(key, id(p), p.requires_grad) for key, p in module.named_parameters()] == before[path]
            assert sum(p.numel() for p in module.parameters()) == sum(p.numel() for p in other.parameters())
            pairs = [*zip(module.named_parameters(), other.named_parameters(), strict=True)]
            pairs += [*zip(module.named_buffers(), other.named_buffers(), strict=True)]
            for (key, mine), (other_key, theirs) in pairs:
                assert key == other_key
                assert (mine.shape, mine.dtype, mine.stride()) == (theirs.shape, theirs.dtype, theirs.stride())
                assert torch.equal(mine.cpu(), theirs), f"{path}.{key}"
            assert module.dtype == other.dtype
            if hasattr(module, "num_parameters"):
                assert module.num_parameters() == other.num_parameters()
        tiny.run(pipe, call)


@names
def test_state_dict_is_the_original_s(device: torch.device, name: str) -> None:
    twin, _ = tiny.BUILDERS[name]()
    pipe, call = offloaded(name)
    for _ in range(2):
        for path, module in modules_of(pipe).items():
            mine, theirs = module.state_dict(), modules_of(twin)[path].state_dict()
            assert list(mine) == list(theirs)
            for key in mine:
                assert torch.equal(mine[key].cpu(), theirs[key]), f"{path}.{key}"
        tiny.run(pipe, call)


@names
def test_torch_save_of_a_state_dict_has_the_ordinary_size(device: torch.device, name: str) -> None:
    def saved(module: nn.Module) -> io.BytesIO:
        file = io.BytesIO()
        torch.save(module.state_dict(), file)
        return file

    twin, _ = tiny.BUILDERS[name]()
    pipe, call = offloaded(name)
    tiny.run(pipe, call)
    streamed, kept = placed_indices(pipe, name)
    for index in (streamed, kept):
        file = saved(getattr(getattr(pipe, DIT[name]), STACK[name])[index])
        other = saved(getattr(getattr(twin, DIT[name]), STACK[name])[index])
        if index == streamed:
            assert file.tell() == other.tell()
    for path, module in modules_of(pipe).items():
        file, other = saved(module), saved(modules_of(twin)[path])
        # The names of devices differ in length.
        assert abs(file.tell() - other.tell()) <= 32 * len(module.state_dict()), path
        file.seek(0)
        loaded = torch.load(file, map_location="cpu", weights_only=True)
        assert all(torch.equal(value, modules_of(twin)[path].state_dict()[key]) for key, value in loaded.items())


# Saving


def assert_same_files(mine: Path, ordinary: Path) -> None:
    files = sorted(path.relative_to(ordinary) for path in ordinary.rglob("*") if path.is_file())
    assert sorted(path.relative_to(mine) for path in mine.rglob("*") if path.is_file()) == files
    for path in files:
        if path.name == "tokenizer.json":
            # Tokenizers save how they were last called.
            continue
        assert (mine / path).stat().st_size == (ordinary / path).stat().st_size, path
        assert filecmp.cmp(mine / path, ordinary / path, shallow=False), path


@names
@pytest.mark.parametrize("max_shard_size", [None, "40KB"])
def test_saving_a_pipeline(device: torch.device, tmp_path: Path, name: str, max_shard_size: str | None) -> None:
    arguments = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    twin, call = tiny.BUILDERS[name]()
    twin.save_pretrained(tmp_path / "ordinary", **arguments)
    expected = tiny.run(twin.to(device), call)
    pipe, _ = offloaded(name)
    for round_, folder in enumerate(("before", "after")):
        pipe.save_pretrained(tmp_path / folder, **arguments)
        assert_same_files(tmp_path / folder, tmp_path / "ordinary")
        if max_shard_size is not None:
            assert len([*(tmp_path / folder / DIT[name]).glob("*.safetensors")]) > 1
        assert np.array_equal(tiny.run(pipe, call), expected), round_
    absent = {key: None for key, value in twin.components.items() if value is None}
    loaded = type(twin).from_pretrained(tmp_path / "after", local_files_only=True, **absent)
    assert np.array_equal(tiny.run(tiny.align_parameters(loaded).to(device), call), expected)


@names
def test_a_loaded_pipeline_can_be_offloaded(device: torch.device, tmp_path: Path, name: str) -> None:
    expected = tiny.run(resident(name, device), tiny.BUILDERS[name]()[1])
    pipe, call = offloaded(name)
    loaded = tiny.reload(pipe, tmp_path)
    assert loaded.omni_offload is None and type(loaded).__name__ == type(pipe).__name__
    loaded.enable_omni_offload("layer")
    for _ in range(2):
        assert np.array_equal(tiny.run(loaded, call), expected)
    assert np.array_equal(tiny.run(pipe, call), expected)


@names
def test_saving_a_component(device: torch.device, tmp_path: Path, name: str) -> None:
    twin, call = tiny.BUILDERS[name]()
    pipe, _ = offloaded(name, components=["dit", "text_encoder"])
    tiny.run(pipe, call)
    for path in (DIT[name], "text_encoder", "vae"):
        modules_of(twin)[path].save_pretrained(tmp_path / path / "ordinary", max_shard_size="40KB")
        module = modules_of(pipe)[path]
        module.save_pretrained(tmp_path / path / "offloaded", max_shard_size="40KB")
        assert_same_files(tmp_path / path / "offloaded", tmp_path / path / "ordinary")
        loaded = type(modules_of(twin)[path]).from_pretrained(tmp_path / path / "offloaded", local_files_only=True)
        state = loaded.state_dict()
        assert all(torch.equal(value, state[key]) for key, value in modules_of(twin)[path].state_dict().items())


# Editing


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        # Every edit on one pipeline and every third on the others; the rest when there is time.
        pytest.param(name, edit, marks=[pytest.mark.slow] if name != "sd3" and index % 3 else [])
        for name in NAMES
        for index, edit in enumerate(EDITS)
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_edits_between_calls(device: torch.device, name: str, edit: Callable[[nn.Module, str], None]) -> None:
    twin = resident(name, device)
    pipe, call = offloaded(name)
    indices = placed_indices(pipe, name)
    output = tiny.run(pipe, call)
    assert np.array_equal(output, tiny.run(twin, call))
    for target in TARGETS:
        for edited in (twin, pipe):
            edit(*parameter_of(edited, name, target, indices))
        before, output = output, tiny.run(pipe, call)
        assert np.array_equal(output, tiny.run(twin, call)), target
        assert not np.array_equal(output, before), f"{target}: the edit doesn't matter"
        assert np.array_equal(tiny.run(pipe, call), output)
    pipe.disable_omni_offload()
    assert np.array_equal(tiny.run(pipe.to(device), call), output)


def check_edit_from_callback(twin: Any, pipe: Any, call: Callable[[], dict[str, Any]], edit: Any) -> None:
    """`edit(pipeline)` after the first step, with and without offload."""

    def edit_and_refresh(edited: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step == 0:
            edit(edited)
            if edited is pipe:
                pipe.omni_offload.refresh()
        return {}

    def with_callback() -> dict[str, Any]:
        return {**call(), "callback_on_step_end": edit_and_refresh}

    plain = tiny.run(pipe, call)
    expected = tiny.run(twin, with_callback)
    assert np.array_equal(tiny.run(pipe, with_callback), expected)
    assert not np.array_equal(expected, plain)
    # And it stays edited.
    assert np.array_equal(tiny.run(pipe, call), tiny.run(twin, call))


@pytest.mark.parametrize("target", TARGETS[:3])
@pytest.mark.parametrize(
    ("name", "edit"),
    [
        pytest.param(name, edit, marks=[pytest.mark.slow] if name != "sd3" and edit is not add_to_data else [])
        for name in NAMES
        for edit in (add_to_data, replace_data, load_and_assign)
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_edits_from_a_callback(
    device: torch.device, name: str, edit: Callable[[nn.Module, str], None], target: str
) -> None:
    twin = resident(name, device)
    pipe, call = offloaded(name)
    indices = placed_indices(pipe, name)
    check_edit_from_callback(twin, pipe, call, lambda edited: edit(*parameter_of(edited, name, target, indices)))


@edits
@pytest.mark.parametrize("index", range(6))
def test_edits_of_each_toy_block_from_a_callback(
    device: torch.device, edit: Callable[[nn.Module, str], None], index: int
) -> None:
    """The first blocks are on their way to the device while the callback runs."""
    twin, call = tiny.build_toy(5)
    twin.to(device)
    pipe, _ = tiny.build_toy(5)
    pipe.enable_omni_offload("layer", layer_options={"dit": {"resident_layers": 1}})
    key = f"blocks.{index}.expand.weight" if index < 5 else "proj_out.weight"
    check_edit_from_callback(twin, pipe, call, lambda edited: edit(edited.transformer, key))


@names
def test_edits_of_dtype(device: torch.device, name: str) -> None:
    twin = resident(name, device)
    pipe, call = offloaded(name)
    indices = placed_indices(pipe, name)
    for target in TARGETS[:2]:
        for edited in (twin, pipe):
            component, key = parameter_of(edited, name, target, indices)
            block = component.get_submodule(".".join(key.split(".")[:2]))
            block.to(torch.bfloat16).to(torch.float32)
        assert np.array_equal(tiny.run(pipe, call), tiny.run(twin, call))
    for edited in (twin, pipe):
        module = getattr(edited, DIT[name])
        for parameter in module.parameters():
            parameter.data = parameter.data.to(torch.float64)
        for buffer in module.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(torch.float64)
    state = getattr(pipe, DIT[name]).state_dict()
    assert all(value.dtype == torch.float64 for value in state.values() if value.is_floating_point())


@pytest.mark.parametrize("target", ["streamed", "resident"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_data_of_another_dtype(device: torch.device, target: str, dtype: torch.dtype) -> None:
    twin, call = tiny.build_toy(4)
    twin.to(device)
    pipe, _ = tiny.build_toy(4)
    handle = pipe.enable_omni_offload("layer", layer_options={"dit": {"resident_layers": 1}})
    stack = handle.plan.stacks[0]
    index = stack.streamed[-1] if target == "streamed" else stack.resident[0]
    before = tiny.run(pipe, call)
    for edited in (twin, pipe):
        gate = edited.transformer.blocks[index].gate
        gate.data = gate.data.to(dtype) * 3
    output = tiny.run(pipe, call)
    assert np.array_equal(output, tiny.run(twin, call)) and not np.array_equal(output, before)
    assert pipe.transformer.blocks[index].gate.dtype == dtype


def test_a_block_may_grow_and_shrink(device: torch.device) -> None:
    twin, call = tiny.build_toy(4)
    twin.to(device)
    pipe, _ = tiny.build_toy(4)
    handle = pipe.enable_omni_offload("layer")
    tiny.run(pipe, call)
    for hidden in (500, 30, 900):
        for edited in (twin, pipe):
            block = edited.transformer.blocks[2]
            where = block.expand.weight.device
            other = tiny.ToyDiT(1, sizes=[hidden]).blocks[0].to(where)
            block.expand, block.contract = other.expand, other.contract
            block.register_buffer("scale", other.scale, persistent=False)
        for _ in range(2):
            assert np.array_equal(tiny.run(pipe, call), tiny.run(twin, call))
        assert handle.device_bytes >= 2 * sum(p.nbytes for p in pipe.transformer.blocks[2].parameters())


def test_an_edit_without_refresh_counts_from_the_next_call_on(device: torch.device) -> None:
    twin, call = tiny.build_toy(4)
    twin.to(device)
    pipe, _ = tiny.build_toy(4)
    pipe.enable_omni_offload("layer")
    # From the first call on it is known how many forwards there are, so nothing is in flight after the last one.
    tiny.run(pipe, call)

    def edit(edited: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step == 1:
            for block in edited.transformer.blocks:
                block.gate.data += 0.5
        return {}

    tiny.run(pipe, lambda: {**call(), "callback_on_step_end": edit})
    tiny.run(twin, lambda: {**call(), "callback_on_step_end": edit})
    assert np.array_equal(tiny.run(pipe, call), tiny.run(twin, call))


# Casting


@names
def test_casting_a_pipeline(device: torch.device, name: str) -> None:
    twin = resident(name, device)
    pipe, call = offloaded(name)
    for dtype in (torch.bfloat16, torch.float32):
        assert pipe.to(dtype) is pipe
        twin.to(dtype)
        assert pipe.dtype == dtype and pipe.omni_offload.is_enabled()
        for path, module in modules_of(pipe).items():
            other = modules_of(twin)[path].state_dict()
            for key, value in module.state_dict().items():
                assert value.dtype == other[key].dtype and torch.equal(value.cpu(), other[key].cpu()), f"{path}.{key}"
        for _ in range(2):
            assert np.array_equal(tiny.run(pipe, call), tiny.run(twin, call))
    assert pipe.to(dtype=torch.bfloat16) is pipe and pipe.dtype == torch.bfloat16


@names
@pytest.mark.parametrize("how", ["to", "to keyword", "method"])
def test_casting_a_component(device: torch.device, name: str, how: str) -> None:
    twin = resident(name, device)
    pipe, call = offloaded(name, components=["dit", "text_encoder"])
    tiny.run(pipe, call)
    for edited in (twin, pipe):
        for path in ("vae", DIT[name], "text_encoder"):
            component = getattr(edited, path)
            if how == "to":
                component.to(torch.float64).to(torch.float32)
            elif how == "to keyword":
                component.to(dtype=torch.float16).to(dtype=torch.float32)
            else:
                component.double().float()
    assert np.array_equal(tiny.run(pipe, call), tiny.run(twin, call))


# from_pipe


def sibling_class(name: str) -> tuple[type, dict[str, Any]]:
    import diffusers
    from PIL import Image

    pixels = np.random.default_rng(1).integers(0, 255, (32, 32, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    if name == "sd3":
        return diffusers.StableDiffusion3Img2ImgPipeline, {"image": image.resize((16, 16)), "strength": 1.0}
    if name == "qwen_image":
        return diffusers.QwenImageImg2ImgPipeline, {"image": image, "strength": 1.0}
    return diffusers.WanVideoToVideoPipeline, {"video": [image.resize((16, 16))] * 5, "strength": 1.0}


def sibling(pipe: Any, name: str, call: Callable[[], dict[str, Any]], **arguments: Any) -> tuple[Any, Any]:
    cls, extra = sibling_class(name)
    other = cls.from_pipe(pipe, **arguments)
    removed = {"num_frames", "guidance_scale_2"} if name == "wan" else set()

    def other_call() -> dict[str, Any]:
        return {key: value for key, value in {**call(), **extra}.items() if key not in removed}

    return other, other_call


@names
# Without a dtype diffusers takes float32.
@pytest.mark.parametrize("dtype", [None, pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16], ids=str)
def test_a_sibling_runs_and_sees_edits(device: torch.device, name: str, dtype: torch.dtype | None) -> None:
    arguments = {} if dtype is None else {"dtype": dtype}
    twin = resident(name, device)
    pipe, call = offloaded(name)
    indices = placed_indices(pipe, name)
    for edited in (twin, pipe):
        tiny.run(edited, call)
    if name == "wan" and dtype is not None:
        # The sibling has one DiT, the early one; the parent casts its inputs for both to the dtype of that one.
        for edited in (twin, pipe):
            edited.transformer_2.to(dtype)
    twin_sibling, sibling_call = sibling(twin, name, call, **arguments)
    other, _ = sibling(pipe, name, call, **arguments)
    assert other.omni_offload is None and type(other) is sibling_class(name)[0]
    assert other.transformer is pipe.transformer
    assert other.transformer.dtype == (dtype or torch.float32)
    output = tiny.run(other, sibling_call)
    assert np.array_equal(output, tiny.run(twin_sibling, sibling_call))
    assert np.array_equal(tiny.run(pipe, call), tiny.run(twin, call))
    for target in TARGETS[:3]:
        for edited in (twin, pipe):
            component, key = parameter_of(edited, name, target, indices)
            if name == "wan":
                component = edited.transformer
            add_to_data(component, key)
        before, output = output, tiny.run(other, sibling_call)
        assert np.array_equal(output, tiny.run(twin_sibling, sibling_call)), target
        assert not np.array_equal(output, before), target
        assert np.array_equal(tiny.run(pipe, call), tiny.run(twin, call)), target


@pytest.mark.parametrize("name", ["sd3", "qwen_image"])
def test_offloaded_siblings_share_one_master(device: torch.device, sim: ModuleType, name: str) -> None:
    twin = resident(name, device)
    twin_sibling, sibling_call = sibling(twin, name, tiny.BUILDERS[name]()[1])
    allocated = torch.accelerator.memory_allocated()
    pipe, call = offloaded(name)
    pinned, held = sim.stats()["pinned_current"], torch.accelerator.memory_allocated()
    other, _ = sibling(pipe, name, call)
    options = {"dit": {"resident_layers": 1}}
    handle = other.enable_omni_offload("layer", layer_options=options)
    assert handle is not pipe.omni_offload and handle.is_enabled()
    assert sim.stats()["pinned_current"] == pinned and torch.accelerator.memory_allocated() == held

    def check_both() -> None:
        for _ in range(2):
            assert np.array_equal(tiny.run(pipe, call), tiny.run(twin, call))
            assert np.array_equal(tiny.run(other, sibling_call), tiny.run(twin_sibling, sibling_call))

    check_both()
    indices = placed_indices(pipe, name)
    for target in TARGETS[:3]:
        for edited in (twin, pipe):
            add_to_data(*parameter_of(edited, name, target, indices))
    check_both()
    pipe.disable_omni_offload()
    assert other.omni_offload is handle and handle.is_enabled() and pipe.omni_offload is None
    check_both()
    pipe.enable_omni_offload("layer", layer_options=options)
    assert sim.stats()["pinned_current"] == pinned
    other.disable_omni_offload()
    check_both()
    pipe.disable_omni_offload()
    assert all(tensor.device.type == "cpu" for tensor in pipe.transformer.parameters())
    gc.collect()
    assert torch.accelerator.memory_allocated() <= allocated + (held - allocated) // 2


@pytest.mark.parametrize("deleted", ["first", "second"])
def test_deleting_one_of_two_offloaded_siblings(device: torch.device, sim: ModuleType, deleted: str) -> None:
    twin = resident("sd3", device)
    start = sim.stats()["pinned_current"]
    pipe, call = offloaded("sd3")
    pinned = sim.stats()["pinned_current"]
    other, sibling_call = sibling(pipe, "sd3", call)
    other.enable_omni_offload("layer", layer_options={"dit": {"resident_layers": 1}})
    tiny.run(other, sibling_call)
    expected = tiny.run(twin, call)
    if deleted == "first":
        twin, _ = sibling(twin, "sd3", call)
        expected = tiny.run(twin, sibling_call)
        kept, kept_call = other, sibling_call
    else:
        kept, kept_call = pipe, call
    del pipe, other
    gc.collect()
    for _ in range(2):
        assert np.array_equal(tiny.run(kept, kept_call), expected)
    assert sim.stats()["pinned_current"] == pinned
    kept.disable_omni_offload()
    assert sim.stats()["pinned_current"] == start
    assert all(tensor.device.type == "cpu" for tensor in kept.transformer.parameters())
    assert np.array_equal(tiny.run(kept.to(device), kept_call), expected)


# Direct calls


def record_inputs(pipe: Any, call: Any, module: nn.Module) -> list[tuple[Any, Any]]:
    """The arguments of every call of `module` during one call of the pipeline, on the CPU."""
    recorded: list[tuple[Any, Any]] = []

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        recorded.append(map_tensors((args, kwargs), lambda tensor: tensor.detach().cpu().clone()))

    hook = module.register_forward_pre_hook(note, with_kwargs=True)
    tiny.run(pipe, call)
    hook.remove()
    return recorded


def map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(item, function) for item in value)
    if isinstance(value, dict):
        return {key: map_tensors(item, function) for key, item in value.items()}
    return value


def first_tensor(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    values = value.values() if isinstance(value, dict) else value
    return next(first_tensor(item) for item in values if item is not None)


@torch.no_grad()
def forward(module: nn.Module, inputs: tuple[Any, Any], device: torch.device | str) -> torch.Tensor:
    args, kwargs = map_tensors(inputs, lambda tensor: tensor.to(device))
    return first_tensor(module(*args, **kwargs)).cpu()


@names
@pytest.mark.parametrize("inputs_on", ["cpu", "sim"])
def test_components_can_be_called_at_any_time(device: torch.device, name: str, inputs_on: str) -> None:
    twin = resident(name, device)
    pipe, call = offloaded(name, components=["dit", "text_encoder"])
    paths = [DIT[name], "text_encoder"]
    inputs = {path: record_inputs(twin, call, getattr(twin, path))[-1] for path in paths}

    def check() -> None:
        for path in [*paths, *reversed(paths)]:
            mine = forward(getattr(pipe, path), inputs[path], inputs_on)
            assert torch.equal(mine, forward(getattr(twin, path), inputs[path], device)), path

    check()
    expected = tiny.run(twin, call)
    for _ in range(2):
        assert np.array_equal(tiny.run(pipe, call), expected)
        check()
        indices = placed_indices(pipe, name)
        for edited in (twin, pipe):
            add_to_data(*parameter_of(edited, name, "streamed", indices))
            add_to_data(*parameter_of(edited, name, "text encoder", indices))
        check()
        expected = tiny.run(twin, call)
    # In the middle of a call.
    seen: list[int] = []

    def look(edited: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        check()
        seen.append(step)
        return {}

    assert np.array_equal(tiny.run(pipe, lambda: {**call(), "callback_on_step_end": look}), expected)
    assert seen == [0, 1]


@names
def test_encode_prompt_by_itself(device: torch.device, name: str) -> None:
    twin = resident(name, device)
    pipe, call = offloaded(name, components=["dit", "text_encoder"])
    arguments = {
        "wan": {"prompt": "dance", "max_sequence_length": 16},
        "sd3": {"prompt": "dance", "prompt_2": None, "prompt_3": None, "max_sequence_length": 16},
        "qwen_image": {"prompt": "dance"},
    }[name]
    for _ in range(2):
        with torch.no_grad():
            expected, found = twin.encode_prompt(**arguments), pipe.encode_prompt(**arguments)
        tensors = [(mine, theirs) for mine, theirs in zip(found, expected, strict=True) if mine is not None]
        assert tensors
        for mine, theirs in tensors:
            assert mine.device == theirs.device and torch.equal(mine.cpu(), theirs.cpu())
        assert np.array_equal(tiny.run(pipe, call), tiny.run(twin, call))


@names
def test_a_single_block_by_hand(device: torch.device, name: str) -> None:
    twin = resident(name, device)
    pipe, call = offloaded(name)
    streamed, kept = placed_indices(pipe, name)
    for index in (streamed, kept, streamed):
        block, other = (getattr(getattr(each, DIT[name]), STACK[name])[index] for each in (pipe, twin))
        inputs = record_inputs(twin, call, other)[0]
        expected = forward(other, inputs, device)
        assert torch.equal(forward(block, inputs, device), expected)
        with torch.no_grad():
            for parameter in block.parameters():
                parameter.mul_(1.125)
            for parameter in other.parameters():
                parameter.mul_(1.125)
        changed = forward(block, inputs, device)
        assert torch.equal(changed, forward(other, inputs, device)) and not torch.equal(changed, expected)
        assert np.array_equal(tiny.run(pipe, call), tiny.run(twin, call))


@names
def test_a_hand_written_loop(device: torch.device, name: str) -> None:
    twin = resident(name, device)
    pipe, call = offloaded(name)
    inputs = record_inputs(twin, call, getattr(twin, DIT[name]))[0]
    transformer, other = getattr(pipe, DIT[name]), getattr(twin, DIT[name])
    handle = pipe.omni_offload

    def loop(module: nn.Module) -> list[torch.Tensor]:
        return [forward(module, inputs, device) for _ in range(4)]

    outside = loop(transformer)
    before = handle.loads
    with handle.call():
        inside = loop(transformer)
        with handle.call():
            nested = loop(transformer)
    assert handle.loads > before
    expected = loop(other)
    for found in (outside, inside, nested):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    # Blocks that stay in their slots between forwards are not loaded again.
    demand = handle.demand_loads
    with handle.call():
        loop(transformer)
    assert handle.demand_loads - demand <= 2
    indices = placed_indices(pipe, name)
    with handle.call():
        loop(transformer)
        for edited in (twin, pipe):
            add_to_data(*parameter_of(edited, name, "streamed", indices))
        handle.refresh()
        changed = loop(transformer)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(changed, loop(other), strict=True))
    assert not torch.equal(changed[0], expected[0])


def test_a_loop_outside_of_a_call_scope_is_never_stale(device: torch.device) -> None:
    twin, _ = tiny.build_toy(5)
    twin.to(device)
    pipe, _ = tiny.build_toy(5)
    pipe.enable_omni_offload("layer")
    x = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(3))
    for step in range(6):
        for edited in (twin, pipe):
            edited.transformer.blocks[step % 5].gate.data += 0.25
        assert torch.equal(forward(pipe.transformer, ((x,), {}), "cpu"), forward(twin.transformer, ((x,), {}), device))
