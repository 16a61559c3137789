"""What the doctor finds on a machine, and what it says would go wrong."""

from __future__ import annotations

import importlib.metadata
import json
import mmap
import re
import resource
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from diffusers_omni_offload import doctor as doctor_module
from diffusers_omni_offload.cli import main
from diffusers_omni_offload.doctor import Diagnosis, Finding, HostFacts, diagnose
from diffusers_omni_offload.host import HostMemory, host_memory
from diffusers_omni_offload.platform import Platform
from tests.test_platform import fake_files

ROOMY = HostFacts(
    machine_nbytes=256 << 30,
    total_nbytes=256 << 30,
    available_nbytes=200 << 30,
    swap_nbytes=8 << 30,
    swap_used_nbytes=0,
    lockable_nbytes=None,
    cpus=16,
)


@pytest.fixture(autouse=True)
def a_roomy_machine(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """A host and a device with which nothing is wrong, where the test has the device."""
    monkeypatch.setattr(doctor_module, "_host_facts", lambda: ROOMY)
    monkeypatch.setattr(doctor_module, "_PROBE_BYTES", 1 << 20)
    if "sim" in request.fixturenames:
        request.getfixturevalue("sim").configure(capacity_bytes=24 << 30)


def said(diagnosis: Diagnosis, words: str) -> Finding:
    """The one finding that has these words."""
    (finding,) = [finding for finding in diagnosis.findings if re.search(words, str(finding))]
    assert str(finding) in str(diagnosis)
    return finding


def test_a_machine_with_which_nothing_is_wrong(device: torch.device, sim: ModuleType, tmp_path: Path) -> None:
    before, taken = sim.stats(), torch.accelerator.memory_allocated()
    diagnosis = diagnose(folder=tmp_path)
    assert diagnosis.works and diagnosis.findings == ()
    facts = diagnosis.device
    assert facts is not None and facts.device == "sim:0" and facts.total_nbytes == facts.free_nbytes + taken == 24 << 30
    assert facts.rates is not None and facts.rates.link_bytes_per_s == pytest.approx(16e9, rel=0.02)
    assert facts.pinning is not None and facts.pinning.is_pinned and facts.pinning.is_exact
    assert facts.pinning.nbytes == 1 << 20 and facts.pinning.file_refusal is None
    after = sim.stats()
    assert after["pinned_current"] == before["pinned_current"] and not list(tmp_path.iterdir())
    text = str(diagnosis)
    assert f"torch {importlib.metadata.version('torch')}" in text and "Nothing would go wrong." in text
    assert re.search(r"link +16\.0 GB/s, modelled: 10 GiB of blocks take 0\.67 s each forward", text)
    assert re.search(r"host memory +200\.0 GiB available of 256\.0 GiB\n", text)
    assert re.search(r"ulimit -l +unlimited\n", text) and re.search(r"page-locking +1\.0 MiB at its exact size", text)


def test_as_json(device: torch.device, sim: ModuleType) -> None:
    found = json.loads(diagnose().to_json())
    assert found["works"] is True and found["findings"] == []
    assert found["device"]["rates"]["link_bytes_per_s"] == pytest.approx(16e9, rel=0.02)
    assert found["host"]["available_nbytes"] == 200 << 30
    assert found["libraries"]["diffusers"] == importlib.metadata.version("diffusers")


def test_without_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    diagnosis = diagnose()
    finding = said(diagnosis, "No accelerator was found")
    assert finding.is_fatal and not diagnosis.works and diagnosis.device is None
    assert "! No accelerator" in str(diagnosis) and re.search(r"device +none", str(diagnosis))


def test_a_device_that_is_named_has_to_be_there() -> None:
    with pytest.raises(ValueError, match="'toaster'"):
        diagnose("toaster")


def test_the_cpu_gains_nothing() -> None:
    diagnosis = diagnose("cpu")
    assert not said(diagnosis, "On the CPU nothing overlaps").is_fatal and diagnosis.works
    assert diagnosis.device is not None and diagnosis.device.pinning is None and diagnosis.device.rates is None
    assert "GB/s" not in str(diagnosis)


def test_a_slow_link(device: torch.device, sim: ModuleType) -> None:
    sim.configure(h2d_bytes_per_s=2e9)
    assert "2.0 GB/s: 10 GiB of blocks take 5.4 s each forward" in said(diagnose(), "The link is slow").what


def test_memory_that_is_in_use(device: torch.device, sim: ModuleType) -> None:
    sim.configure(capacity_bytes=200 << 20)
    held = torch.empty((60 << 20) - torch.accelerator.memory_allocated(), dtype=torch.uint8, device=device)
    assert said(diagnose(), "are in use").what.startswith("60.0 MiB of the 200.0 MiB on sim:0")
    del held
    assert diagnose().findings == ()


def test_a_device_that_is_full(device: torch.device, sim: ModuleType) -> None:
    sim.configure(capacity_bytes=torch.accelerator.memory_allocated() + 100)
    diagnosis = diagnose()
    assert said(diagnosis, "no room for the copies").is_fatal and not diagnosis.works


def test_page_locking_that_is_refused(device: torch.device, sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = doctor_module.measure_link(Platform(torch.device("sim", 0)))
    monkeypatch.setattr(doctor_module, "measure_link", lambda platform: rates)
    sim.configure(pinned_capacity_bytes=1000)
    finding = said(diagnose(), "couldn't be page-locked")
    assert "(sim: cannot pin 1048576 bytes" in finding.what and "ulimit -l" in finding.remedy


def test_page_locking_by_torch_s_allocator(
    device: torch.device, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Platform, "registers_host_memory", property(lambda self: False))
    diagnosis = diagnose()
    assert "power of two" in said(diagnosis, "torch's allocator, which").what
    assert said(diagnosis, "page-locked in the page cache").what.endswith("no way to page-lock memory in place.).")


def test_files_that_cannot_be_page_locked(device: torch.device, sim: ModuleType, tmp_path: Path) -> None:
    sim.configure(registers_read_only=0)
    finding = said(diagnose(folder=tmp_path), "page-locked in the page cache")
    assert str(tmp_path) in finding.what and "registers_read_only=0" in finding.what and not finding.is_fatal
    sim.configure(registers_read_only=1)
    assert "no file could be written" in said(diagnose(folder=tmp_path / "no"), "page-locked in the page cache").what


def test_the_file_that_is_tried_is_one_of_the_folder(
    device: torch.device, sim: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []
    register = Platform.register_file
    monkeypatch.setattr(
        Platform, "register_file", lambda self, *args: (tried.append(args[1]), register(self, *args))[1]
    )
    diagnose(folder=tmp_path)
    assert tried == [mmap.PAGESIZE]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"available_nbytes": 10 << 30}, r"10\.0 GiB of host memory are available.*about 9\.0 GiB of weights"),
        ({"swap_used_nbytes": 30 << 30}, r"30\.0 GiB are in swap"),
    ],
)
def test_a_host_that_is_short_of_memory(
    changed: dict[str, int], words: str, device: torch.device, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_module, "_host_facts", lambda: replace(ROOMY, **changed))
    assert not said(diagnose(), words).is_fatal


