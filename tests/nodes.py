"""Two nodes on one machine: two network namespaces joined by a cable of their own, each with its own `torchrun`.

    found = run_nodes(work, "wan")  # work(rank, size, "wan"); ranks 0 and 1 are on one node, 2 and 3 on the other

A node reaches nothing but the other one. The page cache is the machine's: give each node its own copy of a file, and
its pages are its own too. It takes `unshare` and `ip`, and no rights.
"""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tests.ranks import GROUP_TIMEOUT, Death, DeviceName, Task, answer, leave_group, prepare

ROOT = Path(__file__).resolve().parent.parent
NAMES, ADDRESSES, CABLES = ("first", "second"), ("10.77.0.1", "10.77.0.2"), ("cable-1", "cable-2")
PORT = 29500
"""Of the first node's `torchrun`; the namespace is new, so it is free."""
UNSHARE = ["unshare", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]


@cache
def can_have_nodes() -> bool:
    """Whether this machine lets us make network namespaces."""
    if not (shutil.which("unshare") and shutil.which("ip")):
        return False
    script = "mount -t tmpfs tmpfs /run && ip netns add probe && ip link add one type veth peer name two netns probe"
    return subprocess.run([*UNSHARE, "sh", "-c", script], capture_output=True).returncode == 0


def run_nodes(
    function: Callable[..., Any],
    *args: Any,
    per_node: int = 2,
    device: DeviceName = "cpu",
    timeout: float = 120.0,
    group_timeout: float = GROUP_TIMEOUT,
) -> list[Any]:
    """Each rank's result of `function(rank, size, *args)`, or its `Failure` or `Death`, as `RankPool.run` gives them.

    `torchrun` sets the environment: GROUP_RANK is the node, LOCAL_RANK the place in it. When one rank of a node dies,
    it ends the node's others.

    Raises:
        AssertionError: the nodes weren't done within `timeout` seconds; all processes are killed.
    """
    with tempfile.TemporaryDirectory(prefix="nodes-") as folder:
        Path(folder, "task").write_bytes(pickle.dumps(Task(function, args, "env://", group_timeout)))
        command = [*UNSHARE, sys.executable, "-m", "tests.nodes", "nodes", folder, str(per_node), device]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            # The output ends when the last process inside does: they all die with their namespace.
            output, _ = process.communicate()
            raise AssertionError(f"the nodes weren't done within {timeout:g} s:\n{output[-5000:]}") from None
        finally:
            process.kill()
        return [_outcome(Path(folder, f"outcome-{rank}")) for rank in range(2 * per_node)]


def _outcome(file: Path) -> Any:
    return pickle.loads(file.read_bytes()) if file.exists() else Death(None)


# ---------------------------------------------------------------------- inside of the namespaces


def _run_both(folder: str, per_node: str, device: str) -> None:
    """Make the nodes, start a `torchrun` in each, and wait for all ranks of both."""
    count = int(per_node)

    def is_done(node: int) -> bool:
        return all(Path(folder, f"outcome-{node * count + local}").exists() for local in range(count))

    # `ip netns` keeps its list there, and /run is somebody else's.
    commands = ["mount -t tmpfs tmpfs /run", *(f"ip netns add {name}" for name in NAMES)]
    commands.append(f"ip link add {CABLES[0]} netns {NAMES[0]} type veth peer name {CABLES[1]} netns {NAMES[1]}")
    for name, address, cable in zip(NAMES, ADDRESSES, CABLES, strict=True):
        commands += [f"ip -n {name} address add {address}/24 dev {cable}"]
        commands += [f"ip -n {name} link set {link} up" for link in ("lo", cable)]
    for command in commands:
        subprocess.run(command.split(), check=True)
    nodes = [
        subprocess.Popen(
            [
                *("ip", "netns", "exec", NAMES[node], sys.executable, "-m", "torch.distributed.run"),
                *(f"--nnodes={len(NAMES)}", f"--node-rank={node}", f"--nproc-per-node={per_node}"),
                *(f"--master-addr={ADDRESSES[0]}", f"--master-port={PORT}", f"--local-addr={ADDRESSES[node]}"),
                *("-m", "tests.nodes", "rank", folder, device),
            ],
            env={**os.environ, "GLOO_SOCKET_IFNAME": CABLES[node]},
        )
        for node in range(len(NAMES))
    ]
    # Once its ranks are done, a `torchrun` waits for the other one, for minutes. All end with this process.
    while not all(node.poll() is not None or is_done(number) for number, node in enumerate(nodes)):
        time.sleep(0.1)


def _run_rank(folder: str, device: DeviceName) -> None:
    """One rank, started by `torchrun`: its outcome goes into a file."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    prepare(device)
    outcome = answer(Path(folder, "task").read_bytes(), rank, size, device)
    unfinished = Path(folder, f"unfinished-{rank}")
    unfinished.write_bytes(outcome)
    unfinished.rename(Path(folder, f"outcome-{rank}"))
    leave_group()


if __name__ == "__main__":
    {"nodes": _run_both, "rank": _run_rank}[sys.argv[1]](*sys.argv[2:])  # type: ignore[operator]
