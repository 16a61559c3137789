"""What a checkpoint proves, what it doesn't and why, and reading any range of what was proven."""

from __future__ import annotations

import gc
import json
import os
import random
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from diffusers_omni_offload.declarations import Stored
from diffusers_omni_offload.weights import sources as sources_module
from diffusers_omni_offload.weights.checkpoint import Checkpoint, CheckpointError
from diffusers_omni_offload.weights.leaves import Layout
from diffusers_omni_offload.weights.proof import find_checkpoint, prove, remember, remembered, stored_weights
from diffusers_omni_offload.weights.sources import BlockSource, LeafSource, Segment, bytes_of, same_bytes


class Attention(nn.Module):
    """Three projections of different heights, as grouped attention has them."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = nn.Linear(width, 8), nn.Linear(width, 4), nn.Linear(width, 4)
        self.register_buffer("scale", torch.rand(3))
        self.register_buffer("angles", torch.rand(4), persistent=False)


class Model(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention() for _ in range(blocks))
        self.register_buffer("steps", torch.arange(3))


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


Tensors = dict[str, torch.Tensor]


def saved(folder: Path, tensors: Mapping[str, torch.Tensor], name: str = "model") -> Checkpoint:
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / f"{name}.safetensors")
    return Checkpoint.find(folder, names=(name,))


def proven(module: nn.Module, checkpoint: Checkpoint, **options: Any) -> dict[str, LeafSource]:
    found = prove(module, checkpoint, **options)
    assert isinstance(found, dict), found
    return found


def changed(tensors: Tensors, change: Callable[[Tensors], Any]) -> Tensors:
    change(tensors)
    return tensors


# What proves ------------------------------------------------------------------------------------------------------


def test_every_parameter_and_persistent_buffer_has_its_source(model: Model, tmp_path: Path) -> None:
    found = proven(model, saved(tmp_path, model.state_dict()))
    assert found.keys() == model.state_dict().keys() == stored_weights(model).keys()
    assert "blocks.0.angles" not in found
    for path, tensor in model.state_dict().items():
        source = found[path]
        assert not source.is_cast and source.nbytes == tensor.numel() * tensor.element_size()
        view = source.view()
        assert view is not None and torch.equal(view, tensor) and torch.equal(source.read(), tensor)
        assert same_bytes(tensor, source) and same_bytes(view, source)


def test_a_module_on_meta_proves_as_well(model: Model, tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, model.state_dict())
    assert proven(model.to("meta"), checkpoint).keys() == model.state_dict().keys()


def test_shards_prove_together(model: Model, tmp_path: Path) -> None:
    from huggingface_hub import save_torch_model

    save_torch_model(model, tmp_path, max_shard_size=300)
    checkpoint = Checkpoint.find(tmp_path)
    assert len(checkpoint.files) > 2
    found = proven(model, checkpoint)
    assert {file for source in found.values() for file in source.files} == set(checkpoint.files)
    assert all(torch.equal(found[path].read(), tensor) for path, tensor in model.state_dict().items())


def test_the_views_are_of_the_file(model: Model, tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, model.state_dict())
    source = proven(model, checkpoint)["blocks.1.to_q.weight"]
    with torch.inference_mode():
        view = source.view()
    assert view is not None and not view.is_inference()
    assert checkpoint.files[0].is_viewed_by(view, source.segments[0].start)
    view[0, 0] += 1
    assert not same_bytes(view, source)
    assert not torch.equal(source.read(), view) and torch.equal(source.read(), model.blocks[1].to_q.weight)


def test_a_neighbours_edit_on_the_same_page_changes_nothing(model: Model, tmp_path: Path) -> None:
    found = proven(model, saved(tmp_path, model.state_dict()))
    mine, other = found["blocks.0.to_q.weight"].view(), found["blocks.0.to_k.weight"].view()
    assert mine is not None and other is not None
    other += 1
    assert same_bytes(mine, found["blocks.0.to_q.weight"]) and not same_bytes(other, found["blocks.0.to_k.weight"])


def test_what_is_in_memory_is_compared_bit_by_bit(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources_module, "_CHUNK_BYTES", 16)
    weight = model.blocks[0].to_q.weight
    source = proven(model, saved(tmp_path, model.state_dict()))["blocks.0.to_q.weight"]
    assert same_bytes(weight, source)
    assert not same_bytes(weight.to(torch.float64), source) and not same_bytes(weight.reshape(6, 8), source)
    assert not same_bytes(weight.t().contiguous().t(), source)
    with torch.no_grad():
        weight[-1, -1] = torch.nextafter(weight[-1, -1], torch.tensor(9.0))
    assert not same_bytes(weight, source)
    zero, negative = torch.zeros(2), -torch.zeros(2)
    holder = nn.Module()
    holder.register_buffer("zero", zero)
    assert not same_bytes(negative, proven(holder, saved(tmp_path, {"zero": zero}, "zero"))["zero"])


@pytest.mark.parametrize("wide", [False, True])
def test_a_cast_gives_what_loading_would_give(
    model: Model, tmp_path: Path, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float32 in the file for a bfloat16 module, and the other way round."""
    monkeypatch.setattr(sources_module, "_CHUNK_BYTES", 24)
    stored, mine = (torch.bfloat16, torch.float32) if wide else (torch.float32, torch.bfloat16)
    on_disk = {key: t.to(stored) if t.is_floating_point() else t for key, t in model.state_dict().items()}
    checkpoint = saved(tmp_path, on_disk)
    model.to(mine)
    reason = prove(model, checkpoint)
    assert isinstance(reason, str)
    assert f"{str(mine)[6:]}, but model.safetensors has 'blocks.0." in reason and "no cast is declared" in reason
    found = proven(model, checkpoint, casts=True)
    for path, source in found.items():
        expected = on_disk[path].to(source.dtype)
        assert source.is_cast == (path != "steps") == (source.view() is None)
        assert torch.equal(source.read(), expected) and same_bytes(expected, source)
        whole = bytes_of(expected)
        for start in range(0, whole.numel(), 5):
            target = torch.zeros(7, dtype=torch.uint8)[: whole.numel() - start]
            source.read_into(target, start)
            assert torch.equal(target, whole[start : start + target.numel()]), (path, start)


