"""A forked process doesn't have its parent's page-locked memory, and what takes its place there is safe."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

SCRIPT = """
import gc, mmap, os, sys
import torch
from tests import simdevice
simdevice.install()
from diffusers_omni_offload.platform import platform_for
from diffusers_omni_offload.weights.pinning import HostBuffer, PinnedBudget

platform, budget = platform_for(torch.device("sim", 0)), PinnedBudget(True)
NBYTES = 5 * mmap.PAGESIZE + 1

def forked(body):
    child = os.fork()
    if child == 0:
        body()
        sys.stdout.flush()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

old = HostBuffer(NBYTES, platform, budget)
old.bytes.fill_(1)
assert old.is_pinned

def made_anew():
    news = [HostBuffer(NBYTES, platform, budget) for _ in range(8)]
    news += [mmap.mmap(-1, NBYTES) for _ in range(8)]
    global old
    old = None
    gc.collect()
    for new in news[:8]:
        new.bytes.fill_(2)
        assert int(new.bytes.sum()) == 2 * NBYTES
    for memory in news[8:]:
        memory.write(bytes(NBYTES))
    print("made anew")

def unpinned_and_made_anew():
    old.unpin()
    made_anew()

def read():
    print(int(old.bytes[0]))

print(forked(made_anew), forked(unpinned_and_made_anew), forked(read), flush=True)
assert int(old.bytes.sum()) == NBYTES
old.unpin()
print(forked(read), flush=True)
"""


@pytest.mark.slow
@pytest.mark.processes
def test_what_a_forked_process_maps_is_not_unmapped_with_its_parents_buffers() -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", SCRIPT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    # A child that reads them dies of it, while they are page-locked.
    died = -signal.SIGSEGV
    assert done.stdout.splitlines() == ["made anew", "made anew", f"0 0 {died}", "1", "0"], done.stderr
