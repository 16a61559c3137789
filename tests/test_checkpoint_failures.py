"""Blocks that are read from checkpoint files that are damaged, or change: errors that name them, never wrong numbers.

They run in a process of their own: reading a mapped file that was cut short would end it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import WanPipeline
from safetensors.torch import load_file, save_file

from diffusers_omni_offload import load_omni_pipeline
from tests import tiny
from tests.apart import Found, attempt
from tests.living import fast_ones
from tests.ranks import RankPool, answers

pytestmark = pytest.mark.processes

WEIGHTS = "diffusion_pytorch_model"
FROM_FILES: dict[str, Any] = {"mode": "layer", "layer_options": {"dit": {"source": "checkpoint"}}, "device": "sim"}

Change = Callable[[Path], Any]
"""Something that happens to the folder of the DiT."""


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(1, device="sim") as pool:
        yield pool


@pytest.fixture
def wan(tmp_path: Path) -> Path:
    """A tiny Wan with one DiT, in shards with an index."""
    tiny.build_wan(num_layers=3)[0].save_pretrained(tmp_path, max_shard_size="20KB")
    return tmp_path


def a_shard(folder: Path) -> Path:
    """One that has weights of blocks, in the DiT's folder."""
    return sorted(folder.glob("*.safetensors"))[-2]


def cut_short(folder: Path) -> None:
    path = a_shard(folder)
    os.truncate(path, path.stat().st_size // 2)


def cut_to_nothing(folder: Path) -> None:
    os.truncate(a_shard(folder), 0)


def grow(folder: Path) -> None:
    with a_shard(folder).open("ab") as file:
        file.write(bytes(64))


def write_again(folder: Path) -> None:
    """The same size, other bytes."""
    path = a_shard(folder)
    content = bytearray(path.read_bytes())
    content[-4:] = b"\x00\x00\x80\x3f"
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1_000_000))


def touch(folder: Path) -> None:
    os.utime(a_shard(folder))


def put_another_in_its_place(folder: Path) -> None:
    """As a download does: the file that is open stays what it was."""
    path = a_shard(folder)
    other = path.with_suffix(".new")
    save_file({key: torch.zeros_like(tensor) for key, tensor in load_file(path).items()}, other)
    other.replace(path)


def remove(folder: Path) -> None:
    a_shard(folder).unlink()


def rename_a_key(folder: Path) -> None:
    path = a_shard(folder)
    tensors = load_file(path)
    key = next(iter(tensors))
    tensors[key.replace("blocks", "block")] = tensors.pop(key)
    save_file(tensors, path)


def store_in_another_dtype(folder: Path) -> None:
    path = a_shard(folder)
    save_file({key: tensor.to(torch.float16) for key, tensor in load_file(path).items()}, path)


def change_a_value(folder: Path) -> None:
    path = a_shard(folder)
    tensors = load_file(path)
    next(iter(tensors.values())).view(-1)[0] += 1
    save_file(tensors, path)


def remove_the_index(folder: Path) -> None:
    (folder / f"{WEIGHTS}.safetensors.index.json").unlink()


