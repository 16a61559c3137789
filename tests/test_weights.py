"""Leaves, masters, pinned buffers and snapshots by themselves, and ties and odd tensors through a whole pipeline."""

from __future__ import annotations

import contextlib
import gc
import itertools
import mmap
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import diffusers_omni_offload  # noqa: F401  (adds the methods to pipelines)
from diffusers_omni_offload.host import host_memory
from diffusers_omni_offload.platform import CpuPlatform, Platform
from diffusers_omni_offload.weights.leaves import (
    ALIGNMENT,
    Layout,
    Leaf,
    extent,
    find_leaves,
    move_back,
    move_tensors,
    rebind,
    require_plain,
)
from diffusers_omni_offload.weights.packed import PackedMaster
from diffusers_omni_offload.weights.pinning import HostBuffer, PinnedBudget
from diffusers_omni_offload.weights.snapshot import Snapshot
from tests import tiny

CPU = torch.device("cpu")


class RegisteringPlatform(CpuPlatform):
    """The CPU, but with memory that can be registered; notes what was, and fails when told to."""

    is_asynchronous = True
    registers_host_memory = True  # type: ignore[assignment]

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__(CPU)
        self.registered: dict[int, int] = {}
        self.error = error

    def register_host_memory(self, pointer: int, nbytes: int) -> None:
        if self.error is not None:
            raise self.error
        assert pointer not in self.registered
        self.registered[pointer] = nbytes

    def unregister_host_memory(self, pointer: int) -> None:
        del self.registered[pointer]


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 20
    return values.to(dtype) if dtype is not torch.bool else values > 0


#: Tensors of every geometry; each maker gets a dtype.
GEOMETRIES: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "contiguous": lambda dtype: noise(3, 5, dtype=dtype),
    "0-dim": lambda dtype: noise(1, dtype=dtype)[0].clone(),
    "empty": lambda dtype: torch.empty(0, dtype=dtype),
    "empty with shape": lambda dtype: torch.empty(3, 0, 2, dtype=dtype),
    "transposed": lambda dtype: noise(7, 5, dtype=dtype).t(),
    "channels last": lambda dtype: noise(2, 3, 4, 5, dtype=dtype).contiguous(memory_format=torch.channels_last),
    "expanded": lambda dtype: noise(4, 1, dtype=dtype).expand(4, 6),
    "expanded 0-dim": lambda dtype: noise(1, dtype=dtype)[0].expand(5),
    "row of a matrix": lambda dtype: noise(9, 7, dtype=dtype)[4],
    "column of a matrix": lambda dtype: noise(9, 7, dtype=dtype)[:, 3],
    "strided slice": lambda dtype: noise(9, 7, dtype=dtype)[1:8:2, ::3],
    "permuted": lambda dtype: noise(2, 3, 4, dtype=dtype).permute(2, 0, 1),
    "odd size": lambda dtype: noise(257, dtype=dtype),
}
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]
geometries = pytest.mark.parametrize("geometry", GEOMETRIES)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shape, dtype and bits, whatever the devices."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    raw_a, raw_b = (t.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1) for t in (a, b))
    return torch.equal(raw_a.view(torch.uint8), raw_b.view(torch.uint8))


def module_of(**tensors: torch.Tensor) -> nn.Module:
    """A module with these tensors: floating-point ones as parameters, others as buffers."""
    module = nn.Module()
    for name, tensor in tensors.items():
        if tensor.is_floating_point() or tensor.is_complex():
            module.register_parameter(name, nn.Parameter(tensor, requires_grad=tensor.dtype.itemsize > 1))
        else:
            module.register_buffer(name, tensor)
    return module


def master_of(module: nn.Module, platform: Platform | None = None, pin_memory: bool | int = True) -> PackedMaster:
    """A packed master of what is below `module`."""
    budget = PinnedBudget(pin_memory)
    master = PackedMaster(lambda: find_leaves(module, "block"), [module], "block", platform or CpuPlatform(CPU), budget)
    master.pack()
    return master


@pytest.fixture
def sim_platform(device: torch.device, sim: ModuleType) -> Platform:
    return Platform(torch.device("sim", 0))


# Leaves


def test_find_leaves_gives_each_tensor_once_in_order() -> None:
    inner = nn.Linear(2, 2)
    inner.register_buffer("statistic", torch.zeros(1), persistent=False)
    module = nn.Module()
    module.first, module.again = inner, inner
    module.tied = inner.weight
    module.register_buffer("absent", None)
    module.register_parameter("no_bias", None)
    module.register_buffer("other", torch.ones(2))
    found = find_leaves(module, "dit.blocks.0")
    # The module's own tables first, then those below it, as `named_parameters` has it.
    paths = ["tied", "other", "first.bias", "first.statistic"]
    assert [leaf.path for leaf in found] == [f"dit.blocks.0.{path}" for path in paths]
    assert [leaf.path for leaf in find_leaves(module, "")] == paths
    assert [leaf.path for leaf in find_leaves(module, "", {id(inner.weight), id(inner.bias)})] == paths[1::2]
    assert found[0].tensor is inner.weight
    assert find_leaves(nn.Module(), "x") == []


def test_require_plain_accepts_parameters_and_buffers_of_any_dtype() -> None:
    for dtype in DTYPES:
        for make in GEOMETRIES.values():
            require_plain(Leaf(make(dtype), "block.x"))
    require_plain(Leaf(nn.Parameter(torch.ones(1)), "block.x"))
    require_plain(Leaf(nn.Buffer(torch.ones(1)), "block.x"))


