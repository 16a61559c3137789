"""Progress bars, and what the library says: as diffusers is set to be."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import diffusers.utils.logging as diffusers_logging
import pytest
import torch
from diffusers import WanPipeline
from tqdm import auto as tqdm_auto

from diffusers_omni_offload import load_omni_pipeline, messages, progress
from diffusers_omni_offload.messages import logger
from tests import tiny

# ------------------------------------------------------------------------------------------------------------- bars


class Shown(tqdm_auto.tqdm):
    """A bar on a stream of its own, which notes every state that it shows."""

    bars: list[Shown] = []

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.states: list[str] = []
        self.reached: set[int] = set()
        self.bars.append(self)
        super().__init__(*arguments, **{**options, "file": io.StringIO(), "mininterval": 0})

    def display(self, msg: str | None = None, pos: int | None = None) -> Any:
        self.states.append(str(self) if msg is None else msg)
        self.reached.add(int(self.n))
        return super().display(msg, pos)


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Shown]]:
    """The bars that are made, with progress bars on and without the wait before one is shown."""
    monkeypatch.setattr(progress, "DELAY", 0.0)
    monkeypatch.setattr(Shown, "bars", [])
    monkeypatch.setattr(diffusers_logging.tqdm_lib, "tqdm", Shown)
    diffusers_logging.enable_progress_bar()
    try:
        yield Shown.bars
    finally:
        diffusers_logging.disable_progress_bar()


def named(bars: list[Shown], description: str) -> list[Shown]:
    return [bar for bar in bars if bar.states and bar.states[0].startswith(description)]


@pytest.mark.parametrize("mode", ["layer", "module"])
def test_packing_is_counted_in_bytes_to_the_end(
    mode: str, bars: list[Shown], device: torch.device, sim: ModuleType
) -> None:
    pipe, _ = tiny.build_wan()
    handle = pipe.enable_omni_offload(mode)
    (bar,) = named(bars, "Packing weights")
    assert bar.unit == "B" and bar.total == handle.plan.streamed_bytes + handle.plan.swapped_bytes
    assert bar.n == bar.total
    assert any("pinned" in state for state in bar.states), bar.states
    assert any(state.startswith("Pinning weights") for state in bar.states), bar.states
    # A component that is swapped is one unit, but its bar moves with each weight.
    assert len(bar.reached) > 2 * len(list(handle.backend.masters))


def test_a_bar_is_gone_at_the_end(bars: list[Shown], device: torch.device, sim: ModuleType) -> None:
    pipe, _ = tiny.build_wan()
    pipe.enable_omni_offload("layer")
    for bar in bars:
        assert bar.disable, "it was closed"
        assert bar.states[-1] == "" and bar.fp.getvalue().endswith("\r"), "and wiped"


def test_nothing_is_shown_if_diffusers_shows_no_bars(
    bars: list[Shown], device: torch.device, sim: ModuleType, tmp_path: Path
) -> None:
    diffusers_logging.disable_progress_bar()
    pipe, call = tiny.build_wan()
    pipe.save_pretrained(tmp_path)
    mapped = load_omni_pipeline(WanPipeline, tmp_path)
    for each in (pipe, mapped):
        each.enable_omni_offload("layer")
        tiny.run(each, call)
    assert bars == []


def test_weights_that_changed_are_packed_with_a_bar_of_their_own(
    bars: list[Shown], device: torch.device, sim: ModuleType
) -> None:
    pipe, call = tiny.build_wan()
    pipe.enable_omni_offload("layer")
    tiny.run(pipe, call)
    assert not named(bars, "Packing changed weights")
    block = pipe.transformer.blocks[1]
    block.ffn.net[2].weight = torch.nn.Parameter(block.ffn.net[2].weight.detach() * 2)
    tiny.run(pipe, call)
    (bar,) = named(bars, "Packing changed weights")
    assert bar.n == bar.total == pipe.omni_offload.backend.masters.of(block).nbytes


def test_loading_maps_each_dit_and_reads_what_it_has_to(
    bars: list[Shown], device: torch.device, tmp_path: Path
) -> None:
    pipe, _ = tiny.build_wan()
    pipe.save_pretrained(tmp_path)
    load_omni_pipeline(WanPipeline, tmp_path)
    (bar,) = named(bars, "Mapping DiTs")
    assert (bar.n, bar.total, bar.unit) == (2, 2, "DiT")
    assert not named(bars, "Loading weights"), "all of them are views"
    pipe = load_omni_pipeline(WanPipeline, tmp_path, torch_dtype=torch.float64)
    (bar,) = named(bars, "Loading weights")
    assert bar.n == bar.total and bar.unit == "B"


@pytest.mark.parametrize("bars_are_on", [True, False])
def test_what_is_over_soon_shows_no_bar(bars_are_on: bool, capsys: pytest.CaptureFixture[str]) -> None:
    if bars_are_on:
        diffusers_logging.enable_progress_bar()
    try:
        with progress.progress("Packing weights", 100) as bar, bar.meanwhile("Pinning weights"):
            bar.advance(50)
    finally:
        diffusers_logging.disable_progress_bar()
    assert capsys.readouterr() == ("", "")


def test_a_bar_shows_no_more_than_there_is(bars: list[Shown]) -> None:
    with progress.progress("Packing weights", 100) as bar:
        bar.advance(60)
        bar.reach(30)
        assert bars[0].n == 60
        bar.advance(60)
        assert bars[0].n == 100


def test_of_several_ranks_the_first_one_shows_bars(bars: list[Shown], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "is_torch_dist_rank_zero", lambda: False)
    with progress.progress("Packing weights", 100) as bar:
        bar.advance(60)
    assert bars[0].states == [] and bars[0].disable


def test_a_failure_closes_the_bar(bars: list[Shown]) -> None:
    with pytest.raises(KeyError), progress.progress("Packing weights", 100) as bar:
        bar.advance(60)
        raise KeyError
    assert bars[0].disable and bars[0].n == 60


# ---------------------------------------------------------------------------------------------------------- messages


@contextmanager
def as_in_a_program(verbosity: int) -> Iterator[None]:
    """With the levels that a program has which sets none but diffusers' own, and handles no logs."""
    before, theirs = logger.level, diffusers_logging.get_verbosity()
    root = logging.getLogger()
    handlers = root.handlers[:]
    logger.setLevel(messages._AS_DIFFUSERS)
    diffusers_logging.set_verbosity(verbosity)
    root.handlers[:] = []
    try:
        yield
    finally:
        root.handlers[:] = handlers
        logger.setLevel(before)
        diffusers_logging.set_verbosity(theirs)


