"""Builds the simulated device's library with g++ alone: no Python headers, no ninja."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "csrc"
MAIN_SOURCE = SOURCES / "simdevice.cpp"


def cache_directory() -> Path:
    """Where built libraries are kept: `SIMDEVICE_CACHE`, or `_cache` beside this file."""
    return Path(os.environ.get("SIMDEVICE_CACHE") or HERE / "_cache")


def library_path(compiler: str, flags: list[str]) -> Path:
    """The library's path, named after everything that it is made from: all sources, torch and the command."""
    digest = hashlib.sha256(repr((torch.__version__, compiler, flags)).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode())
        digest.update(source.read_bytes())
    return cache_directory() / f"libsimdevice-{digest.hexdigest()[:16]}.so"


def build() -> Path:
    """Build the library unless this very version is in the cache, and return its path.

    Two processes may build at once: one compiles, the other waits for it.

    Raises:
        RuntimeError: there is no compiler, or it failed; the message holds what it said.
    """
    compiler = os.environ.get("CXX", "g++")
    root = Path(torch.__file__).parent
    flags = [
        "-std=c++20",
        "-O1",
        "-fPIC",
        "-shared",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        f"-I{root}/include",
        f"-I{root}/include/torch/csrc/api/include",
        f"-L{root}/lib",
        "-ltorch_cpu",
        "-lc10",
        f"-Wl,-rpath,{root}/lib",
    ]
    library = library_path(compiler, flags)
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with open(library.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(compiler, flags, library)
    return library


def _compile(compiler: str, flags: list[str], library: Path) -> None:
    unfinished = library.with_suffix(f".{os.getpid()}.tmp")
    # Libraries come after the source: the linker resolves from left to right.
    command = [compiler, str(MAIN_SOURCE), "-o", str(unfinished), *flags]
    try:
        outcome = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise RuntimeError(
            f"The simulated device needs a C++ compiler and {compiler!r} does not start ({error}). "
            "Install g++, or name a compiler in the variable CXX."
        ) from error
    if outcome.returncode != 0:
        unfinished.unlink(missing_ok=True)
        raise RuntimeError(f"{compiler} could not build the simulated device:\n{outcome.stderr[-20_000:]}")
    # A rename is atomic: nobody sees half a library.
    os.replace(unfinished, library)