class Wrapped(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("tensor", "error", "said"),
    [
        (torch.ones(2).as_subclass(Wrapped), TypeError, "block.x is a Wrapped"),
        (torch.ones(2, 2).to_sparse(), TypeError, "block.x is a torch.sparse_coo tensor"),
        (torch.empty(2, device="meta"), ValueError, "block.x is on the meta device"),
        (nn.Parameter(torch.empty(2, device="meta")), ValueError, "load the component's weights before enabling"),
    ],
)
def test_require_plain_refuses_what_has_its_bytes_elsewhere(
    tensor: torch.Tensor, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=re.escape(said)):
        require_plain(Leaf(tensor, "block.x"))


@dtypes
@geometries
def test_extent_is_what_the_tensor_reads(geometry: str, dtype: torch.dtype) -> None:
    tensor = GEOMETRIES[geometry](dtype)
    storage, start, stop = extent(tensor)
    assert storage.data_ptr() == tensor.untyped_storage().data_ptr()
    assert 0 <= start <= stop <= storage.nbytes()
    if tensor.numel():
        assert storage.data_ptr() + start == tensor.data_ptr()
    else:
        assert start == stop


@dtypes
def test_layout_aligns_every_leaf_and_keeps_every_stride(dtype: torch.dtype) -> None:
    tensors = [make(dtype) for make in GEOMETRIES.values()]
    copies = [tensor.clone() for tensor in tensors]
    layout = Layout(tensors)
    assert layout.nbytes % ALIGNMENT == 0
    for tensor, placement in zip(tensors, layout.placements, strict=True):
        assert placement.offset % ALIGNMENT == 0
        assert placement.offset + placement.nbytes <= layout.nbytes
        assert (placement.dtype, placement.shape, placement.stride) == (dtype, tensor.shape, tensor.stride())
    occupied = sorted((p.offset, p.offset + p.nbytes) for p in layout.placements if p.nbytes)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(occupied))
    assert layout.is_disjoint
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    layout.copy_to(buffer)
    for copy, placement in zip(copies, layout.placements, strict=True):
        view = placement.view(buffer[placement.offset : placement.offset + placement.nbytes])
        assert same_bits(view, copy)
        assert view.stride() == placement.stride


def test_layout_keeps_overlaps_and_parts_disjoint_views() -> None:
    base = noise(100)
    tensors = [base[:60], base[40:], base[10:20], base.view(torch.int32)[50:70]]
    layout = Layout(tensors)
    assert not layout.is_disjoint and layout.nbytes == 512
    first = layout.placements[0].offset
    assert [placement.offset - first for placement in layout.placements] == [0, 160, 40, 200]
    disjoint = Layout([base[:50], base[50:]])
    assert disjoint.is_disjoint and [placement.offset for placement in disjoint.placements] == [0, 256]


@pytest.mark.parametrize("start", [0, 1, 3, 7])
def test_overlapping_leaves_stay_aligned_for_their_dtypes(start: int) -> None:
    base = torch.arange(256, dtype=torch.uint8)
    tensors = [base[start : start + 40], base.view(torch.float64)[1:6], base.view(torch.int16)[4:10]]
    copies = [tensor.clone() for tensor in tensors]
    module = module_of(a=tensors[0], b=tensors[1], c=tensors[2])
    master_of(module)
    for tensor, copy in zip((module.a, module.b, module.c), copies, strict=True):
        assert same_bits(tensor, copy)
        assert tensor.data_ptr() % tensor.element_size() == 0


def test_layout_of_nothing() -> None:
    layout = Layout([])
    assert layout.nbytes == 0 and layout.placements == [] and layout.is_disjoint


@pytest.mark.parametrize("is_inference", [False, True])
def test_rebind_in_the_tensor_s_own_mode(is_inference: bool) -> None:
    with torch.inference_mode(is_inference):
        tensor = torch.zeros(3)
    for mode in (False, True):
        with torch.inference_mode(mode):
            rebind(tensor, lambda: torch.ones(3))
        assert tensor.is_inference() == is_inference and tensor.tolist() == [1, 1, 1]


@dtypes
def test_move_tensors_there_and_back(device: torch.device, dtype: torch.dtype) -> None:
    tensors = [make(dtype) for make in GEOMETRIES.values()]
    copies = [tensor.clone() for tensor in tensors]
    geometry = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]
    for where in (torch.device("sim", 0), CPU):
        move_tensors(tensors, where)
        assert [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors] == geometry
        assert all(tensor.device == where for tensor in tensors)
        assert all(same_bits(tensor, copy) for tensor, copy in zip(tensors, copies, strict=True))
        pointers = [tensor.data_ptr() for tensor in tensors]
        move_tensors(tensors, where)
        assert [tensor.data_ptr() for tensor in tensors] == pointers


def test_move_tensors_keeps_overlaps(device: torch.device) -> None:
    base = noise(20)
    left, right, apart = nn.Parameter(base[:12]), nn.Parameter(base[8:]), nn.Parameter(base[:4].clone())
    copies = [tensor.detach().clone() for tensor in (left, right, apart)]
    for where in (torch.device("sim", 0), CPU):
        move_tensors([left, right, apart], where)
        assert all(map(same_bits, (left, right, apart), copies))
        assert left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
        left.data[8] += 1
        copies[0][8] += 1
        copies[1][0] += 1
        assert all(map(same_bits, (left, right, apart), copies))


# Masters


