"""What this machine has for offload, tried and measured, and what would go wrong on it."""

from __future__ import annotations

import importlib.metadata
import json
import mmap
import os
import platform as operating_system
import resource
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from huggingface_hub.constants import HF_HUB_CACHE
from packaging.requirements import Requirement

from diffusers_omni_offload.host import host_memory
from diffusers_omni_offload.measuring import measure_link
from diffusers_omni_offload.messages import format_bytes
from diffusers_omni_offload.planning.costs import Rates
from diffusers_omni_offload.platform import Platform, on_device, platform_for, resolve_device
from diffusers_omni_offload.tables import Table
from diffusers_omni_offload.weights.pinning import HostBuffer, PinnedBudget

if TYPE_CHECKING:
    import rich.console

DISTRIBUTION = "diffusers-omni-offload"
OPTIONAL_LIBRARIES = ("peft", "torchao", "bitsandbytes", "optimum-quanto", "gguf")
"""Not required, but their versions matter where they are."""

#: How much is page-locked for a try: more than a usual `ulimit -l`, and at most this share of what is available.
_PROBE_BYTES, _PROBE_SHARE = 256 << 20, 1 / 16
#: Four lanes of PCIe 4 give 7 GB/s; a card in a slot of its own has sixteen.
_SLOW_LINK_BYTES_PER_S = 6e9
#: From this share of memory on, what others hold there, or what is in swap, is worth a sentence.
_MUCH_IN_USE, _MUCH_SWAPPED = 0.25, 0.1
#: Page locks and other needs of a process leave this much of host memory to weights.
_FOR_WEIGHTS = 0.9


@dataclass(frozen=True)
class Finding:
    """Something that would go wrong.

    Attributes:
        what: what was found, and what comes of it.
        remedy: what to do.
        is_fatal: offload can't work before that is done; else it works, but slower or in part.
    """

    what: str
    remedy: str
    is_fatal: bool = False

    def __str__(self) -> str:
        return f"{self.what} {self.remedy}"


@dataclass(frozen=True)
class HostFacts:
    """The host.

    Attributes:
        machine_nbytes: memory of the machine.
        total_nbytes: what this process may take of it, by its control groups.
        available_nbytes: what is left of that now.
        swap_nbytes, swap_used_nbytes: swap space.
        lockable_nbytes: `ulimit -l`; None for no limit.
        cpus: CPUs that this process may use.
    """

    machine_nbytes: int
    total_nbytes: int
    available_nbytes: int
    swap_nbytes: int
    swap_used_nbytes: int
    lockable_nbytes: int | None
    cpus: int


@dataclass(frozen=True)
class PinningFacts:
    """A try to page-lock host memory.

    Attributes:
        nbytes: how much was tried.
        is_pinned: whether it was page-locked.
        refusal: the platform's words if it wasn't.
        is_exact: memory is page-locked at its exact size, not rounded up to a power of two.
        folder: where a file was whose page in the page cache was tried as well.
        file_refusal: why that can't be page-locked; None if it can.
    """

    nbytes: int
    is_pinned: bool
    refusal: str | None
    is_exact: bool
    folder: str
    file_refusal: str | None


