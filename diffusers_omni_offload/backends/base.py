"""What every offload strategy has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from diffusers_omni_offload.config import OffloadConfig


@dataclass(frozen=True)
class Counters:
    """Copies of blocks into slots, those a forward had to wait for, copies of whole components, and the bytes of all of
    them; device bytes and page-locked bytes held."""

    loads: int = 0
    demand_loads: int = 0
    swaps: int = 0
    bytes_moved: int = 0
    device_bytes: int = 0
    pinned_bytes: int = 0


class OffloadBackend(ABC):
    """A strategy, for one set of components.

    Args:
        config: what the user asked for.
        device: the execution device, with its index.
    """

    def __init__(self, config: OffloadConfig, device: torch.device) -> None:
        self.config = config
        self.device = device

    @abstractmethod
    def enable(self, pipeline: Any) -> None:
        """Resolve the plan and install it. All or nothing: after an exception the pipeline is as it was."""

    @abstractmethod
    def disable(self) -> None:
        """Remove our hooks and leave ordinary tensors on the CPU. Nothing happens if it isn't enabled."""

    @abstractmethod
    def is_enabled(self) -> bool:
        """Whether our hooks are installed."""
