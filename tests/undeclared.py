"""Pipelines that declare nothing, of small models with lists of blocks: for the tests of what is found in them."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x))


def blocks(count: int, width: int = 8) -> nn.ModuleList:
    return nn.ModuleList(Block(width) for _ in range(count))


class DiT(nn.Module):
    """Lists of blocks by name, and a projection that is small beside them."""

    def __init__(self, **counts: int) -> None:
        super().__init__()
        self.proj_in = nn.Linear(2, 2)
        for name, count in counts.items():
            setattr(self, name, blocks(count))


def undeclared(name: str = "Undeclared", sequence: str | None = None, **components: Any) -> DiffusionPipeline:
    """A diffusers pipeline, of a class of its own, that declares nothing."""
    pipe_class = type(name, (DiffusionPipeline,), {"model_cpu_offload_seq": sequence, "__module__": __name__})
    pipe = pipe_class()
    pipe.register_modules(**components)
    return pipe


def within(part: nn.Module, **counts: int) -> nn.Module:
    model = DiT(**counts)
    model.part = part
    return model


def holding(**members: nn.Module) -> nn.Module:
    model = nn.Module()
    for name, member in members.items():
        setattr(model, name, member)
    return model


def grouped(*sizes: int) -> nn.ModuleList:
    return nn.ModuleList(blocks(size) for size in sizes)