@pytest.mark.parametrize("kind", ["cpu", "sim"])
@dtypes
def test_a_packed_leaf_is_the_same_tensor_with_its_own_storage(
    request: pytest.FixtureRequest, kind: str, dtype: torch.dtype
) -> None:
    platform = CpuPlatform(CPU) if kind == "cpu" else request.getfixturevalue("sim_platform")
    module = module_of(**{name.replace(" ", "_").replace("0-", "_"): make(dtype) for name, make in GEOMETRIES.items()})
    tensors = [leaf.tensor for leaf in find_leaves(module, "")]
    before = [(id(t), t.shape, t.stride(), t.dtype, t.requires_grad, type(t)) for t in tensors]
    copies = [tensor.detach().clone() for tensor in tensors]
    master = master_of(module, platform)
    assert master.is_pinned == (kind == "sim")
    after = [leaf.tensor for leaf in find_leaves(module, "")]
    assert [(id(t), t.shape, t.stride(), t.dtype, t.requires_grad, type(t)) for t in after] == before
    assert master.nbytes % ALIGNMENT == 0 and master.host.numel() == master.nbytes
    storages = set()
    for tensor, copy in zip(tensors, copies, strict=True):
        assert same_bits(tensor, copy)
        _, start, stop = extent(tensor)
        # As if each were allocated alone, so that saving computes true sizes.
        assert tensor.untyped_storage().nbytes() == stop - start and tensor.storage_offset() == 0
        if tensor.numel():
            assert tensor.data_ptr() % ALIGNMENT == master.host.data_ptr() % ALIGNMENT
            assert master.host.data_ptr() <= tensor.data_ptr() < master.host.data_ptr() + master.nbytes
            storages.add(tensor.untyped_storage().data_ptr())
    assert len(storages) == sum(1 for tensor in tensors if tensor.numel())
    assert master.is_current()


@dtypes
def test_binding_to_a_slot_and_back(sim_platform: Platform, dtype: torch.dtype) -> None:
    module = module_of(**{name.replace(" ", "_").replace("0-", "_"): make(dtype) for name, make in GEOMETRIES.items()})
    tensors = [leaf.tensor for leaf in find_leaves(module, "")]
    copies = [tensor.detach().clone() for tensor in tensors]
    geometry = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]
    master = master_of(module, sim_platform)
    slot = torch.empty(master.nbytes + 512, dtype=torch.uint8, device="sim")
    slot[: master.nbytes].copy_(master.host)
    for _ in range(2):
        master.bind(slot)
        for tensor, copy in zip(tensors, copies, strict=True):
            assert tensor.device.type == "sim" and same_bits(tensor, copy)
            if tensor.numel():
                assert tensor.data_ptr() % ALIGNMENT == slot.data_ptr() % ALIGNMENT
        assert [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors] == geometry
        assert not master.is_current()
        master.unbind()
        assert all(tensor.device == CPU for tensor in tensors) and master.is_current()
    assert master.views_on(slot) is master.views_on(slot)
    other = torch.empty_like(slot)
    assert master.views_on(other) is not master.views_on(slot)
    kept = master.views_on(slot)
    master.forget_views()
    assert master.views_on(slot) is not kept


def test_a_parameter_that_is_held_twice_is_packed_once() -> None:
    module = nn.Module()
    module.a = nn.Linear(16, 16)
    module.b = nn.Linear(16, 16)
    module.b.weight = module.a.weight
    master = master_of(module)
    assert len(master.tensors) == 3 and master.nbytes == 1024 + 2 * 256
    assert module.b.weight is module.a.weight


def test_views_of_one_storage_stay_views_of_it() -> None:
    base = noise(64)
    module = module_of(a=base[:40], b=base[24:], c=base[:8].clone())
    copies = [t.detach().clone() for t in (module.a, module.b, module.c)]
    master = master_of(module)
    assert all(map(same_bits, (module.a, module.b, module.c), copies))
    with torch.no_grad():
        module.a[30] = 7
    assert module.b[6] == 7 and master.host.view(torch.float32).eq(7).sum() == 1
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in (module.a, module.b, module.c))


def test_packing_again_follows_what_changed() -> None:
    module = module_of(a=noise(8), b=noise(9, seed=1))
    master = master_of(module, RegisteringPlatform())
    platform = master._platform
    a = module.a
    a.data = noise(300, seed=2)
    module.register_parameter("c", nn.Parameter(noise(5, seed=3).bfloat16()))
    del module.b
    assert not master.is_current()
    master.pack()
    assert master.is_current() and master.nbytes == 1280 + 256
    assert [id(t) for t in master.tensors] == [id(a), id(module.c)]
    assert torch.equal(module.a, noise(300, seed=2)) and torch.equal(module.c, noise(5, seed=3).bfloat16())
    # The old buffer was unlocked, the new one is locked.
    assert list(platform.registered.values()) == [master.nbytes]


def test_packing_again_that_fails_changes_nothing() -> None:
    module = module_of(a=noise(8), b=noise(9, seed=1))
    master = master_of(module)
    pointer = module.a.data_ptr()
    module.b = nn.Parameter(torch.empty(9, device="meta"))
    with pytest.raises(ValueError, match=r"block\.b is on the meta device"):
        master.pack()
    assert module.a.data_ptr() == pointer and torch.equal(module.a, noise(8)) and not master.is_current()


