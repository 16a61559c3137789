"""Withheld weights: whatever needs their bytes says where they are, and what doesn't goes on as before."""

from __future__ import annotations

import copy
import io
import operator
import pickle
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import peft
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn

from diffusers_omni_offload.weights.withheld import cover, give_back, is_withheld, uncover, withhold
from tests.tiny.toy import ToyBlock

WHY = "block.weight isn't here. Look for it in the file."
SENTENCE = "isn't here. Look for it in the file."


def _inference(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    with torch.inference_mode():
        return make()


def values(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(16.0).reshape(4, 4).to(dtype)


#: What may be a leaf of a block.
KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "parameter": lambda: nn.Parameter(values(), requires_grad=False),
    "trainable parameter": lambda: nn.Parameter(values()),
    "bfloat16 parameter": lambda: nn.Parameter(values(torch.bfloat16), requires_grad=False),
    "buffer": lambda: values().clone(),
    "nn.Buffer": lambda: nn.Buffer(values()),
    "transposed": lambda: nn.Parameter(values().t(), requires_grad=False),
    "view": lambda: values().repeat(2, 1)[:4],
    "inference parameter": lambda: _inference(lambda: nn.Parameter(values(), requires_grad=False)),
    "inference buffer": lambda: _inference(lambda: values().clone()),
}
kinds = pytest.mark.parametrize("kind", KINDS)


@dataclass
class Subject:
    """A withheld tensor as `weight` of a module, and a tensor that is there."""

    kind: str
    weight: torch.Tensor = field(init=False)
    other: torch.Tensor = field(init=False)
    module: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        self.weight = KINDS[self.kind]()
        self.other = torch.ones(4, 4, dtype=self.weight.dtype)
        self.module = nn.Module()
        self.module.weight = self.weight
        if not isinstance(self.weight, nn.Parameter | nn.Buffer):
            del self.module.weight
            self.module.register_buffer("weight", self.weight)
        withhold(self.weight, WHY)


#: Whatever would read or write the bytes of `s.weight`, or hand out what could.
OPERATIONS: dict[str, Callable[[Subject], object]] = {
    # arithmetic, from both sides and in place
    "w + 1": lambda s: s.weight + 1,
    "1 - w": lambda s: 1 - s.weight,
    "x + w": lambda s: s.other + s.weight,
    "w += 1": lambda s: operator.iadd(s.weight, 1),
    "x.add_(w)": lambda s: s.other.add_(s.weight),
    "-w": lambda s: -s.weight,
    "abs": lambda s: abs(s.weight),
    "w ** 2": lambda s: s.weight**2,
    "w == x": lambda s: s.weight == s.other,
    "x == w": lambda s: s.other == s.weight,
    "x @ w": lambda s: s.other @ s.weight,
    "sum": lambda s: s.weight.sum(),
    "torch.max": lambda s: torch.max(s.weight),
    "topk": lambda s: s.weight.topk(1),
    "isnan": lambda s: torch.isnan(s.weight).any(),
    "equal": lambda s: torch.equal(s.other, s.weight),
    "allclose": lambda s: torch.allclose(s.other, s.weight),
    "aten op": lambda s: torch.ops.aten.add.Tensor(s.other, s.weight),
    "where": lambda s: torch.where(s.other > 0, s.weight, s.other),
    "vmap": lambda s: torch.vmap(lambda row: row * 2)(s.weight),
    # inside of lists, tuples and keywords
    "cat of a list": lambda s: torch.cat([s.other, s.weight]),
    "stack of a tuple": lambda s: torch.stack((s.weight, s.other)),
    "block_diag": lambda s: torch.block_diag(s.other, s.weight),
    "einsum": lambda s: torch.einsum("ij,jk->ik", s.other, s.weight),
    "broadcast_tensors": lambda s: torch.broadcast_tensors(s.other, s.weight),
    "out=": lambda s: torch.add(s.other, s.other, out=s.weight),
    "out=(,)": lambda s: torch.linalg.qr(s.other.float(), out=(s.weight, s.other)),
    "foreach": lambda s: torch._foreach_add([s.other, s.weight], 1),
    "foreach in place": lambda s: torch._foreach_mul_([s.weight], 2),
    "parameters_to_vector": lambda s: nn.utils.parameters_to_vector([s.weight]),
    "source=": lambda s: s.other.index_copy_(0, index=torch.arange(4), source=s.weight),
    # as layers use it
    "linear": lambda s: F.linear(s.other, s.weight),
    "bias of linear": lambda s: F.linear(s.other, s.other, bias=s.weight),
    "embedding": lambda s: F.embedding(torch.tensor([0]), s.weight),
    "conv1d": lambda s: F.conv1d(torch.ones(1, 4, 4), s.weight),
    "attention": lambda s: F.scaled_dot_product_attention(s.other, s.weight, s.other),
    "rms_norm": lambda s: F.rms_norm(s.other, (4, 4), s.weight),
    "mse_loss": lambda s: F.mse_loss(s.other, s.weight),
    # writing
    "fill_": lambda s: s.weight.fill_(0),
    "normal_": lambda s: s.weight.normal_(),
    "copy_": lambda s: s.weight.copy_(s.other),
    "x.copy_(w)": lambda s: s.other.copy_(s.weight),
    "init.zeros_": lambda s: nn.init.zeros_(s.weight),
    "init.xavier_": lambda s: nn.init.xavier_uniform_(s.weight),
    "w[0] = 1": lambda s: operator.setitem(s.weight, 0, 1),
    "x[0] = w[0]": lambda s: operator.setitem(s.other, 0, s.weight[0]),
    "data =": lambda s: setattr(s.weight, "data", s.other),
    "data.mul_": lambda s: s.weight.data.mul_(2),
    "grad =": lambda s: setattr(s.weight, "grad", s.other),
    "resize_": lambda s: s.weight.resize_(1),
    # views and indices
    "data": lambda s: s.weight.data,
    "detach": lambda s: s.weight.detach(),
    "detach_": lambda s: s.weight.detach_(),
    "view": lambda s: s.weight.view(-1),
    "reshape": lambda s: s.weight.reshape(-1),
    "T": lambda s: s.weight.T,
    "mT": lambda s: s.weight.mT,
    "real": lambda s: s.weight.real,
    "as_strided": lambda s: s.weight.as_strided((1,), (1,)),
    "as_subclass": lambda s: s.weight.as_subclass(torch.Tensor),
    "chunk": lambda s: torch.chunk(s.weight, 2),
    "w[0]": lambda s: s.weight[0],
    "x[w]": lambda s: s.other[s.weight],
    "iteration": lambda s: list(s.weight),
    "1 in w": lambda s: 1 in s.weight,
    "nn.Parameter": lambda s: nn.Parameter(s.weight),
    "nn.Buffer": lambda s: nn.Buffer(s.weight),
    # copies, casts, devices
    "clone": lambda s: s.weight.clone(),
    "to dtype": lambda s: s.weight.to(torch.float64),
    "to device": lambda s: s.weight.to("meta"),
    "cpu": lambda s: s.weight.cpu(),
    "half": lambda s: s.weight.half(),
    "type_as": lambda s: s.other.type_as(s.weight),
    "empty_like": lambda s: torch.empty_like(s.weight),
    "randn_like": lambda s: torch.randn_like(s.weight),
    "new_zeros": lambda s: s.weight.new_zeros(3),
    "to_sparse": lambda s: s.weight.to_sparse(),
    "module.to": lambda s: s.module.to(torch.float64),
    "module.to device": lambda s: s.module.to("cpu"),
    "module.half": lambda s: s.module.half(),
    "module.to_empty": lambda s: s.module.to_empty(device="cpu"),
    "module.share_memory": lambda s: s.module.share_memory(),
    # memory
    "data_ptr": lambda s: s.weight.data_ptr(),
    "untyped_storage": lambda s: s.weight.untyped_storage(),
    "pin_memory": lambda s: s.weight.pin_memory(),
    "is_pinned": lambda s: s.weight.is_pinned(),
    "share_memory_": lambda s: s.weight.share_memory_(),
    # out to Python and numpy
    "item": lambda s: s.weight.item(),
    "tolist": lambda s: s.weight.tolist(),
    "bool": lambda s: bool(s.weight),
    "float": lambda s: float(s.weight),
    "int": lambda s: int(s.weight),
    "numpy": lambda s: s.weight.numpy(),
    "np.asarray": lambda s: np.asarray(s.weight),
    "from_dlpack": lambda s: torch.from_dlpack(s.weight),
    "np.from_dlpack": lambda s: np.from_dlpack(s.weight),
    # copies of objects, and files
    "deepcopy": lambda s: copy.deepcopy(s.weight),
    "copy": lambda s: copy.copy(s.weight),
    "deepcopy of the module": lambda s: copy.deepcopy(s.module),
    "pickle": lambda s: pickle.dumps(s.weight),
    "pickle of the module": lambda s: pickle.dumps(s.module),
    "torch.save": lambda s: torch.save({"weight": s.weight}, io.BytesIO()),
    "state_dict": lambda s: s.module.state_dict(),
    "save of a state_dict": lambda s: torch.save(s.module.state_dict(keep_vars=True), io.BytesIO()),
    "load_state_dict": lambda s: s.module.load_state_dict({"weight": s.other}),
    "safetensors": lambda s: safetensors.torch.save({"weight": s.weight}),
    "safetensors of the module": lambda s: safetensors.torch.save_model(s.module, "/nowhere/at.all"),
    # autograd
    "backward": lambda s: s.weight.sum().backward(),
    "register_hook": lambda s: s.weight.register_hook(print),
    "autograd.grad": lambda s: torch.autograd.grad(s.weight, s.other),
}


@kinds
def test_whatever_needs_the_bytes_says_where_they_are(kind: str) -> None:
    wrong = {}
    for name, operation in OPERATIONS.items():
        subject = Subject(kind)
        before = subject.other.clone()
        try:
            wrong[name] = f"gave {operation(subject)!r}"
        except RuntimeError as error:
            if SENTENCE not in str(error):
                wrong[name] = str(error)
        if not is_withheld(subject.weight) or not torch.equal(subject.other, before):
            wrong[name] = "something was changed"
    assert not wrong and len(OPERATIONS) > 100


@pytest.mark.filterwarnings("ignore:To copy construct", "ignore:torch.asarray")
@kinds
def test_what_torch_does_without_asking_gives_no_bytes(kind: str) -> None:
    """It makes tensors on meta, which nobody takes for values, and no error of ours can be raised."""
    subject = Subject(kind)
    for made in (torch.tensor(subject.weight), torch.Tensor._make_subclass(torch.Tensor, subject.weight)):
        assert made.is_meta
        with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
            made.tolist()
    for fails in (
        lambda: torch.utils.dlpack.to_dlpack(subject.weight),
        lambda: subject.weight.set_(subject.other),
        lambda: memoryview(subject.weight),  # type: ignore[arg-type]
    ):
        with pytest.raises((RuntimeError, BufferError, TypeError)):
            fails()
    assert torch.asarray(subject.weight) is subject.weight and torch.as_tensor(subject.weight) is subject.weight


@kinds
def test_the_first_withheld_tensor_of_many_is_named(kind: str) -> None:
    subject, second = Subject(kind), KINDS[kind]()
    withhold(second, "The second isn't, either.")
    with pytest.raises(RuntimeError, match=r"isn't here\. Look"):
        torch.cat([subject.other, subject.weight, second])
    with pytest.raises(RuntimeError, match="The second isn't, either"):
        torch.add(subject.other, subject.other, out=second)


def facts(tensor: torch.Tensor) -> dict[str, object]:
    """What can be said of a tensor without its bytes."""
    found = {
        "id": id(tensor),
        "hash": hash(tensor),
        "size": tensor.size(),
        "size(1)": tensor.size(1),
        "dim": tensor.dim(),
        "numel": tensor.numel(),
        "torch.numel": torch.numel(tensor),
        "stride": tensor.stride(),
        "element_size": tensor.element_size(),
        "len": len(tensor),
        "is_contiguous": tensor.is_contiguous(),
        "floating": (tensor.is_floating_point(), torch.is_floating_point(tensor), tensor.dtype.is_floating_point),
        "complex": (tensor.is_complex(), torch.is_complex(tensor)),
        "inference": tensor.is_inference(),
        "bits": (tensor.is_conj(), tensor.is_neg()),
        "isinstance": [isinstance(tensor, cls) for cls in (torch.Tensor, nn.Parameter, nn.Buffer)],
        "is_tensor": torch.is_tensor(tensor),
        "class": (type(tensor).__name__, type(tensor).__module__),
    }
    names = ["shape", "dtype", "layout", "device", "ndim", "itemsize", "nbytes", "requires_grad", "grad", "is_leaf"]
    names += ["is_meta", "is_cpu", "is_cuda", "is_sparse", "is_quantized"]
    return found | {name: getattr(tensor, name) for name in names}


@kinds
def test_what_needs_no_bytes_is_as_it_was(kind: str) -> None:
    tensor = KINDS[kind]()
    tensor.note = "kept"  # type: ignore[attr-defined]
    before, reference = facts(tensor), weakref.ref(tensor)
    withhold(tensor, WHY)
    assert facts(tensor) == before
    assert is_withheld(tensor) and reference() is tensor and tensor.note == "kept"  # type: ignore[attr-defined]
    assert {tensor: 1}[tensor] == 1 and tensor in {tensor}
    assert any(other is tensor for other in [tensor])


@kinds
def test_it_is_shown_without_its_bytes(kind: str) -> None:
    subject = Subject(kind)
    shown = repr(subject.weight)
    assert shown.startswith("<withheld ") and "(4, 4)" in shown and str(subject.weight.dtype) in shown
    assert f"{subject.weight}" == str(subject.weight) == shown
    with pytest.raises(TypeError, match="format"):
        f"{subject.weight:.2f}"


@kinds
def test_modules_list_it(kind: str) -> None:
    subject = Subject(kind)
    module = subject.module
    assert module.weight is subject.weight
    assert subject.weight in {*module.parameters(), *module.buffers()}
    assert module.state_dict(keep_vars=True)["weight"] is subject.weight
    assert subject.weight not in set(nn.Linear(1, 1).parameters())
    module.eval()
    module.zero_grad()
    repr(module)


def test_only_withheld_tensors_are_withheld() -> None:
    for other in (torch.ones(1), nn.Parameter(torch.ones(1)), None, "text", SimpleNamespace()):
        assert not is_withheld(other)


# In and out


@kinds
def test_it_is_itself_while_it_is_uncovered(kind: str) -> None:
    original, tensor = KINDS[kind](), KINDS[kind]()
    before = facts(tensor)
    withhold(tensor, WHY)
    with torch.inference_mode(tensor.is_inference()):
        data = original.detach().clone(memory_format=torch.preserve_format)
    for cycle in range(5):
        uncover(tensor)
        uncover(tensor)  # as after an interrupt: the second does nothing
        assert not is_withheld(tensor) and type(tensor) is type(original) and tensor.numel() == 0
        with torch.inference_mode(tensor.is_inference()):
            tensor.data = data * cycle if cycle else data
        assert facts(tensor) == before
        assert torch.equal(tensor, original * cycle if cycle else original)
        cover(tensor)
        cover(tensor)
        assert is_withheld(tensor) and facts(tensor) == before
        with pytest.raises(RuntimeError, match=SENTENCE):
            tensor.sum()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "view"])  # which has a base that keeps them
