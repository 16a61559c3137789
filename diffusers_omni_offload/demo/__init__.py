"""A tiny Wan pipeline to try layer mode on, without downloads: `python -m diffusers_omni_offload.demo`."""

from __future__ import annotations

import torch

__all__ = ["pick_device"]


def pick_device(name: str | None = None) -> torch.device:
    """The device called `name`; else the current accelerator, or the CPU where there is none."""
    if name is not None:
        return torch.device(name)
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        # Unified memory has nothing to stream to.
        if accelerator is not None and accelerator.type != "mps":
            return torch.device(accelerator.type, torch.accelerator.current_device_index())
    return torch.device("cpu")