@pytest.mark.parametrize("where", ["cpu", "sim"])
@geometries
def test_replaced_data_of_the_same_geometry_is_taken_in_place(
    sim_platform: Platform, geometry: str, where: str
) -> None:
    make = GEOMETRIES[geometry]
    module = module_of(a=noise(8), b=make(torch.float32), c=noise(9, seed=1))
    master = master_of(module, sim_platform)
    host, pinned = master.host.data_ptr(), master.is_pinned
    alias, identity = module.a.data, id(module.b)
    replacement = make(torch.float32)
    if replacement.numel():
        replacement[(0,) * replacement.dim()] = 1234.5
    expected = replacement.clone()
    move_tensors([replacement], torch.device(where, 0) if where == "sim" else CPU)
    module.b.data = replacement
    assert not master.is_current() or not replacement.numel()
    master.pack()
    assert master.is_current() and master.host.data_ptr() == host and master.is_pinned == pinned
    assert id(module.b) == identity and same_bits(module.b, expected) and module.b.stride() == replacement.stride()
    assert torch.equal(module.a, noise(8)) and torch.equal(module.c, noise(9, seed=1))
    # Whoever kept a view of another leaf still holds the truth.
    alias.add_(1)
    assert torch.equal(module.a, noise(8) + 1)
    replacement.zero_()
    assert same_bits(module.b, expected)


@pytest.mark.parametrize("mode_of_packing", [False, True])
def test_replaced_data_of_inference_tensors(mode_of_packing: bool) -> None:
    with torch.inference_mode():
        module = module_of(a=noise(8), b=noise(9, seed=1))
    master = master_of(module)
    with torch.inference_mode():
        module.a.data = noise(8, seed=2)
    with torch.inference_mode(mode_of_packing):
        master.pack()
    assert master.is_current() and module.a.is_inference() and torch.equal(module.a, noise(8, seed=2))


def test_replaced_data_may_overlap() -> None:
    module = module_of(a=noise(8), b=noise(8, seed=1), c=noise(8, seed=2))
    master = master_of(module)
    base = noise(12, seed=3)
    module.a.data, module.b.data = base[:8], base[4:]
    master.pack()
    assert torch.equal(module.a, noise(12, seed=3)[:8]) and torch.equal(module.b, noise(12, seed=3)[4:])
    module.a.data[5] = 77
    assert module.b[1] == 77
    # And apart again.
    module.b.data = noise(8, seed=4)
    master.pack()
    module.a.data[5] = 78
    assert torch.equal(module.b, noise(8, seed=4)) and torch.equal(module.c, noise(8, seed=2))


def test_replaced_and_swapped() -> None:
    module = module_of(a=noise(8), b=noise(8, seed=1))
    master = master_of(module)
    module.a.data, module.b.data = module.b.data, module.a.data
    master.pack()
    assert torch.equal(module.a, noise(8, seed=1)) and torch.equal(module.b, noise(8))
    # The objects themselves changed places.
    module.a, module.b = module.b, module.a
    assert not master.is_current()
    master.pack()
    assert torch.equal(module.a, noise(8)) and torch.equal(module.b, noise(8, seed=1))


def test_a_failing_find_changes_nothing() -> None:
    module = module_of(a=noise(8), b=noise(9).as_subclass(Wrapped))
    module.b = nn.Parameter(noise(9))
    pointer = module.a.data_ptr()
    module._parameters["b"] = noise(9).as_subclass(Wrapped)
    with pytest.raises(TypeError, match=r"block\.b is a Wrapped"):
        master_of(module)
    assert module.a.data_ptr() == pointer


def test_versions_tell_who_was_written_to() -> None:
    module = module_of(a=noise(8), b=noise(8), counter=torch.zeros(1, dtype=torch.int64))
    master = master_of(module)
    before = master.versions()
    assert master.written_leaf(before) is None
    slot = torch.zeros(master.nbytes, dtype=torch.uint8)
    master.bind(slot)
    assert (module.a + module.b).shape == (8,) and master.written_leaf(before) is None
    module.counter += 1
    assert master.written_leaf(before) == "block.counter"
    master.unbind()
    before = master.versions()
    assert master.written_leaf(before) is None


def test_requires_grad_is_read_when_asked() -> None:
    module = module_of(a=noise(8), counter=torch.zeros(1, dtype=torch.int64))
    master = master_of(module)
    assert master.requires_grad()
    module.requires_grad_(False)
    assert not master.requires_grad()


def test_a_released_master_leaves_ordinary_tensors() -> None:
    module = module_of(a=noise(8), b=noise(9, seed=1))
    platform = RegisteringPlatform()
    master = master_of(module, platform)
    assert master.is_pinned and len(platform.registered) == 1
    master.release()
    master.release()
    assert not master.is_pinned and platform.registered == {}
    del master
    gc.collect()
    module.a.data.add_(1)
    assert torch.equal(module.a, noise(8) + 1) and torch.equal(module.b, noise(9, seed=1))


def test_move_back_goes_to_where_each_leaf_was(sim_platform: Platform) -> None:
    module = module_of(a=noise(8), b=noise(9, seed=1), steps=torch.arange(3))
    module.b.data = module.b.data.to("sim")
    module.steps = module.steps.to("sim")
    identities = [id(module.a), id(module.b), id(module.steps)]
    homes = [(leaf.tensor, leaf.tensor.device) for leaf in find_leaves(module, "block")]
    master = master_of(module, sim_platform)
    assert {t.device for t in master.tensors} == {CPU}
    assert torch.equal(module.b, noise(9, seed=1))
    master.release()
    move_back(homes)
    assert [t.device.type for t in (module.a, module.b, module.steps)] == ["cpu", "sim", "sim"]
    assert [id(module.a), id(module.b), id(module.steps)] == identities
    assert torch.equal(module.b.cpu(), noise(9, seed=1)) and module.steps.tolist() == [0, 1, 2]