def test_covering_lets_go_of_the_bytes(kind: str) -> None:
    tensor = KINDS[kind]()
    pointer = tensor.untyped_storage()._weak_ref()
    withhold(tensor, WHY)
    for _ in range(3):
        assert torch.UntypedStorage._expired(pointer)  # type: ignore[attr-defined]
        torch.UntypedStorage._free_weak_ref(pointer)  # type: ignore[attr-defined]
        uncover(tensor)
        with torch.inference_mode(tensor.is_inference()):
            tensor.data = values(tensor.dtype)
        pointer = tensor.untyped_storage()._weak_ref()
        cover(tensor)
    torch.UntypedStorage._free_weak_ref(pointer)


@kinds
def test_it_can_be_given_back_for_good(kind: str) -> None:
    original, tensor = KINDS[kind](), KINDS[kind]()
    before, attributes = facts(tensor), dict(vars(tensor))
    withhold(tensor, WHY)
    with torch.inference_mode(tensor.is_inference()):
        data = original.detach().clone(memory_format=torch.preserve_format)
    give_back(tensor, data)
    assert facts(tensor) == before and torch.equal(tensor, original) and dict(vars(tensor)) == attributes
    assert tensor.data_ptr() == data.data_ptr()
    copy.deepcopy(tensor)
    withhold(tensor, "Again.")
    with pytest.raises(RuntimeError, match=r"Again\."):
        tensor.sum()


