"""Staging: the bytes of files come into slots, whatever the order, errors and interrupts; nothing stays behind."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch

from diffusers_omni_offload.streaming import reader as reader_module
from diffusers_omni_offload.streaming import staging as staging_module
from diffusers_omni_offload.streaming.transport import Transport
from tests.staged import FileMaster, Gate, Stage, eventually

ROOT = Path(__file__).parent.parent
OURS = {reader_module.__file__, staging_module.__file__}


@pytest.fixture(params=["sim", "cpu"])
def place(request: pytest.FixtureRequest) -> torch.device:
    """The simulated device, or the CPU, where nothing is asynchronous."""
    if request.param == "sim":
        request.getfixturevalue("device")
        return torch.device("sim", 0)
    return torch.device("cpu")


@pytest.fixture
def sim_device(device: torch.device) -> torch.device:
    return torch.device("sim", 0)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    if readers():
        gc.collect()
    eventually(lambda: not readers())


def readers() -> list[threading.Thread]:
    """The reading threads that are there."""
    return [thread for thread in threading.enumerate() if isinstance(thread, reader_module.Reader)]


def masters(count: int, nbytes: int = 4096, **options: Any) -> list[FileMaster]:
    return [FileMaster(number, nbytes, **options) for number in range(count)]


def check(outputs: list[tuple[FileMaster, torch.Tensor]]) -> None:
    """Late, when all is issued, so that what was overwritten too early shows."""
    for master, output in outputs:
        assert torch.equal(output.cpu(), master.expected), f"{master.path} has wrong bytes"
        assert master.clashes == 0


# ---------------------------------------------------------------------- bytes


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_any_sequence_gives_the_right_bytes(place: torch.device, count: int, seed: int) -> None:
    """Expected, skipped, repeated and unexpected masters of several sizes; reads and the device are late at times."""
    rng = random.Random(f"{count} {seed}")
    blocks = [FileMaster(n, rng.choice([256, 4096, 5000]), seconds=rng.choice([0, 0, 0.002])) for n in range(6)]
    stage = Stage(place, count=count, slots=3, nbytes=5000)
    for _ in range(3):
        outputs, position, loaded = [], 0, None
        for _ in range(25):
            action = rng.choice(["follow", "follow", "follow", "skip", "repeat", "jump", "only expect", "wait"])
            position = {"skip": position + 2, "repeat": position, "jump": rng.randrange(6)}.get(action, position + 1)
            upcoming = [blocks[(position + step) % 6] for step in range(rng.randrange(5))]
            if action == "wait":
                time.sleep(0.003)
            elif action == "only expect":
                stage.staging.expect(upcoming)
            else:
                master = blocks[position % 6]
                # As in a streamer: the block before computes when this one's copy is issued, and may not have begun.
                before, loaded = loaded, (stage.load(master), master)
                if rng.random() < 0.8:
                    stage.staging.expect(upcoming)
                if before is not None:
                    outputs.append((before[1], stage.compute(*before)))
        stage.staging.settle()
        check(outputs)
    stage.staging.release()


def test_it_is_a_transport_of_masters_in_files(place: torch.device) -> None:
    stage = Stage(place, count=3)
    transport: Transport = stage.staging
    assert transport.lookahead == 3 and transport.serves(FileMaster(0)) and not transport.serves(torch.nn.Module())
    transport.settle()
    transport.release()


def test_works_in_inference_mode_and_out_of_it(place: torch.device) -> None:
    a, b = masters(2)
    stage = Stage(place)
    for mode in (True, False, True):
        with torch.inference_mode(mode):
            stage.staging.expect([a, b])
            check([(a, stage.run(a)), (b, stage.run(b))])
            stage.staging.settle()


def test_what_was_expected_is_read_once_and_ahead(sim_device: torch.device) -> None:
    a, b, c = masters(3)
    stage = Stage(sim_device)
    stage.staging.expect([a, b, c])
    eventually(lambda: stage.staging.is_ready(a) and stage.staging.is_ready(b))
    time.sleep(0.02)
    assert (a.reads, b.reads, c.reads) == (1, 1, 0), "two buffers hold two masters"
    stage.staging.expect([a, b, c])
    outputs = [(a, stage.run(a))]
    eventually(partial(stage.staging.is_ready, c))
    assert not stage.staging.is_ready(a) and stage.staging.is_ready(b)
    outputs += [(b, stage.run(b)), (c, stage.run(c)), (c, stage.run(c))]
    check(outputs)
    assert (a.reads, b.reads, c.reads) == (1, 1, 1)
    assert (stage.staging.reads, stage.staging.read_bytes) == (3, 3 * 4096)
    assert stage.staging.demand_reads == 0


def test_a_read_under_way_is_waited_for(sim_device: torch.device) -> None:
    (a,) = masters(1)
    a.during = gate = Gate()
    stage = Stage(sim_device)
    stage.staging.expect([a])
    assert gate.reached.wait(10) and not stage.staging.is_ready(a)
    threading.Timer(0.05, gate.opened.set).start()
    check([(a, stage.run(a))])
    assert a.reads == 1 and stage.staging.demand_reads == 0
    assert 0.02 < stage.staging.waited_seconds < 10


def test_what_is_no_longer_expected_gives_way(sim_device: torch.device) -> None:
    a, b, c, d = masters(4)
    a.during = gate = Gate()
    stage = Stage(sim_device)
    stage.staging.expect([a, b])
    assert gate.reached.wait(10)
    stage.staging.expect([c, d])
    gate.opened.set()
    eventually(lambda: stage.staging.is_ready(c) and stage.staging.is_ready(d))
    assert b.reads == 0 and not stage.staging.is_ready(a)
    check([(c, stage.run(c)), (d, stage.run(d))])


def test_an_unexpected_master_is_read_before_what_is_queued(sim_device: torch.device) -> None:
    a, b, c, other = masters(4)
    order: list[str] = []
    for master in (b, c, other):
        master.during = lambda path=master.path: order.append(path)
    a.during = gate = Gate()
    stage = Stage(sim_device, count=3)
    stage.staging.expect([a, b, c])
    assert gate.reached.wait(10)
    threading.Timer(0.02, gate.opened.set).start()
    check([(other, stage.run(other))])
    eventually(lambda: stage.staging.is_ready(a) and stage.staging.is_ready(b))
    assert order[0] == other.path and stage.staging.demand_reads == 1 and a.reads == 1


def test_on_the_cpu_bytes_are_read_into_the_slot() -> None:
    a, b = masters(2)
    stage = Stage(torch.device("cpu"))
    stage.staging.expect([a, b])
    assert not readers() and a.reads == 0 and not stage.staging.is_ready(a)
    check([(a, stage.run(a)), (b, stage.run(b))])
    assert stage.staging.reads == stage.staging.demand_reads == 2 and stage.staging.read_bytes == 2 * 4096
    stage.staging.settle()
    stage.staging.release()


# ---------------------------------------------------------------------- memory


def test_buffers_have_the_size_of_the_largest_expected_master(sim_device: torch.device, sim: ModuleType) -> None:
    small, large, larger = FileMaster(0, 1000), FileMaster(1, 3000), FileMaster(2, 5000)
    stage = Stage(sim_device, nbytes=5000)
    before = sim.stats()["pinned_current"]
    stage.staging.expect([small, large])
    assert sim.stats()["pinned_current"] - before == 2 * 3000 == stage.budget.pinned_bytes
    outputs = [(small, stage.run(small)), (large, stage.run(large)), (larger, stage.run(larger))]
    assert stage.budget.pinned_bytes == 3000 + 5000
    check(outputs)


def test_release_ends_the_thread_and_frees_the_pinned_bytes(sim_device: torch.device, sim: ModuleType) -> None:
    blocks = masters(3, seconds=0.01)
    stage = Stage(sim_device)
    before = sim.stats()["pinned_current"]
    for _ in range(2):
        stage.staging.expect(blocks)
        outputs = [(blocks[0], stage.run(blocks[0]))]
        assert readers() and sim.stats()["pinned_current"] > before
        stage.staging.release()
        assert not readers() and sim.stats()["pinned_current"] == before and stage.budget.pinned_bytes == 0
        check(outputs)


@pytest.mark.parametrize("when", ["idle", "reading"])
def test_the_thread_ends_when_staging_is_garbage(sim_device: torch.device, sim: ModuleType, when: str) -> None:
    a, b = masters(2)
    a.during = gate = Gate()
    before = sim.stats()["pinned_current"]
    stage = Stage(sim_device)
    stage.staging.expect([a, b])
    assert gate.reached.wait(10)
    if when == "idle":
        gate.opened.set()
        eventually(partial(stage.staging.is_ready, b))
    else:
        threading.Timer(0.05, gate.opened.set).start()
    gone = weakref.ref(stage.staging)
    del stage
    assert gone() is None, "it is in a cycle, or its thread holds it"
    eventually(lambda: not readers())
    assert b.reads == (when == "idle") and sim.stats()["pinned_current"] == before


def test_without_a_budget_nothing_is_pinned_and_the_bytes_are_right(sim_device: torch.device, sim: ModuleType) -> None:
    blocks = masters(3)
    before = sim.stats()["pinned_current"]
    stage = Stage(sim_device, pin=False)
    stage.staging.expect(blocks)
    check([(block, stage.run(block)) for block in blocks])
    assert sim.stats()["pinned_current"] == before


# ---------------------------------------------------------------------- errors, interrupts


@pytest.mark.parametrize("expected", [True, False])
def test_an_error_of_a_read_is_raised_by_the_load_that_needs_it(place: torch.device, expected: bool) -> None:
    a, b = masters(2)
    a.errors.append(OSError("injected"))
    stage = Stage(place)
    if expected:
        stage.staging.expect([a, b])
    check([(b, stage.run(b))])
    with pytest.raises(OSError, match="injected") as caught:
        stage.run(a)
    assert "read_into" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    check([(a, stage.run(a)), (b, stage.run(b))])
    assert a.reads == 2


def test_an_error_that_nobody_meets_is_forgotten(sim_device: torch.device) -> None:
    a, b = masters(2)
    a.errors.append(OSError("injected"))
    stage = Stage(sim_device)
    stage.staging.expect([a, b])
    eventually(partial(stage.staging.is_ready, b))
    assert not stage.staging.is_ready(a)
    stage.staging.settle()
    check([(a, stage.run(a))])


def test_an_error_that_is_kept_pins_nothing(sim_device: torch.device, sim: ModuleType) -> None:
    (a,) = masters(1)
    a.errors.append(OSError("injected"))
    before = sim.stats()["pinned_current"]
    stage = Stage(sim_device)
    with pytest.raises(OSError, match="injected") as caught:
        stage.run(a)
    stage.staging.release()
    assert sim.stats()["pinned_current"] == before and caught.value.__traceback__ is not None


def test_an_error_leaves_no_cycle(sim_device: torch.device, sim: ModuleType) -> None:
    a, b = masters(2)
    a.errors.append(OSError("injected"))
    before = sim.stats()["pinned_current"]
    stage = Stage(sim_device)
    with contextlib.suppress(OSError):
        stage.run(a)
    a.errors.append(OSError("nobody meets it"))
    stage.staging.expect([a, b])
    eventually(partial(stage.staging.is_ready, b))
    del stage
    assert sim.stats()["pinned_current"] == before


@pytest.mark.parametrize("expected", [True, False])
def test_ctrl_c_while_load_waits(sim_device: torch.device, expected: bool) -> None:
    a, b = masters(2)
    a.during = gate = Gate()
    stage = Stage(sim_device)
    if expected:
        stage.staging.expect([a])

    def interrupt() -> None:
        assert gate.reached.wait(10)
        time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        stage.run(a)
    gate.opened.set()
    stage.staging.settle()
    assert not stage.staging.is_ready(a)
    check([(a, stage.run(a)), (b, stage.run(b)), (a, stage.run(a))])


class _Interrupting:
    """Raises KeyboardInterrupt at the `wanted`-th line of staging that this thread runs, as Ctrl-C may."""

    def __init__(self, wanted: int | None) -> None:
        self.wanted, self.lines, self.where = wanted, 0, ""

    def __enter__(self) -> _Interrupting:
        sys.settrace(self._enter)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename in OURS else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self.wanted:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._line


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_ctrl_c_at_any_line(count: int, sim_device: torch.device, sim: ModuleType) -> None:
    """From a first read to release: the next call is right, and nothing is left behind."""
    blocks = [FileMaster(n, nbytes) for n, nbytes in enumerate([1000, 1000, 4096])]

    def call(stage: Stage) -> None:
        outputs = []
        for position in (0, 1, 0, 2):
            outputs.append((blocks[position], stage.run(blocks[position])))
            stage.staging.expect([blocks[(position + step) % 3] for step in (1, 2)])
        stage.staging.settle()
        check(outputs)

    with _Interrupting(None) as counted:
        stage = Stage(sim_device, count=count)
        call(stage)
        stage.staging.release()
    faults: dict[str, str] = {}
    for wanted in range(1, counted.lines + 1):
        before = sim.stats()["pinned_current"]
        stage = Stage(sim_device, count=count)
        with contextlib.suppress(KeyboardInterrupt), _Interrupting(wanted) as tracer:
            call(stage)
            stage.staging.release()
        stage.staging.settle()
        call(stage)
        stage.staging.release()
        del stage
        if readers():
            faults[tracer.where] = "a thread is left"
        if sim.stats()["pinned_current"] != before:
            faults[tracer.where] = "pinned bytes are left"
        if sim.hazards():
            faults[tracer.where] = sim.hazards()[0]
    assert not faults, faults
    assert counted.lines > 100


# ---------------------------------------------------------------------- settle


def test_settle_forgets(sim_device: torch.device) -> None:
    a, b = masters(2)
    stage = Stage(sim_device)
    stage.staging.expect([a, b])
    eventually(partial(stage.staging.is_ready, b))
    stage.staging.settle()
    assert not stage.staging.is_ready(a) and not stage.staging.is_ready(b)
    a.expected = a.expected.flip(0)  # another file lies there now
    check([(a, stage.run(a))])
    assert a.reads == 2


def test_settle_waits_for_the_read_and_drops_the_queue(sim_device: torch.device) -> None:
    a, b = masters(2)
    a.during = gate = Gate()
    stage = Stage(sim_device)
    stage.staging.expect([a, b])
    assert gate.reached.wait(10)
    threading.Timer(0.05, gate.opened.set).start()
    stage.staging.settle()
    assert gate.opened.is_set() and not FileMaster._busy and b.reads == 0


# ---------------------------------------------------------------------- processes

SCRIPT = """
import os, sys, time, torch
from tests import simdevice
simdevice.install()
import diffusers_omni_offload.streaming.reader as reader
from diffusers_omni_offload.streaming.transport import Transport
from tests.staged import FileMaster, Gate, Stage, eventually
reader._PATIENCE = 1.0
stage, a, b = Stage(torch.device("sim", 0)), FileMaster(0), FileMaster(1)
"""

#: What a process does last; each ends without an error and in time, even if its read never does.
EXITS = """
def slow():
    a.during = lambda: time.sleep(0.3)
    stage.staging.expect([a, b])
    eventually(lambda: a.reads)