def test_a_declared_cast_is_for_its_parameters_only(model: Model, tmp_path: Path) -> None:
    cast_scales = {"blocks.*.scale": Stored("blocks.*.scale", cast=True)}
    tensors = model.state_dict()
    tensors["blocks.0.scale"] = tensors["blocks.0.scale"].to(torch.float16)
    assert proven(model, saved(tmp_path, tensors), layouts=cast_scales)["blocks.0.scale"].is_cast
    tensors["blocks.0.to_q.bias"] = tensors["blocks.0.to_q.bias"].to(torch.float16)
    reason = prove(model, saved(tmp_path, tensors), layouts=cast_scales)
    assert isinstance(reason, str) and reason.startswith("blocks.0.to_q.bias is float32, but")


def test_a_declared_rename_finds_its_key(model: Model, tmp_path: Path) -> None:
    tensors = {key.replace("blocks.", "layers.").replace("to_q", "query"): t for key, t in model.state_dict().items()}
    layouts = {"blocks.*.to_q.*": Stored("layers.*.query.*"), "blocks.*.scale": Stored("layers.*.scale")}
    layouts["blocks.*.*.*"] = Stored("layers.*.*.*")
    found = proven(model, saved(tmp_path, tensors), layouts=layouts)
    assert all(torch.equal(found[path].read(), tensor) for path, tensor in model.state_dict().items())


FUSED = {
    f"blocks.*.to_{name}.*": Stored("blocks.*.qkv.*", sizes=(2, 1, 1), parts=(part,)) for part, name in enumerate("qkv")
}
GROUPED = {
    f"blocks.*.to_{name}.*": Stored("blocks.*.qkv.*", groups=2, sizes=(2, 1, 1), parts=(part,))
    for part, name in enumerate("qkv")
}


