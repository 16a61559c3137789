"""Run a function in N processes, one rank each, that always come to an end.

    with RankPool(2, device="sim") as pool:
        first, second = answers(pool.run(work, "wan"))  # work(rank, size, "wan"), a function of a module

Each run has a default process group of its own. Processes are forked from a server that has imported the libraries once
(multiprocessing's `forkserver`): a start takes half a second instead of fifteen. They share its memory, so a test that
measures memory starts them by `start="spawn"`.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from socket import create_server
from typing import Any, Literal

DeviceName = Literal["cpu", "sim"]
StoreKind = Literal["file", "tcp"]
StartMethod = Literal["forkserver", "spawn"]

PRELOADED = [
    "torch",
    "diffusers_omni_offload",
    "diffusers.pipelines.wan.pipeline_wan",
    "tests.tiny",
    "tests.simdevice.collectives",
    "tests.ranks",
]
GROUP_TIMEOUT = 10.0
"""Seconds until a collective gives up."""
START_TIMEOUT = 120.0
"""Seconds within which all processes have to be there."""


@dataclass(frozen=True)
class Failure:
    """What a rank has raised: the class's name, the text, the traceback as text. Hazards count as `Hazards`."""

    kind: str
    text: str
    trace: str = ""


@dataclass(frozen=True)
class Death:
    """A rank's process has ended without an answer; by signal n if `exit_code` is -n."""

    exit_code: int | None


@dataclass(frozen=True)
class Task:
    """One run, as it is sent to a rank."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    store: str
    group_timeout: float


def answers(outcomes: Sequence[Any]) -> list[Any]:
    """What the ranks returned; AssertionError with the tracebacks if any has raised or died."""
    wrong = {rank: outcome for rank, outcome in enumerate(outcomes) if isinstance(outcome, Failure | Death)}
    if wrong:
        raise AssertionError("\n".join(f"rank {rank}: {getattr(it, 'trace', '') or it}" for rank, it in wrong.items()))
    return list(outcomes)


def run_ranks(
    function: Callable[..., Any],
    size: int,
    *args: Any,
    device: DeviceName = "cpu",
    timeout: float = 60.0,
    expect_death: Collection[int] = (),
    **options: Any,
) -> list[Any]:
    """`function(rank, size, *args)` in `size` new processes; `options` are those of `RankPool` and `RankPool.run`."""
    of_run = {name: options.pop(name) for name in ("store", "group_timeout") if name in options}
    with RankPool(size, device, **options) as pool:
        return pool.run(function, *args, timeout=timeout, expect_death=expect_death, **of_run)


class RankPool:
    """`size` processes for many runs. They are started when they are needed, and anew after one has died or hung.

    Args:
        size: number of ranks.
        device: "sim" installs the simulated device and its collectives in each.
        start: how processes are started.
    """

    def __init__(self, size: int, device: DeviceName = "cpu", start: StartMethod = "forkserver") -> None:
        self.size, self.device = size, device
        self.starts = 0
        self._context = multiprocessing.get_context(start)
        if start == "forkserver":
            self._context.set_forkserver_preload(PRELOADED)  # type: ignore[attr-defined]
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._runs = 0
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    @property
    def process_ids(self) -> list[int]:
        """Of the processes that run now."""
        return [process.pid for process in self._processes]

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 60.0,
        expect_death: Collection[int] = (),
        store: StoreKind = "file",
        group_timeout: float = GROUP_TIMEOUT,
    ) -> list[Any]:
        """Each rank's result of `function(rank, size, *args)`, or its `Failure` or `Death`.

        Args:
            function: of a module, not a closure. On the simulated device it starts with default options and no hazards;
                a hazard that it leaves is a failure.
            timeout: seconds for all.
            expect_death: ranks whose processes have to die in this run, and no others.
            store: what the group meets in, a file or (with "tcp") a server in rank 0's process.
            group_timeout: seconds until a collective gives up.

        Raises:
            AssertionError: a rank hasn't answered in time (all are killed; the message shows where it was), or other
                ranks than `expect_death` died.
        """
        if not self._processes:
            self._start()
        self._runs += 1
        task = pickle.dumps(Task(function, args, self._meeting_point(store), group_timeout))
        for connection in self._connections:
            try:
                connection.send_bytes(task)
            except BrokenPipeError:  # it died between two runs
                pass
        outcomes = self._collect(timeout)
        dead = {rank for rank, outcome in enumerate(outcomes) if isinstance(outcome, Death)}
        if dead:
            self._kill()
        if dead != set(expect_death):
            raise AssertionError(f"ranks {sorted(dead)} have died, {sorted(expect_death)} were to: {outcomes}")
        return outcomes

    def restart(self) -> None:
        """End all processes; the next run starts new ones."""
        self._kill()

    def close(self) -> None:
        """End all processes, for good."""
        self._kill()
        self._folder.cleanup()

    def _meeting_point(self, store: StoreKind) -> str:
        if store == "file":
            return f"file://{self._folder.name}/store-{self._runs}"
        with create_server(("127.0.0.1", 0)) as server:
            return f"tcp://127.0.0.1:{server.getsockname()[1]}"

    def _stack_file(self, rank: int) -> Path:
        return Path(self._folder.name, f"stacks-{rank}")

    def _start(self) -> None:
        self.starts += 1
        for rank in range(self.size):
            mine, theirs = self._context.Pipe()
            arguments = (theirs, rank, self.size, self.device, self._stack_file(rank))
            process = self._context.Process(target=_serve, args=arguments, daemon=True)
            process.start()  # type: ignore[attr-defined]
            theirs.close()
            self._processes.append(process)
            self._connections.append(mine)
        ready = self._collect(START_TIMEOUT)
        if ready != list(range(self.size)):
            self._kill()
            raise AssertionError(f"the ranks didn't start: {ready}")

    def _collect(self, timeout: float) -> list[Any]:
        """One message from each rank, or its death."""
        deadline = time.monotonic() + timeout
        missing = dict(enumerate(self._connections))
        outcomes: list[Any] = [None] * self.size
        while missing:
            ready = wait(list(missing.values()), max(0.0, deadline - time.monotonic()))
            if not ready:
                where = "\n".join(f"rank {rank} was at:\n{self._stacks(rank)}" for rank in missing)
                self._kill()
                raise AssertionError(f"ranks {sorted(missing)} haven't answered within {timeout:g} s.\n{where}")
            for rank in [rank for rank, connection in missing.items() if connection in ready]:
                outcomes[rank] = self._receive(rank)
                del missing[rank]
        return outcomes

    def _receive(self, rank: int) -> Any:
        try:
            return pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(5)
            return Death(self._processes[rank].exitcode)

    def _stacks(self, rank: int) -> str:
        """Where the rank's threads are now."""
        os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.3)
        return self._stack_file(rank).read_text()

    def _kill(self) -> None:
        process_ids = self.process_ids
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            _signal_session(process.pid, signal.SIGKILL)
            process.kill()  # it may not have a session yet
            process.join(10)
        self._processes, self._connections = [], []
        deadline = time.monotonic() + 10
        while left := [pid for pid in process_ids if _signal_session(pid, 0)]:
            assert time.monotonic() < deadline, f"processes of ranks are left: {left}"
            time.sleep(0.02)


