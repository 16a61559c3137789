"""Ranks on two nodes, which are two network namespaces, over a cable."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.nodes import ADDRESSES, CABLES, can_have_nodes, run_nodes
from tests.ranks import Death, Failure, answers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.skipif(not can_have_nodes(), reason="network namespaces can't be made here"),
]


def where(rank: int, size: int, device: str) -> tuple[int, str, list[str], float]:
    """The node, its namespace and network devices, and the sum of all ranks."""
    total = torch.full((5,), float(rank), device=device)
    dist.all_reduce(total)
    links = sorted(link.name for link in Path("/proc/self/net/dev_snmp6").iterdir())
    return int(os.environ["GROUP_RANK"]), os.readlink("/proc/self/ns/net"), links, total[0].item()


def counting(rank: int, size: int) -> int:
    """Bytes that this rank's node has received over the cable while a tensor of 4 MB was gathered."""
    cable = CABLES[int(os.environ["GROUP_RANK"])]
    share = torch.ones(4_000_000, dtype=torch.uint8)
    output = torch.empty(size * share.numel(), dtype=torch.uint8)
    before = received(cable)
    dist.all_gather_single(output, share)
    dist.barrier()
    assert output.min() == 1
    return received(cable) - before


def received(link: str) -> int:
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.strip().startswith(f"{link}:"))


def dying(rank: int, size: int) -> float:
    """A rank of the second node is killed: the first node's seconds until they know."""
    begin = time.monotonic()
    dist.barrier()
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_reduce(torch.zeros(1))
    except RuntimeError:
        return time.monotonic() - begin
    return -1.0


def hanging(rank: int, size: int, folder: str) -> None:
    """Holds a lock for as long as the process lives."""
    with open(f"{folder}/{rank}", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        time.sleep(600)


@pytest.mark.parametrize("name", ["cpu", "sim"])
def test_two_nodes_are_one_world(name: str) -> None:
    found = answers(run_nodes(where, name, device=name))
    assert [node for node, *_ in found] == [0, 0, 1, 1]
    namespaces = [namespace for _, namespace, _, _ in found]
    assert namespaces[0] == namespaces[1] != namespaces[2] == namespaces[3]
    assert os.readlink("/proc/self/ns/net") not in namespaces
    assert [links for _, _, links, _ in found] == [[CABLES[0], "lo"]] * 2 + [[CABLES[1], "lo"]] * 2
    assert [total for *_, total in found] == [6.0] * 4 and len(set(ADDRESSES)) == 2


def test_what_is_gathered_goes_over_the_cable() -> None:
    found = answers(run_nodes(counting, per_node=1))
    assert all(4_000_000 < nbytes < 6_000_000 for nbytes in found), found


def test_a_killed_rank_ends_the_other_node_in_time() -> None:
    first, second, *others = run_nodes(dying, timeout=100.0)
    assert 0 < first < 20 and 0 < second < 20, "torch's own error, not torchrun's"
    assert others[1] == Death(None) and not isinstance(others[0], Failure)


def test_a_hang_ends_in_time_and_leaves_no_process(tmp_path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(AssertionError, match="weren't done within 40 s"):
        run_nodes(hanging, str(tmp_path), per_node=1, timeout=40.0)
    assert time.monotonic() - begin < 60
    time.sleep(0.1)  # a process closes its files one after another
    for rank in range(2):
        with open(tmp_path / str(rank)) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
