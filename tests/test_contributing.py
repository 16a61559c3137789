"""Adding a model is what CONTRIBUTING.md says: the file that it prints is all that the package needs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

PROGRAM = """
import sys

sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
import diffusers_omni_offload
import numpy as np
import torch
from diffusers_omni_offload import registered_pipelines

assert diffusers_omni_offload.__file__.startswith(sys.argv[1])
torch.set_num_threads(1)
assert "ZImagePipeline" in registered_pipelines()
from tests import tiny
from tests.zoo import PIPELINES

expected = tiny.run(*(PIPELINES["ZImagePipeline"]()))
pipe, call = PIPELINES["ZImagePipeline"]()
for components in (["dit", "text_encoder"], {"dit": "layer", "text_encoder": "module", "vae": "module"}):
    handle = pipe.enable_omni_offload(components=components, device="cpu")
    assert np.array_equal(tiny.run(pipe, call), expected)
    print(*handle.plan.notes, [(stack.component, stack.block_paths) for stack in handle.plan.stacks], handle.swaps)
"""


def printed_file() -> tuple[str, str]:
    """The name and the text of the adapter that CONTRIBUTING.md prints."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    found = re.search(r"`(\w+\.py)`, with declarations only.*?```python\n(.*?)   ```", text, flags=re.DOTALL)
    assert found is not None
    return found[1], textwrap.dedent(found[2])


@pytest.mark.slow
@pytest.mark.processes
def test_the_printed_file_makes_a_family(tmp_path: Path) -> None:
    name, source = printed_file()
    assert not (ROOT / "adapters" / name).exists(), "print one that isn't there yet"
    for folder in ("diffusers_omni_offload", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "_cache"))
    adapters = tmp_path / "diffusers_omni_offload" / "adapters"
    shutil.copytree(ROOT / "adapters", adapters, ignore=shutil.ignore_patterns("__pycache__"))
    (adapters / name).write_text(source)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    streamed, mixed = done.stdout.splitlines()
    for containers in ("noise_refiner.0", "context_refiner.0", "layers.3"):
        assert containers in streamed and containers in mixed
    assert "'text_encoder'" in streamed and mixed.endswith(" 2")
    assert "found by" not in done.stdout, "nothing had to be found out"


def test_the_printed_file_is_formatted_as_the_others_are(tmp_path: Path) -> None:
    name, source = printed_file()
    (tmp_path / name).write_text(source)
    for command in (["format", "--check"], ["check"]):
        words = [sys.executable, "-m", "ruff", *command, "--config", str(ROOT / "pyproject.toml"), str(tmp_path / name)]
        done = subprocess.run(words, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
