"""Which pages of a private mapping of a file were written to, as the kernel knows it (Linux)."""

from __future__ import annotations

import array
import ctypes
import fcntl
import os
from collections.abc import Iterator

PAGE = os.sysconf("SC_PAGE_SIZE")

_PAGEMAP = "/proc/self/pagemap"

Region = tuple[int, int]
"""Addresses [start, stop) of whole pages."""

_PRESENT, _SWAPPED, _OF_FILE = 1 << 3, 1 << 4, 1 << 2
_REGIONS = 512


class _Scan(ctypes.Structure):
    """Argument of the ioctl PAGEMAP_SCAN (Linux 6.7 and newer)."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            *("size", "flags", "start", "end", "walk_end", "regions", "region_count", "max_pages"),
            *("inverted", "all_of", "any_of", "returned"),
        )
    ]


_PAGEMAP_SCAN = 3 << 30 | ctypes.sizeof(_Scan) << 16 | ord("f") << 8 | 16


def why_unknown() -> str | None:
    """Why this system doesn't tell which pages were written to; None if it does."""
    try:
        written(0, PAGE)
    except OSError as error:
        return (
            f"this system doesn't say which pages of a file's mapping were edited ({_PAGEMAP}: {error.strerror}); "
            "Linux does"
        )
    return None


def written(start: int, stop: int) -> list[Region]:
    """The regions of [start, stop), addresses of pages of a private mapping, that are copies of the process's own.

    Regions come in order. What was only read, or never touched, is the file's. Costs nearly nothing where no page
    was touched.

    Raises:
        OSError: there is no /proc/self/pagemap.
    """
    descriptor = os.open(_PAGEMAP, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            return list(_scanned(descriptor, start, stop))
        except OSError:
            return list(_listed(descriptor, start, stop))
    finally:
        os.close(descriptor)


def _scanned(descriptor: int, start: int, stop: int) -> Iterator[Region]:
    """By the ioctl, which passes over what has no page table. OSError where the kernel doesn't have it."""
    found = (ctypes.c_uint64 * (3 * _REGIONS))()
    scan = _Scan(size=ctypes.sizeof(_Scan), regions=ctypes.addressof(found), region_count=_REGIONS)
    scan.inverted = scan.all_of = _OF_FILE
    scan.any_of = scan.returned = _PRESENT | _SWAPPED
    while start < stop:
        scan.start, scan.end = start, stop
        count = fcntl.ioctl(descriptor, _PAGEMAP_SCAN, scan)
        for index in range(count):
            yield found[3 * index], found[3 * index + 1]
        start = scan.walk_end


def _listed(descriptor: int, start: int, stop: int) -> Iterator[Region]:
    """By reading one number a page."""
    step = 1 << 17
    for first in range(start // PAGE, -(-stop // PAGE), step):
        count = min(step, -(-stop // PAGE) - first)
        pages = array.array("Q", os.pread(descriptor, 8 * count, 8 * first))
        if len(pages) != count:
            raise OSError(0, "it is shorter than the mapping")
        if not any(pages):
            continue
        for number, page in enumerate(pages, start=first):
            # Bit 63: present, 62: swapped out, 61: a page of a file.
            if page >> 62 and not page >> 61 & 1:
                yield number * PAGE, (number + 1) * PAGE