def fused(tensors: Tensors, groups: int = 1) -> Tensors:
    """The three projections in one, whole or by groups of heads."""
    result = {key: tensor for key, tensor in tensors.items() if ".to_" not in key}
    for number in range(2):
        for kind in ("weight", "bias"):
            parts = [tensors[f"blocks.{number}.to_{name}.{kind}"].chunk(groups) for name in "qkv"]
            result[f"blocks.{number}.qkv.{kind}"] = torch.cat([part[g] for g in range(groups) for part in parts])
    return result


@pytest.mark.parametrize(("groups", "layouts"), [(1, FUSED), (2, GROUPED)])
@pytest.mark.parametrize("casts", [False, True])
def test_fused_and_grouped_projections_are_taken_apart(
    model: Model, tmp_path: Path, groups: int, layouts: dict[str, Stored], casts: bool
) -> None:
    on_disk = fused(model.state_dict(), groups)
    if casts:
        model.to(torch.float16)
    found = proven(model, saved(tmp_path, on_disk), layouts=layouts, casts=casts)
    for path, tensor in model.state_dict().items():
        source = found[path]
        assert torch.equal(source.read(), tensor)
        assert (source.view() is None) == (bool(source.is_cast) or (groups == 2 and ".to_" in path))
    assert len(found["blocks.0.to_q.weight"].segments) == groups


def test_parts_in_another_order_are_put_together(tmp_path: Path) -> None:
    stored = torch.arange(24.0).view(12, 2)
    holder = nn.Module()
    holder.weight = nn.Parameter(torch.empty(12, 2))
    layout = {"weight": Stored("grouped", groups=2, sizes=(3, 2, 1), parts=(0, 1, 2))}
    source = proven(holder, saved(tmp_path, {"grouped": stored}), layouts=layout)["weight"]
    rows = [0, 1, 2, 6, 7, 8, 3, 4, 9, 10, 5, 11]
    assert torch.equal(source.read(), stored[rows])
    assert [segment.nbytes // 8 for segment in source.segments] == [3, 3, 2, 2, 1, 1]
    whole = {"weight": Stored("grouped", groups=1, sizes=(3, 2, 1), parts=(0, 1, 2))}
    assert proven(holder, saved(tmp_path, {"grouped": stored}), layouts=whole)["weight"].view() is not None


def test_a_tied_weight_has_one_source(model: Model, tmp_path: Path) -> None:
    model.blocks[1].to_q = model.blocks[0].to_q
    tensors = model.state_dict()
    del tensors["blocks.0.to_q.weight"], tensors["blocks.1.to_q.bias"]
    found = proven(model, saved(tmp_path, tensors))
    for kind in ("weight", "bias"):
        assert found[f"blocks.0.to_q.{kind}"] is found[f"blocks.1.to_q.{kind}"]
        assert torch.equal(found[f"blocks.0.to_q.{kind}"].read(), getattr(model.blocks[0].to_q, kind))


def test_keys_that_diffusers_ignores_may_be_there(model: Model, tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, {**model.state_dict(), "norm_added_q.weight": torch.ones(1)})
    assert "norm_added_q.weight" in str(prove(model, checkpoint))
    model._keys_to_ignore_on_load_unexpected = ["norm_added_q"]
    assert proven(model, checkpoint).keys() == model.state_dict().keys()


def test_empty_weights_have_nothing_to_read(tmp_path: Path) -> None:
    holder = nn.Module()
    holder.weight = nn.Parameter(torch.empty(0, 3))
    source = proven(holder, saved(tmp_path, {"weight": torch.empty(0, 3)}))["weight"]
    view = source.view()
    assert source.segments == () and view is not None and view.shape == (0, 3) and source.read().shape == (0, 3)
    assert same_bytes(view, source)


# What doesn't -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda t: t.update({"blocks.0.query.weight": t.pop("blocks.0.to_q.weight")}),
            ["model.safetensors has no 'blocks.0.to_q.weight'", "closest keys are", "'blocks.0.query.weight'"],
        ),
        (lambda t: t.pop("steps"), ["model.safetensors has no 'steps'"]),
        (lambda t: t.pop("blocks.1.scale"), ["has no 'blocks.1.scale'"]),
        (lambda t: t.update(more=torch.ones(1)), ["has 'more', which Model has no weight for"]),
        (
            lambda t: t.update({f"more.{n}": torch.ones(1) for n in range(5)}),
            ["'more.0', 'more.1', 'more.2' and 2 more"],
        ),
        (
            lambda t: t.update({"blocks.0.angles": torch.ones(4)}),
            ["has 'blocks.0.angles', which Model has no weight for"],
        ),
        (
            lambda t: t.update({"blocks.1.to_k.weight": torch.ones(6, 4)}),
            ["blocks.1.to_k.weight has the shape [4, 6]", "'blocks.1.to_k.weight' of [6, 4]."],
        ),
        (
            lambda t: t.update({"blocks.1.to_k.bias": torch.ones(4).double()}),
            ["blocks.1.to_k.bias is float32", "in float64", "no cast"],
        ),
        (lambda t: t.update(steps=torch.arange(3.0)), ["steps is int64", "in float32."]),
    ],
)
def test_what_does_not_fit_gives_a_reason(
    model: Model, tmp_path: Path, change: Callable[[Tensors], Any], words: list[str]
) -> None:
    reason = prove(model, saved(tmp_path, changed(model.state_dict(), change)))
    assert isinstance(reason, str) and reason.endswith(".")
    assert all(word in reason for word in words), reason


