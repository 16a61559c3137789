"""`omni-offload run`: the same pictures as from Python, by every flag, and bad input in one sentence."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from diffusers_omni_offload.backends import PlanBackend
from diffusers_omni_offload.cli import main
from diffusers_omni_offload.cli import running as running_module
from diffusers_omni_offload.config import OffloadConfig
from diffusers_omni_offload.demo.tiny_wan import build_pipeline
from tests import tiny

DEMO = ["run", "demo", "--prompt", "a cat"]
SD3_SIZE = ["--height", "16", "--width", "16", "--steps", "2"]


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch) -> list[OffloadConfig]:
    """Of every backend that was installed."""
    found: list[OffloadConfig] = []
    install = PlanBackend.install
    monkeypatch.setattr(
        PlanBackend, "install", lambda self, *args: (found.append(self.config), install(self, *args))[1]
    )
    return found


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def sd3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The folder of a pipeline for images."""
    folder = tmp_path_factory.mktemp("sd3")
    tiny.build_sd3()[0].save_pretrained(folder)
    yield str(folder)


def frames(path: str | Path) -> np.ndarray:
    with Image.open(path) as image:
        pictures = []
        for number in range(getattr(image, "n_frames", 1)):
            image.seek(number)
            pictures.append(np.array(image.convert("RGB")))
        return np.stack(pictures)


def demo_on(device: torch.device | str, prompt: str, seed: int = 0, **arguments: Any) -> list[Any]:
    """The frames of the resident demo pipeline."""
    pipe, _ = build_pipeline()
    size = {"height": 16, "width": 16, "num_frames": 5, "max_sequence_length": 16, "num_inference_steps": 4}
    generator = torch.Generator().manual_seed(seed)
    call = {**size, "prompt": prompt, "generator": generator, "output_type": "pil", **arguments}
    return list(pipe.to(device)(**call).frames[0])