def _signal_session(process_id: int, number: int) -> bool:
    """Send a signal (0: none) to a rank's process and all that it has started; False if there are none."""
    try:
        os.killpg(process_id, number)
    except ProcessLookupError:
        return False
    return True


# ---------------------------------------------------------------------- in a rank's process


def _serve(connection: Connection, rank: int, size: int, device: DeviceName, stack_file: Path) -> None:
    """Answer one task after another, until the other end of the connection is closed."""
    os.setsid()
    with open(stack_file, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        prepare(device)
        connection.send_bytes(pickle.dumps(rank))
        while True:
            try:
                message = connection.recv_bytes()
            except EOFError:
                message = b""
            leave_group()
            if not message:
                return
            connection.send_bytes(answer(message, rank, size, device))


def prepare(device: DeviceName) -> None:
    import diffusers.utils.logging
    import torch
    import transformers.utils.logging

    from diffusers_omni_offload.messages import logger
    from tests import simdevice
    from tests.simdevice.collectives import install_collectives

    torch.set_num_threads(1)
    logger.setLevel(logging.INFO)
    for library in (diffusers.utils.logging, transformers.utils.logging):
        library.set_verbosity_error()
        library.disable_progress_bar()
    if device == "sim":
        simdevice.install()
        install_collectives()


def answer(message: bytes, rank: int, size: int, device: DeviceName) -> bytes:
    """The pickled result or `Failure` of a pickled task."""
    try:
        task: Task = pickle.loads(message)
        _join_group(task, rank, size, device)
        with _clean_device(device):
            # The group stays until the next run: others may still need this rank's end of a connection.
            return pickle.dumps(task.function(rank, size, *task.arguments))
    except BaseException as error:
        leave_group()  # as a process does that ends: the others learn it at once
        return pickle.dumps(Failure(type(error).__name__, str(error), traceback.format_exc()))


def _join_group(task: Task, rank: int, size: int, device: DeviceName) -> None:
    import torch
    import torch.distributed as dist

    from tests.simdevice.collectives import BACKENDS

    dist.init_process_group(
        BACKENDS if device == "sim" else "gloo",
        init_method=task.store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=task.group_timeout),
    )
    dist.all_reduce(torch.zeros(1))  # nobody may leave before all are connected


def leave_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


class Hazards(AssertionError):
    """A run has left hazards on the simulated device."""


@contextmanager
def _clean_device(device: DeviceName) -> Iterator[None]:
    """Defaults before the run; no hazards after it."""
    from tests import simdevice

    if device == "sim":
        simdevice.start_afresh()
    yield
    if device == "sim":
        gc.collect()
        found = simdevice.hazards()
        if found:
            raise Hazards("\n".join(found))