@pytest.mark.parametrize("stored", [torch.int32, torch.bool])
def test_only_floating_point_is_cast(model: Model, tmp_path: Path, stored: torch.dtype) -> None:
    tensors = model.state_dict()
    tensors["steps"] = tensors["steps"].to(stored)
    assert "steps is int64" in str(prove(model, saved(tmp_path, tensors), casts=True))


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        (Stored("missing.*"), ["has no 'missing.0', which blocks.0.scale is declared to come from"]),
        (Stored("blocks.*.to_q.weight"), ["shape [3]", "of [8, 6]."]),
        (Stored("blocks.*.to_q.bias", sizes=(1, 2)), ["shape [8]", "1 groups", "1:2"]),
        (Stored("blocks.*.to_q.bias", groups=3), ["shape [8]", "3 groups"]),
        (Stored("blocks.*.to_q.bias", sizes=(1, 3)), ["shape [3]", "of [8], which gives [2]"]),
        (Stored("blocks.*.to_q.bias", sizes=(3, 5)), ["would be read from the same bytes of model.safetensors"]),
    ],
)
def test_a_declaration_that_does_not_fit_gives_a_reason(
    model: Model, tmp_path: Path, stored: Stored, words: list[str]
) -> None:
    tensors = {key: tensor for key, tensor in model.state_dict().items() if "scale" not in key}
    reason = prove(model, saved(tmp_path, tensors), layouts={"blocks.*.scale": stored})
    assert isinstance(reason, str)
    assert all(word in reason for word in words), reason


def test_a_scalar_cannot_be_divided(tmp_path: Path) -> None:
    holder = nn.Module()
    holder.weight = nn.Parameter(torch.empty(1))
    layouts = {"weight": Stored("weight", sizes=(1, 1))}
    assert "can't be divided" in str(prove(holder, saved(tmp_path, {"weight": torch.tensor(1.0)}), layouts=layouts))


def test_a_tied_weight_that_the_file_has_twice_gives_a_reason(model: Model, tmp_path: Path) -> None:
    model.blocks[1].to_q = model.blocks[0].to_q
    tensors = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    reason = prove(model, saved(tmp_path, tensors))
    assert isinstance(reason, str) and "one tied weight, but" in reason and "'blocks.1.to_q.weight'" in reason


