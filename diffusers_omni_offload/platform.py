"""What the library needs of a device: streams, events, pinned host memory and memory figures.

`torch.accelerator`, `torch.Stream` and `torch.Event` cover every accelerator; the few calls that only a vendor's module
has are made here and nowhere else.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from diffusers_omni_offload.host import available_host_bytes, host_memory

#: `cudaHostRegisterReadOnly`, and `hipHostRegisterReadOnly`: the device only reads there.
_READ_ONLY = 0x08


class Event(Protocol):
    """A point in a stream's work, as `torch.Event`."""

    def record(self, stream: Any = None) -> None: ...

    def elapsed_time(self, other: Any) -> float: ...

    def synchronize(self) -> None: ...


class Stream(Protocol):
    """An ordered queue of device work, as `torch.Stream`."""

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def __enter__(self) -> Any: ...

    def __exit__(self, *exc: Any) -> None: ...


class Platform:
    """An accelerator as `torch.accelerator` reports it: CUDA, ROCm, XPU or a PrivateUse1 device.

    Args:
        device: the execution device, with an index.
    """

    #: Copies run beside the compute; where they don't, `stream` and `event` do nothing.
    is_asynchronous = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module = torch.get_device_module(device)
        self._index = device.index
        self._is_capturing = getattr(self.module, "is_current_stream_capturing", None)

    def stream(self) -> Stream:
        """A new stream for copies."""
        return torch.Stream(device=self.device)

    def event(self, *, enable_timing: bool = False) -> Event:
        """A new event; `enable_timing` makes `elapsed_time` (milliseconds) available."""
        return torch.Event(device=self.device.type, enable_timing=enable_timing)

    def current_stream(self) -> Stream:
        """The stream that compute is issued to."""
        return torch.accelerator.current_stream(self._index)

    def is_capturing(self) -> bool:
        """Whether the current stream's work is being captured into a graph."""
        return self._is_capturing is not None and self._is_capturing()

    def synchronize(self) -> None:
        """Wait on the host for all of the device's work."""
        torch.accelerator.synchronize(self.device)

    def return_freed_memory(self) -> None:
        """Give memory that torch's allocator keeps in reserve back to the device, as far as the platform can; this may
        wait for the device's work."""
        empty_cache = getattr(self.module, "empty_cache", None)
        if empty_cache is not None:
            empty_cache()

    def free_bytes(self) -> int:
        """Bytes that a new allocation could take: the device's free memory and what torch holds in reserve."""
        free, _ = torch.accelerator.get_memory_info(self.device)
        reserved = torch.accelerator.memory_reserved(self.device)
        return int(free) + max(0, int(reserved) - int(torch.accelerator.memory_allocated(self.device)))

    def allocated_bytes(self) -> int:
        """Bytes that this process's tensors take on the device."""
        return int(torch.accelerator.memory_allocated(self.device))

    def peak_bytes(self) -> int:
        """The most that `allocated_bytes` was since `restart_peak`."""
        return int(torch.accelerator.max_memory_allocated(self.device))

    def restart_peak(self) -> None:
        """Count `peak_bytes` anew; it is torch's own count."""
        torch.accelerator.reset_peak_memory_stats(self.device)

    def total_bytes(self) -> int:
        """Size of the device's memory in bytes."""
        return int(torch.accelerator.get_memory_info(self.device)[1])

    @property
    def name(self) -> str:
        """What the device calls itself."""
        name: Callable[..., str] | None = getattr(self.module, "get_device_name", None)
        return str(self.device) if name is None else name(self.device)

    @property
    def is_modelled(self) -> bool:
        """Whether the device is simulated, so that its times come from a model."""
        return bool(getattr(self.module, "is_modelled", False))

    @property
    def registers_host_memory(self) -> bool:
        """Whether memory of our own can be page-locked in place, at its exact size."""
        return self.device.type == "cuda" or hasattr(self.module, "host_register")

    def register_host_memory(self, pointer: int, nbytes: int) -> None:
        """Page-lock `nbytes` from `pointer` on.

        Raises:
            RuntimeError: the platform refused; the memory is as before.
        """
        if self.device.type == "cuda":
            self._cuda_register(pointer, nbytes, 0)
        else:
            self.module.host_register(pointer, nbytes)

    def register_file(self, pointer: int, nbytes: int) -> None:
        """Page-lock `nbytes` from `pointer` on, of a read-only shared mapping of a file: pages of the page cache, from
        which the device may then read.

        Raises:
            RuntimeError: the platform refused; nothing is page-locked.
        """
        if not self.registers_host_memory:
            raise RuntimeError(f"{str(self.device)!r} has no way to page-lock memory in place.")
        if self.device.type == "cuda":
            self._cuda_register(pointer, nbytes, _READ_ONLY)
        else:
            self.module.host_register(pointer, nbytes, read_only=True)

    def why_no_files(self, pointer: int) -> str | None:
        """Why pages of files can't be page-locked, as the platform says it; None if they can.

        It is tried with the page at `pointer`: what a driver says that it supports depends on the file system as well.
        """
        try:
            self.register_file(pointer, mmap.PAGESIZE)
        except RuntimeError as error:
            return str(error).splitlines()[0]
        self.unregister_host_memory(pointer)
        return None

    def _cuda_register(self, pointer: int, nbytes: int, flags: int) -> None:
        with torch.cuda.device(self.device):
            error = torch.cuda.cudart().cudaHostRegister(pointer, nbytes, flags)
        if int(error) != 0:
            _forget_cuda_error()
            raise RuntimeError(f"cudaHostRegister refused {nbytes:,} bytes: error {int(error)}.")

    def unregister_host_memory(self, pointer: int) -> None:
        """Undo `register_host_memory` or `register_file`; the last copy from there has to be over."""
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                torch.cuda.cudart().cudaHostUnregister(pointer)
        else:
            self.module.host_unregister(pointer)


