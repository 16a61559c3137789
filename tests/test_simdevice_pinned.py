"""The simulated device: page-locked host memory, safetensors, the build, the plugin's rule."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch

from tests.simdevice import build as build_module

pytest_plugins = ["pytester"]
ROOT = Path(__file__).resolve().parents[1]


def pinned_delta(sim, action):
    before = sim.stats()["pinned_current"]
    kept = action()
    return sim.stats()["pinned_current"] - before, kept


# Pinned memory


@pytest.mark.parametrize(("nbytes", "charged"), [(1, 1), (1000, 1024), (1024, 1024), (1025, 2048), (3 << 20, 4 << 20)])
@pytest.mark.parametrize("how", ["pin_memory", "empty"])
def test_torch_s_pinned_allocator_rounds_up_to_a_power_of_two(sim, how, nbytes, charged):
    def make():
        if how == "empty":
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return torch.zeros(nbytes, dtype=torch.uint8).pin_memory()

    delta, tensor = pinned_delta(sim, make)
    assert delta == charged and tensor.is_pinned() and tensor[nbytes // 2 :].is_pinned()
    before = sim.stats()["pinned_current"]
    del tensor
    assert sim.stats()["pinned_current"] == before - charged


def test_registration_is_exact_and_in_place(sim):
    tensor = torch.zeros(1000, dtype=torch.uint8)
    delta, _ = pinned_delta(sim, lambda: torch.sim.host_register(tensor.data_ptr(), 1000))
    assert delta == 1000 and tensor.is_pinned()
    delta, _ = pinned_delta(sim, lambda: torch.sim.host_unregister(tensor.data_ptr()))
    assert delta == -1000 and not tensor.is_pinned()


def test_registering_twice_or_unregistering_nothing_is_refused(sim):
    tensor = torch.zeros(1000, dtype=torch.uint8)
    sim.host_register(tensor)
    for pointer, nbytes in ((tensor.data_ptr(), 10), (tensor.data_ptr() + 999, 1), (tensor.data_ptr() - 8, 9)):
        with pytest.raises(RuntimeError, match="page-locked already"):
            torch.sim.host_register(pointer, nbytes)
    sim.host_unregister(tensor)
    with pytest.raises(RuntimeError, match="no memory is registered"):
        sim.host_unregister(tensor)


@pytest.fixture
def mapped(tmp_path):
    """Makes tensors over mappings of a file of random bytes that ends inside of a page; and the file."""
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(3 * mmap.PAGESIZE + 100))

    def make(flags, protection):
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), 0, flags=flags, prot=protection)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch knows no tensors that can't be written to
            return torch.frombuffer(memory, dtype=torch.uint8)

    return make, path


@pytest.mark.parametrize(
    ("flags", "protection", "is_writable"),
    [
        (mmap.MAP_SHARED, mmap.PROT_READ, False),
        (mmap.MAP_PRIVATE, mmap.PROT_READ, False),
        (mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE, True),
    ],
)
def test_memory_that_cannot_be_written_to_is_registered_to_be_read_only(sim, mapped, flags, protection, is_writable):
    tensor = mapped[0](flags, protection)
    pointer, nbytes = tensor.data_ptr(), tensor.numel()
    if is_writable:
        torch.sim.host_register(pointer, nbytes)
        torch.sim.host_unregister(pointer)
    else:
        with pytest.raises(RuntimeError, match="can't be written to"):
            torch.sim.host_register(pointer, nbytes)
    assert not tensor.is_pinned()
    torch.sim.host_register(pointer, nbytes, read_only=True)
    assert tensor.is_pinned()
    on_device = tensor.to("sim", non_blocking=True)
    assert sim.stats()["pending"] and bytes(on_device.tolist()) == mapped[1].read_bytes()
    with pytest.raises(RuntimeError, match="page-locked to be read only"):
        tensor.copy_(on_device, non_blocking=True)
    torch.sim.host_unregister(pointer)


def test_pages_that_a_file_has_lost_are_not_registered(sim, mapped):
    make, path = mapped
    tensor = make(mmap.MAP_SHARED, mmap.PROT_READ)
    os.truncate(path, 2 * mmap.PAGESIZE)
    torch.sim.host_register(tensor.data_ptr(), 2 * mmap.PAGESIZE, read_only=True)
    torch.sim.host_unregister(tensor.data_ptr())
    with pytest.raises(RuntimeError, match="can't be read"):
        torch.sim.host_register(tensor.data_ptr(), tensor.numel(), read_only=True)
    with pytest.raises(RuntimeError, match="can't be written to"):
        torch.sim.host_register(16 * mmap.PAGESIZE, 1)  # nothing is mapped there


def test_read_only_registration_can_be_switched_off(sim, mapped):
    sim.configure(registers_read_only=0)
    tensor = mapped[0](mmap.MAP_SHARED, mmap.PROT_READ)
    with pytest.raises(RuntimeError, match="registers_read_only=0"):
        torch.sim.host_register(tensor.data_ptr(), 1, read_only=True)


def test_pinned_capacity(sim):
    tensor = torch.zeros(1000, dtype=torch.uint8)
    sim.configure(pinned_capacity_bytes=sim.stats()["pinned_current"] + 1000)
    with pytest.raises(torch.OutOfMemoryError, match="cannot pin 1001 bytes"):
        torch.sim.host_register(tensor.data_ptr(), 1001)
    with pytest.raises(torch.OutOfMemoryError, match=r"cannot pin 1024 bytes \(1000 rounded up"):
        tensor.pin_memory()
    assert not tensor.is_pinned()
    sim.host_register(tensor)
    sim.host_unregister(tensor)


def test_peak_of_pinned_bytes_counts_from_the_last_reset(sim):
    sim.reset_clock()
    before = sim.stats()["pinned_peak"]
    torch.empty(4096, dtype=torch.uint8, pin_memory=True)
    assert sim.stats()["pinned_peak"] == before + 4096
    sim.reset_clock()
    assert sim.stats()["pinned_peak"] == before


def test_pinning_takes_modelled_host_time(sim):
    sim.configure(pin_bytes_per_s=1e9)
    sim.reset_clock()
    tensor = torch.zeros(1000, dtype=torch.uint8)
    sim.host_register(tensor)
    assert sim.stats()["host_ns"] == 1000
    sim.host_unregister(tensor)


@pytest.mark.expects_hazards
@pytest.mark.parametrize("waited", ["not", "on the device", "on the host"])
def test_unregistering_under_a_copy_is_a_hazard(device, sim, waited):
    source, slot = torch.ones(1024), torch.zeros(1024, device=device)
    torch.accelerator.synchronize()
    sim.host_register(source)
    stream = torch.Stream(device=device)
    with stream:
        slot.copy_(source, non_blocking=True)
    if waited == "on the device":
        torch.accelerator.current_stream().wait_stream(stream)
        slot + 1
    elif waited == "on the host":
        stream.synchronize()
    sim.host_unregister(source)
    assert len(sim.hazards()) == (0 if waited == "on the host" else 1)
    assert all("unregistered while a copy on stream" in hazard for hazard in sim.hazards())


def test_registered_memory_that_torch_does_not_own(device, sim):
    memory = ctypes.create_string_buffer(4096)
    torch.sim.host_register(ctypes.addressof(memory), 4096)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    tensor.fill_(7)
    slot = torch.zeros(4096, dtype=torch.uint8, device=device)
    slot.copy_(tensor, non_blocking=True)
    assert sim.stats()["pending"] == 1
    torch.accelerator.synchronize()
    assert (slot == 7).all().item()
    torch.accelerator.synchronize()
    torch.sim.host_unregister(ctypes.addressof(memory))


# safetensors


@pytest.fixture
def weights_file(tmp_path):
    weights = {"a": torch.randn(4, 5), "b": torch.arange(6).to(torch.bfloat16)}
    safetensors.torch.save_file(weights, tmp_path / "weights.safetensors")
    return weights, tmp_path / "weights.safetensors"


@pytest.mark.parametrize("name", ["sim", "sim:0", "cpu"])
def test_safetensors_load_file(device, weights_file, name):
    weights, path = weights_file
    loaded = safetensors.torch.load_file(path, device=name)
    assert {key: tensor.device.type for key, tensor in loaded.items()} == dict.fromkeys(weights, name[:3])
    assert all(torch.equal(loaded[key].cpu(), weights[key]) for key in weights)


@pytest.mark.parametrize("as_string", [False, True])
def test_safetensors_safe_open(device, weights_file, as_string):
    weights, path = weights_file
    with safetensors.safe_open(path, framework="pt", device=str(device) if as_string else device) as file:
        assert sorted(file.keys()) == ["a", "b"]
        assert file.get_tensor("a").device.type == "sim"
        piece = file.get_slice("a")
        assert piece.get_shape() == [4, 5] and piece[1:3].device.type == "sim"
        assert torch.equal(piece[1:3].cpu(), weights["a"][1:3])


def test_safetensors_saves_device_tensors(device, tmp_path):
    safetensors.torch.save_file({"a": torch.ones(3, device=device)}, tmp_path / "saved.safetensors")
    assert torch.equal(safetensors.torch.load_file(tmp_path / "saved.safetensors")["a"], torch.ones(3))


# The build


def test_a_failing_compiler_is_quoted(tmp_path, monkeypatch):
    compiler = tmp_path / "broken-compiler"
    compiler.write_text("#!/bin/sh\necho 'line 1: no such thing' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("SIMDEVICE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(RuntimeError, match="could not build the simulated device:\nline 1: no such thing"):
        build_module.build()
    monkeypatch.setenv("CXX", str(tmp_path / "absent"))
    with pytest.raises(RuntimeError, match=r"needs a C\+\+ compiler and .*absent' does not start"):
        build_module.build()


def test_the_library_s_name_depends_on_every_source(tmp_path, monkeypatch):
    sources = tmp_path / "csrc"
    sources.mkdir()
    for name in ("one.h", "two.cpp"):
        (sources / name).write_text("// text\n")
    monkeypatch.setattr(build_module, "SOURCES", sources)
    names = {build_module.library_path("g++", [])}
    names.add(build_module.library_path("g++", ["-O2"]))
    for path in sources.iterdir():
        path.write_text("// other text\n")
        names.add(build_module.library_path("g++", []))
    assert len(names) == 4


@pytest.mark.processes
def test_two_processes_build_once(tmp_path):
    compiler = tmp_path / "slow-compiler"
    compiler.write_text(
        '#!/bin/sh\necho run >> "$(dirname "$0")/runs"\nsleep 1\n'
        'while [ "$1" != -o ]; do shift; done\necho built > "$2"\n'
    )
    compiler.chmod(0o755)
    code = (
        f"import os; os.environ.update(CXX={str(compiler)!r}, SIMDEVICE_CACHE={str(tmp_path / 'cache')!r})\n"
        "from tests.simdevice.build import build; print(build().read_text())"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    assert [process.communicate()[0].strip() for process in processes] == ["built", "built"]
    assert (tmp_path / "runs").read_text().split() == ["run"]


# The plugin


@pytest.mark.processes
def test_the_plugin_fails_a_test_that_leaves_a_hazard(pytester, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makepyfile(
        """
        import os, pytest, torch

        def test_without_the_device():
            assert os.environ["HF_HUB_OFFLINE"] == "1" and torch.get_num_threads() == 1
            assert torch.accelerator.current_accelerator() is None

        def leave_hazard(device):
            stream = torch.Stream(device=device)
            with stream:
                tensor = torch.ones(10, pin_memory=True).to(device, non_blocking=True)
            torch.accelerator.current_stream().wait_stream(stream)
            tensor + 1

        def test_hazard(device):
            leave_hazard(device)

        @pytest.mark.expects_hazards
        def test_expected(device):
            leave_hazard(device)

        def test_unfinished(device, sim):
            sim.configure(capacity_bytes=1e6, capturing=1, devices=2, poison=0)
            torch.accelerator.set_device_index(1)
            torch.accelerator.set_stream(torch.Stream(device="sim:1"))

        def test_clean(device, sim):
            assert {key: sim.get_config(key) for key in sim.DEFAULTS} == sim.DEFAULTS
            assert torch.accelerator.current_device_index() == 0 and sim.stats()["host_ns"] == 0
            assert torch.accelerator.current_stream() == torch.sim.default_stream()
        """
    )
    result = pytester.runpytest_subprocess("-p", "tests.simdevice.plugin", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=5, errors=1)
    result.stdout.fnmatch_lines(
        ["*left hazards on the simulated device*", "*were freed while stream*", "ERROR*test_hazard*"]
    )