@kinds
def test_the_sentence_can_be_another_one_later(kind: str) -> None:
    subject = Subject(kind)
    withhold(subject.weight, "It is lost.")
    with pytest.raises(RuntimeError, match="It is lost"):
        subject.weight.sum()
    uncover(subject.weight)
    cover(subject.weight)
    with pytest.raises(RuntimeError, match="It is lost"):
        subject.weight.sum()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@kinds
def test_any_mode_will_do(kind: str, mode: Callable[[], torch.no_grad]) -> None:
    tensor = KINDS[kind]()
    before = facts(tensor)
    with mode():
        withhold(tensor, WHY)
    with mode():
        uncover(tensor)
    with mode():
        cover(tensor)
    assert facts(tensor) == before
    with torch.inference_mode(tensor.is_inference()):
        data = values(tensor.dtype)
    with mode():
        give_back(tensor, data)
    assert torch.equal(tensor, data) and tensor.is_inference() == before["inference"]


def test_a_gradient_waits_until_the_weight_is_back() -> None:
    weight = nn.Parameter(values())
    weight.sum().backward()
    gradient = weight.grad
    withhold(weight, WHY)
    assert weight.grad is None
    give_back(weight, values())
    assert weight.grad is gradient


def test_others_that_share_the_bytes_keep_them() -> None:
    weight = nn.Parameter(values())
    view, graph = weight.detach()[1], (weight * 2).sum()
    withhold(weight, WHY)
    assert torch.equal(view, values()[1]) and graph.item() == 240


