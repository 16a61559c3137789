"""The wheel has everything in it, and works from where it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.processes


def run(command: list[str], **options: object) -> str:
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INDEX": "1"}
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


def test_the_installed_wheel_works(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "installed"
    run([sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(target), str(wheel)])
    program = """
import sys
sys.path.insert(0, sys.argv[1])
# An editable install of this project answers through a finder of its own: it must not here.
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
import diffusers_omni_offload
from diffusers_omni_offload.registry import registered_pipelines
from diffusers_omni_offload.demo.__main__ import main
import diffusers_omni_offload.adapters
for module in (diffusers_omni_offload, diffusers_omni_offload.adapters):
    assert module.__file__.startswith(sys.argv[1]), module.__file__
assert "WanPipeline" in registered_pipelines()
sys.exit(main(["--device", "cpu", "--blocks", "2"]))
"""
    printed = run([sys.executable, "-c", program, str(target)], cwd=tmp_path)
    assert "output equal: True" in printed