@dataclass(frozen=True)
class DeviceFacts:
    """The execution device.

    Attributes:
        device: as torch writes it.
        name: what it calls itself.
        total_nbytes, free_nbytes: its memory.
        is_modelled: it is simulated, and its times come from a model.
        rates: of copies from page-locked host memory; None on the CPU, and where no room for a try was left.
        pinning: what page-locking gave; None on the CPU, which needs none.
    """

    device: str
    name: str
    total_nbytes: int
    free_nbytes: int
    is_modelled: bool
    rates: Rates | None
    pinning: PinningFacts | None


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` has found. `str()` and a notebook show it as a table.

    Attributes:
        system: operating system and Python.
        libraries: library -> version, of those that are installed.
        host: the host.
        device: the execution device; None if there is none.
        findings: what would go wrong, the worst first.
    """

    system: str
    libraries: Mapping[str, str]
    host: HostFacts
    device: DeviceFacts | None
    findings: tuple[Finding, ...]

    @property
    def works(self) -> bool:
        """Whether offload works here."""
        return not any(finding.is_fatal for finding in self.findings)

    def table(self) -> Table:
        """What was found, and below it what would go wrong."""
        notes = [f"{'!' if finding.is_fatal else '-'} {finding}" for finding in self.findings]
        heading = "What would go wrong:" if notes else "Nothing would go wrong."
        return Table("", ("what", "found"), tuple(_rows(self)), ("", heading, *notes), left=2)

    def __str__(self) -> str:
        return str(self.table())

    def __rich__(self) -> rich.console.RenderableType:
        return self.table().__rich__()

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def to_json(self) -> str:
        """All of it as JSON; sizes in bytes, times in seconds."""
        return json.dumps({**asdict(self), "works": self.works}, indent=2)


def diagnose(device: torch.device | str | int | None = None, *, folder: str | Path | None = None) -> Diagnosis:
    """Look at this machine: versions, memory and limits; measure the link, and try to page-lock memory and a file.

    Takes a second or two, and up to 256 MiB of host memory for that long.

    Args:
        device: the execution device; None takes the current accelerator. If there is none, that is among the findings.
        folder: where checkpoints are: whether a file in the page cache can be page-locked depends on its file system.
            None takes the hub's cache, if there is one, else the folder for temporary files.

    Raises:
        ValueError: `device` was named and isn't there.
    """
    libraries = _versions()
    host = _host_facts()
    findings = list(_of_libraries(libraries))
    facts = None
    try:
        where = resolve_device(device)
    except ValueError as error:
        if device is not None:
            raise
        findings.append(Finding(str(error), _how_to_get_an_accelerator(), is_fatal=True))
    else:
        with on_device(where):
            facts = _device_facts(platform_for(where), Path(folder) if folder is not None else _checkpoints(), host)
        findings += _of_device(facts)
    findings += _of_host(host, facts)
    system = f"{operating_system.platform()}, Python {operating_system.python_version()}"
    ordered = sorted(findings, key=lambda finding: not finding.is_fatal)
    return Diagnosis(system, libraries, host, facts, tuple(ordered))


# Looking ------------------------------------------------------------------------------------------------------------


def _requirements() -> Iterator[Requirement]:
    """What this library requires, without extras."""
    for text in importlib.metadata.requires(DISTRIBUTION) or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement


def _versions() -> dict[str, str]:
    found = {}
    for name in (DISTRIBUTION, *(requirement.name for requirement in _requirements()), *OPTIONAL_LIBRARIES):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _host_facts() -> HostFacts:
    memory = host_memory()
    swap = {"SwapTotal": 0, "SwapFree": 0}
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in swap:
                swap[name] = int(value.split()[0]) * 1024
    lockable, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return HostFacts(
        machine_nbytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        total_nbytes=memory.total_bytes,
        available_nbytes=memory.available_bytes,
        swap_nbytes=swap["SwapTotal"],
        swap_used_nbytes=swap["SwapTotal"] - swap["SwapFree"],
        lockable_nbytes=None if lockable == resource.RLIM_INFINITY else lockable,
        cpus=len(os.sched_getaffinity(0)),
    )


def _device_facts(platform: Platform, folder: Path, host: HostFacts) -> DeviceFacts:
    free = platform.free_bytes()  # before anything is tried
    rates = None
    if platform.is_asynchronous:
        with suppress(torch.OutOfMemoryError):
            rates = measure_link(platform)
    return DeviceFacts(
        device=str(platform.device),
        name=platform.name,
        total_nbytes=platform.total_bytes(),
        free_nbytes=free,
        is_modelled=platform.is_modelled,
        rates=rates,
        pinning=_try_pinning(platform, folder, host) if platform.is_asynchronous else None,
    )


def _try_pinning(platform: Platform, folder: Path, host: HostFacts) -> PinningFacts:
    nbytes = min(_PROBE_BYTES, int(host.available_nbytes * _PROBE_SHARE)) // mmap.PAGESIZE * mmap.PAGESIZE
    budget = PinnedBudget(nbytes * 2)
    buffer = HostBuffer(nbytes, platform, budget)
    is_pinned, refusal = buffer.is_pinned, budget.refusal
    buffer.unpin()
    why_no_files = _why_no_files(platform, folder)
    return PinningFacts(nbytes, is_pinned, refusal, platform.registers_host_memory, str(folder), why_no_files)


def _checkpoints() -> Path:
    cache = Path(HF_HUB_CACHE)
    return cache if os.access(cache, os.W_OK) else Path(tempfile.gettempdir())


def _why_no_files(platform: Platform, folder: Path) -> str | None:
    """Why a page of a file in `folder` can't be page-locked; None if it can."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(mmap.PAGESIZE))
            file.flush()
            with mmap.mmap(file.fileno(), mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ) as mapping:
                return platform.why_no_files(_address(mapping))
    except OSError as error:
        return f"no file could be written in {folder}: {error.strerror}"


def _address(mapping: mmap.mmap) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch has no tensors that can't be written to.
        return torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()


# Judging ------------------------------------------------------------------------------------------------------------


def _how_to_get_an_accelerator() -> str:
    nvidia = Path("/dev/nvidia0").exists() or Path("/proc/driver/nvidia").exists()
    if nvidia and not torch.backends.cuda.is_built():
        return f"There is an NVIDIA driver, but torch {torch.__version__} was built without CUDA: install one with it."
    return "Otherwise install a driver and a build of torch for the accelerator, and give the container access to it."


def _of_libraries(libraries: Mapping[str, str]) -> Iterator[Finding]:
    for requirement in _requirements():
        version = libraries.get(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            found = f"{requirement.name} {version}" if version else f"no {requirement.name}"
            yield Finding(
                f"There is {found}, but {requirement} is needed.",
                f"Install it: pip install '{requirement}'.",
                is_fatal=True,
            )


def _of_device(facts: DeviceFacts) -> Iterator[Finding]:
    if facts.pinning is None:
        yield Finding(
            "On the CPU nothing overlaps, and nothing is gained.", "It is for demos and tests: name an accelerator."
        )
        return
    in_use = facts.total_nbytes - facts.free_nbytes
    if in_use > facts.total_nbytes * _MUCH_IN_USE:
        words = f"{format_bytes(in_use)} of the {format_bytes(facts.total_nbytes)} on {facts.device} are in use."
        yield Finding(words, "End the other programs that use it, or take another device.")
    link = None if facts.rates is None else facts.rates.link_bytes_per_s
    if link is None:
        words = f"{facts.device} has no room for the copies that measure the link."
        yield Finding(words, "End the other programs that use it.", is_fatal=True)
    elif link < _SLOW_LINK_BYTES_PER_S:
        yield Finding(
            f"The link is slow, {link / 1e9:.1f} GB/s: 10 GiB of blocks take {10 * 2**30 / link:.1f} s each forward.",
            "See whether the card has all lanes of its slot (LnkSta of lspci -vv); take module mode where it fits.",
        )
    yield from _of_pinning(facts.pinning)


def _of_pinning(pinning: PinningFacts) -> Iterator[Finding]:
    if not pinning.is_pinned:
        yield Finding(
            f"{format_bytes(pinning.nbytes)} of host memory couldn't be page-locked ({pinning.refusal}), so copies "
            "don't overlap with compute.",
            "Raise `ulimit -l` (docker run --ulimit memlock=-1) and the container's memory limit.",
        )
    elif not pinning.is_exact:
        yield Finding(
            "Page-locked memory comes from torch's allocator, which rounds each buffer up to a power of two.",
            "Reckon with up to twice the bytes of the weights, or set a budget: pin_memory=<bytes>.",
        )
    if pinning.file_refusal is not None:
        yield Finding(
            f"Files in {pinning.folder} can't be page-locked in the page cache ({pinning.file_refusal}).",
            "Leave host_registration_limit_gib out: weights of a checkpoint are then staged by a thread.",
        )


def _of_host(host: HostFacts, device: DeviceFacts | None) -> Iterator[Finding]:
    if device is not None and device.pinning is not None and host.available_nbytes < device.total_nbytes:
        yield Finding(
            f"{format_bytes(host.available_nbytes)} of host memory are available, less than the device has: about "
            f"{format_bytes(int(host.available_nbytes * _FOR_WEIGHTS))} of weights can be offloaded to it.",
            "Leave larger ones in their files: load_omni_pipeline, or omni-offload run --source checkpoint.",
        )
    if host.swap_used_nbytes > host.total_nbytes * _MUCH_SWAPPED:
        yield Finding(
            f"{format_bytes(host.swap_used_nbytes)} are in swap, so host memory is short already, and weights that "
            "aren't page-locked may be swapped out.",
            "End other programs, or leave the weights in their files (load_omni_pipeline).",
        )


# Showing ------------------------------------------------------------------------------------------------------------


def _rows(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    yield "system", diagnosis.system
    yield "libraries", "\n".join(f"{name} {version}" for name, version in diagnosis.libraries.items())
    host, device = diagnosis.host, diagnosis.device
    limited = host.total_nbytes < host.machine_nbytes
    limit = f" (the control group's limit; the machine has {format_bytes(host.machine_nbytes)})" if limited else ""
    yield "host memory", f"{format_bytes(host.available_nbytes)} available of {format_bytes(host.total_nbytes)}{limit}"
    swap = f"{format_bytes(host.swap_used_nbytes)} used of {format_bytes(host.swap_nbytes)}"
    yield "swap", swap if host.swap_nbytes else "none"
    yield "ulimit -l", "unlimited" if host.lockable_nbytes is None else format_bytes(host.lockable_nbytes)
    yield "CPUs", str(host.cpus)
    if device is None:
        yield "device", "none"
        return
    name = f"{device.device}, {device.name}" if device.name != device.device else device.device
    yield "device", f"{name}: {format_bytes(device.free_nbytes)} free of {format_bytes(device.total_nbytes)}"
    if device.rates is not None:
        link, how = device.rates.link_bytes_per_s, "modelled" if device.is_modelled else "measured"
        yield "link", f"{link / 1e9:.1f} GB/s, {how}: 10 GiB of blocks take {10 * 2**30 / link:.2f} s each forward"
    if device.pinning is not None:
        pinning = device.pinning
        exact = "at its exact size" if pinning.is_exact else "by torch's allocator, in powers of two"
        yield "page-locking", f"{format_bytes(pinning.nbytes)} {exact}" if pinning.is_pinned else "refused"
        yield "files page-locked", "yes" if pinning.file_refusal is None else "no"
