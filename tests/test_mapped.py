"""Mapped masters: bytes stay in files; what is edited, replaced or added gets bytes of its own, and no more does."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import WanPipeline
from safetensors.torch import save_file
from torch import nn

from diffusers_omni_offload import load_omni_pipeline
from diffusers_omni_offload.declarations import Stored
from diffusers_omni_offload.weights.checkpoint import Checkpoint, CheckpointError
from diffusers_omni_offload.weights.leaves import find_leaves
from diffusers_omni_offload.weights.mapped import MappedMaster
from diffusers_omni_offload.weights.proof import prove, stored_weights
from diffusers_omni_offload.weights.withheld import is_withheld, withhold
from tests import tiny
from tests.operations.families import QWEN_IMAGE
from tests.operations.subject import Subject
from tests.tiny.toy import ToyBlock

WIDTH, HIDDEN = 16, 1100
#: `expand.weight` and `contract.weight` are many pages each, and have more than a page between them.
X = torch.linspace(-1, 1, 2 * WIDTH).reshape(1, 2, WIDTH)


def toy(seed: int = 0, dtype: torch.dtype = torch.float32) -> ToyBlock:
    return ToyBlock(WIDTH, HIDDEN, dtype, seed=seed).eval().requires_grad_(False)


class Mapped:
    """A block whose weights are in a file, its master, and a plain twin that is edited in the same way.

    Args:
        folder: where the file is.
        stored: what the file has; the block's state if None.
        block, twin: two equal modules.
        options: of `prove`.
    """

    def __init__(
        self,
        folder: Path,
        stored: Mapping[str, torch.Tensor] | None = None,
        block: nn.Module | None = None,
        twin: nn.Module | None = None,
        **options: Any,
    ) -> None:
        self.block, self.twin = block or toy(), twin or toy()
        tensors = self.block.state_dict() if stored is None else stored
        self.path = folder / "model.safetensors"
        save_file({key: tensor.clone().contiguous() for key, tensor in tensors.items()}, self.path)
        self.checkpoint = Checkpoint.find(folder)
        sources = prove(self.block, self.checkpoint, **options)
        assert isinstance(sources, dict), sources
        weights = stored_weights(self.block)
        self.origins = {id(weights[path]): (weights[path], source) for path, source in sources.items()}
        self.master = MappedMaster(lambda: find_leaves(self.block, "block"), [self.block], "block", self.origins)
        self.master.pack()

    @property
    def own(self) -> set[str]:
        """Paths of the leaves with bytes of their own."""
        from_files = {o for o, source in self.master.source.leaves if not isinstance(source, torch.Tensor)}
        return {
            leaf.path.removeprefix("block.")
            for leaf, p in zip(self.master.find(), self.master._placements, strict=True)
            if p.offset not in from_files
        }

    def is_in_file(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's data is the mapping's."""
        file = self.checkpoint.files[0]
        return 0 <= tensor.data_ptr() - file._address < file.nbytes

    def check(self) -> None:
        """Packed anew if need be, the block has the twin's weights, at rest and in a forward."""
        if not self.master.is_current():
            self.master.pack()
        assert self.master.is_current()
        assert self.master.changed_leaf() is None
        buffer = torch.empty(self.master.nbytes, dtype=torch.uint8)
        self.master.read_into(buffer)
        expected = dict([*self.twin.named_parameters(), *self.twin.named_buffers()])
        found = dict([*self.block.named_parameters(), *self.block.named_buffers()])
        assert found.keys() == expected.keys()
        self.master.bind(buffer)
        try:
            for path, tensor in found.items():
                assert _is_same(tensor, expected[path]), path
            x = X.to(self.block.expand.weight.dtype) if isinstance(self.block, ToyBlock) else X
            assert torch.equal(self.block(x), self.twin(x))
        finally:
            self.master.unbind()
            self.master.forget_views()
        for path, tensor in found.items():
            assert is_withheld(tensor) or _is_same(tensor, expected[path]), path
        # Any part of it can be read by itself, as ranks do; what lies between leaves is left alone.
        start, nbytes = self.master.nbytes // 3 + 1, self.master.nbytes // 2
        expected_part = buffer[start : start + nbytes].clone()
        for filler in (0, 255):
            part = torch.full((nbytes,), filler, dtype=torch.uint8)
            self.master.read_into(part, start)
            differs = (part != expected_part).nonzero().reshape(-1) + start
            ends = [(p.offset, p.offset + p.nbytes) for p in self.master._placements]
            assert all(part[at - start] == filler and not any(a <= at < b for a, b in ends) for at in differs.tolist())