def _forget_cuda_error() -> None:
    """What a call has refused is kept as the last error, and the next kernel launch would report it as its own."""
    for name in ("cudaGetLastError", "hipGetLastError"):
        with contextlib.suppress(OSError, AttributeError, TypeError):
            getattr(ctypes.CDLL(None), name)()


class _HostEvent:
    """What was issued before is done, so all there is to note is the time."""

    __slots__ = ("_seconds",)

    def __init__(self) -> None:
        self._seconds = 0.0

    def record(self, stream: Any = None) -> None:
        self._seconds = time.perf_counter()

    def elapsed_time(self, other: _HostEvent) -> float:
        return 1e3 * (other._seconds - self._seconds)

    def synchronize(self) -> None: ...


class _NoStream:
    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *exc: Any) -> None: ...


class CpuPlatform(Platform):
    """The CPU in an accelerator's place: every copy is done when it returns, so there is nothing to wait for."""

    is_asynchronous = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = _NoStream()

    def stream(self) -> Stream:
        return self._stream

    def event(self, *, enable_timing: bool = False) -> Event:
        return _HostEvent()

    def current_stream(self) -> Stream:
        return self._stream

    def is_capturing(self) -> bool:
        return False

    def synchronize(self) -> None: ...

    def return_freed_memory(self) -> None: ...

    def free_bytes(self) -> int:
        return available_host_bytes()

    def allocated_bytes(self) -> int:
        return 0

    def peak_bytes(self) -> int:
        return 0

    def restart_peak(self) -> None: ...

    def total_bytes(self) -> int:
        return host_memory().total_bytes

    @property
    def name(self) -> str:
        return "CPU"

    @property
    def is_modelled(self) -> bool:
        return False

    @property
    def registers_host_memory(self) -> bool:
        return False


@contextlib.contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Make `device` the current one of its kind for the body; the CPU has no index to set."""
    if device.type == "cpu":
        yield
        return
    previous = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(device.index)
    try:
        yield
    finally:
        torch.accelerator.set_device_index(previous)


def resolve_device(device: torch.device | str | int | None) -> torch.device:
    """The execution device, with its index.

    Args:
        device: what the user asked for; None takes the current accelerator.

    Raises:
        ValueError: there is no accelerator and none was named, the device isn't there, or it shares the host's memory.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        if accelerator is None:
            raise ValueError(
                'No accelerator was found. To run on the CPU, for a demo or a test, ask for it: device="cpu".'
            )
        device = accelerator
    if isinstance(device, bool):
        raise ValueError(f"device={device!r} is not a device; name one, such as 'cuda:0', or an index.")
    try:
        if isinstance(device, int) and accelerator is not None:
            device = torch.device(accelerator.type, device)
        device = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device!r} is not a device that torch knows: {error}") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type == "mps":
        raise ValueError(
            "device='mps' shares its memory with the host, so there is nothing to gain from offloading to the host: "
            "move the pipeline there with pipe.to('mps')."
        )
    if accelerator is None or device.type != accelerator.type:
        found = accelerator.type if accelerator is not None else "none"
        raise ValueError(
            f"device={str(device)!r} is not the accelerator of this process (found: {found}). "
            'To run on the CPU, for a demo or a test, ask for it: device="cpu".'
        )
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    count = torch.accelerator.device_count()
    if not 0 <= index < count:
        raise ValueError(f"device={str(device)!r} doesn't exist: {count} of type {device.type!r} found.")
    return torch.device(device.type, index)


def platform_for(device: torch.device) -> Platform:
    """The platform of a device that `resolve_device` returned."""
    return CpuPlatform(device) if device.type == "cpu" else Platform(device)


def is_supported(device: torch.device) -> bool:
    """Whether blocks can be streamed to this device: the CPU (for tests), or the process's accelerator, MPS aside."""
    if device.type in ("cpu", "mps"):
        return device.type == "cpu"
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and device.type == accelerator.type
