"""What platforms are asked for when pages of files are to be page-locked, and what they have to wait with."""

from __future__ import annotations

import mmap
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from diffusers_omni_offload import platform as platform_module
from diffusers_omni_offload.platform import CpuPlatform, Platform


class Runtime:
    """What the CUDA runtime is asked for.

    Attributes:
        result: what it answers.
        asked: flags of what was registered.
    """

    def __init__(self, result: int) -> None:
        self.result, self.asked = result, []

    def cudaHostRegister(self, pointer: int, nbytes: int, flags: int) -> int:
        self.asked.append((pointer, nbytes, flags))
        return self.result

    def cudaHostUnregister(self, pointer: int) -> int:
        self.asked.append(pointer)
        return 0


@pytest.mark.parametrize("result", [0, 801])
def test_cuda_is_asked_for_memory_to_be_read_only(monkeypatch: pytest.MonkeyPatch, result: int) -> None:
    runtime, forgotten = Runtime(result), []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    names = {"cudaGetLastError": lambda: forgotten.append(1)}
    monkeypatch.setattr(platform_module.ctypes, "CDLL", lambda name: SimpleNamespace(**names))
    platform = Platform(torch.device("cuda", 0))
    why = platform.why_no_files(4096)
    assert runtime.asked[0] == (4096, mmap.PAGESIZE, 8)
    if result:
        assert why is not None and "error 801" in why and runtime.asked[1:] == []
        assert forgotten, "the next kernel launch would report the error as its own"
    else:
        assert why is None and runtime.asked[1:] == [4096] and not forgotten


def test_events_of_the_cpu_can_be_waited_for() -> None:
    CpuPlatform(torch.device("cpu")).event().synchronize()