def as_gif(pictures: list[Any], path: Path, fps: int = 16) -> bytes:
    pictures[0].save(path, save_all=True, append_images=pictures[1:], optimize=False, duration=1000 // fps, loop=0)
    return path.read_bytes()


# Outputs


@pytest.mark.parametrize("mode", ["layer", "module", "resident"])
def test_the_video_is_the_resident_one_in_each_mode(mode: str, device: torch.device, tmp_path: Path) -> None:
    expected = as_gif(demo_on(device, "a cat"), tmp_path / "expected.gif")
    assert main([*DEMO, "--output", "cat.gif", "--mode", mode]) == 0
    assert (tmp_path / "cat.gif").read_bytes() == expected


def test_flags_of_the_call_reach_it(device: torch.device, tmp_path: Path) -> None:
    flags = ["--steps", "2", "--height", "32", "--width", "16", "--num-frames", "9", "--seed", "3", "--fps", "5"]
    flags += ["--guidance-scale", "3.5", "--negative-prompt", "dull"]
    assert main([*DEMO, "--output", "cat.gif", "--mode", "layer", *flags]) == 0
    size = {"height": 32, "width": 16, "num_frames": 9, "num_inference_steps": 2}
    pictures = demo_on(device, "a cat", 3, guidance_scale=3.5, negative_prompt="dull", **size)
    assert (tmp_path / "cat.gif").read_bytes() == as_gif(pictures, tmp_path / "expected.gif", fps=5)
    assert frames("cat.gif").shape[1:] == (32, 16, 3)


@pytest.mark.parametrize("source", ["memory", "checkpoint"])
def test_images_of_a_folder_by_suffix(
    source: str, device: torch.device, sd3: str, tmp_path: Path, configs: list[OffloadConfig]
) -> None:
    pipe = tiny.build_sd3()[0].to(device, torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    expected = pipe("a cat", num_inference_steps=2, height=16, width=16, generator=generator).images[0]
    for name in ("cat.png", "cat.webp", "cat.jpg"):
        arguments = ["run", sd3, "--prompt", "a cat", "--output", name, "--mode", "layer", "--source", source]
        assert main([*arguments, *SD3_SIZE]) == 0
        assert (tmp_path / name).stat().st_size > 0
    assert np.array_equal(frames("cat.png")[0], np.array(expected))
    assert len(configs) == 3


def test_a_file_of_prompts(device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("prompts.txt").write_text("a cat\n\n  rain  \n")
    assert main(["run", "demo", "--prompts", "prompts.txt", "--output", "it.gif", "--mode", "layer"]) == 0
    assert sorted(path.name for path in tmp_path.glob("*.gif")) == ["it-0.gif", "it-1.gif"]
    for index, prompt in enumerate(("a cat", "rain")):
        expected = as_gif(demo_on(device, prompt, seed=index), tmp_path / "expected.gif")
        assert Path(f"it-{index}.gif").read_bytes() == expected
    assert "wrote it-0.gif\nwrote it-1.gif\n" in capsys.readouterr().out


def test_the_demo_runs_on_the_cpu_where_there_is_no_accelerator(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert main([*DEMO, "--output", "cat.gif", "--mode", "layer"]) == 0
    printed = capsys.readouterr().out
    assert "wrote cat.gif\n" in printed and "blocks and 0 components were copied" in printed


# The specification's flags


FLAGS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "model-level": (["--enable-cpu-offload"], {"enable_cpu_offload": True}),
    "layerwise": (["--enable-layerwise-offload"], {"enable_layerwise_offload": True}),
    "layerwise goes first": (
        ["--enable-cpu-offload", "--enable-layerwise-offload"],
        {"enable_layerwise_offload": True},
    ),
    "distributed goes first": (
        ["--enable-layerwise-offload", "--enable-distributed-layerwise-offload"],
        {"enable_distributed_layerwise_offload": True},
    ),
    "all-gather is the default": (
        ["--enable-distributed-layerwise-offload", "--dlo-use-allgather", "--data-parallel-size", "1", "--usp", "1"],
        {"enable_distributed_layerwise_offload": True},
    ),
    "rank-local, with residents": (
        ["--enable-distributed-layerwise-offload", "--dlo-no-use-allgather", "--dlo-resident-layers", "2"],
        {"enable_distributed_layerwise_offload": True, "dlo_use_allgather": False, "dlo_resident_layers": 2},
    ),
    "compact": (
        ["--diffusion-offload-config", '{"mode": "module", "components": ["dit"], "pin_memory": false}'],
        {"diffusion_offload_config": {"mode": "module", "components": ["dit"], "pin_memory": False}},
    ),
    "compact, with a flag that agrees": (
        ["--enable-cpu-offload", "--diffusion-offload-config", '{"mode": "module", "components": ["dit"]}'],
        {"diffusion_offload_config": {"mode": "module", "components": ["dit"]}},
    ),
}


@pytest.mark.parametrize("name", FLAGS)
def test_flags_choose_as_the_configuration_does(name: str, device: torch.device, configs: list[OffloadConfig]) -> None:
    flags, fields = FLAGS[name]
    assert main([*DEMO, "--output", "cat.gif", "--steps", "1", *flags]) == 0
    assert configs == [OffloadConfig.from_od_config(fields)]


# Bad input


def not_there(folder: Path) -> None:
    """Nothing to prepare."""


def a_folder_without_index(folder: Path) -> None:
    (folder / "empty").mkdir()


def a_class_of_its_own(folder: Path) -> None:
    (folder / "own").mkdir()
    (folder / "own" / "model_index.json").write_text(json.dumps({"_class_name": "MyPipeline"}))


def an_empty_file(folder: Path) -> None:
    (folder / "prompts.txt").write_text("\n  \n")


def another_kind(name: str) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        (folder / "own").mkdir()
        (folder / "own" / "model_index.json").write_text(json.dumps({"_class_name": name}))

    return prepare


LAYER = ["--mode", "layer"]
BAD: dict[str, tuple[list[str], str, Callable[[Path], None]]] = {
    "no model": (["run", "--prompt", "x", "--output", "x.gif"], "Missing argument 'MODEL'", not_there),
    "no output": (DEMO, "Missing option '--output'", not_there),
    "an unknown flag": ([*DEMO, "--output", "x.gif", "--outptu", "x"], "No such option: --outptu", not_there),
    "an unknown command": (["frob"], "No such command 'frob'", not_there),
    "a word for a number": ([*DEMO, "--output", "x.gif", "--steps", "x"], "'--steps'.*valid integer", not_there),
    "no steps": ([*DEMO, "--output", "x.gif", "--steps", "0"], "'--steps'.*greater than or equal to 1", not_there),
    "an unknown model": (["run", "nope", "--prompt", "x", "--output", "x.gif", *LAYER], "no folder 'nope'", not_there),
    "not on the hub": (
        ["run", "nobody/nothing", "--prompt", "x", "--output", "x.gif", *LAYER],
        "nobody/nothing can't be had from the Hub",
        not_there,
    ),
    "a folder without an index": (
        ["run", "empty", "--prompt", "x", "--output", "x.gif", *LAYER],
        "empty has no model_index.json",
        a_folder_without_index,
    ),
    "a class that diffusers lacks": (
        ["run", "own", "--prompt", "x", "--output", "x.gif", *LAYER],
        "own is a MyPipeline, which diffusers .* doesn't have",
        a_class_of_its_own,
    ),
    "sound": (
        ["run", "own", "--prompt", "x", "--output", "x.gif", *LAYER],
        "AudioLDM2Pipeline makes sound",
        another_kind("AudioLDM2Pipeline"),
    ),
    "a pipeline that needs an image": (
        ["run", "own", "--prompt", "x", "--output", "x.gif", *LAYER],
        "WanImageToVideoPipeline needs 'image'",
        another_kind("WanImageToVideoPipeline"),
    ),
    "a pipeline without a prompt": (
        ["run", "own", "--prompt", "x", "--output", "x.png", *LAYER],
        "DDPMPipeline takes no prompt",
        another_kind("DDPMPipeline"),
    ),
    "frames of an image": (
        ["run", "own", "--prompt", "x", "--output", "x.png", "--num-frames", "9", *LAYER],
        "StableDiffusion3Pipeline has no 'num_frames' in its call; leave --num-frames out",
        another_kind("StableDiffusion3Pipeline"),
    ),
    "a video as an image": ([*DEMO, "--output", "x.png", *LAYER], "makes a video.*one of .gif, .mp4", not_there),
    "an image as a video": (
        ["run", "own", "--prompt", "x", "--output", "x.gif", *LAYER],
        "makes an image.*one of .png",
        another_kind("StableDiffusion3Pipeline"),
    ),
    "an unknown suffix": ([*DEMO, "--output", "x.tif", *LAYER], "its suffix has to be one of .png", not_there),
    "a folder that isn't there": ([*DEMO, "--output", "no/x.gif", *LAYER], "there is no folder 'no'", not_there),
    "no library for mp4": ([*DEMO, "--output", "x.mp4", *LAYER], "pip install imageio", not_there),
    "no prompt": (["run", "demo", "--output", "x.gif", *LAYER], "either --prompt or --prompts", not_there),
    "prompt and prompts": (
        [*DEMO, "--prompts", "prompts.txt", "--output", "x.gif", *LAYER],
        "either --prompt or --prompts",
        an_empty_file,
    ),
    "no file of prompts": (
        ["run", "demo", "--prompts", "no.txt", "--output", "x.gif"],
        "'no.txt', which can't be read",
        not_there,
    ),
    "a file without prompts": (
        ["run", "demo", "--prompts", "prompts.txt", "--output", "x.gif"],
        "has no prompt in it",
        an_empty_file,
    ),
    "an unknown mode": ([*DEMO, "--output", "x.gif", "--mode", "fast"], "choose from auto, layer", not_there),
    "an unknown dtype": ([*DEMO, "--output", "x.gif", "--dtype", "int8"], "--dtype is 'int8'", not_there),
    "an unknown source": ([*DEMO, "--output", "x.gif", "--source", "disk"], "--source is 'disk'", not_there),
    "the demo has no files": (
        [*DEMO, "--output", "x.gif", "--source", "checkpoint", *LAYER],
        "The demo is in no files",
        not_there,
    ),
    "mode and strategy": (
        [*DEMO, "--output", "x.gif", *LAYER, "--enable-cpu-offload"],
        "--mode layer and --enable-cpu-offload both say",
        not_there,
    ),
    "a budget for another mode": (
        [*DEMO, "--output", "x.gif", *LAYER, "--memory-budget", "12GiB"],
        "--memory-budget is for --mode auto",
        not_there,
    ),
    "a budget beside a strategy": (
        [*DEMO, "--output", "x.gif", "--enable-layerwise-offload", "--host-memory-budget", "12GiB"],
        "--host-memory-budget is for --mode auto.*--enable-layerwise-offload out",
        not_there,
    ),
    "a budget that is no size": ([*DEMO, "--output", "x.gif", "--memory-budget", "lots"], "'lots', but a", not_there),
    "residents without a strategy": (
        [*DEMO, "--output", "x.gif", "--dlo-resident-layers", "2"],
        "--dlo-resident-layers belongs to",
        not_there,
    ),
    "residents with all-gather": (
        [*DEMO, "--output", "x.gif", "--enable-distributed-layerwise-offload", "--dlo-resident-layers", "2"],
        "dlo_resident_layers=2 needs rank-local weights",
        not_there,
    ),
    "no JSON": ([*DEMO, "--output", "x.gif", "--diffusion-offload-config", "{mode"], "is no JSON", not_there),
    "null": ([*DEMO, "--output", "x.gif", "--diffusion-offload-config", "null"], "is null", not_there),
    "a key that is unknown": (
        [*DEMO, "--output", "x.gif", "--diffusion-offload-config", '{"mood": "layer"}'],
        "has 'mood', which is unknown.*Did you mean 'mode'",
        not_there,
    ),
    "a compact form and another strategy": (
        [*DEMO, "--output", "x.gif", "--enable-layerwise-offload", "--diffusion-offload-config"]
        + ['{"mode": "module", "components": ["dit"]}'],
        "asks for the strategy 'model-level', but enable_layerwise_offload",
        not_there,
    ),
    "a compact form and a tuned flag": (
        [*DEMO, "--output", "x.gif", "--dlo-no-use-allgather", "--diffusion-offload-config"]
        + ['{"mode": "layer", "components": ["dit"]}'],
        "dlo_use_allgather=False can't stand beside",
        not_there,
    ),
    "more processes than there are": (
        [*DEMO, "--output", "x.gif", "--enable-distributed-layerwise-offload", "--data-parallel-size", "4"],
        "--data-parallel-size 4 needs 4 processes, but there is 1; start them with torchrun --nproc-per-node 4",
        not_there,
    ),
    "tokens to share with nobody": ([*DEMO, "--output", "x.gif", "--usp", "2"], "--usp 2 needs 2 processes", not_there),
    "a component that isn't there": (
        [*DEMO, "--output", "x.gif", "--diffusion-offload-config"]
        + ['{"mode": "layer", "components": ["image_encoder"]}'],
        "image_encoder",
        not_there,
    ),
    "an unknown device": ([*DEMO, "--output", "x.gif", *LAYER, "--device", "toaster"], "'toaster'", not_there),
    "a size that the pipeline refuses": (
        [*DEMO, "--output", "x.gif", *LAYER, "--height", "17"],
        "divisible by 16",
        not_there,
    ),
    "a report of nothing": (
        [*DEMO, "--output", "x.gif", "--mode", "resident", "--report"],
        "--report is about offload",
        not_there,
    ),
    "a trace in no folder": ([*DEMO, "--output", "x.gif", *LAYER, "--trace", "no/t.json"], "no folder 'no'", not_there),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence(
    name: str, tmp_path: Path, device: torch.device, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    arguments, words, prepare = BAD[name]
    prepare(tmp_path)
    assert main(arguments) == 2
    printed = capsys.readouterr()
    lines = [line for line in printed.err.splitlines() if not line.startswith("omni offload:")]
    assert len(lines) == 1 and re.search(words, lines[0]), printed.err
    assert "Traceback" not in printed.err and printed.out == ""
    assert not list(tmp_path.glob("x.*"))


def test_bad_input_is_found_before_anything_is_loaded(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, sd3: str
) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(running_module.Model, "load", lambda self, *args: loaded.append(self.name))
    asked = ["run", sd3, "--prompt", "x", *LAYER]
    assert main([*asked, "--output", "x.gif"]) == main([*asked, "--output", "x.png", "--num-frames", "3"]) == 2
    assert main([*asked, "--output", "x.png", "--device", "toaster"]) == 2
    assert loaded == []


def test_too_little_device_memory_is_a_failure(
    device: torch.device, sim: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    sim.configure(capacity_bytes=900_000)
    assert main([*DEMO, "--output", "x.gif", "--mode", "resident", "--height", "64", "--width", "64"]) == 1
    assert "The device's memory didn't suffice" in capsys.readouterr().err


def test_without_typer_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    assert main(["run", "demo"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and 'pip install "diffusers-omni-offload[cli]"' in error and "typer" in error
