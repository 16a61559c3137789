"""What the README says is true: its code runs, its keywords exist, its tables agree with the package."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import WanPipeline

import diffusers_omni_offload
from diffusers_omni_offload import OffloadHandle, OffloadPlan, enable_omni_offload, registered_pipelines
from diffusers_omni_offload.demo import __main__ as demo
from diffusers_omni_offload.demo import pick_device
from diffusers_omni_offload.registry import _third_party
from tests import tiny

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


class PromptOnly:
    """A tiny pipeline whose call takes a prompt alone, and whose offload goes to the CPU."""

    def __init__(self, pipe: Any, call: Any) -> None:
        self.pipe, self.call = pipe, call

    def __call__(self, prompt: str) -> Any:
        return self.pipe(**{**self.call(), "prompt": prompt})

    def enable_omni_offload(self, *arguments: Any, **keywords: Any) -> OffloadHandle:
        if "layer_options" in keywords:  # the tiny DiTs have four blocks
            keywords["layer_options"]["dit"]["resident_layers"] = 2
        return self.pipe.enable_omni_offload(*arguments, **keywords, device="cpu")


def test_the_snippets_run_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def tiny_checkpoint(name: str, **arguments: Any) -> PromptOnly:
        return PromptOnly(*tiny.build_wan())

    monkeypatch.setattr(WanPipeline, "from_pretrained", tiny_checkpoint)
    expected = tiny_checkpoint("")("a cat walks on the grass").frames[0]
    names: dict[str, Any] = {}
    try:
        for snippet in SNIPPETS:
            exec(compile(snippet, "README.md", "exec"), names)
    finally:
        _third_party.pop("TheirPipeline", None)
    assert np.array_equal(names["video"], expected)
    assert all(len(stack.resident) == 2 for stack in names["handle"].plan.stacks)
    assert names["MyPipeline"]._offload_plan.block_attrs["transformer"] == ("blocks",)


def test_keywords_of_calls_exist() -> None:
    parameters = {"enable_omni_offload": set(inspect.signature(enable_omni_offload).parameters)}
    parameters["OffloadPlan"] = set(inspect.signature(OffloadPlan).parameters)
    checked = 0
    for snippet in SNIPPETS:
        for node in ast.walk(ast.parse(snippet)):
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if name in parameters:
                    assert {keyword.arg for keyword in node.keywords} <= parameters[name]
                    checked += 1
    assert checked >= 5


def test_keywords_in_the_text_exist() -> None:
    parameters = inspect.signature(enable_omni_offload).parameters
    prose = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    named = set(re.findall(r"`(\w+)=", prose)) - {"weight_transfer", "source"}
    assert {"slots", "pin_memory", "device", "resident_policy"} <= named <= set(parameters)
    assert parameters["slots"].default == 2 and parameters["pin_memory"].default is True


def test_names_on_the_handle_and_the_package_exist() -> None:
    for name in ("is_enabled", "disable", "refresh", "call", "loads", "demand_loads", "bytes_moved"):
        assert f"`{name}" in README and hasattr(OffloadHandle, name)
    for name in ("device_bytes", "pinned_bytes"):
        assert f"`{name}`" in README and hasattr(OffloadHandle, name)
    for name in re.findall(r"diffusers_omni_offload\.(\w+)\(\)", README):
        assert hasattr(diffusers_omni_offload, name)


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("module", None),
        ("layer", {"dit": {"weight_transfer": "allgather"}}),
        ("layer", {"dit": {"source": "checkpoint"}}),
    ],
)
def test_what_the_table_calls_not_yet_raises(mode: str, options: dict[str, dict[str, str]] | None) -> None:
    pipe, _ = tiny.build_toy(3)
    with pytest.raises(NotImplementedError):
        pipe.enable_omni_offload(mode, layer_options=options, device="cpu")
    assert pipe.omni_offload is None


FAMILIES = {
    "wan": "Wan 2.1, 2.2",
    "flux2": "FLUX.2",
    "stable_diffusion_3": "Stable Diffusion 3",
    "qwen_image": "Qwen-Image",
    "longcat_image": "LongCat-Image",
    "ovis_image": "Ovis-Image",
    "stable_diffusion_xl": "Stable Diffusion XL",
    "cosmos": "Cosmos 3",
    "minimax_h3": "MiniMax-H3",
    "nextstep": "NextStep-1.1",
    "soulx_singer": "SoulX-Singer",
    "bagel": "BAGEL",
}


def test_the_families_in_the_table_are_the_registered_ones() -> None:
    for row in FAMILIES.values():
        assert re.search(rf"^\| {re.escape(row)}\*? \|", README, flags=re.MULTILINE), row
    package = "diffusers_omni_offload.adapters."
    modules = {adapter.__module__ for adapter in registered_pipelines().values()}
    assert {module.removeprefix(package) for module in modules if module.startswith(package)} == set(FAMILIES)


def test_links_and_commands_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target
    makefile = (ROOT / "Makefile").read_text()
    text = README + (ROOT / "CONTRIBUTING.md").read_text()
    for target in re.findall(r"make ([a-z][\w-]*)", text):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_the_demo_says_what_is_resident_streamed_and_pinned(
    device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pick_device().type == device.type
    assert demo.main(["--blocks", "3"]) == 0
    printed = capsys.readouterr().out
    assert "output equal: True" in printed
    assert printed.count("3 of 3 blocks streamed") == 2
    assert re.search(r"vae .* on the device\n", printed)
    assert re.search(r"[1-9][\d.]* KiB of host memory pinned", printed)


def test_the_demo_fails_when_the_outputs_differ(
    device: torch.device, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo.tiny_wan, "to_video", lambda output: np.array(output.frames) + np.random.rand())
    assert demo.main(["--blocks", "2"]) == 1
    assert "output equal: False" in capsys.readouterr().out


def test_the_demo_prints_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert demo.printer() is print


def test_the_demo_takes_the_cpu_where_there_is_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert pick_device() == torch.device("cpu")
    assert pick_device("cuda:1") == torch.device("cuda:1")


def test_the_versions_agree() -> None:
    assert diffusers_omni_offload.__version__ == importlib.metadata.version("diffusers-omni-offload")
    assert f"## {diffusers_omni_offload.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()
    assert "Python 3.11 or newer" in README
    assert 'requires-python = ">=3.11"' in (ROOT / "pyproject.toml").read_text()
