"""The tiny pipelines are fit to test with: repeatable, saveable, and every block of them matters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import tiny

CASES = {**tiny.BUILDERS, **{name: build for name, build in tiny.VARIANTS.items() if name != "longcat_rewrite"}}


def leaves(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from (tensor for tensor in [*module.parameters(), *module.buffers()] if tensor.is_floating_point())


def changes_when_scaled(pipe: object, call: object, block: torch.nn.Module, baseline: np.ndarray) -> bool:
    saved = [tensor.detach().clone() for tensor in leaves(block)]
    for tensor in leaves(block):
        tensor.data.mul_(1.5)
    changed = not np.array_equal(tiny.run(pipe, call), baseline)
    for tensor, before in zip(leaves(block), saved, strict=True):
        tensor.data.copy_(before)
    return changed


@pytest.mark.parametrize("name", CASES)
def test_runs_are_repeatable_and_survive_saving(name: str, tmp_path: Path) -> None:
    pipe, call = CASES[name]()
    first = tiny.run(pipe, call)
    assert np.isfinite(first).all() and first.std() > 0
    assert np.array_equal(tiny.run(pipe, call), first)
    if name == "minimax_h3":
        with pytest.raises(NotImplementedError, match="modular"):
            tiny.reload(pipe, tmp_path)
        return
    assert np.array_equal(tiny.run(tiny.reload(pipe, tmp_path), call), first)


@pytest.mark.parametrize(
    ("name", "stacks"),
    [
        ("wan", {"transformer": ["blocks"], "transformer_2": ["blocks"]}),
        ("wan_i2v", {"transformer": ["blocks"], "transformer_2": ["blocks"]}),
        ("flux2", {"transformer": ["transformer_blocks", "single_transformer_blocks"]}),
        ("sd3", {"transformer": ["transformer_blocks"]}),
        ("qwen_image", {"transformer": ["transformer_blocks"]}),
        ("sdxl", {"unet": ["down_blocks", "up_blocks"]}),
        ("longcat_image", {"transformer": ["transformer_blocks", "single_transformer_blocks"]}),
        ("ovis_image", {"transformer": ["transformer_blocks", "single_transformer_blocks"]}),
        ("cosmos3_omni", {"transformer": ["layers"]}),
        ("minimax_h3", {"transformer": ["transformer_blocks"]}),
    ],
)
def test_every_dit_block_matters(name: str, stacks: dict[str, list[str]]) -> None:
    pipe, call = tiny.BUILDERS[name]()
    baseline = tiny.run(pipe, call)
    for component, containers in stacks.items():
        for container in containers:
            for index, block in enumerate(getattr(getattr(pipe, component), container)):
                assert changes_when_scaled(pipe, call, block, baseline), f"{component}.{container}.{index}"


def test_trace_gives_the_order_of_blocks() -> None:
    pipe, call = tiny.build_wan(num_layers=3)
    order = [entry for entry in tiny.trace(pipe, call) if entry[0].startswith("transformer")]
    one_pass = [("transformer.blocks", index) for index in range(3)]
    second_dit = [("transformer_2.blocks", index) for index in range(3)]
    # Two steps, each with and without the prompt.
    assert order == one_pass * 2 + second_dit * 2


def test_wan_single_has_one_dit() -> None:
    pipe, _ = tiny.VARIANTS["wan_single"]()
    assert pipe.transformer is not None and pipe.transformer_2 is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_blocks", [1, 3, 12])
def test_every_leaf_of_a_toy_block_matters(num_blocks: int, dtype: torch.dtype) -> None:
    pipe, call = tiny.build_toy(num_blocks, dtype=dtype, sizes=[32, 64], gate_dtype=torch.float32, vae=True)
    baseline = tiny.run(pipe, call)
    for block in pipe.transformer.blocks:
        assert {tensor.dtype for tensor in leaves(block)} == {dtype, torch.float32}
        for tensor in leaves(block):
            saved = tensor.detach().clone()
            tensor.data.mul_(1.5)
            assert not np.array_equal(tiny.run(pipe, call), baseline)
            tensor.data.copy_(saved)
    assert np.array_equal(tiny.run(pipe, call), baseline)


def test_toy_blocks_differ_in_bytes() -> None:
    dit = tiny.ToyDiT(4, sizes=[32, 128])
    sizes = [sum(tensor.nbytes for tensor in leaves(block)) for block in dit.blocks]
    assert sizes[0] == sizes[2] < sizes[1] == sizes[3]


def test_toy_order_skips_and_callbacks() -> None:
    pipe, _ = tiny.build_toy(5, two_stage=True, text_encoder=True, vae=True)
    x = torch.linspace(-1, 1, 4 * 8).reshape(1, 4, 8)
    plain = tiny.to_array(pipe(x))
    assert np.array_equal(tiny.to_array(pipe(x, order=range(5))), plain)
    assert not np.array_equal(tiny.to_array(pipe(x, order=[4, 3, 2, 1, 0])), plain)
    assert not np.array_equal(tiny.to_array(pipe(x, forwards_per_step=2)), plain)
    assert np.array_equal(tiny.to_array(pipe(x, skip=[1, 3])), tiny.to_array(pipe(x, order=[0, 2, 4])))
    seen: list[int] = []

    def note(pipe: object, step: int, timestep: int, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        seen.append(step)
        return {"latents": torch.zeros_like(tensors["latents"])}

    assert not np.array_equal(tiny.to_array(pipe(x, steps=3, callback_on_step_end=note)), plain)
    assert seen == [0, 1, 2]


def test_toy_pipeline_survives_saving(tmp_path: Path) -> None:
    pipe, call = tiny.build_toy(
        3, two_stage=True, text_encoder=True, vae=True, dtype=torch.bfloat16, gate_dtype=torch.float32, sizes=[16, 48]
    )
    loaded = tiny.reload(pipe, tmp_path)
    assert loaded.transformer.blocks[1].gate.dtype == torch.float32
    assert loaded.transformer.blocks[1].expand.weight.dtype == torch.bfloat16
    assert np.array_equal(tiny.run(loaded, call), tiny.run(pipe, call))


def test_toy_weights_are_a_function_of_the_seed() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first, second = tiny.ToyDiT(2, seed=1), tiny.ToyDiT(2, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(leaves(first), leaves(second), strict=True))
