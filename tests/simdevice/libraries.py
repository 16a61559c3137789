"""What `install()` does to other libraries, in this process alone, so that they see the simulated device.

safetensors parses device names in compiled code and knows only those of real hardware, so `device="sim"` is refused
before any tensor exists. A thin function in front of `safe_open` opens the file for the CPU and moves what is read.

torch's flex attention has a list of device types, though its eager form is made of ordinary operators.

diffusers asks for the accelerator once and remembers the answer, which may be from before the device was there.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch.nn.attention import flex_attention


class _MovedSlice:
    """A lazy slice of a tensor whose parts arrive on the device."""

    def __init__(self, inner: Any, device: torch.device) -> None:
        self._inner, self._device = inner, device

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._inner[index].to(self._device)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._inner, attribute)


class _MovedFile:
    """An open safetensors file whose tensors arrive on the device."""

    def __init__(self, inner: Any, device: torch.device) -> None:
        self._inner, self._device = inner, device

    def __enter__(self) -> _MovedFile:
        self._inner.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._inner.__exit__(*exc)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._inner, attribute)

    def get_tensor(self, key: str) -> torch.Tensor:
        return self._inner.get_tensor(key).to(self._device)

    def get_tensors(self) -> dict[str, torch.Tensor]:
        return {key: self.get_tensor(key) for key in self._inner.keys()}

    def get_slice(self, key: str) -> _MovedSlice:
        return _MovedSlice(self._inner.get_slice(key), self._device)


def accept_device_in_safetensors(name: str) -> None:
    """Make `safe_open(..., device=name)` and `safetensors.torch.load_file(..., device=name)` work in this process."""
    original = safetensors.safe_open

    def safe_open(filename: str | os.PathLike, framework: str, device: Any = "cpu", **options: Any) -> Any:
        """`safetensors.safe_open` that knows the simulated device too."""
        if str(device).split(":")[0] == name:
            return _MovedFile(original(filename, framework=framework, device="cpu", **options), torch.device(device))
        return original(filename, framework=framework, device=device, **options)

    # Modules that did `from safetensors import safe_open` hold the original under their own name.
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("safe_open") is original:
            module.safe_open = safe_open


def accept_device_in_flex_attention(name: str) -> None:
    """Make `torch.nn.attention.flex_attention` take tensors of this device in this process; it runs eagerly there."""
    original = flex_attention._validate_device

    def validate_device(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """torch's own check, for every other device."""
        if query.device.type != name:
            original(query, key, value)

    flex_attention._validate_device = validate_device


def forget_remembered_accelerator() -> None:
    """Let diffusers, if it is imported already, look for the accelerator again."""
    torch_utils = sys.modules.get("diffusers.utils.torch_utils")
    holders = (torch_utils, getattr(torch_utils, "TorchDeviceBackend", None))
    names = ("get_device", "_detect_device_type")
    for remembered in (getattr(holder, name, None) for holder in holders for name in names):
        if hasattr(remembered, "cache_clear"):
            remembered.cache_clear()
