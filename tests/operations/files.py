"""Small random LoRA files, written by the pipelines' own `save_lora_weights` when they are first asked for."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model
from torch import nn

from tests.operations.families import Family


@dataclass(frozen=True)
class Recipe:
    """What a file holds.

    Args:
        rank: of each layer.
        seed: of its values.
        dtype: of its values.
        outside: whether layers outside of the blocks have some, too.
        text: whether the text encoders have some, too.
        first_block: whether no block but the first has any.
    """

    rank: int
    seed: int
    dtype: torch.dtype = torch.float32
    outside: bool = False
    text: bool = False
    first_block: bool = False


RECIPES = {
    "plain": Recipe(rank=4, seed=1),
    "same": Recipe(rank=4, seed=2),
    "smaller": Recipe(rank=2, seed=3),
    "larger": Recipe(rank=8, seed=4),
    "half": Recipe(rank=4, seed=5, dtype=torch.bfloat16),
    "outside": Recipe(rank=4, seed=6, outside=True),
    "text": Recipe(rank=4, seed=7, text=True),
    "first_block": Recipe(rank=4, seed=8, first_block=True),
}
"""The files, by name; all but "plain" are made to stand beside it, or to take its place."""

TEXT_TARGETS = ("q_proj", "k_proj", "v_proj", "out_proj")


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="lora-files-")


@functools.cache
def lora_file(family: Family, name: str, expert: str = "transformer") -> str:
    """The folder with a file of `RECIPES`; each expert has one of its own."""
    recipe = RECIPES[name]
    seed = 100 * recipe.seed + family.experts.index(expert)
    pipe, _ = family.build()
    targets = (*family.targets, *family.outside) if recipe.outside else family.targets
    model = getattr(pipe, expert)
    layers = {"transformer_lora_layers": _layers(model, _linears(model, targets, family, recipe), recipe, seed)}
    for number, encoder in enumerate(family.text_encoders if recipe.text else (), start=10):
        model = getattr(pipe, encoder)
        names = [path for path, _ in model.named_modules() if path.endswith(TEXT_TARGETS)]
        layers[f"{encoder}_lora_layers"] = _layers(model, names, recipe, seed + number)
    folder = Path(_folder().name, family.name, expert, name)
    type(pipe).save_lora_weights(folder, **layers)
    return str(folder)


def _linears(model: nn.Module, targets: tuple[str, ...], family: Family, recipe: Recipe) -> list[str]:
    names = [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and any(path == end or path.endswith(f".{end}") for end in targets)
    ]
    return [path for path in names if path.startswith(f"{family.stack}.0.")] if recipe.first_block else names


def _layers(model: nn.Module, targets: list[str], recipe: Recipe, seed: int) -> dict[str, Any]:
    """Values of LoRA layers for these linear layers of a model, which are put in for that."""
    inject_adapter_in_model(
        LoraConfig(r=recipe.rank, lora_alpha=recipe.rank, target_modules=targets), model, adapter_name="made"
    )
    generator = torch.Generator().manual_seed(seed)
    values = get_peft_model_state_dict(model, adapter_name="made")
    return {
        name: (0.2 * torch.randn(value.shape, generator=generator)).to(recipe.dtype) for name, value in values.items()
    }
