"""Public cases of weights that are read from files: views that are kept, files that aren't ours, what loaders do."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from diffusers_omni_offload import CheckpointError, load_omni_pipeline
from diffusers_omni_offload.weights.proof import remembered
from diffusers_omni_offload.weights.withheld import is_withheld
from tests import distributed_cases as cases
from tests import tiny
from tests.living import fast_ones
from tests.test_cases_host_memory import FILES, GATHERED, blocks_of, call, expected, mapped, wan
from tests.test_loading import buffers_of

__all__ = ["wan"]  # a fixture


def all_tensors(pipe: Any) -> list[torch.Tensor]:
    modules = [part for part in pipe.components.values() if isinstance(part, nn.Module)]
    return [tensor for part in modules for tensor in (*part.parameters(), *part.buffers())]


# ---------------------------------------------------------------------- weights that stay in files


def test_sdnext_5092_views_of_files_stay_views_of_files(device: torch.device, sim: ModuleType, wan: Path) -> None:
    """Fresh copies took the place of weights that were mapped: 15 GB twice."""
    reference = expected(device)
    pipe = mapped(wan)
    weights = [weight for block in blocks_of(pipe) for weight in block.parameters()]
    addresses = [weight.data_ptr() for weight in weights]
    files = {
        segment.file: segment.file.nbytes
        for dit in (pipe.transformer, pipe.transformer_2)
        for source in remembered(dit).values()  # type: ignore[union-attr]
        for segment in source.segments
    }
    pipe.enable_omni_offload("layer")
    for _ in range(2):
        assert [weight.data_ptr() for weight in weights] == addresses
        sim.reset_clock()
        video = pipe(**{**call(), "output_type": "latent"}).frames
        assert video.device.type == "sim" and sim.stats()["d2h_bytes"] < 1000, "nothing but numbers"
        assert not any(any(file.edited([(0, nbytes)])) for file, nbytes in files.items()), "nothing but the files"
    assert np.array_equal(tiny.run(pipe, call), reference)
    pipe.disable_omni_offload()
    assert [weight.data_ptr() for weight in weights] == addresses


def other_weights(folder: Path, factor: float = 1.5) -> dict[Path, bytes]:
    """By file of the DiTs: the bytes of a file with the same tensors, of other values."""
    found = {}
    for path in sorted(folder.glob("transformer*/*.safetensors")):
        scaled = {key: tensor * factor for key, tensor in load_file(path, device="cpu").items()}
        other = path.with_suffix(".other")
        save_file(scaled, other, metadata={"format": "pt"})
        found[path] = other.read_bytes()
        other.unlink()
    return found


def replaced(path: Path, content: bytes) -> None:
    """Another file of the same name and size; the old one lives on while it is open."""
    assert len(content) == path.stat().st_size
    path.with_suffix(".new").write_bytes(content)
    os.replace(path.with_suffix(".new"), path)


def overwritten(path: Path, content: bytes) -> None:
    """The file itself, with other bytes."""
    with path.open("r+b") as file:
        file.write(content)


def test_diffusers_11682_two_folders_with_the_same_names(device: torch.device, tmp_path: Path) -> None:
    """Files for offloading got the same names, and one model ran with another one's weights."""
    folders = [cases.save("wan", tmp_path / name) for name in ("one", "two")]
    for path, content in other_weights(folders[1]).items():
        replaced(path, content)
    fresh, _ = cases.build("wan", 0)
    cls = type(fresh)
    references = [tiny.run(tiny.align_parameters(cls.from_pretrained(folder)).to(device), call) for folder in folders]
    assert not np.array_equal(*references)
    pipes = [mapped(folders[0]), cls.from_pretrained(folders[1])]
    pipes[0].enable_omni_offload("layer")
    pipes[1].enable_omni_offload(**FILES)
    for _ in range(2):
        for pipe, reference in zip(pipes, references, strict=True):
            assert sum(master.host_nbytes for master in pipe.omni_offload.backend.masters) == 0
            assert np.array_equal(tiny.run(pipe, call), reference)


def test_diffusers_11682_a_file_of_the_same_name_is_not_ours(device: torch.device, wan: Path) -> None:
    """It is never read: the one that was opened is, whatever its name has become."""
    reference = expected(device)
    pipe = mapped(wan)
    pipe.enable_omni_offload("layer")
    assert np.array_equal(tiny.run(pipe, call), reference)
    others = other_weights(wan)
    for path, content in others.items():
        replaced(path, content)
    assert len(others) > 4 and np.array_equal(tiny.run(pipe, call), reference)
    for path in others:
        path.unlink()
    assert np.array_equal(tiny.run(pipe, call), reference)


@pytest.mark.parametrize("when", ["before enabling", "between calls", "in a call"])
def test_diffusers_11682_a_file_that_was_overwritten_is_named(when: str, device: torch.device, wan: Path) -> None:
    """Bytes that aren't those that were proven are never computed with."""
    reference = expected(device)
    pipe = mapped(wan)
    others = other_weights(wan)
    # Of the second DiT, which runs in the last step.
    path = next(
        p for p in others if p.parent.name == "transformer_2" and any("blocks.1" in key for key in load_file(p))
    )
    content = others[path]

    def overwrite(*args: Any) -> dict[str, Any]:
        overwritten(path, content)
        return {}

    if when == "before enabling":
        overwrite()
        with pytest.raises(CheckpointError, match=path.name):
            pipe.enable_omni_offload("layer")
        assert pipe.omni_offload is None
        return
    pipe.enable_omni_offload("layer")
    assert np.array_equal(tiny.run(pipe, call), reference)
    more = {"callback_on_step_end": overwrite} if when == "in a call" else {}
    if not more:
        overwrite()
    for _ in range(2):
        with pytest.raises(CheckpointError, match=path.name):
            tiny.run(pipe, lambda: {**call(), **more})