@pytest.mark.parametrize(
    ("verbosity", "shown"),
    [
        (logging.DEBUG, ["debug", "info", "warning", "error"]),
        (logging.INFO, ["info", "warning", "error"]),
        (logging.WARNING, ["info", "warning", "error"]),
        (logging.ERROR, ["error"]),
        (logging.CRITICAL, []),
    ],
    ids=["debug", "info", "warning", "error", "critical"],
)
def test_the_library_is_as_loud_as_diffusers(
    verbosity: int, shown: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """But for the few lines of information, which are shown at diffusers' default."""
    with as_in_a_program(verbosity):
        for level in ("debug", "info", "warning", "error"):
            getattr(logger, level)("%s it is", level)
    assert capsys.readouterr() == ("", "".join(f"omni offload: {level} it is\n" for level in shown))


def test_a_level_of_its_own_goes_before_that(capsys: pytest.CaptureFixture[str]) -> None:
    with as_in_a_program(logging.CRITICAL):
        logger.setLevel(logging.INFO)
        logger.debug("no")
        logger.info("yes")
    with as_in_a_program(logging.DEBUG):
        logger.setLevel(logging.ERROR)
        logger.info("no")
    assert capsys.readouterr().err == "omni offload: yes\n"


def test_a_program_that_handles_logs_gets_them_and_stderr_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    with as_in_a_program(logging.WARNING):
        stream = io.StringIO()
        logging.getLogger().addHandler(logging.StreamHandler(stream))
        logger.info("here")
        diffusers_logging.set_verbosity_error()
        logger.info("nowhere")
    assert stream.getvalue() == "here\n" and capsys.readouterr().err == ""


def test_every_rank_warns_and_the_first_one_informs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "is_torch_dist_rank_zero", lambda: False)
    with as_in_a_program(logging.WARNING):
        logger.info("once")
        logger.warning("each")
    assert capsys.readouterr().err == "omni offload: each\n"


def test_a_call_says_nothing_where_only_errors_are_wanted(
    device: torch.device, sim: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = {}
    for verbosity in (logging.WARNING, logging.ERROR):
        pipe, call = tiny.build_wan(num_layers=6)
        with as_in_a_program(verbosity):
            pipe.enable_omni_offload("layer", pin_memory=1 << 10)
            tiny.run(pipe, call)
        printed[verbosity] = capsys.readouterr().err
    assert "are pageable" in printed[logging.WARNING] and "-bound" in printed[logging.WARNING]
    assert printed[logging.ERROR] == ""


def test_all_of_the_package_speaks_through_one_logger() -> None:
    """A logger of its own in a module would have a level of its own."""
    package = Path(messages.__file__).parent
    for path in package.rglob("*.py"):
        is_cli = "demo" in path.parts or path.name == "messages.py"
        assert is_cli or "getLogger" not in path.read_text(), path
    assert not [name for name in logging.root.manager.loggerDict if name.startswith("diffusers_omni_offload.")]
