"""`omni-offload run` in several processes: prompts are spread over them, or they share the tokens of one."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from diffusers_omni_offload.cli import main
from tests.ranks import RankPool, answers

pytestmark = pytest.mark.processes

PROMPTS = ("a cat", "rain", "a red kite")
RUN = ["run", "demo", "--prompts", "prompts.txt", "--output", "it.gif", "--steps", "2", "--device", "cpu"]
DISTRIBUTED = ["--enable-distributed-layerwise-offload"]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    return tmp_path


def command(rank: int, size: int, folder: str, arguments: list[str]) -> int:
    os.chdir(folder)
    return main(arguments)


def files_written(rank: int, size: int, folder: str, arguments: list[str]) -> list[str]:
    """As the command says it."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert command(rank, size, folder, arguments) == 0
    return re.findall(r"^wrote (.*)$", printed.getvalue(), flags=re.MULTILINE)


def written(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.gif")}


@pytest.fixture
def alone(folder: Path) -> dict[str, str]:
    """What one process writes."""
    assert main([*RUN, "--mode", "resident"]) == 0
    found = written(folder)
    assert len(set(found.values())) == len(PROMPTS)
    for name in found:
        (folder / name).unlink()
    return found


@pytest.mark.parametrize(
    "flags",
    [[], ["--dlo-no-use-allgather", "--dlo-resident-layers", "1"], ["--data-parallel-size", "2"]],
    ids=["all-gather", "rank-local", "sizes given"],
)
def test_prompts_are_spread(flags: list[str], pool: RankPool, folder: Path, alone: dict[str, str]) -> None:
    assert answers(pool.run(command, str(folder), [*RUN, *DISTRIBUTED, *flags])) == [0, 0]
    assert written(folder) == alone


def test_ranks_that_share_the_tokens_of_a_prompt_write_it_once(folder: Path, device: torch.device) -> None:
    arguments = ["sim" if argument == "cpu" else argument for argument in RUN]
    with RankPool(2, device="sim") as pool:
        outcomes = pool.run(files_written, str(folder), [*arguments, *DISTRIBUTED, "--usp", "2"])
        first = written(folder)
        resident = pool.run(files_written, str(folder), [*arguments, "--mode", "resident", "--usp", "2"])
    assert answers(outcomes) == answers(resident) == [["it-0.gif", "it-1.gif", "it-2.gif"], []]
    assert len(first) == 3 and written(folder) == first


def test_tokens_are_not_shared_on_the_cpu(pool: RankPool, folder: Path) -> None:
    assert answers(pool.run(command, str(folder), [*RUN, *DISTRIBUTED, "--usp", "2"])) == [2, 2]
    assert written(folder) == {}


def test_processes_that_cannot_be_divided(pool: RankPool, folder: Path) -> None:
    assert answers(pool.run(command, str(folder), [*RUN, *DISTRIBUTED, "--data-parallel-size", "3"])) == [2, 2]
    assert answers(pool.run(command, str(folder), [*RUN, *DISTRIBUTED, "--usp", "4"])) == [2, 2]
    assert written(folder) == {}