def test_diffusers_11682_other_values_than_the_files_stay_in_memory(device: torch.device, wan: Path) -> None:
    """A folder that has another model of the same form isn't where the weights are."""
    pipe, _ = cases.load("wan", wan, 0)
    for path, content in other_weights(wan).items():
        replaced(path, content)
    handle = pipe.enable_omni_offload(**FILES)
    assert np.array_equal(tiny.run(pipe, call), expected(device))
    assert sum(m.host_nbytes for m in handle.backend.masters) == sum(m.nbytes for m in handle.backend.masters)


def test_diffusers_11682_nothing_is_written(device: torch.device, wan: Path) -> None:
    """So there is no folder to share, to fill or to have a right for."""

    def listed() -> dict[Path, tuple[int, int]]:
        return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in wan.rglob("*")}

    before = listed()
    for path in before:
        path.chmod(0o555 if path.is_dir() else 0o444)
    pipe = mapped(wan)
    pipe.enable_omni_offload("layer")
    tiny.run(pipe, call)
    pipe.disable_omni_offload()
    assert listed() == before


# ---------------------------------------------------------------------- what loading does to weights


def add_a_key(path: Path) -> None:
    save_file({**load_file(path), "more": torch.ones(1)}, path)


def rename_a_key(path: Path) -> None:
    tensors = load_file(path)
    tensors["proj.weight"] = tensors.pop("proj_out.weight")
    save_file(tensors, path)


def lose_a_key(path: Path) -> None:
    tensors = load_file(path)
    del tensors["blocks.1.attn1.to_q.weight"]
    save_file(tensors, path)


def cut_a_shape(path: Path) -> None:
    tensors = load_file(path)
    tensors["blocks.1.attn1.to_q.weight"] = tensors["blocks.1.attn1.to_q.weight"][1:].contiguous()
    save_file(tensors, path)


CHANGES: dict[str, tuple[Callable[[Path], None] | None, torch.dtype | None, type[Exception] | None]] = {
    "nothing": (None, None, None),
    "cast": (None, torch.bfloat16, None),
    "extra key": (add_a_key, None, None),
    "renamed key": (rename_a_key, None, CheckpointError),
    "missing key": (lose_a_key, None, CheckpointError),
    "wrong shape": (cut_a_shape, None, CheckpointError),
}
"""By name: what is done to a file, the dtype that is asked for, and the error."""


@pytest.mark.parametrize("way", ["layer", fast_ones(["group of one"])[0]])
@pytest.mark.parametrize("name", CHANGES)
def test_vllm_omni_5397_what_the_loader_does_is_done_or_its_way_is_taken(
    name: str, way: str, device: torch.device, tmp_path: Path
) -> None:
    """The mapped way left the model's loader out: wrong weights where it casts, renames or checks; others on meta."""
    change, dtype, error = CHANGES[name]
    fresh, _ = cases.build("wan", 0)
    cls = type(fresh)
    fresh.save_pretrained(tmp_path)
    if change is not None:
        change(tmp_path / "transformer" / "diffusion_pytorch_model.safetensors")
    options = {} if dtype is None else {"torch_dtype": dtype}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if error is not None:
            with pytest.raises(error, match="transformer"):
                load_omni_pipeline(cls, tmp_path, **options)
            return
        pipe = load_omni_pipeline(cls, tmp_path, **options)
    assert any("into memory" in str(warning.message) for warning in caught) == (change is not None)
    theirs = tiny.align_parameters(cls.from_pretrained(tmp_path, **options)).to(device)
    pipe.enable_omni_offload(**{"layer": {"mode": "layer"}, "group of one": GATHERED}[way])
    assert not any(tensor.is_meta for tensor in all_tensors(pipe))
    reference = tiny.run(theirs, call)
    for _ in range(2):
        assert np.array_equal(tiny.run(pipe, call), reference)
    pipe.disable_omni_offload()
    assert not any(tensor.is_meta or is_withheld(tensor) for tensor in all_tensors(pipe))


@pytest.mark.parametrize("way", ["layer", "group of one"])
def test_transformers_45902_buffers_that_no_file_has(way: str, device: torch.device, wan: Path) -> None:
    """Positions were uninitialised memory where a model was built on meta."""
    eager, _ = cases.build("wan", 0)
    pipe = mapped(wan)
    handle = pipe.enable_omni_offload(**{"layer": {"mode": "layer"}, "group of one": GATHERED}[way])
    for _ in range(2):
        for name in ("transformer", "transformer_2"):
            found, right = buffers_of(getattr(pipe, name)), buffers_of(getattr(eager, name))
            assert found.keys() == right.keys() and len(right) >= 2
            assert all(torch.equal(tensor.cpu(), right[path]) for path, tensor in found.items())
        tiny.run(pipe, call)
    assert handle.loads > 0
    pipe.disable_omni_offload()
    assert all(torch.equal(t, buffers_of(eager.transformer)[path]) for path, t in buffers_of(pipe.transformer).items())
