"""What tests say to the simulated device and ask it: configuration, counters, hazards, the modelled clock."""

from __future__ import annotations

import ctypes

import torch

from .build import build
from .libraries import accept_device_in_flex_attention, accept_device_in_safetensors, forget_remembered_accelerator
from .module import make_device_module

#: Every option with its value after `install()`. Rates are per second; -1 means "no limit".
DEFAULTS: dict[str, float] = {
    # Modelled rates.
    "h2d_bytes_per_s": 16e9,
    "d2h_bytes_per_s": 16e9,
    "pageable_bytes_per_s": 4e9,
    "copy_latency_s": 10e-6,
    "fabric_bytes_per_s": 50e9,
    "fabric_latency_s": 20e-6,
    "flops_per_s": 50e12,
    "mem_bytes_per_s": 600e9,
    "kernel_overhead_s": 2e-6,
    "launch_overhead_s": 4e-6,
    "pin_bytes_per_s": 2e9,
    # Memory.
    "capacity_bytes": -1,
    "pinned_capacity_bytes": -1,
    "registers_read_only": 1,
    "alloc_round": 512,
    "poison": 1,
    # Behaviour: race is 0 (off), 1 (record) or 2 (record and raise).
    "race": 2,
    "verify_source": 1,
    "defer": 1,
    "trace": 0,
    "devices": 1,
    "capturing": 0,
}

#: The counters that `stats()` gives.
STATS = (
    "host_ns",
    "compute_busy_ns",
    "h2d_busy_ns",
    "d2h_busy_ns",
    "fabric_busy_ns",
    "kernels",
    "copies",
    "collectives",
    "deferred_run",
    "h2d_bytes",
    "d2h_bytes",
    "fabric_bytes",
    "pinned_current",
    "pinned_peak",
    "hazards",
    "pending",
    "allocations",
)

_library: ctypes.CDLL | None = None


def _lib() -> ctypes.CDLL:
    if _library is None:
        raise RuntimeError("The simulated device is not installed in this process; call simdevice.install() first.")
    return _library


def _load() -> ctypes.CDLL:
    library = ctypes.CDLL(str(build()))
    library.sim_set.argtypes = [ctypes.c_char_p, ctypes.c_double]
    library.sim_get.argtypes, library.sim_get.restype = [ctypes.c_char_p], ctypes.c_double
    library.sim_stat.argtypes, library.sim_stat.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_int64
    library.sim_stream_ns.argtypes = [ctypes.c_int, ctypes.c_int64]
    library.sim_stream_ns.restype = ctypes.c_int64
    library.sim_host_advance.argtypes = [ctypes.c_double]
    library.sim_manual_seed.argtypes = [ctypes.c_int, ctypes.c_uint64]
    library.sim_hazards.restype = library.sim_trace.restype = ctypes.c_char_p
    library.sim_host_register.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int]
    library.sim_host_unregister.argtypes = [ctypes.c_uint64]
    return library


def install(name: str = "sim", **config: float | None) -> torch.device:
    """Register the device with torch (once in a process, for good), configure it and return it.

    From then on `torch.accelerator.current_accelerator()` is this device in the whole process.

    Raises:
        RuntimeError: the library could not be built; the message holds the compiler's text.
    """
    global _library
    if _library is None:
        library = _load()
        library.sim_init()
        torch.utils.rename_privateuse1_backend(name)
        torch._register_device_module(name, make_device_module(name, library))
        torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
        accept_device_in_safetensors(name)
        accept_device_in_flex_attention(name)
        forget_remembered_accelerator()
        # torch asks no device whether memory is pinned until its own pinned allocator was used once.
        torch.empty(1, pin_memory=True)
        _library = library
    configure(**config)
    return torch.device(name)


def configure(**options: float | None) -> None:
    """Set options of `DEFAULTS`; None means -1, "no limit".

    Raises:
        KeyError: there is no such option.
    """
    for key, value in options.items():
        if _lib().sim_set(key.encode(), float(-1 if value is None else value)) != 0:
            raise KeyError(f"The simulated device has no option {key!r}; it has {', '.join(DEFAULTS)}.")


def restore_defaults() -> None:
    """Set every option back to its value in `DEFAULTS`."""
    configure(**DEFAULTS)


def get_config(key: str) -> float:
    """The option's value; KeyError if there is no such option."""
    if key not in DEFAULTS:
        raise KeyError(f"The simulated device has no option {key!r}; it has {', '.join(DEFAULTS)}.")
    return _lib().sim_get(key.encode())


def stats(device: int = 0) -> dict[str, int]:
    """All counters of `STATS` (nanoseconds, bytes, counts), as `README.md` explains them."""
    return {key: _lib().sim_stat(key.encode(), device) for key in STATS}


def stream_time(stream: torch.Stream) -> float:
    """Modelled seconds, since `reset_clock()`, at which the stream's last work is done."""
    return _lib().sim_stream_ns(stream.device_index, stream.stream_id) / 1e9


def reset_clock() -> None:
    """Finish all work, then count time and the counters from zero.

    `pinned_current`, `hazards` and `allocations` stay (compare two readings), `pinned_peak` falls to `pinned_current`.

    Raises:
        RuntimeError: with `race=2`, a copy that was still to run met a hazard.
    """
    if _lib().sim_reset_clock() != 0:
        raise RuntimeError(hazards()[-1])


def advance_host(seconds: float) -> None:
    """Let the host work for so many modelled seconds."""
    _lib().sim_host_advance(seconds)


def start_afresh() -> None:
    """Default options, streams and device, no hazards, the clock at zero: as after `install()`."""
    # Copies that are left in flight may be faulty: run them with the checks recorded, not raised.
    configure(race=1)
    for index in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(index)
        torch.accelerator.set_stream(torch.get_device_module("sim").default_stream(index))
    torch.accelerator.set_device_index(0)
    restore_defaults()
    clear_hazards()
    reset_clock()


def hazards() -> list[str]:
    """What the race checker has found since `clear_hazards()`, one sentence each."""
    return _lib().sim_hazards().decode().splitlines()


def clear_hazards() -> None:
    """Forget the hazards found so far."""
    _lib().sim_clear_hazards()


def check() -> None:
    """Raise RuntimeError if there are hazards."""
    found = hazards()
    if found:
        raise RuntimeError(f"{len(found)} hazards; the first: {found[0]}")


def trace() -> list[tuple[str, int, int, int]]:
    """With `trace=1`: (operation, stream, begin, end) of all work since `reset_clock()`, in modelled nanoseconds."""
    rows = (line.split("\t") for line in _lib().sim_trace().decode().splitlines())
    return [(name, int(stream), int(begin), int(end)) for name, stream, begin, end in rows]


def host_register(tensor: torch.Tensor) -> None:
    """Page-lock a CPU tensor's whole storage in place, at its exact size."""
    _lib()
    storage = tensor.untyped_storage()
    torch.get_device_module(torch.accelerator.current_accelerator()).host_register(storage.data_ptr(), storage.nbytes())


def host_unregister(tensor: torch.Tensor) -> None:
    """Undo `host_register`."""
    _lib()
    torch.get_device_module(torch.accelerator.current_accelerator()).host_unregister(
        tensor.untyped_storage().data_ptr()
    )