@pytest.mark.parametrize("kind", [name for name, make in KINDS.items() if isinstance(make(), nn.Parameter)])
@pytest.mark.parametrize("is_covered", [True, False])
def test_whether_it_wants_gradients_may_change(kind: str, is_covered: bool) -> None:
    """As PEFT and `requires_grad_` do. It isn't a question of bytes."""
    subject = Subject(kind)
    if subject.weight.is_inference():
        subject.module.requires_grad_(False)
        return
    for flag in (True, False, True):
        if is_covered:
            subject.module.requires_grad_(flag)
        else:
            uncover(subject.weight)
            subject.weight.requires_grad = flag
            cover(subject.weight)
            subject.weight.requires_grad = flag
        assert subject.weight.requires_grad == flag
        uncover(subject.weight)
        assert subject.weight.requires_grad == flag and not is_withheld(subject.weight)
        cover(subject.weight)
        assert subject.weight.requires_grad == flag and is_withheld(subject.weight)
    give_back(subject.weight, subject.other)
    assert subject.weight.requires_grad


# PEFT


@contextmanager
def bound(block: nn.Module, data: dict[torch.Tensor, torch.Tensor]) -> Iterator[None]:
    """A forward's time: withheld tensors have these bytes."""
    for tensor, its in data.items():
        uncover(tensor)
        tensor.data = its
    try:
        yield
    finally:
        for tensor in data:
            cover(tensor)