class Messages(logging.Handler):
    """What the package says of checkpoints."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "checkpoint" in record.getMessage():
            self.texts.append(record.getMessage())


def running(rank: int, size: int, folder: Path, is_mapped: bool, before: Change | None, between: Change | None) -> Any:
    """Load, damage, enable, call, damage, and call twice more.

    Returns:
        What enabling and each call came to (True: the right output), what turning offload off did, and the messages.
    """
    messages = Messages()
    logging.getLogger("diffusers_omni_offload").addHandler(messages)
    _, call = tiny.build_wan(num_layers=3)
    plain = tiny.align_parameters(WanPipeline.from_pretrained(folder, local_files_only=True))
    expected = tiny.run(plain.to("sim"), call)
    if is_mapped:
        pipe = load_omni_pipeline(WanPipeline, folder)
    else:
        pipe = WanPipeline.from_pretrained(folder, local_files_only=True)
    if before is not None:
        before(folder / "transformer")

    def enable() -> None:
        pipe.enable_omni_offload(**FROM_FILES)

    def run() -> bool:
        return bool(np.array_equal(tiny.run(pipe, call), expected))

    found = [attempt(enable)]
    if found[0].kind:
        return found, None, messages.texts  # A plain pipeline that reads such a file may end the process.
    found.append(attempt(run))
    if between is not None:
        between(folder / "transformer")
    found += [attempt(run), attempt(run)]
    return found, attempt(pipe.disable_omni_offload), messages.texts


def assert_names_a_file(found: Found, words: str) -> None:
    assert found.kind == "CheckpointError", found
    assert words in found.text and ".safetensors" in found.text, found


BETWEEN: dict[Change, str] = {
    cut_short: "was changed since it was opened: it had",
    cut_to_nothing: "was changed since it was opened: it had",
    grow: "was changed since it was opened: it had",
    write_again: "was written to since it was opened",
    touch: "was written to since it was opened",
    put_another_in_its_place: "",
    remove: "",
}
"""What happens between two calls, and what the next one says; nothing where the open file stays as it was."""


@pytest.mark.parametrize("is_mapped", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("change", fast_ones(BETWEEN, cut_short, put_another_in_its_place))
def test_a_file_that_changes_between_calls(change: Change, is_mapped: bool, wan: Path, pool: RankPool) -> None:
    ((enabled, first, *later), disabled, _) = answers(pool.run(running, wan, is_mapped, None, change))[0]
    assert disabled.kind == "" and enabled.kind == "" and first.result is True
    for found in later:
        if BETWEEN[change]:
            assert_names_a_file(found, BETWEEN[change])
        else:
            assert found.result is True


MAPPED: dict[Change, str] = {
    cut_short: "was changed since it was opened: it had",
    cut_to_nothing: "was changed since it was opened: it had",
    write_again: "was written to since it was opened",
    put_another_in_its_place: "",
    remove: "",
    remove_the_index: "",
}
"""What happens between `load_omni_pipeline` and enabling, and what enabling says; nothing where all goes on."""


@pytest.mark.parametrize("change", fast_ones(MAPPED, cut_short))
def test_a_mapped_file_that_changes_before_enabling(change: Change, wan: Path, pool: RankPool) -> None:
    (enabled, *calls), _, messages = answers(pool.run(running, wan, True, change, None))[0]
    if MAPPED[change]:
        assert_names_a_file(enabled, MAPPED[change])
        assert calls == []
    else:
        assert enabled.kind == "" and [call.result for call in calls] == [True, True, True] and messages == []


LOADED: dict[Change, str] = {
    rename_a_key: "doesn't say that it has 'block.",
    store_in_another_dtype: "float16",
    remove: "has none; fetch it too",
    remove_the_index: "has no safetensors files",
    change_a_value: "",
    put_another_in_its_place: "",
}
"""What happens between ordinary loading and enabling, and why blocks aren't read from files then; nothing where they
are, all but those that the files have other bytes of. (Ordinary loading maps files as well, so one that is cut short or
written to changes a plain pipeline, too.)"""


@pytest.mark.parametrize("change", fast_ones(LOADED, rename_a_key))
def test_a_file_that_changes_after_ordinary_loading(change: Change, wan: Path, pool: RankPool) -> None:
    """The weights that are in memory are right, and are streamed from there."""
    (enabled, *calls), _, messages = answers(pool.run(running, wan, False, change, None))[0]
    assert enabled.kind == "" and [call.result for call in calls] == [True, True, True]
    if LOADED[change]:
        (said,) = messages
        assert said.startswith("transformer is streamed from host memory, not from its checkpoint: ")
        assert LOADED[change] in said
    else:
        assert messages == []
