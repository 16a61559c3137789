"""A pipeline that operations are done to, resident or offloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from tests import tiny
from tests.equality import build_as
from tests.operations.families import Family
from tests.operations.files import lora_file


class Subject:
    """A pipeline with what operations need to know of it.

    Attributes:
        family: its family.
        pipe: the pipeline itself.
        arguments: more arguments of its calls.
    """

    def __init__(self, family: Family, dtype: torch.dtype | None = None) -> None:
        self.family = family
        self.pipe, self._call = build_as(family.build, dtype)
        self.arguments: dict[str, Any] = dict(family.arguments)

    @property
    def dits(self) -> list[Any]:
        """The DiTs."""
        return self.family.dits(self.pipe)

    @property
    def blocks(self) -> list[nn.ModuleList]:
        """The blocks of each DiT."""
        return self.family.blocks(self.pipe)

    def run(self) -> np.ndarray:
        """The output of a call."""
        return tiny.run(self.pipe, lambda: {**self._call(), **self.arguments})

    def load(self, file: str, adapter: str = "style", **options: Any) -> None:
        """Load a LoRA file into each DiT, and into the text encoders if it is for them, too."""
        for expert in self.family.experts:
            where = {"load_into_transformer_2": True} if expert == "transformer_2" else {}
            self.pipe.load_lora_weights(lora_file(self.family, file, expert), adapter, **where, **options)

    def fuse(self, **options: Any) -> None:
        """Fuse the active adapters of all components that have some."""
        self.pipe.fuse_lora(components=self._components, **options)

    def unfuse(self) -> None:
        """Take fused adapters out again."""
        self.pipe.unfuse_lora(components=self._components)

    def home(self, module: nn.Module) -> nn.Module:
        """`module` where a user puts a new one: on the device of a resident pipeline, on the host of an offloaded."""
        return module if self.pipe.omni_offload is not None else module.to(self.pipe._execution_device)

    def linear(self, dit: int = 0, block: int = 1) -> Any:
        """A linear layer within a block."""
        return next(module for module in self.blocks[dit][block].modules() if isinstance(module, nn.Linear))

    @property
    def _components(self) -> list[str]:
        return [*self.family.experts, *self.family.text_encoders]


Change = Callable[[Subject], None]
"""Something that is done to a pipeline."""
