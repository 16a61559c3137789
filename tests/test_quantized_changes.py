"""Quantized weights that change between calls: the next call equals the resident pipeline with the same change."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests import tiny
from tests.equality import assert_no_hazards
from tests.living import fast_ones
from tests.modes import MODES
from tests.quantized import KINDS, build, inner_tensors, plain, to_resident, transformer

pytestmark = pytest.mark.filterwarnings("ignore:.*[Qq]uanto:FutureWarning")

BOTH = ("layer", "module")
"""What is done to the DiT; the mixed mode does to it what layer mode does."""

WIDTH, SEED = 128, 60
"""Of the DiTs, and of their other weights."""


class Twins:
    """A resident pipeline and an offloaded one, to which the same is done."""

    def __init__(self, kind: str, mode: str, device: torch.device, sim: ModuleType) -> None:
        self.kind, self.device, self._sim = kind, device, sim
        self.resident, self.call = build(kind, "sd3", WIDTH)
        to_resident(self.resident, device)
        self.offloaded, _ = build(kind, "sd3", WIDTH)
        self.handle = self.offloaded.enable_omni_offload(**MODES[mode])
        self.output: np.ndarray | None = None

    def both(self, change: Callable[[Any], Any]) -> None:
        """Do something to each of the two pipelines."""
        for pipe in (self.resident, self.offloaded):
            change(pipe)

    def assert_equal(self, what: str, shows: bool = True) -> None:
        """A call of each is equal, and differs from what it was before if the change `shows`."""
        before, self.output = self.output, tiny.run(self.resident, self.call)
        assert np.isfinite(self.output).all()
        assert (before is None or not np.array_equal(before, self.output)) == shows, what
        assert np.array_equal(tiny.run(self.offloaded, self.call), self.output), what
        assert_no_hazards(self._sim, what)

    def other(self, pipe: Any) -> Any:
        """A DiT with other weights of the same kind, where new weights of `pipe` belong."""
        kind = KINDS[self.kind]
        model = kind.apply(transformer("sd3", WIDTH, seed=SEED, dtype=kind.dtype))
        return self.placed(model) if pipe is self.resident else model

    def placed(self, model: nn.Module) -> nn.Module:
        """`model` on the device."""
        holder = tiny.build_sd3(t5=False)[0]
        holder.transformer = model
        return to_resident(holder, self.device).transformer


def layer_of(pipe_or_model: Any, path: str = "attn.to_q") -> nn.Module:
    """A linear layer of the block in the middle."""
    model = getattr(pipe_or_model, "transformer", pipe_or_model)
    return model.transformer_blocks[1].get_submodule(path)


def distinct(module: nn.Module) -> list[torch.Tensor]:
    """The tensors that hold a module's bytes, those that share a storage once."""
    return list({tensor.data_ptr(): tensor for tensor in map(plain, inner_tensors(module).values())}.values())


def turn_codes(module: nn.Module) -> None:
    """Edit the quantized weights in place."""
    for tensor in distinct(module):
        if tensor.element_size() == 1 and tensor.dim() > 1 and tensor.numel() > 256:
            tensor.copy_(tensor.flip(0))


def scale_statistics(module: nn.Module) -> int:
    """Edit what quantized weights are multiplied by, in place; how many tensors those were."""
    names = ("scale", "_scale", "SCB", "absmax")
    found = {
        tensor.data_ptr(): tensor
        for path, tensor in inner_tensors(module).items()
        if path.rsplit(".", 1)[-1] in names and tensor.dtype.is_floating_point
    }
    for tensor in found.values():
        tensor.mul_(1.5)
    return len(found)


def replace_statistics(kind: str, layer: Any) -> None:
    """Put another tensor in the place of what quantized weights are multiplied by."""
    holders: dict[str, Callable[[], tuple[Any, str]]] = {
        "torchao int8": lambda: (layer.weight, "scale"),
        "torchao int8 v1": lambda: (layer.weight.tensor_impl, "scale"),
        "bitsandbytes int8": lambda: (layer.state, "SCB"),
        "bitsandbytes int8 outliers": lambda: (layer.state, "SCB"),
        "bitsandbytes nf4 nested": lambda: (layer.weight.quant_state.state2, "absmax"),
        "quanto int8": lambda: (layer.weight, "_scale"),
    }
    holder, name = holders[kind]()
    setattr(holder, name, getattr(holder, name) * 1.5)


def replace_data(layer: Any) -> None:
    """Give a weight other data."""
    layer.weight.data = plain(layer.weight).flip(0)


CHANGED = [
    "torchao int8",
    "torchao int8 v1",
    "bitsandbytes int8",
    "bitsandbytes int8 outliers",
    "bitsandbytes nf4 nested",
    "quanto int8",
    "gguf q8_0",
]