def hanging():
    a.during = lambda: time.sleep(600)
    stage.staging.expect([a, b])
    eventually(lambda: a.reads)

def after_a_copy():
    stage.staging.expect([a, b])
    stage.load(a)

def with_an_error():
    b.errors.append(OSError("nobody meets it"))
    stage.staging.expect([a, b])

for state in (slow, hanging, after_a_copy, with_an_error):
    begin = time.monotonic()
    child = os.fork()
    if child == 0:
        state()
        raise SystemExit(0)
    print(state.__name__, os.waitpid(child, 0)[1], "in time" if time.monotonic() - begin < 20 else "late", flush=True)
"""

#: A fork takes the reader's thread and the pinned memory away, and nothing from the parent.
FORK = """
stage.staging.expect([a, b])
eventually(lambda: stage.staging.is_ready(b))
assert torch.equal(stage.run(a).cpu(), a.expected)
child = os.fork()
where = "child" if child == 0 else "parent"
if child == 0:
    b.expected = b.expected.flip(0)
for master in (b, a, b):
    assert torch.equal(stage.run(master).cpu(), master.expected), (where, master.path)
stage.staging.release()
if child:
    assert os.waitpid(child, 0)[1] == 0
print(where, flush=True)
"""


@pytest.mark.slow
@pytest.mark.processes
def test_processes_end_and_fork_whatever_the_reader_does() -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", SCRIPT + EXITS + FORK]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    for sign in ("Traceback", "Fatal", "terminate", "Exception ignored"):
        assert sign not in done.stderr, done.stderr
    states = ("slow", "hanging", "after_a_copy", "with_an_error")
    assert done.stdout.splitlines() == [*(f"{state} 0 in time" for state in states), "child", "parent"]