def test_a_master_without_bytes() -> None:
    for module in (nn.Module(), module_of(a=torch.empty(0, 3))):
        platform = RegisteringPlatform()
        master = master_of(module, platform)
        assert master.nbytes == 0 and not master.is_pinned and platform.registered == {}
        assert master.is_current()
        master.bind(torch.empty(0, dtype=torch.uint8))
        master.unbind()
        master.release()


def test_weights_that_share_a_file_mapping(tmp_path: Path, sim_platform: Platform) -> None:
    # Odd sizes, so that most start off any boundary.
    weights = {f"w{index}": noise(3 + index, 5, seed=index, dtype=torch.bfloat16) for index in range(6)}
    weights["bytes"] = torch.arange(7, dtype=torch.uint8)
    weights["doubles"] = noise(3, dtype=torch.float64)
    safetensors.torch.save_file(weights, tmp_path / "weights.safetensors")
    loaded = safetensors.torch.load_file(tmp_path / "weights.safetensors")
    module = module_of(**loaded)
    master = master_of(module, sim_platform)
    state = module.state_dict()
    assert all(same_bits(state[key], weights[key]) for key in weights)
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in state.values())
    assert all(value.data_ptr() % ALIGNMENT == 0 for value in state.values())
    file_before = (tmp_path / "weights.safetensors").read_bytes()
    for value in state.values():
        value.zero_()
    assert (tmp_path / "weights.safetensors").read_bytes() == file_before
    safetensors.torch.save_file({key: value.clone() for key, value in state.items()}, tmp_path / "again.safetensors")
    assert master.is_current()


def test_a_master_of_a_mapped_file_does_not_keep_the_mapping(tmp_path: Path) -> None:
    safetensors.torch.save_file({"a": noise(1 << 16), "b": noise(1 << 16)}, tmp_path / "mapped.safetensors")
    module = module_of(**safetensors.torch.load_file(tmp_path / "mapped.safetensors"))
    master = master_of(module)
    gc.collect()
    assert "mapped.safetensors" not in Path("/proc/self/maps").read_text()
    assert master.is_current()


# Pinned buffers


def test_the_budget_counts() -> None:
    budget = PinnedBudget(1000)
    assert budget.take(600) and not budget.take(401) and budget.take(400) and not budget.take(1)
    assert budget.pinned_bytes == 1000
    budget.give_back(600)
    assert budget.pinned_bytes == 400 and budget.take(600)
    assert not PinnedBudget(False).take(1) and PinnedBudget(False).take(0)
    assert PinnedBudget(0).limit == 0


def test_true_leaves_a_tenth_of_the_host_s_memory() -> None:
    assert PinnedBudget(True).limit == pytest.approx(0.9 * host_memory().total_bytes, rel=1e-6)


@pytest.mark.parametrize("nbytes", [1, 255, 4096, 4097, 1 << 20, (1 << 20) + 1])
def test_a_buffer_is_registered_at_its_exact_size(nbytes: int) -> None:
    platform, budget = RegisteringPlatform(), PinnedBudget(True)
    buffer = HostBuffer(nbytes, platform, budget)
    assert buffer.is_pinned and buffer.bytes.shape == (nbytes,) and buffer.bytes.dtype is torch.uint8
    assert platform.registered == {buffer.bytes.data_ptr(): nbytes}
    assert buffer.bytes.data_ptr() % mmap.PAGESIZE == 0
    assert budget.pinned_bytes == nbytes
    buffer.unpin()
    buffer.unpin()
    assert not buffer.is_pinned and platform.registered == {} and budget.pinned_bytes == 0
    buffer.bytes.fill_(3)
    assert buffer.bytes.eq(3).all()


def test_a_buffer_that_goes_is_unregistered_though_its_memory_lives() -> None:
    platform, budget = RegisteringPlatform(), PinnedBudget(True)
    buffer = HostBuffer(5000, platform, budget)
    view = buffer.view(256, 100)
    view.fill_(9)
    assert view.untyped_storage().nbytes() == 100
    del buffer
    gc.collect()
    assert platform.registered == {} and budget.pinned_bytes == 0
    assert view.eq(9).all() and view.add_(1).eq(10).all()


def test_an_empty_buffer() -> None:
    platform, budget = RegisteringPlatform(), PinnedBudget(True)
    buffer = HostBuffer(0, platform, budget)
    assert not buffer.is_pinned and platform.registered == {} and buffer.bytes.shape == (0,)
    assert buffer.view(0, 0).shape == (0,)
    buffer.unpin()


@pytest.mark.parametrize("error", [RuntimeError("no more\nof it"), torch.OutOfMemoryError("no more")])
def test_a_refused_registration_is_pageable_and_remembered(error: Exception) -> None:
    platform, budget = RegisteringPlatform(error), PinnedBudget(True)
    buffer = HostBuffer(5000, platform, budget)
    assert not buffer.is_pinned and budget.pinned_bytes == 0 and budget.refusal == "no more"
    buffer.bytes.fill_(1)
    # Not tried again: the first refusal costs a system call, and the rest would too.
    platform.error = AssertionError("tried again")
    assert not HostBuffer(10, platform, budget).is_pinned
    buffer.unpin()


def test_an_interrupted_registration_takes_nothing_from_the_budget() -> None:
    platform, budget = RegisteringPlatform(KeyboardInterrupt()), PinnedBudget(True)
    with pytest.raises(KeyboardInterrupt):
        HostBuffer(5000, platform, budget)
    assert budget.pinned_bytes == 0 and budget.refusal is None
    platform.error = None
    assert HostBuffer(5000, platform, budget).is_pinned


