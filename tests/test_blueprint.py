"""A blueprint has the sizes that the loaded pipeline has, reads configurations alone, and says what it can't do."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from diffusers import DiffusionPipeline, WanPipeline
from torch import nn

from diffusers_omni_offload import adapter_for
from diffusers_omni_offload.blueprint import INDEX, build_blueprint
from diffusers_omni_offload.planning.costs import ComponentCost
from diffusers_omni_offload.planning.survey import survey
from tests import tiny
from tests.tiny import reload

FAMILIES = {name: build for name, build in {**tiny.BUILDERS, **tiny.VARIANTS}.items() if name != "minimax_h3"}


def surveyed(pipe: Any) -> tuple[ComponentCost, ...]:
    return survey(pipe, declarations=adapter_for(type(pipe)))


def without_weights(folder: Path) -> None:
    """Leave files there that can't be read as weights."""
    for file in folder.rglob("*.safetensors"):
        file.write_bytes(b"no weights")


@pytest.mark.parametrize("name", FAMILIES)
def test_sizes_are_those_of_the_loaded_pipeline(name: str, tmp_path: Path) -> None:
    loaded = reload(FAMILIES[name]()[0], tmp_path, torch.bfloat16)
    without_weights(tmp_path)
    pipe = build_blueprint(tmp_path, dtype=torch.bfloat16)
    assert type(pipe) is type(loaded)
    assert surveyed(pipe) == surveyed(loaded)
    models = [model for model in pipe.components.values() if isinstance(model, nn.Module)]
    assert models and all(tensor.is_meta for model in models for tensor in [*model.parameters(), *model.buffers()])
    assert pipe.config["_name_or_path"] == str(tmp_path)


@pytest.mark.parametrize("dtype", [None, torch.float16], ids=str)
def test_what_stays_in_float32(dtype: torch.dtype | None, tmp_path: Path) -> None:
    """In float16 transformers keeps some of T5's weights, in bfloat16 it doesn't; diffusers has Wan's norms in both."""
    loaded = reload(tiny.build_wan()[0], tmp_path, dtype or torch.float32)
    assert surveyed(build_blueprint(tmp_path, dtype=dtype)) == surveyed(loaded)


def test_a_dtype_for_each_component(tmp_path: Path) -> None:
    tiny.build_sd3()[0].save_pretrained(tmp_path)
    pipe = build_blueprint(tmp_path, dtype={"default": torch.bfloat16, "vae": torch.float32})
    assert (pipe.vae.dtype, pipe.transformer.dtype) == (torch.float32, torch.bfloat16)


@pytest.fixture
def wan_folder(tmp_path: Path) -> Path:
    tiny.build_wan()[0].save_pretrained(tmp_path)
    without_weights(tmp_path)
    return tmp_path


def test_settings_and_absent_components(wan_folder: Path) -> None:
    edit(wan_folder / INDEX, lambda index: index.update(transformer_2=[None, None]))
    pipe = build_blueprint(wan_folder)
    assert isinstance(pipe, WanPipeline) and pipe.transformer_2 is None and pipe.tokenizer is None
    assert pipe.config.boundary_ratio == 0.875 and pipe.scheduler is not None


def test_of_a_repository_only_configurations_are_fetched(wan_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def download(repository: str, **arguments: Any) -> str:
        asked.update(arguments, repository=repository)
        return str(wan_folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    pipe = build_blueprint("owner/wan")
    assert pipe.config["_name_or_path"] == "owner/wan" and asked["repository"] == "owner/wan"
    patterns = asked["allow_patterns"]
    fetched = [
        str(file.relative_to(wan_folder))
        for file in wan_folder.rglob("*.*")
        if any(file.relative_to(wan_folder).match(pattern) for pattern in patterns)
    ]
    assert INDEX in fetched and all(os.path.basename(file).endswith((INDEX, "config.json")) for file in fetched)


def edit(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def quantized(folder: Path) -> None:
    config = {"quantization_config": {"quant_method": "bitsandbytes"}}
    edit(folder / "transformer" / "config.json", lambda content: content.update(config))


REFUSED: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "no index": (lambda f: (f / INDEX).unlink(), FileNotFoundError, "has no model_index.json, so it isn't the folder"),
    "bad index": (lambda f: (f / INDEX).write_text("{"), ValueError, "isn't valid JSON"),
    "a list": (lambda f: (f / INDEX).write_text("[]"), ValueError, "holds list, but a mapping is needed"),
    "class": (
        lambda f: edit(f / INDEX, lambda index: index.update(_class_name="TheirPipeline")),
        ValueError,
        "is a TheirPipeline, which diffusers .* doesn't have",
    ),
    "code": (
        lambda f: edit(f / INDEX, lambda index: index.update(_class_name=["pipeline", "TheirPipeline"])),
        ValueError,
        "has code of its own \\(pipeline\\)",
    ),
    "library": (
        lambda f: edit(f / INDEX, lambda index: index.update(transformer=["their_model", "TheirModel"])),
        ValueError,
        "'transformer' is a TheirModel of 'their_model', which isn't installed or has code of its own",
    ),
    "model class": (
        lambda f: edit(f / INDEX, lambda index: index.update(transformer=["diffusers", "TheirModel"])),
        ValueError,
        "'transformer' is a TheirModel of 'diffusers'",
    ),
    "config": (
        lambda f: (f / "transformer" / "config.json").unlink(),
        FileNotFoundError,
        "transformer/config.json isn't there",
    ),
    "bad value": (
        lambda f: edit(f / "transformer" / "config.json", lambda config: config.update(num_layers="four")),
        ValueError,
        "'transformer' \\(WanTransformer3DModel\\) can't be made from",
    ),
    "quantized": (quantized, ValueError, "'transformer' has quantized weights"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str, wan_folder: Path) -> None:
    damage, error, sentence = REFUSED[case]
    damage(wan_folder)
    with pytest.raises(error, match=sentence):
        build_blueprint(wan_folder)


def test_what_is_neither_a_folder_nor_on_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is no folder, and no name of a repository"):
        build_blueprint("nowhere")

    def download(repository: str, **arguments: Any) -> str:
        raise ConnectionError("The hub can't be reached.\nA trace follows.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(FileNotFoundError, match=r"can't be had from the Hub: The hub can't be reached\.$"):
        build_blueprint("owner/name")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repository, **arguments: str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"The repository 'owner/name' has no model_index\.json"):
        build_blueprint("owner/name")


def test_the_default_dtype_comes_back(wan_folder: Path) -> None:
    before = torch.get_default_dtype()
    build_blueprint(wan_folder, dtype=torch.bfloat16)
    assert torch.get_default_dtype() is before and torch.empty(1).device.type == "cpu"
    assert isinstance(build_blueprint(wan_folder), DiffusionPipeline)
