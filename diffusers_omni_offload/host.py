"""The host's memory: how much there is, and giving back what isn't used."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class HostMemory:
    """Host memory in bytes, the smaller of the machine's and the control group's."""

    total_bytes: int
    available_bytes: int


def _read_int(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text().strip())
    return None


def _control_groups() -> Iterator[tuple[Path, Path]]:
    """The files with limit and usage of the control groups that this process is in, and of those around them."""
    versions = (
        (Path("/sys/fs/cgroup"), "", "memory.max", "memory.current"),
        (Path("/sys/fs/cgroup/memory"), "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    )
    with contextlib.suppress(OSError):
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        for root, controller, limit, usage in versions:
            for _, controllers, path in lines:
                if controller in controllers.split(","):
                    inner = root / path.lstrip("/")
                    for folder in (inner, *inner.parents):
                        if folder != root and folder.is_relative_to(root):
                            yield folder / limit, folder / usage
    for root, _, limit, usage in versions:
        yield root / limit, root / usage


def host_memory() -> HostMemory:
    """Total and available host memory; a control group's limit (version 2 or 1), as of a container, counts where it is
    the lower one."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = machine = os.sysconf("SC_PHYS_PAGES") * page
    available = os.sysconf("SC_AVPHYS_PAGES") * page
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    for limit_file, usage_file in _control_groups():
        limit, usage = _read_int(limit_file), _read_int(usage_file)
        if limit is not None and limit < machine:
            total = min(total, limit)
            available = min(available, max(0, limit - (usage or 0)))
    return HostMemory(total, available)


def available_host_bytes() -> int:
    """Bytes of host memory that can still be taken."""
    return host_memory().available_bytes


def return_freed_host_memory() -> None:
    """Give freed heap memory back to the system, where the C library is one that would keep it (glibc).

    Masters are mapped, and mapped memory can't take the place of what the heap keeps: without this, replaced weights
    stay in the process's memory beside their masters.
    """
    if _malloc_trim is not None:
        _malloc_trim(0)


def _find_malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None


_malloc_trim = _find_malloc_trim()