def test_a_control_group_s_limit_is_named(
    device: torch.device, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited = replace(ROOMY, total_nbytes=64 << 30, available_nbytes=60 << 30)
    monkeypatch.setattr(doctor_module, "_host_facts", lambda: limited)
    text = str(diagnose())
    assert "60.0 GiB available of 64.0 GiB (the control group's limit; the machine has 256.0 GiB)" in text


def test_a_library_that_is_too_old_or_new(
    device: torch.device, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = importlib.metadata.version
    other = {"diffusers": "0.43.0", "torch": "2.11.0+cpu"}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: other.get(name) or version(name))
    diagnosis = diagnose()
    finding = said(diagnosis, "There is diffusers 0.43.0, but diffusers<0.43,>=0.42 is needed")
    assert finding.is_fatal and "pip install" in finding.remedy and len(diagnosis.findings) == 1


def test_facts_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    memory = HostMemory(5 << 30, 3 << 30)
    monkeypatch.setattr(doctor_module, "host_memory", lambda: memory)
    monkeypatch.setattr(resource, "getrlimit", lambda what: (8 << 20, resource.RLIM_INFINITY))
    read_text = Path.read_text
    lines = "MemTotal: 1 kB\nSwapTotal:  2048 kB\nSwapFree:  512 kB\n"
    monkeypatch.setattr(
        Path, "read_text", lambda path, *args: lines if str(path) == "/proc/meminfo" else read_text(path, *args)
    )
    facts = doctor_module._host_facts()
    assert (facts.total_nbytes, facts.available_nbytes, facts.lockable_nbytes) == (5 << 30, 3 << 30, 8 << 20)
    assert (facts.swap_nbytes, facts.swap_used_nbytes) == (2 << 20, 1536 << 10)
    monkeypatch.setattr(resource, "getrlimit", lambda what: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert doctor_module._host_facts().lockable_nbytes is None


@pytest.mark.parametrize("version", [1, 2])
def test_limits_of_the_process_s_own_group_and_of_those_around_it(
    monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    line, root, limit, usage = {
        2: ("0::/job/step", "/sys/fs/cgroup", "memory.max", "memory.current"),
        1: ("4:memory:/job/step", "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    }[version]
    read_text = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path: line if str(path) == "/proc/self/cgroup" else read_text(path))
    files = {f"{root}/job/{limit}": 100 << 20, f"{root}/job/{usage}": 30 << 20}
    fake_files(monkeypatch, files)
    assert host_memory() == HostMemory(100 << 20, 70 << 20)
    fake_files(monkeypatch, {**files, f"{root}/job/step/{limit}": 50 << 20, f"{root}/job/step/{usage}": 45 << 20})
    assert host_memory() == HostMemory(50 << 20, 5 << 20)


# The command


def test_the_command_prints_what_was_found(
    device: torch.device, sim: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor"]) == 0
    assert "Nothing would go wrong." in capsys.readouterr().out
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["works"] is True


def test_the_command_ends_with_one_where_offload_cannot_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    assert main(["doctor"]) == 1
    assert "No accelerator" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--device", "toaster"], ["--folder", "/no/such"]], ids=str)
def test_bad_input_of_the_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *arguments]) == 2
    printed: Any = capsys.readouterr()
    assert printed.err.count("\n") == 1 and arguments[1] in printed.err and not printed.out
