"""The simulated device: operators give the CPU's numbers, bit for bit, and refuse what a GPU refuses."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention

from tests.doubles import Wrapped

torch.manual_seed(0)
MATRIX = torch.randn(4, 5)
IMAGE = torch.randn(1, 4, 8, 8)
HEADS = torch.randn(1, 4, 7, 16)


def moved(value, device):
    """The value with its tensors on the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, list | tuple):
        return type(value)(moved(item, device) for item in value)
    return value


def assert_same(on_device, on_cpu):
    """Equal bits, shapes, strides-independent; the first one lives on the device."""
    if isinstance(on_cpu, list | tuple):
        assert len(on_device) == len(on_cpu)
        for pair in zip(on_device, on_cpu, strict=True):
            assert_same(*pair)
    elif isinstance(on_cpu, torch.Tensor):
        assert on_device.device.type == "sim" and on_device.dtype == on_cpu.dtype
        assert torch.equal(on_device.cpu(), on_cpu)
    else:
        assert on_device == on_cpu


OPERATORS = {
    "add": lambda x: x + 1,
    "scalar tensor": lambda x: x * torch.tensor(2.0),
    "matmul": lambda x: x @ x.T,
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "cpu index": lambda x: x[torch.tensor([0, 2])],
    "mask": lambda x: x[x > 0],
    "nonzero": lambda x: (x > 0).nonzero(),
    "integer index": lambda x: x[1, 2:4],
    "unbind": lambda x: x.unbind(1),
    "split": lambda x: x.split(2),
    "item": lambda x: x[0, 0].item(),
    "layer norm": lambda x: F.layer_norm(x, (5,)),
    "rms norm": lambda x: F.rms_norm(x, (5,)),
    "softmax": lambda x: x.softmax(-1),
    "bfloat16": lambda x: x.to(torch.bfloat16),
    "float8": lambda x: x.to(torch.float8_e4m3fn).to(torch.float32),
    "complex": lambda x: torch.view_as_real(torch.polar(x.abs(), x) * 2j),
    "conjugate": lambda x: torch.view_as_real(torch.polar(x.abs(), x).conj().clone()),
    "fft": lambda x: torch.view_as_real(torch.fft.fft(x)),
    "sort": lambda x: tuple(x.sort(-1)),
    "topk": lambda x: tuple(x.topk(2)),
    "svd": lambda x: torch.linalg.svd(x)[1],
    "tril": lambda x: x.tril(),
    "foreach": lambda x: torch._foreach_add([x], 1),
    "vmap": lambda x: torch.vmap(lambda row: row * row.sum())(x),
    "cat": lambda x: torch.cat([x, x]),
    "unfold": lambda x: x.unfold(1, 2, 1),
    "view as bytes": lambda x: x.view(torch.uint8),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operator_equals_the_cpu(device, name):
    assert_same(OPERATORS[name](MATRIX.to(device)), OPERATORS[name](MATRIX))


IN_PLACE = {
    "write to a view": lambda x: x[1].add_(1),
    "masked assignment": lambda x: x.__setitem__(x > 0, 0.0),
    "index assignment": lambda x: x.__setitem__(torch.tensor([0, 2]), 7.0),
    "out=": lambda x: torch.add(x, 1, out=x),
    "copy within": lambda x: x[0].copy_(x[1]),
    "fill": lambda x: x.zero_(),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_operator_equals_the_cpu(device, name):
    on_device, on_cpu = MATRIX.to(device), MATRIX.clone()
    IN_PLACE[name](on_device)
    IN_PLACE[name](on_cpu)
    assert_same(on_device, on_cpu)


MODULES = {
    "linear": (torch.nn.Linear(5, 3), MATRIX),
    "layer norm": (torch.nn.LayerNorm(5), MATRIX),
    "group norm": (torch.nn.GroupNorm(2, 4), IMAGE),
    "conv2d": (torch.nn.Conv2d(4, 6, 3, padding=1), IMAGE),
    "conv2d grouped": (torch.nn.Conv2d(4, 6, 3, groups=2, bias=False), IMAGE),
    "conv transposed": (torch.nn.ConvTranspose2d(4, 6, 3, stride=2), IMAGE),
    "conv3d": (torch.nn.Conv3d(4, 6, (1, 2, 2), stride=(1, 2, 2)), IMAGE[:, :, None].expand(1, 4, 2, 8, 8)),
    "interpolate": (torch.nn.Upsample(scale_factor=2), IMAGE),
}


@pytest.mark.parametrize("name", MODULES)
def test_module_equals_the_cpu_forward_and_backward(device, name):
    module, example = MODULES[name]
    on_cpu, on_device = copy.deepcopy(module), copy.deepcopy(module).to(device)
    inputs = example.clone().requires_grad_(), example.to(device).requires_grad_()
    outputs = on_cpu(inputs[0]), on_device(inputs[1])
    assert_same(outputs[1].detach(), outputs[0].detach())
    for output in outputs:
        output.square().sum().backward()
    assert_same(inputs[1].grad, inputs[0].grad)
    for p, q in zip(on_device.parameters(), on_cpu.parameters(), strict=True):
        assert_same(p.grad, q.grad)


def test_rms_norm_equals_the_cpu_forward_and_nearly_backward(device):
    gradients = []
    for where in ("cpu", device):
        module, example = torch.nn.RMSNorm(5).to(where), MATRIX.clone().to(where).requires_grad_()
        output = module(example)
        assert torch.equal(output.cpu(), F.rms_norm(MATRIX, (5,)))
        output.square().sum().backward()
        gradients.append((example.grad.cpu(), module.weight.grad.cpu()))
    torch.testing.assert_close(*gradients)


ATTENTION = {
    "plain": dict(query=HEADS, key=HEADS, value=HEADS),
    "cross": dict(query=HEADS, key=torch.randn(1, 4, 5, 16), value=torch.randn(1, 4, 5, 16)),
    "causal": dict(query=HEADS, key=HEADS, value=HEADS, is_causal=True),
    "mask": dict(query=HEADS, key=HEADS, value=HEADS, attn_mask=torch.randn(1, 1, 7, 7)),
    "boolean mask": dict(query=HEADS, key=HEADS, value=HEADS, attn_mask=torch.ones(7, 7, dtype=torch.bool).tril()),
    "scale": dict(query=HEADS, key=HEADS, value=HEADS, scale=0.3),
    "three dimensions": dict(query=HEADS[0], key=HEADS[0], value=HEADS[0]),
    "value of another width": dict(query=HEADS, key=HEADS, value=torch.randn(1, 4, 7, 8)),
    "grouped heads": dict(query=HEADS, key=HEADS[:, :2], value=HEADS[:, 2:], enable_gqa=True),
    "one key head": dict(query=HEADS, key=HEADS[:, :1], value=HEADS[:, 1:2], enable_gqa=True, is_causal=True),
    "grouped heads, mask": dict(
        query=HEADS, key=HEADS[:, :2], value=HEADS[:, 2:], enable_gqa=True, attn_mask=torch.randn(1, 1, 7, 7)
    ),
    "grouped heads, boolean mask": dict(
        query=HEADS,
        key=HEADS[:, :2],
        value=HEADS[:, 2:],
        enable_gqa=True,
        attn_mask=torch.ones(1, 1, 7, 7, dtype=torch.bool).tril(),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
def test_attention_equals_the_cpu(device, name, dtype, grad):
    def run(where):
        arguments = {}
        for key, value in ATTENTION[name].items():
            if isinstance(value, torch.Tensor):
                value = value.to(dtype) if value.is_floating_point() else value
                value = value.detach().clone().to(where).requires_grad_(grad and key != "attn_mask")
            arguments[key] = value
        output = F.scaled_dot_product_attention(**arguments)
        if not grad:
            return [output]
        output.square().sum().backward()
        return [output.detach()] + [arguments[key].grad for key in ("query", "key", "value")]

    assert_same(run(device), run("cpu"))


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_equals_the_cpu(device):
    def run(where):
        heads = HEADS.to(where)
        with torch.no_grad():
            return flex_attention(heads, heads, heads, score_mod=lambda score, batch, head, q, k: score - (q - k).abs())

    assert_same(run(device), run("cpu"))


MIXED = {
    "add": lambda x, y: x + y,
    "matmul": lambda x, y: torch.mm(y, x.T),
    "linear": lambda x, y: F.linear(x, y),
    "cat": lambda x, y: torch.cat([x, y]),
    "embedding": lambda x, y: F.embedding(torch.tensor([1, 2]), x),
    "layer norm": lambda x, y: F.layer_norm(x, (5,), y[0]),
    "attention": lambda x, y: F.scaled_dot_product_attention(x[None, None], y[None, None], y[None, None]),
    "convolution": lambda x, y: F.conv2d(x[None, None], y[None, None, :2, :2]),
    "in place": lambda x, y: y.add_(x),
}


@pytest.mark.parametrize("name", MIXED)
def test_cpu_and_device_tensors_do_not_mix(device, name):
    with pytest.raises(RuntimeError, match=r"Expected .* same device"):
        MIXED[name](MATRIX.to(device), MATRIX.clone())


# Random numbers


def test_generators_give_the_cpu_s_numbers(device):
    drawn = torch.randn(3, device=device, generator=torch.Generator(device).manual_seed(3))
    assert_same(drawn, torch.randn(3, generator=torch.Generator().manual_seed(3)))
    with pytest.raises(RuntimeError, match="Expected a 'sim' device type for generator"):
        torch.randn(3, device=device, generator=torch.Generator())


def test_manual_seed_and_fork(device):
    torch.manual_seed(1)
    first = torch.randn(3, device=device)
    with torch.random.fork_rng(devices=[0], device_type="sim"):
        torch.randn(3, device=device)
    second = torch.randn(3, device=device)
    torch.manual_seed(1)
    assert_same(torch.stack([first, second]), torch.stack([torch.randn(3) for _ in range(2)]))
    torch.manual_seed(1)
    assert torch.equal(torch.randn(3, device=device).cpu(), first.cpu())


# What libraries do with tensors and modules


def test_parameters_take_device_data(device):
    parameter = torch.nn.Parameter(MATRIX.clone())
    identity = id(parameter)
    parameter.data = MATRIX.to(device)
    assert parameter.device.type == "sim" and id(parameter) == identity
    other = torch.nn.Parameter(torch.ones(2))
    torch.utils.swap_tensors(parameter, other)
    assert parameter.shape == (2,) and other.device.type == "sim"


def test_modules_move_copy_and_materialise(device):
    assert torch.nn.Linear(2, 2).to(device).weight.device.type == "sim"
    assert copy.deepcopy(torch.nn.Linear(2, 2).to(device)).weight.device.type == "sim"
    assert torch.nn.Linear(2, 2, device="meta").to_empty(device=device).weight.device.type == "sim"
    with torch.device(device):
        assert torch.nn.Linear(2, 2).weight.device.type == "sim"


def test_wrapper_subclasses_move_as_they_do_to_other_devices(device):
    """torch asks whether a parameter may stay the object that it is; no real device asks the subclass about that."""
    layer = torch.nn.Linear(5, 4)
    layer.weight = torch.nn.Parameter(Wrapped.of(MATRIX), requires_grad=False)
    expected = layer(MATRIX)
    layer.to(device)
    assert type(layer.weight) is Wrapped and layer.weight.codes.device.type == "sim"
    assert_same(layer(MATRIX.to(device)).detach(), expected.detach())


@pytest.mark.parametrize("how", ["torch", "pickle"])
def test_tensors_are_saved_and_loaded(device, how):
    tensor = MATRIX.to(device)
    if how == "pickle":
        assert_same(pickle.loads(pickle.dumps(tensor)), MATRIX)
    else:
        buffer = io.BytesIO()
        torch.save(tensor, buffer)
        buffer.seek(0)
        assert_same(torch.load(buffer), MATRIX)


def test_storage_can_be_resized(device):
    before = torch.accelerator.memory_allocated()
    tensor = MATRIX.to(device)
    tensor.untyped_storage().resize_(0)
    assert torch.accelerator.memory_allocated() == before
    tensor.untyped_storage().resize_(80)
    assert torch.accelerator.memory_allocated() > before


def test_out_arguments_are_resized(device):
    out = torch.empty(0, device=device)
    assert_same(torch.add(MATRIX.to(device), 1, out=out), MATRIX + 1)
    assert out.shape == MATRIX.shape


def test_casting_while_copying(device):
    pinned = MATRIX.pin_memory()
    assert_same(pinned.to(device, torch.bfloat16, non_blocking=True), MATRIX.bfloat16())


def test_numpy_is_refused(device):
    with pytest.raises(TypeError, match="can't convert sim"):
        MATRIX.to(device).numpy()


def test_inference_mode(device):
    with torch.inference_mode():
        assert_same(MATRIX.to(device)[1] + 1, MATRIX[1] + 1)


def test_autocast_casts_and_remembers_a_weight_as_on_a_gpu(device):
    linear = torch.nn.Linear(5, 3).to(device)
    weight, bias, x = linear.weight.detach().bfloat16(), linear.bias.detach().bfloat16(), MATRIX.to(device)
    expected = F.linear(MATRIX.bfloat16(), weight.cpu(), bias.cpu())
    with torch.no_grad(), torch.autocast("sim", torch.bfloat16):
        output = linear(x)
        assert_same(output, expected)
        assert_same(output.softmax(-1), expected.float().softmax(-1))
        assert_same(torch.dot(output[0], x[0, :3]), torch.dot(expected[0].float(), MATRIX[0, :3]))
        linear.weight.zero_()
        assert_same(linear(x), expected)
    with torch.no_grad(), torch.autocast("sim", torch.bfloat16):
        assert_same(linear(x), bias.cpu().expand(4, 3))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_functions(device, backend):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: (x @ x.T).relu(), backend=backend)
    assert_same(compiled(MATRIX.to(device)), (MATRIX @ MATRIX.T).relu())


def test_training_steps_equal_the_cpu(device):
    def train(where):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(5, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Linear(8, 2)
        )
        model.to(where)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        for _ in range(3):
            optimizer.zero_grad()
            model(MATRIX.to(where)).square().mean().backward()
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    assert_same(train(device), train("cpu"))