def test_over_budget_is_pageable_but_smaller_ones_still_fit() -> None:
    platform, budget = RegisteringPlatform(), PinnedBudget(1000)
    buffers = [HostBuffer(nbytes, platform, budget) for nbytes in (800, 300, 200, 1)]
    assert [buffer.is_pinned for buffer in buffers] == [True, False, True, False]
    assert budget.refusal is None


def test_where_memory_cannot_be_registered_the_allocator_s_rounding_counts(
    sim_platform: Platform, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Platform, "registers_host_memory", property(lambda self: False))
    before = sim.stats()["pinned_current"]
    budget = PinnedBudget(1 << 20)
    buffer = HostBuffer(5000, sim_platform, budget)
    assert buffer.is_pinned and budget.pinned_bytes == sim.stats()["pinned_current"] - before == 8192
    view = buffer.view(256, 100)
    view.fill_(9)
    assert view.untyped_storage().nbytes() == 100 and buffer.bytes[256:356].eq(9).all()
    assert not HostBuffer((1 << 20) - 8192 + 1, sim_platform, budget).is_pinned
    del buffer
    gc.collect()
    assert view.eq(9).all() and budget.pinned_bytes == 0
    del view
    gc.collect()
    assert sim.stats()["pinned_current"] == before


def mapping_flags(pointer: int) -> set[str]:
    """The flags that the kernel has for the mapping at this address of ours."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if found:
            inside = int(found[1], 16) <= pointer < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    raise AssertionError(f"nothing is mapped at {pointer:#x}")


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's /proc")
def test_locked_memory_is_not_inherited_by_a_fork() -> None:
    platform, budget = RegisteringPlatform(), PinnedBudget(1 << 20)
    pinned, pageable = HostBuffer(1 << 20, platform, budget), HostBuffer(1 << 20, platform, budget)
    assert pinned.is_pinned and not pageable.is_pinned
    assert "dc" in mapping_flags(pinned.bytes.data_ptr())
    assert "dc" not in mapping_flags(pageable.bytes.data_ptr())
    pinned.bytes.fill_(1)
    pageable.bytes.fill_(1)

    def is_readable_in_child(pointer: int) -> bool:
        child = os.fork()
        if child == 0:
            status = 2
            with contextlib.suppress(BaseException):
                with open("/proc/self/maps") as file:
                    # What keeps the place of memory that isn't there can't be read.
                    ranges = [line.split()[0].split("-") for line in file if line.split()[1].startswith("r")]
                status = int(any(int(start, 16) <= pointer < int(stop, 16) for start, stop in ranges))
            os._exit(status)
        return {0: False, 1: True}[os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]

    assert not is_readable_in_child(pinned.bytes.data_ptr())
    assert is_readable_in_child(pageable.bytes.data_ptr())
    # Ordinary again once it is unlocked: whoever forks after disabling still has the weights.
    pinned.unpin()
    assert "dc" not in mapping_flags(pinned.bytes.data_ptr())
    assert is_readable_in_child(pinned.bytes.data_ptr())


# Snapshots


def replace_child(module: Any) -> None:
    module.child = nn.Linear(2, 2)


def replace_parameter(module: Any) -> None:
    module.child.weight = nn.Parameter(module.child.weight.data)


def delete_buffer(module: Any) -> None:
    del module.statistic


def untie(module: Any) -> None:
    module.child.bias = None


def grow(module: Any) -> None:
    module.adapter = nn.Linear(1, 1)


def add_parameter(module: Any) -> None:
    module.child.scale = nn.Parameter(torch.ones(1))


def replace_data(module: Any) -> None:
    module.child.weight.data = module.child.weight.data.clone()


def cast(module: Any) -> None:
    module.child.to(torch.bfloat16)


def restride(module: Any) -> None:
    module.child.weight.data = module.child.weight.data.t()


def reshape(module: Any) -> None:
    module.child.weight.data = module.child.weight.data.view(4)


@pytest.mark.parametrize(
    "change",
    [
        replace_child,
        replace_parameter,
        delete_buffer,
        untie,
        grow,
        add_parameter,
        replace_data,
        cast,
        restride,
        reshape,
    ],
    ids=lambda change: change.__name__,
)
def test_a_snapshot_sees(change: Callable[[Any], None]) -> None:
    module = nn.Module()
    module.child = nn.Linear(2, 2)
    module.register_buffer("statistic", torch.zeros(1))
    snapshot = Snapshot(list(module.modules()), find_leaves(module, ""))
    assert snapshot.is_current()
    change(module)
    assert not snapshot.is_current()


def test_a_snapshot_does_not_mind_edits_in_place() -> None:
    module = nn.Linear(2, 2)
    snapshot = Snapshot([module], find_leaves(module, ""))
    module.weight.data += 1
    with torch.no_grad():
        module.bias.zero_()
    module.load_state_dict(nn.Linear(2, 2).state_dict())
    module.requires_grad_(False)
    module.train()
    assert snapshot.is_current()


# Ties, through a pipeline


def tie_within_a_block(dit: Any) -> None:
    dit.blocks[1].contract.bias = dit.blocks[1].gate


def tie_across_blocks(dit: Any) -> None:
    dit.blocks[3].gate = dit.blocks[1].gate
    dit.blocks[2].shift = dit.blocks[1].shift


def tie_a_block_to_the_rest(dit: Any) -> None:
    dit.norm.weight = dit.blocks[2].gate


def tie_the_rest(dit: Any) -> None:
    dit.norm.bias = dit.norm.weight


def tie_all(dit: Any) -> None:
    for block in dit.blocks:
        block.gate = dit.norm.weight


def share_a_module(dit: Any) -> None:
    dit.blocks[3].expand = dit.blocks[1].expand


def overlap_within_a_block(dit: Any) -> None:
    base = noise(48, seed=4) / 20
    dit.blocks[1].gate, dit.blocks[1].contract.bias = nn.Parameter(base[:32]), nn.Parameter(base[16:])


def overlap_across_blocks(dit: Any) -> None:
    base = noise(48, seed=4) / 20
    dit.blocks[1].gate, dit.blocks[2].gate = nn.Parameter(base[:32]), nn.Parameter(base[16:])


def overlap_a_block_with_the_rest(dit: Any) -> None:
    base = noise(48, seed=4) / 20
    dit.blocks[1].gate, dit.norm.bias = nn.Parameter(base[:32]), nn.Parameter(base[16:])


def slices_of_one_storage(dit: Any) -> None:
    base = noise(5 * 32, seed=4) / 20
    for index, block in enumerate(dit.blocks):
        block.gate = nn.Parameter(base[32 * index : 32 * (index + 1)])
    dit.norm.weight = nn.Parameter(base[4 * 32 :])


#: What ties, and pairs of tensors that share bytes after it: (path, index of an element) twice.
TIES: list[tuple[Callable[[Any], None], list[tuple[tuple[str, int], tuple[str, int]]]]] = [
    (tie_within_a_block, [(("blocks.1.gate", 3), ("blocks.1.contract.bias", 3))]),
    (
        tie_across_blocks,
        [(("blocks.1.gate", 3), ("blocks.3.gate", 3)), (("blocks.1.shift", 0), ("blocks.2.shift", 0))],
    ),
    (tie_a_block_to_the_rest, [(("norm.weight", 0), ("blocks.2.gate", 0))]),
    (tie_the_rest, [(("norm.weight", 0), ("norm.bias", 0))]),
    (tie_all, [(("norm.weight", 0), ("blocks.0.gate", 0)), (("blocks.1.gate", 2), ("blocks.3.gate", 2))]),
    (share_a_module, [(("blocks.1.expand.bias", 0), ("blocks.3.expand.bias", 0))]),
    (overlap_within_a_block, [(("blocks.1.gate", 20), ("blocks.1.contract.bias", 4))]),
    (overlap_across_blocks, [(("blocks.1.gate", 20), ("blocks.2.gate", 4))]),
    (overlap_a_block_with_the_rest, [(("blocks.1.gate", 20), ("norm.bias", 4))]),
    (slices_of_one_storage, []),
]


def tensor_at(module: nn.Module, path: str) -> torch.Tensor:
    owner, _, name = path.rpartition(".")
    return getattr(module.get_submodule(owner), name)


@pytest.mark.parametrize("resident_layers", [0, 2])
@pytest.mark.parametrize(("tie", "pairs"), TIES, ids=[tie.__name__ for tie, _ in TIES])
def test_ties_are_kept(
    device: torch.device,
    tie: Callable[[Any], None],
    pairs: list[tuple[tuple[str, int], tuple[str, int]]],
    resident_layers: int,
) -> None:
    twin, call = tiny.build_toy(4)
    tie(twin.transformer)
    pipe, _ = tiny.build_toy(4)
    tie(pipe.transformer)
    names = [name for name, _ in pipe.transformer.named_parameters()]
    state = {key: value.clone() for key, value in pipe.transformer.state_dict().items()}
    options = {"dit": {"resident_layers": resident_layers}} if resident_layers else None
    expected = tiny.run(twin, call)  # on the CPU, where no tie is lost
    handle = pipe.enable_omni_offload("layer", layer_options=options)

    def check() -> None:
        assert [name for name, _ in pipe.transformer.named_parameters()] == names
        for key, value in pipe.transformer.state_dict().items():
            assert torch.equal(value.cpu(), twin.transformer.state_dict()[key]), key
        for _ in range(2):
            assert np.array_equal(tiny.run(pipe, call), expected)

    assert all(torch.equal(value.cpu(), state[key]) for key, value in pipe.transformer.state_dict().items())
    check()
    for (path, index), (other, other_index) in pairs:
        for edited in (twin, pipe):
            tensor_at(edited.transformer, path).data[index] += 1.5
            assert tensor_at(edited.transformer, path)[index] == tensor_at(edited.transformer, other)[other_index]
        before, expected = expected, tiny.run(twin, call)
        assert not np.array_equal(before, expected)
        check()
    handle.disable()
    for (path, index), (other, other_index) in pairs:
        for edited in (twin, pipe):
            tensor_at(edited.transformer, path).data[index] += 1
        assert tensor_at(pipe.transformer, path)[index] == tensor_at(pipe.transformer, other)[other_index]
    for tensor in [*pipe.transformer.parameters(), *pipe.transformer.buffers()]:
        assert tensor.device.type == "cpu"
    pipe.enable_omni_offload("layer")
    assert np.array_equal(tiny.run(pipe, call), tiny.run(twin, call))


def test_a_tie_between_components(device: torch.device) -> None:
    twin, call = tiny.build_toy(3, two_stage=True, text_encoder=True)
    pipe, _ = tiny.build_toy(3, two_stage=True, text_encoder=True)
    for tied in (twin, pipe):
        tied.transformer_2.blocks[1].expand.weight = tied.transformer.blocks[2].expand.weight
        tied.transformer_2.proj_in.weight = tied.transformer.proj_in.weight
    pipe.enable_omni_offload("layer", components=["dit", "text_encoder"])
    expected = tiny.run(twin, call)
    for _ in range(3):
        assert np.array_equal(tiny.run(pipe, call), expected)
    for edited in (twin, pipe):
        edited.transformer.blocks[2].expand.weight.data.mul_(1.5)
        edited.transformer.proj_in.weight.data.mul_(1.5)
    assert pipe.transformer_2.blocks[1].expand.weight is pipe.transformer.blocks[2].expand.weight
    assert np.array_equal(tiny.run(pipe, call), tiny.run(twin, call))


# Odd tensors, through a pipeline


class OddBlock(nn.Module):
    """Leaves of every dtype and geometry, all of which reach the output."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.transposed = nn.Parameter(noise(6, 32, seed=seed).t() / 60)
        self.image = nn.Parameter(noise(2, 3, 4, 4, seed=seed).contiguous(memory_format=torch.channels_last) / 60)
        self.scalar = nn.Parameter(noise(1, seed=seed)[0].clone() / 20)
        self.wide = nn.Parameter(noise(32, seed=seed + 1, dtype=torch.float64) / 20)
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.phase = nn.Parameter(noise(32, seed=seed, dtype=torch.complex64) / 20)
        self.register_buffer("whole", noise(32, seed=seed).to(torch.int8))
        self.register_buffer("mask", noise(32, seed=seed) > 0, persistent=False)
        self.register_buffer("steps", torch.tensor(seed))
        self.register_buffer("expanded", noise(1, seed=seed).expand(32) / 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = x + torch.tanh(x @ self.transposed).sum(-1, keepdim=True) * self.scalar + self.image.sum() / 100
        mixed = mixed + (self.wide.float() + self.phase.abs()) * 0.1 + self.whole.float() * 0.01 + self.expanded
        return torch.tanh(torch.where(self.mask, mixed, -mixed) + self.steps * 0.001 + self.empty.sum())


def odd_pipeline() -> tuple[Any, Any]:
    pipe, call = tiny.build_toy(4)
    pipe.transformer.blocks = nn.ModuleList(OddBlock(seed) for seed in range(4)).eval()
    return pipe, call


@pytest.mark.parametrize("resident_layers", [0, 1])
def test_odd_tensors_stream(device: torch.device, resident_layers: int) -> None:
    twin, call = odd_pipeline()
    expected = tiny.run(twin.to(device), call)
    pipe, _ = odd_pipeline()
    before = [(t.shape, t.stride(), t.dtype) for t in [*pipe.transformer.parameters(), *pipe.transformer.buffers()]]
    state = {key: value.clone() for key, value in pipe.transformer.state_dict().items()}
    options = {"dit": {"resident_layers": resident_layers}} if resident_layers else None
    handle = pipe.enable_omni_offload("layer", layer_options=options)
    for _ in range(2):
        assert np.array_equal(tiny.run(pipe, call), expected)
        tensors = [*pipe.transformer.parameters(), *pipe.transformer.buffers()]
        assert [(t.shape, t.stride(), t.dtype) for t in tensors] == before
        now = pipe.transformer.state_dict()
        assert list(now) == list(state) and all(same_bits(now[key], state[key]) for key in state)
    handle.disable()
    assert [(t.shape, t.stride(), t.dtype) for t in [*pipe.transformer.parameters(), *pipe.transformer.buffers()]] == (
        before
    )
    assert np.array_equal(tiny.run(pipe.to(device), call), expected)


@contextlib.contextmanager
def mode(name: str) -> Iterator[None]:
    with {"none": contextlib.nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}[name]():
        yield


MODES = ["none", "no_grad", "inference"]


@pytest.mark.parametrize("calling", MODES)
@pytest.mark.parametrize("enabling", MODES)
@pytest.mark.parametrize("building", ["none", "inference"])
def test_inference_mode_in_every_combination(device: torch.device, building: str, enabling: str, calling: str) -> None:
    twin, call = tiny.build_toy(4, text_encoder=True, vae=True)
    expected = tiny.run(twin.to(device), call)
    with mode(building):
        pipe, _ = tiny.build_toy(4, text_encoder=True, vae=True)
    is_inference = building == "inference"
    parameters = [*pipe.transformer.parameters()]
    options = {"dit": {"resident_layers": 1}}
    with mode(enabling):
        handle = pipe.enable_omni_offload("layer", components=["dit", "text_encoder"], layer_options=options)
    with mode(calling):
        assert np.array_equal(tiny.run(pipe, call), expected)
    for other in MODES:
        with mode(other):
            assert np.array_equal(tiny.run(pipe, call), expected)
    assert all(parameter.is_inference() == is_inference for parameter in parameters)
    with mode(calling if not is_inference else "inference"):
        for edited in (twin, pipe):
            with torch.no_grad():
                edited.transformer.blocks[1].gate.data.mul_(2)
                edited.transformer.blocks[3].expand.weight.data.mul_(1.5)
    expected = tiny.run(twin, call)
    with mode(calling):
        assert np.array_equal(tiny.run(pipe, call), expected)
    with mode(enabling):
        handle.disable()
    assert all(parameter.is_inference() == is_inference and parameter.device == CPU for parameter in parameters)
    with mode(building):  # torch can't move inference tensors outside of it
        pipe.to(device)
    assert np.array_equal(tiny.run(pipe, call), expected)
