"""The script for several GPUs, started by the commands that the README prints, on CPUs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.utils import export_to_gif

from diffusers_omni_offload.demo.tiny_wan import build_pipeline
from tests.nodes import UNSHARE, can_have_nodes

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
SCRIPT = ROOT / "notebooks" / "multi_gpu.py"


def commands() -> list[str]:
    """What the README says to start, on a line of its own."""
    return re.findall(r"^((?:torchrun|accelerate) .*multi_gpu\.py)$", README, flags=re.MULTILINE)


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command of the README in a folder that has the notebooks."""
    folder.mkdir()
    (folder / "notebooks").symlink_to(SCRIPT.parent)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    words = shlex.split(command)
    if can_have_nodes():  # both meet at one port, which somebody else may have outside
        words = [*UNSHARE, "sh", "-c", f"ip link set lo up && exec {command}"]
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def test_the_readme_shows_the_lines_of_the_script_and_how_to_start_it() -> None:
    lines = SCRIPT.read_text().splitlines()
    (shown,) = [code for code in re.findall(r"^```py\n(.*?)^```", README, re.DOTALL | re.M) if "spread_prompts" in code]
    assert len(shown.splitlines()) == 2 and all(line in lines for line in shown.splitlines()), shown
    assert [command.split()[0] for command in commands()] == ["torchrun", "accelerate"]


@pytest.mark.slow
@pytest.mark.processes
def test_the_commands_make_what_one_process_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = re.search(r"^PROMPTS = (\[.*\])$", SCRIPT.read_text(), flags=re.MULTILINE)
    assert prompts is not None
    expected: dict[str, bytes] = {}
    pipe: Any = build_pipeline()[0]
    for index, prompt in enumerate(eval(prompts[1])):
        generator = torch.Generator().manual_seed(index)
        size = {"height": 16, "width": 16, "num_frames": 5}
        video = pipe(prompt, num_inference_steps=8, generator=generator, output_type="pil", **size).frames[0]
        export_to_gif(video, str(tmp_path / "expected.gif"))
        expected[f"{index}.gif"] = (tmp_path / "expected.gif").read_bytes()
    assert len(set(expected.values())) == 6
    for number, command in enumerate(commands()):
        ended = run(command, tmp_path / str(number))
        assert ended.returncode == 0, ended.stderr[-20_000:]
        assert {path.name: path.read_bytes() for path in (tmp_path / str(number)).glob("*.gif")} == expected
