"""The wheel has everything in it, and works where it is installed: in an environment that has no sources of ours."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

pytestmark = pytest.mark.processes


def run(command: list[str], **options: object) -> str:
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INDEX": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    outcome = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, **options)
    assert outcome.returncode == 0, f"{command} failed:\n{outcome.stdout}\n{outcome.stderr}"
    return outcome.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources (setuptools writes into the folder that it builds)."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("diffusers_omni_offload", "adapters"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    built = tmp_path_factory.mktemp("wheel")
    run([sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(built), str(source)])
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the commands of a fresh environment: the wheel is installed there, and what it depends on is that
    of this environment."""
    environment = tmp_path_factory.mktemp("environment")
    run([sys.executable, "-m", "venv", "--without-pip", str(environment)])
    commands = environment / "bin"
    python = str(commands / "python")
    run([sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", str(wheel)])
    (packages,) = environment.glob("lib/python*/site-packages")
    # Folders that a .pth names are only searched: an editable install of this project, there, doesn't answer.
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    return commands


def test_the_wheel_holds_every_source_file(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "diffusers_omni_offload").rglob("*.py")}
    adapters = {f"diffusers_omni_offload/adapters/{path.name}" for path in (ROOT / "adapters").glob("*.py")}
    assert {"diffusers_omni_offload/adapters/wan.py", "diffusers_omni_offload/demo/__main__.py"} <= package | adapters
    assert package | adapters <= names
    assert "diffusers_omni_offload/py.typed" in names
    metadata = {name for name in names if ".dist-info/" in name}
    assert any(name.endswith("/LICENSE") for name in metadata)
    foreign = names - package - adapters - metadata - {"diffusers_omni_offload/py.typed"}
    assert not foreign


def test_it_needs_five_packages_and_offers_the_rest_as_extras(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(name).decode())
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    names = {re.match(r"[\w-]+", line)[0] for line in needed}  # type: ignore[index]
    assert names == {"torch", "diffusers", "transformers", "accelerate", "safetensors"}
    assert set(metadata.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])
    assert metadata["Requires-Python"] == PROJECT["requires-python"] and metadata["License-Expression"] == "Apache-2.0"


def test_what_is_imported_is_what_was_installed(installed: Path, tmp_path: Path) -> None:
    program = """
import importlib.metadata
import importlib.resources
import sys
import diffusers_omni_offload
import diffusers_omni_offload.adapters
from diffusers_omni_offload import OffloadHandle, registered_pipelines
from diffusers import DiffusionPipeline
for module in (diffusers_omni_offload, diffusers_omni_offload.adapters):
    assert module.__file__.startswith(sys.prefix), module.__file__
assert importlib.metadata.version("diffusers-omni-offload") == diffusers_omni_offload.__version__
assert importlib.resources.files("diffusers_omni_offload").joinpath("py.typed").is_file(), "type checkers look for it"
assert {"WanPipeline", "Flux2Pipeline", "QwenImagePipeline"} <= set(registered_pipelines())
assert DiffusionPipeline.enable_omni_offload is diffusers_omni_offload.enable_omni_offload
for name in diffusers_omni_offload.__all__:
    assert getattr(diffusers_omni_offload, name) is not None
optional = {"matplotlib", "rich", "typer", "IPython"} & set(sys.modules)
assert not optional, f"imported without need: {optional}"
"""
    run([str(installed / "python"), "-c", program], cwd=tmp_path)


def test_a_tiny_pipeline_runs(installed: Path, tmp_path: Path) -> None:
    demo = ["-m", "diffusers_omni_offload.demo", "--device", "cpu", "--blocks", "2"]
    assert "output equal: True" in run([str(installed / "python"), *demo], cwd=tmp_path)


def test_the_command_is_there(installed: Path, tmp_path: Path) -> None:
    assert set(PROJECT["scripts"]) == {"omni-offload"}
    printed = run([str(installed / "omni-offload"), "--help"], cwd=tmp_path)
    assert all(word in printed for word in ("plan", "run", "bench", "doctor"))
