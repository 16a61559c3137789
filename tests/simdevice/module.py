"""The device module, `torch.sim`: what `torch.cuda` is for CUDA."""

from __future__ import annotations

import ctypes
import types
from typing import Any

import torch

#: Results of the library's host registration.
_OVER_CAPACITY, _OVERLAPS, _NO_ACCESS, _UNSUPPORTED = 1, 2, 3, 4


class _StreamContext:
    """`with torch.sim.stream(stream)`; None changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> torch.Stream | None:
        if self.stream is not None:
            self.previous = torch.accelerator.current_stream(self.stream.device)
            torch.accelerator.set_stream(self.stream)
        return self.stream

    def __exit__(self, *exc: Any) -> None:
        if self.stream is not None:
            torch.accelerator.set_stream(self.previous)


def make_device_module(name: str, library: ctypes.CDLL) -> types.ModuleType:
    """The module to register as `torch.<name>`."""
    module = types.ModuleType(f"torch.{name}")
    accelerator = torch.accelerator

    def index_of(device: Any = None) -> int:
        if isinstance(device, int):
            return device
        index = None if device is None else torch.device(device).index
        return accelerator.current_device_index() if index is None else index

    _add_device_functions(module, library, index_of)
    _add_streams(module, library, name, index_of)
    _add_memory(module, library, index_of)
    _add_random(module, library, name, index_of)
    return module


def _add_device_functions(module: Any, library: ctypes.CDLL, index_of: Any) -> None:
    class device:
        """`with torch.sim.device(index)`."""

        def __init__(self, which: Any) -> None:
            self.index = index_of(which)

        def __enter__(self) -> None:
            self.previous = torch.accelerator.current_device_index()
            torch.accelerator.set_device_index(self.index)

        def __exit__(self, *exc: Any) -> None:
            torch.accelerator.set_device_index(self.previous)

    module._initialized = True
    module.init = module._lazy_init = lambda: None
    module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.is_available = lambda: library.sim_get(b"devices") > 0
    module.device_count = lambda: int(library.sim_get(b"devices"))
    module.current_device = torch.accelerator.current_device_index
    module.set_device = lambda which: torch.accelerator.set_device_index(index_of(which))
    module.synchronize = lambda which=None: torch.accelerator.synchronize(index_of(which))
    module.device = device
    module.get_device_name = lambda which=None: "simulated device (modelled)"
    module.is_modelled = True
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.is_bf16_supported = lambda *args: True


def _add_streams(module: Any, library: ctypes.CDLL, name: str, index_of: Any) -> None:
    def make_stream(device: Any = None, priority: int = 0) -> torch.Stream:
        return torch.Stream(device=torch.device(name, index_of(device)), priority=priority)

    def make_event(enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
        return torch.Event(device=name, enable_timing=enable_timing, blocking=blocking)

    def default_stream(device: Any = None) -> torch.Stream:
        private_use_1 = 20
        return torch.Stream(stream_id=0, device_index=index_of(device), device_type=private_use_1)

    module.Stream, module.Event, module.stream = make_stream, make_event, _StreamContext
    module.current_stream = lambda device=None: torch.accelerator.current_stream(index_of(device))
    module.default_stream = default_stream
    module.set_stream = torch.accelerator.set_stream
    # Tests pretend with `configure(capturing=1)`; nothing is ever captured.
    module.is_current_stream_capturing = lambda: library.sim_get(b"capturing") > 0


def _add_memory(module: Any, library: ctypes.CDLL, index_of: Any) -> None:
    accelerator = torch.accelerator

    def host_register(pointer: int, nbytes: int, read_only: bool = False) -> None:
        """Page-lock `nbytes` of host memory from `pointer` on, in place and exactly.

        Args:
            pointer: where the memory begins.
            nbytes: its size.
            read_only: the device only reads there. Without it, memory that can't be written to is refused.

        Raises:
            torch.OutOfMemoryError: `pinned_capacity_bytes` would be exceeded.
            RuntimeError: some of it is page-locked already, can't be accessed that way, or isn't there.
        """
        result = library.sim_host_register(pointer, nbytes, int(read_only))
        if result == _OVER_CAPACITY:
            limit = int(library.sim_get(b"pinned_capacity_bytes"))
            pinned = library.sim_stat(b"pinned_current", 0)
            raise torch.OutOfMemoryError(f"sim: cannot pin {nbytes} bytes; {pinned} of {limit} are pinned.")
        if result == _OVERLAPS:
            raise RuntimeError(f"sim: some of the {nbytes} bytes from {pointer:#x} on are page-locked already.")
        if result == _NO_ACCESS:
            access = "read" if read_only else "written to"
            raise RuntimeError(f"sim: some of the {nbytes} bytes from {pointer:#x} on can't be {access}.")
        if result == _UNSUPPORTED:
            raise RuntimeError("sim: memory to be read only can't be page-locked (registers_read_only=0).")

    def host_unregister(pointer: int) -> None:
        """Undo `host_register`; RuntimeError if nothing was registered at `pointer`."""
        if library.sim_host_unregister(pointer) != 0:
            raise RuntimeError(f"sim: no memory is registered at {pointer:#x}.")

    module.host_register, module.host_unregister = host_register, host_unregister
    module.empty_cache = accelerator.empty_cache
    module.memory_allocated = lambda device=None: accelerator.memory_allocated(index_of(device))
    module.max_memory_allocated = lambda device=None: accelerator.max_memory_allocated(index_of(device))
    module.memory_reserved = lambda device=None: accelerator.memory_reserved(index_of(device))
    module.max_memory_reserved = lambda device=None: accelerator.max_memory_reserved(index_of(device))
    module.memory_stats = lambda device=None: accelerator.memory_stats(index_of(device))
    module.reset_peak_memory_stats = lambda device=None: accelerator.reset_peak_memory_stats(index_of(device))
    module.mem_get_info = lambda device=None: accelerator.get_memory_info(index_of(device))


def _add_random(module: Any, library: ctypes.CDLL, name: str, index_of: Any) -> None:
    def manual_seed(seed: int) -> None:
        library.sim_manual_seed(index_of(), seed % 2**64)

    def manual_seed_all(seed: int) -> None:
        for index in range(module.device_count()):
            library.sim_manual_seed(index, seed % 2**64)

    module.manual_seed, module.manual_seed_all = manual_seed, manual_seed_all
    module.get_rng_state = lambda device=name: torch.ops.simdevice.get_rng_state(index_of(device))
    module.set_rng_state = lambda state, device=name: torch.ops.simdevice.set_rng_state(index_of(device), state)
    module.initial_seed = torch.initial_seed