def test_a_weight_that_is_not_plain_or_not_contiguous_gives_a_reason(model: Model, tmp_path: Path) -> None:
    class Packed(nn.Parameter):
        pass

    checkpoint = saved(tmp_path, model.state_dict())
    to_q = model.blocks[0].to_q
    plain = to_q.weight
    to_q.weight = Packed(plain.data)
    assert "blocks.0.to_q.weight is a Packed" in str(prove(model, checkpoint))
    to_q.weight = nn.Parameter(plain.data.t().contiguous().t())
    assert "blocks.0.to_q.weight has the strides (1, 8)" in str(prove(model, checkpoint))


# Packed blocks ----------------------------------------------------------------------------------------------------


def block_of(found: Mapping[str, LeafSource], model: Model) -> tuple[BlockSource, torch.Tensor]:
    """The first block as it would be packed, and the bytes that reading it should give; padding is 255."""
    block = model.blocks[0]
    named = [*block.named_parameters(), *block.named_buffers()]
    placements = Layout([tensor for _, tensor in named]).placements
    nbytes = -(-max(p.offset + p.nbytes for p in placements) // 256) * 256
    expected = torch.full((nbytes,), 255, dtype=torch.uint8)
    leaves: list[tuple[int, LeafSource | torch.Tensor]] = []
    for (name, tensor), place in zip(named, placements, strict=True):
        expected[place.offset : place.offset + place.nbytes] = bytes_of(tensor)
        leaves.append((place.offset, found.get(f"blocks.0.{name}", tensor)))
    return BlockSource(leaves, nbytes), expected


KINDS: dict[str, tuple[Callable[[Tensors], Tensors], dict[str, Any]]] = {
    "plain": (lambda t: t, {}),
    "grouped": (lambda t: fused(t, 2), {"layouts": GROUPED}),
    "cast": (
        lambda t: {k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in t.items()},
        {"casts": True},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_any_range_of_a_packed_block_can_be_read(model: Model, tmp_path: Path, kind: str) -> None:
    change, options = KINDS[kind]
    model.load_state_dict({key: t.to(torch.bfloat16).to(t.dtype) for key, t in model.state_dict().items()})
    source, expected = block_of(proven(model, saved(tmp_path, change(model.state_dict())), **options), model)
    assert len(source.files) == 1
    ranges = [(0, source.nbytes)]
    draw = random.Random(0)
    for _ in range(60):
        start = draw.randrange(source.nbytes)
        ranges.append((start, draw.randint(start, source.nbytes)))
    for start, stop in ranges:
        target = torch.full((stop - start,), 255, dtype=torch.uint8)
        source.read_into(target, start)
        assert torch.equal(target, expected[start:stop]), (start, stop)


def test_what_follows_in_the_file_is_read_in_one_go(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, expected = block_of(proven(model, saved(tmp_path, model.state_dict())), model)
    calls: list[int] = []
    whole = os.preadv

    def counted(descriptor: int, buffers: Any, start: int) -> int:
        calls.append(len(buffers))
        return whole(descriptor, buffers, start)

    monkeypatch.setattr(os, "preadv", counted)
    target = torch.full_like(expected, 255)
    source.read_into(target)
    assert torch.equal(target, expected)
    assert calls == [7], "the file has the block's seven tensors side by side"


def test_a_block_over_several_files_is_read(model: Model, tmp_path: Path) -> None:
    from huggingface_hub import save_torch_model

    save_torch_model(model, tmp_path, max_shard_size=200)
    source, expected = block_of(proven(model, Checkpoint.find(tmp_path)), model)
    assert len(source.files) > 1
    target = torch.full_like(expected, 255)
    source.read_into(target)
    assert torch.equal(target, expected)


def test_places_in_two_files_do_not_follow_each_other(tmp_path: Path) -> None:
    files = []
    for number in range(2):
        content = torch.arange(100, dtype=torch.uint8) + 100 * number
        files += saved(tmp_path, {"a": content}, f"file_{number}").files
    start = files[0].entries["a"].start
    for first, second in (files, files[::-1]):
        segments = (Segment(first, start, 10), Segment(second, start + 10, 20))
        source = LeafSource(segments, torch.uint8, torch.uint8, torch.Size([30]))
        expected = [*range(10), *range(10, 30)]
        steps = [100 * files.index(first)] * 10 + [100 * files.index(second)] * 20
        assert source.read().tolist() == [value + step for value, step in zip(expected, steps, strict=True)]


def test_a_weight_that_is_not_aligned_in_the_file_is_read(tmp_path: Path) -> None:
    weight = torch.arange(6.0)
    header = json.dumps({"weight": {"dtype": "F32", "shape": [6], "data_offsets": [0, 24]}})
    header += " " * ((1 - len(header)) % 4)
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(bytes_of(weight).tolist()))
    holder = nn.Module()
    holder.weight = nn.Parameter(torch.empty(6))
    source = proven(holder, Checkpoint.find(tmp_path))["weight"]
    assert source.segments[0].start % 4 == 1
    assert source.view() is None and torch.equal(source.read(), weight) and same_bytes(weight, source)


def test_a_thread_reads_what_inference_mode_made(model: Model, tmp_path: Path) -> None:
    on_disk = {k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in model.state_dict().items()}
    model.load_state_dict(on_disk)
    source, expected = block_of(proven(model, saved(tmp_path, on_disk), casts=True), model)
    with torch.inference_mode():
        target = torch.full((source.nbytes,), 255, dtype=torch.uint8)
    assert target.is_inference()
    thread = threading.Thread(target=source.read_into, args=(target,))
    thread.start()
    thread.join()
    assert torch.equal(target, expected)


@pytest.mark.parametrize("change", ["size", "time"])
def test_a_block_of_a_file_that_changed_is_an_error(model: Model, tmp_path: Path, change: str) -> None:
    found = proven(model, saved(tmp_path, model.state_dict()))
    source, expected = block_of(found, model)
    view = found["blocks.0.scale"].view()
    assert view is not None
    path = tmp_path / "model.safetensors"
    if change == "size":
        os.truncate(path, 64)
    else:
        os.utime(path, ns=(5, 5))
    for use in (
        lambda: source.read_into(torch.empty_like(expected)),
        source.require_unchanged,
        found["blocks.0.scale"].require_unchanged,
        found["blocks.0.scale"].read,
        lambda: same_bytes(model.blocks[0].scale, found["blocks.0.scale"]),
        lambda: same_bytes(view, found["blocks.0.scale"]),
    ):
        with pytest.raises(CheckpointError, match=r"model\.safetensors was"):
            use()


# The checkpoint of a module that was loaded -------------------------------------------------------------------------


def vae(width: int = 4) -> Any:
    from diffusers import AutoencoderTiny

    channels = (width, width)
    return AutoencoderTiny(
        num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1),
        encoder_block_out_channels=channels,
        decoder_block_out_channels=channels,
    )


def test_the_folder_that_a_model_was_loaded_from_is_found(tmp_path: Path) -> None:
    vae().save_pretrained(tmp_path, max_shard_size="2KB")
    module = type(vae()).from_pretrained(tmp_path)
    checkpoint = find_checkpoint(module)
    assert isinstance(checkpoint, Checkpoint) and len(checkpoint.files) > 1
    found = proven(module, checkpoint)
    assert all(same_bytes(tensor, found[path]) for path, tensor in module.state_dict().items())


def test_among_variants_it_is_the_one_that_was_loaded(tmp_path: Path) -> None:
    for variant in (None, "ema", "other"):
        vae().save_pretrained(tmp_path, variant=variant)
    vae().half().save_pretrained(tmp_path, variant="fp16")
    cls = type(vae())
    for variant, name in ((None, ""), ("ema", ".ema"), ("other", ".other")):
        checkpoint = find_checkpoint(cls.from_pretrained(tmp_path, variant=variant))
        assert isinstance(checkpoint, Checkpoint)
        assert checkpoint.files[0].path.name == f"diffusion_pytorch_model{name}.safetensors"
    half = cls.from_pretrained(tmp_path, variant="fp16", torch_dtype=torch.float16)
    checkpoint = find_checkpoint(half)
    assert isinstance(checkpoint, Checkpoint) and checkpoint.files[0].path.name.endswith(".fp16.safetensors")


def test_a_subfolder_is_found_by_the_class(tmp_path: Path) -> None:
    vae().save_pretrained(tmp_path / "vae")
    vae().save_pretrained(tmp_path / "vae_2")
    vae(8).save_pretrained(tmp_path / "vae_3")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    module = type(vae()).from_pretrained(tmp_path, subfolder="vae_2")
    checkpoint = find_checkpoint(module)
    assert isinstance(checkpoint, Checkpoint) and checkpoint.files[0].path.parent.name == "vae_2"


def test_models_of_transformers_are_found(tmp_path: Path) -> None:
    from tests.tiny.text_encoders import t5_encoder

    t5_encoder(16).save_pretrained(tmp_path)
    module = type(t5_encoder(16)).from_pretrained(tmp_path)
    checkpoint = find_checkpoint(module)
    assert isinstance(checkpoint, Checkpoint), checkpoint
    assert checkpoint.files[0].path == tmp_path / "model.safetensors"
    assert module.shared.weight is module.encoder.embed_tokens.weight
    found = proven(module, checkpoint)
    assert found["shared.weight"] is found["encoder.embed_tokens.weight"]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "diffusion_pytorch_model.safetensors").unlink(), "has no safetensors files of"),
        (lambda folder: os.truncate(folder / "diffusion_pytorch_model.safetensors", 2000), "was cut short"),
        (lambda folder: vae(8).save_pretrained(folder), "has the shape"),
    ],
)
def test_why_no_checkpoint_is_found(tmp_path: Path, damage: Callable[[Path], Any], words: str) -> None:
    vae().save_pretrained(tmp_path)
    module = type(vae()).from_pretrained(tmp_path, disable_mmap=True)
    damage(tmp_path)
    reason = find_checkpoint(module)
    assert isinstance(reason, str) and words in reason