@pytest.mark.parametrize("trainable", [False, True])
def test_peft_wraps_withheld_weights(trainable: bool) -> None:
    config = peft.LoraConfig(r=2, target_modules=["expand", "contract"], init_lora_weights=False)
    plain, block = ToyBlock(16, 32), ToyBlock(16, 32).requires_grad_(trainable)
    torch.manual_seed(0)
    peft.inject_adapter_in_model(config, plain)
    tensors = [*block.parameters(), *block.buffers()]
    data = {tensor: tensor.detach().clone() for tensor in tensors}
    for name, tensor in [*block.named_parameters(), *block.named_buffers()]:
        withhold(tensor, f"{name} {SENTENCE}")
    torch.manual_seed(0)
    peft.inject_adapter_in_model(config, block)
    assert block.expand.base_layer.weight is tensors[1] and all(map(is_withheld, tensors))
    assert not any(tensor.requires_grad for tensor in tensors)
    adapters = [tensor for name, tensor in block.named_parameters() if "lora_" in name]
    assert len(adapters) == 4 and not any(map(is_withheld, adapters))
    assert {(tensor.dtype, tensor.device.type) for tensor in adapters} == {(torch.float32, "cpu")}
    x = torch.ones(1, 3, 16)
    with torch.no_grad():
        with bound(block, data):
            assert torch.equal(block(x), plain(x))
        with pytest.raises(RuntimeError, match=SENTENCE):
            block(x)
        with pytest.raises(RuntimeError, match=r"expand.* isn't here"):
            block.expand.merge()
    assert not block.expand.merged
    for tensor, its in data.items():
        give_back(tensor, its)
    with torch.no_grad():
        block.expand.merge()
        plain.expand.merge()
    assert torch.equal(block.expand.base_layer.weight, plain.expand.base_layer.weight)


# Cost


@pytest.mark.timing
def test_a_forward_costs_a_few_microseconds_a_tensor() -> None:
    tensors = [nn.Parameter(values(), requires_grad=False) for _ in range(100)]
    for tensor in tensors:
        withhold(tensor, WHY)
    data, best = values(), float("inf")
    for _ in range(20):
        begin = time.perf_counter()
        for tensor in tensors:
            uncover(tensor)
        for tensor in tensors:
            tensor.data = data
        for tensor in tensors:
            cover(tensor)
        best = min(best, (time.perf_counter() - begin) / len(tensors))
    assert best < 6e-6, f"{best * 1e6:.1f} us a tensor"