def _is_same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return (tensor.dtype, tensor.shape, tensor.stride()) == (other.dtype, other.shape, other.stride()) and torch.equal(
        tensor, other
    )


@pytest.fixture
def mapped(tmp_path: Path) -> Mapped:
    return Mapped(tmp_path)


# At rest


def test_at_rest_the_leaves_are_views_of_the_file(mapped: Mapped) -> None:
    mapped.check()
    assert mapped.own == {"scale"}, "the buffer that no file has"
    assert mapped.master.host_nbytes == HIDDEN * 4 and not mapped.master.is_pinned and not mapped.master.withheld
    for path, tensor in stored_weights(mapped.block).items():
        assert mapped.is_in_file(tensor), path
        assert mapped.master.holds(tensor) and not mapped.master.holds(tensor.clone())
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    assert mapped.master.holds(mapped.block.scale) and not mapped.is_in_file(mapped.block.scale)


def test_identities_and_versions_stay(mapped: Mapped) -> None:
    before = [(id(tensor), tensor.requires_grad) for tensor in mapped.master.tensors]
    for _ in range(3):
        mapped.check()
        mapped.master.pack()
    assert [(id(tensor), tensor.requires_grad) for tensor in mapped.master.tensors] == before
    assert {id(tensor) for tensor in mapped.block.parameters()} <= {key for key, _ in before}


def test_nothing_is_copied_by_packing_again(mapped: Mapped) -> None:
    pointers = [tensor.data_ptr() for tensor in mapped.master.tensors]
    mapped.master.pack(in_place=False)
    assert [tensor.data_ptr() for tensor in mapped.master.tensors] == pointers and mapped.own == {"scale"}


def test_reading_does_not_count_as_an_edit(mapped: Mapped) -> None:
    for tensor in mapped.master.tensors:
        tensor.sum().item()
        tensor.detach().numpy().copy()
    mapped.block(X)
    assert mapped.master.is_current()


# Edits


def data_mul(tensor: torch.Tensor) -> None:
    tensor.data.mul_(1.5)