def test_a_model_from_nowhere_has_no_checkpoint(tmp_path: Path) -> None:
    assert "doesn't say where" in str(find_checkpoint(vae()))
    module = vae()
    module.register_to_config(_name_or_path="someone/some-model")
    assert "'someone/some-model', which isn't a folder" in str(find_checkpoint(module))


def test_files_that_do_not_prove_are_closed(tmp_path: Path) -> None:
    vae().save_pretrained(tmp_path)
    vae().half().save_pretrained(tmp_path, variant="fp16")
    module = type(vae()).from_pretrained(tmp_path, disable_mmap=True)
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    checkpoint = find_checkpoint(module)
    assert isinstance(checkpoint, Checkpoint)
    assert len(set(os.listdir("/proc/self/fd")) - before) == 1
    checkpoint.close()
    assert set(os.listdir("/proc/self/fd")) <= before


def test_a_proof_is_kept_as_long_as_the_module(model: Model, tmp_path: Path) -> None:
    found = proven(model, saved(tmp_path, model.state_dict()))
    assert remembered(model) is None
    remember(model, found)
    assert remembered(model) is found
    assert remembered(Model()) is None


def test_an_index_that_lies_is_the_reason(tmp_path: Path) -> None:
    vae().save_pretrained(tmp_path, max_shard_size="2KB")
    module = type(vae()).from_pretrained(tmp_path)
    index = tmp_path / "diffusion_pytorch_model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["nowhere"] = "gone.safetensors"
    index.write_text(json.dumps(content))
    assert "names the file gone.safetensors" in str(find_checkpoint(module))
