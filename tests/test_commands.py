"""Every command that the README and the command line's help print is run as it is printed."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from diffusers_omni_offload.cli import main, models, outputs
from tests import tiny
from tests.nodes import UNSHARE, can_have_nodes

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "adapters/README.md", "tests/simdevice/README.md")
COMMANDS = ("plan", "run", "bench", "doctor")
PROGRAM = "omni-offload"

ELSEWHERE: dict[str, str] = {
    "make demo": "test_readme runs the demo",
    "make test": "the whole of the tests",
    "torchrun --nproc-per-node 4 notebooks/multi_gpu.py": "test_launchers",
    "accelerate launch --multi_gpu --num_processes 4 notebooks/multi_gpu.py": "test_launchers",
    'pip install "diffusers-omni-offload[cli]"': "test_packaging installs the wheel",
    'pip install ".[cli]"': "test_packaging installs the wheel",
    "pip install .": "test_packaging installs the wheel",
}
"""Commands that set up environments, or are run by other tests: why they aren't run here."""

BUILDERS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "wan": tiny.build_wan,
    "flux.2": tiny.build_flux2,
    "qwen-image": tiny.build_qwen_image,
    "stable-diffusion-3": tiny.build_sd3,
}
"""By a part of a model's name: what stands in for it, at a relative path that is that name."""


def commands_in(text: str) -> list[str]:
    """The lines of fenced `sh` blocks, lines that begin with a prompt, and inline `omni-offload ...` with arguments."""
    found: list[str] = []
    for block in re.findall(r"^```(?:sh|bash|console|shell)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        lines = block.replace("\\\n", " ").splitlines()
        found += [without_comment(line.removeprefix("$ ")) for line in lines if line.strip()]
    found += [without_comment(line) for line in re.findall(r"^\s*\$ (.+)$", text, flags=re.MULTILINE)]
    found += re.findall(rf"`({PROGRAM} \w+ [^`]+)`", text)
    return list(dict.fromkeys(filter(None, found)))


def without_comment(line: str) -> str:
    return re.sub(r"\s+# .*$|^# .*$", "", line).strip()


def help_of(*command: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main([*command, "--help"]) == 0
    return printed.getvalue()


def printed_commands() -> list[str]:
    texts = [(ROOT / name).read_text() for name in DOCUMENTS]
    texts += [help_of(), *map(help_of, COMMANDS)]
    return list(dict.fromkeys(command for text in texts for command in commands_in(text)))


PRINTED = printed_commands()
OURS = [command for command in PRINTED if command.startswith(f"{PROGRAM} ")]
STARTED = [
    command for command in PRINTED if command.startswith("torchrun ") and "diffusers_omni_offload.cli" in command
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a file of prompts; where mp4 files can be written, and a call of a large pipeline takes no time."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(outputs, "_writes_mp4", lambda: True)
    monkeypatch.setattr(
        "diffusers.utils.export_to_video", lambda frames, path, fps: Path(path).write_bytes(bytes(len(frames)))
    )
    arguments = models.Model.arguments
    small = {"height": 16, "width": 16, "num_inference_steps": 2, "max_sequence_length": 16}

    def small_arguments(self: models.Model, flags: models.CallFlags) -> dict[str, Any]:
        found = {**arguments(self, flags), **{name: small[name] for name in small if name in self.parameters}}
        return {**found, "num_frames": 5} if "num_frames" in self.parameters else found

    monkeypatch.setattr(models.Model, "arguments", small_arguments)
    (tmp_path / "prompts.txt").write_text("a cat\nrain\n")
    return tmp_path


def stand_in(model: str, command: str) -> None:
    """Put a pipeline at the relative path that is the model's name on the Hub: its published configurations for a plan,
    else a tiny one."""
    if model == models.DEMO:
        return
    published = ROOT / "tests" / "data" / "published" / Path(model).name
    if command == "plan" and published.is_dir():
        shutil.copytree(published, model)
        return
    (build,) = [build for part, build in BUILDERS.items() if part in model.lower()]
    build()[0].save_pretrained(model)


def test_what_is_printed_is_found() -> None:
    text = (
        "```sh\nmake demo    # a comment\n# alone\nomni-offload run demo \\\n  --output a.gif\n```\n"
        "  $ omni-offload plan demo\n`omni-offload doctor` and `omni-offload bench demo --calls 1`\n```py\nmake\n```\n"
    )
    assert commands_in(text) == [
        "make demo",
        "omni-offload run demo    --output a.gif",
        "omni-offload plan demo",
        "omni-offload bench demo --calls 1",
    ]


def test_each_command_is_run_here_or_elsewhere() -> None:
    unknown = [command for command in PRINTED if command not in {*OURS, *STARTED, *ELSEWHERE}]
    assert not unknown, f"Run these in a test, and say in ELSEWHERE in which: {unknown}"
    assert {shlex.split(command)[1] for command in OURS} == set(COMMANDS), "each has examples in its help"


def test_each_command_is_in_the_help() -> None:
    overview = help_of()
    for command in COMMANDS:
        assert re.search(rf"^  {command} ", overview, flags=re.MULTILINE), command
        text = help_of(command)
        assert f"  $ {PROGRAM} {command}" in text and "[default: " in text


@pytest.mark.parametrize("command", OURS)
def test_printed_commands_run(
    command: str, folder: Path, device: torch.device, sim: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *arguments = shlex.split(command)[1:]
    if name != "doctor":
        stand_in(arguments[0], name)
    before = {path for path in folder.rglob("*") if path.is_file()}
    assert main([name, *arguments]) == 0, capsys.readouterr().err
    written = {
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file() and path not in before
    }
    named = {argument for flag, argument in pairwise(arguments) if flag in ("--output", "--trace")}
    if "--prompts" in arguments:
        output = Path(arguments[arguments.index("--output") + 1])
        named = (named - {str(output)}) | {f"{output.stem}-{index}{output.suffix}" for index in range(2)}
    assert written == named
    assert capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("command", STARTED)
def test_printed_commands_of_several_processes_run(command: str, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a cat\nrain\na red kite\n")
    words = shlex.split(command)
    if can_have_nodes():  # its port may be somebody else's outside
        words = [*UNSHARE, "sh", "-c", f"ip link set lo up && exec {command}"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-20_000:]
    assert len({path.read_bytes() for path in tmp_path.glob("*-[012].*")}) == 3


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    "words", [[PROGRAM], [sys.executable, "-m", "diffusers_omni_offload.cli"]], ids=["script", "-m"]
)
def test_the_program_is_installed(words: list[str], tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    assert shutil.which(PROGRAM, path=path)
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    for arguments, status in ((["--help"], 0), (["run", "nope", "--prompt", "x", "--output", "x.png"], 2)):
        ended = subprocess.run(
            [*words, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert ended.returncode == status, ended.stderr
        assert "Traceback" not in ended.stderr
    assert "There is no folder 'nope'" in ended.stderr.splitlines()[-1]