@pytest.mark.parametrize(
    ("kind", "mode"),
    fast_ones(
        [(kind, mode) for kind in CHANGED for mode in BOTH],
        ("bitsandbytes int8", "layer"),
    ),
)
def test_edits_and_replacements(kind: str, mode: str, device: torch.device, sim: ModuleType) -> None:
    twins = Twins(kind, mode, device, sim)
    twins.assert_equal("as built")
    twins.both(lambda pipe: turn_codes(layer_of(pipe)))
    twins.assert_equal("codes edited in place")
    if kind != "gguf q8_0":  # Its statistics are among its codes.
        twins.both(lambda pipe: scale_statistics(layer_of(pipe)))
        twins.assert_equal("statistics edited in place")
        twins.both(lambda pipe: replace_statistics(kind, layer_of(pipe)))
        twins.assert_equal("statistics replaced")
    if kind in ("bitsandbytes nf4 nested", "gguf q8_0"):  # No data can be assigned to wrappers.
        twins.both(lambda pipe: replace_data(layer_of(pipe)))
        twins.assert_equal("data replaced")

    def replace_weight(pipe: Any) -> None:
        layer, other = layer_of(pipe), layer_of(twins.other(pipe))
        layer.weight = other.weight

    def replace_layer(pipe: Any) -> None:
        pipe.transformer.transformer_blocks[1].attn.to_k = layer_of(twins.other(pipe), "attn.to_k")

    twins.both(replace_weight)
    twins.assert_equal("a weight replaced")
    twins.both(replace_layer)
    twins.assert_equal("a layer replaced")
    twins.both(lambda pipe: turn_codes(layer_of(pipe)))
    twins.assert_equal("codes of the new weight edited in place")


@pytest.mark.parametrize("mode", BOTH)
def test_new_data_of_an_8_bit_weight_is_dropped(mode: str, device: torch.device, sim: ModuleType) -> None:
    """A layer that has run goes by its state, whatever is assigned to the weight."""
    twins = Twins("bitsandbytes int8", mode, device, sim)
    twins.assert_equal("as built")
    twins.both(lambda pipe: replace_data(layer_of(pipe)))
    twins.assert_equal("data replaced", shows=False)


@pytest.mark.parametrize(
    ("kind", "mode"), fast_ones([(kind, mode) for kind in CHANGED for mode in BOTH], ("bitsandbytes int8", "layer"))
)
def test_other_weights_are_loaded(kind: str, mode: str, device: torch.device, sim: ModuleType) -> None:
    twins = Twins(kind, mode, device, sim)
    if not kind.startswith("bitsandbytes int8"):  # Until they have run, they can be loaded into.
        twins.assert_equal("as built")

    def load(pipe: Any) -> None:
        state = twins.other(pipe).state_dict()
        pipe.transformer.load_state_dict(state, strict=not kind.startswith("bitsandbytes nf4"))

    twins.both(load)
    twins.assert_equal("other weights loaded")


# ---------------------------------------------------------------------- LoRA


def lora(seed: int, rank: int = 4, width: int = WIDTH, blocks: int = 3) -> dict[str, torch.Tensor]:
    """A LoRA of the attention's projections."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for block in range(blocks):
        for name in ("to_q", "to_k", "to_v"):
            path = f"transformer.transformer_blocks.{block}.attn.{name}"
            state[f"{path}.lora_A.weight"] = 0.2 * torch.randn(rank, width, generator=generator)
            state[f"{path}.lora_B.weight"] = 0.2 * torch.randn(width, rank, generator=generator)
    return state


LORA_STEPS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "loaded": (lambda pipe: pipe.load_lora_weights(lora(1), adapter_name="style"), True),
    "a second one": (lambda pipe: pipe.load_lora_weights(lora(2, rank=8), adapter_name="detail"), True),
    "both set": (lambda pipe: pipe.set_adapters(["style", "detail"], [0.5, 0.25]), True),
    "one set": (lambda pipe: pipe.set_adapters("detail"), True),
    "disabled": (lambda pipe: pipe.disable_lora(), True),
    "enabled": (lambda pipe: pipe.enable_lora(), True),
    "one deleted": (lambda pipe: pipe.delete_adapters("style"), False),
    "unloaded": (lambda pipe: pipe.unload_lora_weights(), True),
}
"""Each step, and whether it shows in the output."""

WITH_LORA = ["torchao int8", "bitsandbytes int8", "bitsandbytes nf4 nested", "quanto int8", "gguf q8_0"]


@pytest.mark.parametrize(
    ("kind", "mode"),
    fast_ones([(kind, mode) for kind in WITH_LORA for mode in BOTH], ("bitsandbytes int8", "layer")),
)
def test_a_lora_on_a_quantized_dit(kind: str, mode: str, device: torch.device, sim: ModuleType) -> None:
    twins = Twins(kind, mode, device, sim)
    twins.assert_equal("as built")
    first = twins.output
    for what, (step, shows) in LORA_STEPS.items():
        twins.both(step)
        twins.assert_equal(what, shows)
    assert first is not None and np.array_equal(first, twins.output)