def in_place(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.add_(0.25)


def one_element(tensor: torch.Tensor) -> None:
    tensor.data.view(-1)[-1] = 7


def through_numpy(tensor: torch.Tensor) -> None:
    tensor.detach().numpy().reshape(-1)[0] = -3


def through_an_alias(tensor: torch.Tensor) -> None:
    alias = tensor.detach().view(-1)
    alias[alias.numel() // 2] = 5


def replaced_data(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.flip(0)


def to_equal_data(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.clone()


EDITS = [data_mul, in_place, one_element, through_numpy, through_an_alias, replaced_data, to_equal_data]


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("leaf", ["expand.weight", "contract.weight"])
def test_an_edited_leaf_gets_bytes_of_its_own_and_the_others_stay_in_the_file(
    mapped: Mapped, leaf: str, edit: Callable[[torch.Tensor], None]
) -> None:
    other = {"expand.weight": "contract.weight", "contract.weight": "expand.weight"}[leaf]
    content = mapped.path.read_bytes()
    for module in (mapped.block, mapped.twin):
        edit(module.get_parameter(leaf))
    assert not mapped.master.is_current()
    mapped.check()
    # Small leaves on the same page may be taken for edited as well.
    assert leaf in mapped.own and other not in mapped.own
    assert not mapped.is_in_file(mapped.block.get_parameter(leaf))
    assert mapped.is_in_file(mapped.block.get_parameter(other))
    assert mapped.path.read_bytes() == content
    # From now on it is an ordinary tensor, whose edits count at once.
    for module in (mapped.block, mapped.twin):
        module.get_parameter(leaf).data.mul_(-1)
    assert mapped.master.is_current()
    mapped.check()


def test_pages_that_were_edited_are_given_back(mapped: Mapped) -> None:
    weight = mapped.block.contract.weight
    source = mapped.origins[id(weight)][1]
    ((file, start, nbytes),) = source.segments
    data_mul(weight)
    assert file.edited([(start, nbytes)]) == [True]
    mapped.master.pack()
    inside = (start + 8192, nbytes - 2 * 8192)
    assert inside[1] > 0 and file.edited([inside]) == [False]
    view = source.view()
    elements = slice(8192 // 4, -8192 // 4)
    assert view is not None and torch.equal(view.view(-1)[elements], toy().contract.weight.view(-1)[elements])


def test_a_replaced_parameter(mapped: Mapped) -> None:
    for module in (mapped.block, mapped.twin):
        module.expand.weight = nn.Parameter(torch.full((HIDDEN, WIDTH), 0.01), requires_grad=False)
        module.register_buffer("shift", torch.ones(WIDTH))
    mapped.check()
    assert mapped.own == {"scale", "expand.weight", "shift"}


def test_a_parameter_that_was_taken_away(mapped: Mapped) -> None:
    for module in (mapped.block, mapped.twin):
        module.expand.bias = None
    before = mapped.master.nbytes
    mapped.check()
    assert mapped.master.nbytes < before and mapped.own == {"scale"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_leaf_that_is_cast_at_rest(mapped: Mapped, dtype: torch.dtype) -> None:
    for module in (mapped.block, mapped.twin):
        module.gate.data = module.gate.data.to(dtype)
    mapped.check()
    assert mapped.own == {"scale", "gate"}


def test_strides_are_kept(mapped: Mapped) -> None:
    for module in (mapped.block, mapped.twin):
        module.expand.weight.data = module.expand.weight.data.t().contiguous().t()
    mapped.check()
    assert mapped.block.expand.weight.stride() == (1, HIDDEN) and mapped.own == {"scale", "expand.weight"}


def test_a_leaf_on_another_device_comes_home(mapped: Mapped, device: torch.device) -> None:
    mapped.block.expand.to(device)
    mapped.check()
    assert mapped.own == {"scale", "expand.weight", "expand.bias"}
    assert mapped.block.expand.weight.device.type == "cpu"


def test_added_lora_leaves_come_and_go(mapped: Mapped) -> None:
    import peft

    config = peft.LoraConfig(r=4, target_modules=["expand", "contract"], init_lora_weights=False)
    for module in (mapped.block, mapped.twin):
        torch.manual_seed(0)
        peft.inject_adapter_in_model(config, module)
    mapped.check()
    lora = {f"{name}.lora_{which}.default.weight" for name in ("expand", "contract") for which in "AB"}
    assert mapped.own == {"scale", *lora}
    with torch.no_grad():
        for module in (mapped.block, mapped.twin):
            module.expand.merge()
    mapped.check()
    assert {"scale", *lora, "expand.base_layer.weight"} <= mapped.own
    assert mapped.is_in_file(mapped.block.contract.base_layer.weight)
    for module in (mapped.block, mapped.twin):
        module.contract = module.contract.base_layer
    mapped.check()
    assert "contract.weight" not in mapped.own


@pytest.mark.parametrize("seed", range(6))
def test_a_walk_of_edits_against_a_plain_twin(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    mapped = Mapped(tmp_path)
    for step in range(25):
        both = (mapped.block, mapped.twin)
        paths = [path for path, _ in (*mapped.twin.named_parameters(), *mapped.twin.named_buffers())]
        path = rng.choice(paths)
        action = rng.choice([*EDITS, "replace", "add", "remove", "swap", "pack", "nothing"])
        for module in both:
            holder = module.get_submodule(path.rpartition(".")[0])
            tensor = getattr(holder, path.rpartition(".")[2])
            if action == "replace":
                fresh = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(step)) * 0.1
                is_parameter = isinstance(tensor, nn.Parameter)
                setattr(holder, path.rpartition(".")[2], nn.Parameter(fresh, False) if is_parameter else fresh)
            elif action == "add":
                module.register_parameter(f"extra_{step}", nn.Parameter(torch.full((step + 1,), 0.5), False))
            elif action == "remove":
                for name in [name for name in module._parameters if name.startswith("extra_")][:1]:
                    delattr(module, name)
            elif action == "swap":
                a, b = module.expand.weight, module.contract.weight
                a.data, b.data = b.data.t().contiguous(), a.data.t().contiguous()
            elif callable(action):
                action(tensor)
        if action == "pack":
            mapped.master.pack(in_place=rng.random() < 0.5)
        if rng.random() < 0.6:
            mapped.check()
    mapped.check()
    assert torch.equal(torch.load(_saved(mapped.block), weights_only=True)["gate"], mapped.twin.gate)


def _saved(module: nn.Module) -> Any:
    import io

    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    return file


# Ties


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = toy(0), toy(1)
        self.second.expand.weight = self.first.expand.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def test_a_weight_that_is_tied_within_the_block(tmp_path: Path) -> None:
    block, twin = Tied(), Tied()
    stored = {key: tensor for key, tensor in block.state_dict().items() if key != "second.expand.weight"}
    mapped = Mapped(tmp_path, stored, block, twin)
    mapped.check()
    assert len({id(tensor) for tensor in mapped.master.tensors}) == len(mapped.master.tensors)
    for module in (block, twin):
        module.first.expand.weight.data.mul_(2)
    mapped.check()
    assert block.second.expand.weight is block.first.expand.weight
    assert "first.expand.weight" in mapped.own and "first.contract.weight" not in mapped.own


def test_a_leaf_that_was_taken_away_edited_and_put_back(mapped: Mapped) -> None:
    for module in (mapped.block, mapped.twin):
        weight = module.expand.weight
        module.expand.weight = nn.Parameter(weight.data.clone(), requires_grad=False)
        if module is mapped.block:
            mapped.master.pack()
            weight.data.mul_(2)
            mapped.master.pack()
            assert mapped.master.is_current(), "what it doesn't hold is nothing to it"
        else:
            weight.data.mul_(2)
        module.expand.weight = weight
    mapped.check()
    assert "expand.weight" in mapped.own


# What has to be read: casts and regroupings


def casting(folder: Path, *, mixed: bool = False) -> Mapped:
    """A bfloat16 block whose file is float32; `mixed`: but for one weight."""
    block, twin = toy(dtype=torch.bfloat16), toy(dtype=torch.bfloat16)
    stored = {key: tensor.float() for key, tensor in block.state_dict().items()}
    if mixed:
        stored["contract.weight"] = block.contract.weight
    else:
        # Nothing in the block has bytes at rest then.
        for module in (block, twin):
            module.register_buffer("scale", module.scale, persistent=True)
        stored["scale"] = block.scale.float()
    return Mapped(folder, stored, block, twin, casts=True)


@pytest.mark.parametrize("mixed", [False, True])
def test_casts_are_withheld_until_they_are_realized(tmp_path: Path, mixed: bool) -> None:
    mapped = casting(tmp_path, mixed=mixed)
    weight = mapped.block.expand.weight
    mapped.check()
    assert mapped.master.withheld and is_withheld(weight)
    assert is_withheld(mapped.block.contract.weight) != mixed
    with pytest.raises(RuntimeError, match=r"block\.expand\.weight isn't in memory between forwards"):
        weight.sum()
    mapped.master.realize()
    assert not mapped.master.withheld and not is_withheld(weight)
    mapped.check()
    weight.data.mul_(2)
    mapped.twin.expand.weight.data.mul_(2)
    mapped.check()
    mapped.master.realize()
    mapped.check()


@pytest.mark.parametrize("mixed", [False, True])
def test_released_leaves_are_ordinary_tensors(tmp_path: Path, mixed: bool) -> None:
    mapped = casting(tmp_path, mixed=mixed)
    mapped.master.release()
    assert not any(map(is_withheld, mapped.master.tensors))
    x = X.bfloat16()
    assert torch.equal(mapped.block(x), mapped.twin(x))
    mapped.master.release()
    mapped.block.to(torch.float32)
    assert mapped.block.expand.weight.dtype == torch.float32


def test_a_leaf_that_was_withheld_before_is_taken_as_it_is(tmp_path: Path) -> None:
    """As `load_omni_pipeline` leaves them."""
    block = toy(dtype=torch.bfloat16)
    stored = {key: tensor.float() for key, tensor in block.state_dict().items()}
    save_file(stored, tmp_path / "model.safetensors")
    sources = prove(block, Checkpoint.find(tmp_path), casts=True)
    assert isinstance(sources, dict)
    weights = stored_weights(block)
    for path, tensor in weights.items():
        withhold(tensor, f"{path} is in the file.")
    origins = {id(tensor): (tensor, sources[path]) for path, tensor in weights.items()}
    master = MappedMaster(lambda: find_leaves(block, "block"), [block], "block", origins)
    master.pack()
    master.release()
    x = X.bfloat16()
    assert torch.equal(block(x), toy(dtype=torch.bfloat16)(x))


def test_replacing_a_withheld_parameter(tmp_path: Path) -> None:
    mapped = casting(tmp_path)
    for module in (mapped.block, mapped.twin):
        module.expand.weight = nn.Parameter(torch.full((HIDDEN, WIDTH), 0.01, dtype=torch.bfloat16), False)
    mapped.check()
    assert mapped.own == {"expand.weight"}


def test_regrouped_weights(tmp_path: Path) -> None:
    """The file has two weights in one, head by head."""
    block, twin = toy(), toy()
    stored = block.state_dict()
    expand = stored.pop("expand.weight")
    stored["both"] = torch.stack([expand.view(10, -1, WIDTH), torch.zeros(10, HIDDEN // 10, WIDTH)], 1).reshape(
        -1, WIDTH
    )
    layouts = {"expand.weight": Stored("both", groups=10, sizes=(1, 1), parts=(0,))}
    mapped = Mapped(tmp_path, stored, block, twin, layouts=layouts)
    assert is_withheld(block.expand.weight) and not is_withheld(block.contract.weight)
    mapped.check()
    mapped.master.realize()
    mapped.check()
    assert {"scale", "expand.weight"} == mapped.own


# Leaves that come home


def test_a_leaf_that_was_elsewhere_comes_home(mapped: Mapped) -> None:
    weight = mapped.block.expand.weight
    buffer = torch.empty(mapped.master.nbytes, dtype=torch.uint8)
    mapped.master.read_into(buffer)
    assert mapped.master.take_home(weight, buffer), "nothing to do"
    assert mapped.is_in_file(weight)
    weight.data = weight.data * 2
    mapped.twin.expand.weight.data.mul_(2)
    assert mapped.master.take_home(weight, buffer)
    second = torch.empty_like(buffer)
    second.copy_(buffer)
    mapped.master.read_into(second)
    assert torch.equal(second, buffer), "the loaded buffer and what is read next are the same"
    mapped.check()
    assert mapped.own == {"scale", "expand.weight"}
    weight.data = weight.data.double()
    assert not mapped.master.take_home(weight) and not mapped.master.take_home(torch.ones(1))


def test_a_withheld_leaf_that_was_given_bytes_comes_home(tmp_path: Path) -> None:
    mapped = casting(tmp_path)
    weight = mapped.block.expand.weight
    buffer = torch.empty(mapped.master.nbytes, dtype=torch.uint8)
    mapped.master.read_into(buffer)
    mapped.master.bind(buffer)
    weight.data = weight.data * 2
    mapped.twin.expand.weight.data.mul_(2)
    assert mapped.master.take_home(weight, buffer)
    mapped.master.unbind()
    assert not is_withheld(weight) and is_withheld(mapped.block.contract.weight)
    mapped.check()
    assert mapped.own == {"expand.weight"}


# Files that change


def touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def test_a_changed_file_is_an_error_before_anything_is_touched(mapped: Mapped) -> None:
    touch(mapped.path)
    at_rest = [tensor.data_ptr() for tensor in mapped.master.tensors]
    for attempt in (mapped.master.pack, lambda: mapped.master.read_into(torch.empty(10, dtype=torch.uint8))):
        with pytest.raises(CheckpointError, match=r"model\.safetensors was written to"):
            attempt()
    assert [tensor.data_ptr() for tensor in mapped.master.tensors] == at_rest
    mapped.master.release()


def test_a_file_that_changes_while_weights_are_realized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were read are ordinary tensors, the others stay withheld, and the error stays the same."""
    mapped = casting(tmp_path)
    read, reads = type(mapped.origins[id(mapped.block.gate)][1]).read, []

    def failing(source: Any) -> torch.Tensor:
        reads.append(source)
        if len(reads) == 3:
            touch(mapped.path)
        return read(source)

    monkeypatch.setattr(type(mapped.origins[id(mapped.block.gate)][1]), "read", failing)
    for attempt in (mapped.master.realize, mapped.master.realize, mapped.master.release, mapped.master.pack):
        with pytest.raises(CheckpointError, match=r"model\.safetensors was written to"):
            attempt()
        there = [not is_withheld(tensor) for tensor in mapped.master.tensors]
        assert sum(there) == 2
        mapped.master.unbind()


# LoRA that is fused


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32], ids=str)
def test_fused_lora_is_that_of_the_resident_run_bit_for_bit(
    tmp_path: Path, stored: torch.dtype, device: torch.device, sim: ModuleType
) -> None:
    resident, offloaded = Subject(QWEN_IMAGE), Subject(QWEN_IMAGE, stored)
    kind = type(offloaded.pipe)
    offloaded.pipe.save_pretrained(tmp_path)
    resident.pipe = kind.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    offloaded.pipe = load_omni_pipeline(kind, tmp_path, torch_dtype=torch.bfloat16)
    for subject in (resident, offloaded):
        subject.pipe.set_progress_bar_config(disable=True)
    resident.pipe.to(device)
    offloaded.pipe.enable_omni_offload("layer")
    masters = offloaded.pipe.omni_offload.backend.masters
    assert any(isinstance(master, MappedMaster) for master in masters)
    outputs: list[list[np.ndarray]] = [[], []]
    for subject, found in zip((resident, offloaded), outputs, strict=True):
        found.append(subject.run())
        if subject is offloaded and stored is torch.float32:
            with pytest.raises(RuntimeError, match=r"isn't in memory between forwards.*gather\(\)"):
                subject.load("plain")
            with subject.pipe.omni_offload.gather():
                assert not any(is_withheld(tensor) for tensor in subject.pipe.transformer.parameters())
        subject.load("plain")
        found.append(subject.run())
        subject.fuse(lora_scale=0.7)
        found.append(subject.run())
        subject.unfuse()
        found.append(subject.run())
        subject.pipe.delete_adapters("style")
        found.append(subject.run())
    for number, (expected, output) in enumerate(zip(*outputs, strict=True)):
        assert np.array_equal(expected, output), number
    assert not np.array_equal(outputs[0][0], outputs[0][1]) and sim.hazards() == []
    offloaded.pipe.disable_omni_offload()
    for path, parameter in resident.pipe.transformer.named_parameters():
        assert torch.equal(parameter.cpu(), offloaded.pipe.transformer.get_parameter(path)), path


def _large() -> nn.Module:
    """Two leaves of many pages, and one behind them."""
    block = nn.Module()
    torch.manual_seed(0)
    for name in ("first", "second", "last"):
        setattr(block, name, nn.Parameter(torch.randn(64, 1024), requires_grad=False))
    return block


def _swap(block: Any) -> None:
    block.first.data.mul_(2)
    block.second.data.mul_(3)
    block.first.data, block.second.data = block.second.data, block.first.data


def _tie(block: Any) -> None:
    block.first.data.mul_(2)
    block.second.data = block.first.data


@pytest.mark.parametrize("edit", [_swap, _tie])
def test_edited_pages_that_another_leaf_looks_at_stay(edit: Callable[[Any], None], tmp_path: Path) -> None:
    mapped = Mapped(tmp_path, block=_large(), twin=_large())
    edit(mapped.block)
    edit(mapped.twin)
    mapped.master.pack()
    buffer = torch.empty(mapped.master.nbytes, dtype=torch.uint8)
    mapped.master.read_into(buffer)
    for tensor, view in mapped.master.views_on(buffer):
        name = next(name for name, weight in mapped.block.named_parameters() if weight is tensor)
        expected = mapped.twin.get_parameter(name)
        assert torch.equal(tensor, expected) and torch.equal(view, expected), name


def test_edited_pages_that_an_alias_looks_at_stay(tmp_path: Path) -> None:
    mapped = Mapped(tmp_path, block=_large(), twin=_large())
    weight: Any = mapped.block.first
    alias, before = weight.detach(), weight.clone()
    weight.data.mul_(2)
    mapped.master.pack()
    assert torch.equal(alias, before * 2)


def test_edited_pages_that_nobody_looks_at_are_given_back(tmp_path: Path) -> None:
    mapped = Mapped(tmp_path, block=_large(), twin=_large())
    weight: Any = mapped.block.first
    (segment,) = mapped.origins[id(weight)][1].segments
    weight.data.mul_(2)
    inner = (segment.start + 4096, segment.nbytes - 2 * 4096)
    assert segment.file.edited([inner]) == [True]
    mapped.master.pack()
    assert segment.file.edited([inner]) == [False] and torch.equal(weight, _large().first * 2)


def test_a_cast_of_the_pipeline_that_cast_weights_refuse_casts_nothing(tmp_path: Path, device: torch.device) -> None:
    tiny.build_wan(num_layers=3)[0].save_pretrained(tmp_path)
    pipe = load_omni_pipeline(WanPipeline, tmp_path, dtype=torch.bfloat16)
    handle = pipe.enable_omni_offload("layer")
    before = {name: module.dtype for name, module in handle.modules().items()}
    with pytest.raises(RuntimeError, match=r"transformer.*gather\(\)"):
        pipe.to(torch.float16)
    assert {name: module.dtype for name, module in handle.modules().items()} == before
    with handle.gather():
        pipe.to(torch.float16)
    assert {module.dtype for module in handle.modules().values()} == {torch.float16}
