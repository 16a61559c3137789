"""What the README says is true: its code runs, its keywords exist, its tables agree with the package."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import json
import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import WanPipeline
from torch import nn

import diffusers_omni_offload
from diffusers_omni_offload import (
    OffloadHandle,
    OffloadPlan,
    SupportsModelCpuOffload,
    enable_omni_offload,
    registered_pipelines,
)
from diffusers_omni_offload.demo import __main__ as demo
from diffusers_omni_offload.demo import pick_device
from diffusers_omni_offload.weights.packed import PackedMaster
from tests import tiny
from tests.benchmarks import cards

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = {path: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
PUBLISHED = ROOT / "tests" / "data" / "published"
PHASES = re.search(r"## Models that run in phases\n.*?\n## ", (ROOT / "adapters" / "README.md").read_text(), re.DOTALL)
assert PHASES is not None
SNIPPETS = re.findall(r"```python\n(.*?)```", README + PHASES[0], flags=re.DOTALL)


class PromptOnly:
    """A tiny pipeline whose call takes a prompt alone, and whose offload goes to the CPU."""

    def __init__(self, pipe: Any, call: Any) -> None:
        self.pipe, self.call = pipe, call

    @property
    def omni_offload(self) -> OffloadHandle:
        return self.pipe.omni_offload

    def __call__(self, prompt: str) -> Any:
        return self.pipe(**{**self.call(), "prompt": prompt})

    def enable_omni_offload(self, *arguments: Any, **keywords: Any) -> OffloadHandle:
        if "layer_options" in keywords:  # the tiny DiTs have four blocks
            keywords["layer_options"]["dit"]["resident_layers"] = 2
        return self.pipe.enable_omni_offload(*arguments, **keywords, device="cpu")


@pytest.fixture
def names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Iterator[dict[str, Any]]:
    """What the snippets define, run one after the other."""

    def tiny_checkpoint(name: str, **arguments: Any) -> PromptOnly:
        return PromptOnly(*tiny.build_wan())

    monkeypatch.setattr(WanPipeline, "from_pretrained", tiny_checkpoint)
    monkeypatch.setenv("DIFFUSERS_OMNI_OFFLOAD_PROFILE", "")
    monkeypatch.chdir(tmp_path)  # where the published configurations lie under the name that the model has on the Hub
    (tmp_path / "Wan-AI").mkdir()
    (tmp_path / "Wan-AI" / "Wan2.2-T2V-A14B-Diffusers").symlink_to(PUBLISHED / "Wan2.2-T2V-A14B-Diffusers")
    found: dict[str, Any] = {"__name__": "readme"}
    monkeypatch.setitem(sys.modules, "readme", ModuleType("readme"))  # where diffusers looks a pipeline's class up
    for snippet in SNIPPETS:
        exec(compile(snippet, "README.md", "exec"), found)
    yield {**found, "printed": capsys.readouterr().out}


def test_the_snippets_run_one_after_the_other(names: dict[str, Any]) -> None:
    pipe, call = tiny.build_wan()
    assert np.array_equal(names["video"], PromptOnly(pipe, call)("a cat walks on the grass").frames[0])
    assert all(len(stack.resident) == 2 for stack in names["handle"].plan.stacks)
    assert names["MyPipeline"]._offload_plan.block_attrs["transformer"] == ("blocks",)
    assert json.loads(Path("trace.json").read_text())["traceEvents"]


def test_what_the_snippets_print(names: dict[str, Any]) -> None:
    assert "14,288,491,584" in names["printed"] and "auto: pipe.enable_omni_offload(" in names["printed"], "the plan"
    assert "Offload on " in names["printed"] and "By hand:" in names["printed"], "the report"


@pytest.mark.slow
def test_the_table_of_cards_is_what_the_plan_says() -> None:
    assert cards.written() == cards.table(), "write it anew with python -m tests.benchmarks.cards"


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
    named = set(re.findall(r"`(\w+)=", prose)) - {"weight_transfer", "source", "timeout"}
    assert {"slots", "pin_memory", "device", "resident_policy"} <= named <= set(parameters)
    assert parameters["slots"].default == 2 and parameters["pin_memory"].default is True


def test_names_on_the_handle_and_the_package_exist() -> None:
    for name in ("is_enabled", "disable", "refresh", "call", "loads", "demand_loads", "swaps", "bytes_moved"):
        assert f"`{name}" in README and hasattr(OffloadHandle, name)
    for name in ("device_bytes", "pinned_bytes"):
        assert f"`{name}`" in README and hasattr(OffloadHandle, name)
    for name in re.findall(r"diffusers_omni_offload\.(\w+)\(\)", README):
        assert hasattr(diffusers_omni_offload, name)


class Vae(nn.Linear):
    def decode_frames(self, hidden: torch.Tensor) -> torch.Tensor:
        return self(hidden) * self.bias


class Vocoder(nn.Linear):
    """Moves itself."""

    moves: list[str]

    def load_to_device(self, device: torch.device) -> None:
        self.moves.append("load")
        self.to(device)

    def offload_to_cpu(self) -> None:
        self.moves.append("offload")
        self.to("cpu")


class Layers(nn.Module):
    """Runs the lists of layers that it is given, each in its phase if it has some."""

    phases: Any = None

    def __init__(self, *lists: str) -> None:
        super().__init__()
        self.lists = lists
        for name in lists:
            self.add_module(name, nn.ModuleList(nn.Linear(8, 8) for _ in range(3)))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for phase, name in zip(("reason", "draw"), self.lists, strict=False):
            with nullcontext() if self.phases is None else self.phases.context(phase):
                for layer in self.get_submodule(name):
                    hidden = torch.tanh(layer(hidden))
        return hidden


def expected_of(pipe: Any, device: torch.device) -> torch.Tensor:
    """The output with every part on the device; they are on the CPU again after."""
    parts = list(pipe.components.values())
    for part in parts:
        part.to(device)
    output = pipe()
    for part in parts:
        part.to("cpu")
    return output


def test_a_pipeline_of_your_own(names: dict[str, Any], device: torch.device, sim: ModuleType) -> None:
    class Runnable(names["MyPipeline"]):
        def __init__(self, transformer: Any, text_encoder: Any, vae: Any, vocoder: Any) -> None:
            super().__init__()
            self.register_modules(transformer=transformer, text_encoder=text_encoder, vae=vae, vocoder=vocoder)

        @torch.no_grad()
        def __call__(self) -> torch.Tensor:
            hidden = self.text_encoder(torch.linspace(-1, 1, 16).reshape(2, 8).to(device))
            return self.vocoder(self.vae.decode_frames(self.transformer(hidden))).cpu()

    torch.manual_seed(0)
    encoder, vocoder = nn.Sequential(), Vocoder(8, 8)
    encoder.add_module("encoder", Layers("block"))
    pipe = Runnable(Layers("blocks"), encoder, Vae(8, 8), vocoder)
    expected = expected_of(pipe, device)
    for components in (["dit"], ["dit", "text_encoder"], {"dit": "module", "text_encoder": "module", "vae": "module"}):
        vocoder.moves = []
        handle = pipe.enable_omni_offload(components=components)
        assert torch.equal(pipe(), expected)
        assert vocoder.moves == ["load", "offload"]
    assert handle.swaps == 3, "the vocoder moves itself"
    pipe.disable_omni_offload()
    assert torch.equal(expected_of(pipe, device), expected)


def test_a_pipeline_that_moves_its_phases(names: dict[str, Any], device: torch.device, sim: ModuleType) -> None:
    class Runnable(names["TwoPhasePipeline"]):
        def __init__(self, transformer: Any, vae: Any) -> None:
            super().__init__()
            self.register_modules(transformer=transformer, vae=vae)

        @torch.no_grad()
        def __call__(self) -> torch.Tensor:
            return self.vae(self.transformer(torch.linspace(-1, 1, 16).reshape(2, 8).to(device))).cpu()

    torch.manual_seed(0)
    pipe = Runnable(Layers("layers", "gen_layers"), nn.Linear(8, 8))
    assert isinstance(pipe, SupportsModelCpuOffload)
    expected = expected_of(pipe, device)
    handle = pipe.enable_omni_offload("module")
    assert torch.equal(pipe(), expected)
    assert handle.swaps == 6 and handle.device_bytes == 0
    pipe.disable_omni_offload()
    assert torch.equal(expected_of(pipe, device), expected)


@torch.no_grad()
def test_the_limits_of_swapped_components(device: torch.device, sim: ModuleType) -> None:
    pipe, call = tiny.build_wan()
    handle = pipe.enable_omni_offload("module")
    for calls in (1, 2):
        tiny.run(pipe, call)
        assert handle.swaps == 3 * calls and handle.device_bytes == 0
    inputs = {
        "hidden_states": torch.ones(1, 16, 2, 2, 2, device=device),
        "timestep": torch.tensor([1], device=device),
        "encoder_hidden_states": torch.ones(1, 4, 32, device=device),
    }
    for _ in range(3):
        pipe.transformer(**inputs)
    assert handle.swaps == 6 + 3
    with handle.call():
        for _ in range(3):
            pipe.transformer(**inputs)
    assert handle.swaps == 6 + 3 + 1
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(1, 32, device=device) @ pipe.text_encoder.shared.weight.T


@pytest.mark.parametrize(("dtype", "packs"), [(torch.float16, 2), (torch.float32, 0)], ids=str)
def test_a_vae_that_is_cast_in_each_call_is_packed_anew(
    dtype: torch.dtype, packs: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, call = tiny.build_sdxl()
    pipe.to(dtype)
    pipe.enable_omni_offload(components={"dit": "module", "vae": "module"})
    tiny.run(pipe, call)
    packed: list[str] = []
    pack = PackedMaster.pack
    monkeypatch.setattr(
        PackedMaster, "pack", lambda self, **options: (packed.append(self.path), pack(self, **options))[1]
    )
    tiny.run(pipe, call)
    assert packed == ["vae"] * packs


def test_what_the_table_of_modes_says_works(device: torch.device) -> None:
    table = re.search(r"\| mode \| what it does \|\n.*?\n\n", README, flags=re.DOTALL)
    assert table is not None
    works = re.findall(r"^\| ([^|]+?) \|", table[0], flags=re.MULTILINE)[2:]
    assert works[:3] == ['`"layer"`', '`"module"`', '`components={"dit": "layer", "vae": "module", ...}`']
    pipe, call = tiny.build_wan()
    options = [ast.literal_eval(text) for work in works[3:] for text in re.findall(r"`layer_options=(.+?)`", work)]
    assert [list(option["dit"]) for option in options] == [["source"], ["weight_transfer"]]
    arguments_of_all = [{"mode": "layer"}, {"mode": "module"}, {"components": {"dit": "layer", "vae": "module"}}]
    arguments_of_all += [{"mode": "layer", "layer_options": option} for option in options]
    for arguments in arguments_of_all:
        handle = pipe.enable_omni_offload(**arguments)
        tiny.run(pipe, call)
        assert (handle.loads > 0, handle.swaps > 0) == ("layer" in str(arguments), "module" in str(arguments))


def test_every_adapter_has_a_row_that_begins_as_its_docstring_does_and_every_row_an_adapter() -> None:
    rows = re.search(r"\| family \|.*?\n\n", README, flags=re.DOTALL)
    assert rows is not None
    names = [line.strip("| ").split(" | ")[0].rstrip("*") for line in rows[0].strip().splitlines()[2:]]
    package = "diffusers_omni_offload.adapters."
    files = {module for each in registered_pipelines().values() if (module := each.__module__).startswith(package)}
    documents = {module: sys.modules[module].__doc__ or "" for module in files}
    for module, document in documents.items():
        assert sum(document.startswith(name) for name in names) == 1, f"{module}: {document!r} is none of {names}"
    assert len(names) == len(set(names)) == len(files)


def test_the_rest_is_as_many_as_it_says() -> None:
    classes = re.search(r"The (\d+) transformer classes", README)
    pipelines = re.search(r"over (\d+) pipeline classes", README)
    assert classes is not None and pipelines is not None
    table = (ROOT / "adapters" / "README.md").read_text()
    assert f"{classes[1]} classes, {classes[1]} of them equal." in table
    assert "## Every transformer class\n" in table
    from tests.zoo import PIPELINES

    assert len(PIPELINES) > int(pipelines[1])


def test_the_figures_of_a_call_are_those_of_the_bench() -> None:
    printed = (ROOT / "tests" / "benchmarks" / "results" / "calls.txt").read_text().split("\n\n")[0]
    benched = {line[:22].strip(): re.split(r"\s{2,}", line[22:].strip()) for line in printed.splitlines()[3:]}
    rows = re.search(r"\| a call \|.*?\n\n", README, flags=re.DOTALL)
    assert rows is not None
    _, _, *lines = rows[0].strip().splitlines()
    for line in lines:
        name, *cells = (cell.strip() for cell in line.strip("| ").split("|"))
        to_device, to_host, _, swaps, peak, time, _ = benched[name.removeprefix("accelerate's ")]
        assert [cell.split(",")[0] for cell in cells] == [to_device, to_host, swaps, peak, time], name
    assert len(lines) == 4 and benched["model offload (*)"][5] in README
    assert re.search(r"weights of ([\d.]+ KiB)", printed)[1] in README  # type: ignore[index]


def test_links_and_commands_exist() -> None:
    for path, text in DOCUMENTS.items():
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            assert target.startswith("https://") or (path.parent / target).exists(), target
    makefile = (ROOT / "Makefile").read_text()
    text = README + (ROOT / "CONTRIBUTING.md").read_text()
    for target in re.findall(r"(?:^|`)make ([a-z][\w-]*)", text, flags=re.MULTILINE):
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
