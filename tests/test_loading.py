"""A pipeline whose DiTs' weights stay in the checkpoint's files is what `from_pretrained` gives."""

from __future__ import annotations

import gc
import json
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from diffusers_omni_offload.declarations import OffloadPlan, Stored
from diffusers_omni_offload.loading import load_omni_pipeline
from diffusers_omni_offload.weights.checkpoint import CheckpointError
from diffusers_omni_offload.weights.proof import read_withheld, remembered, stored_weights
from diffusers_omni_offload.weights.sources import same_bytes
from diffusers_omni_offload.weights.withheld import is_withheld
from tests import tiny

FAMILIES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "wan": tiny.build_wan,
    "flux2": tiny.build_flux2,
    "qwen_image": tiny.build_qwen_image,
    "sd3": tiny.build_sd3,
    "cosmos3": tiny.build_cosmos3_omni,
}
WEIGHTS = "diffusion_pytorch_model"

#: One file, shards with an index, and both in a variant.
FORMS: dict[str, dict[str, Any]] = {
    "single": {},
    "sharded": {"max_shard_size": "20KB"},
    "variant": {"variant": "fp16"},
    "sharded variant": {"variant": "fp16", "max_shard_size": "20KB"},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any, Any]]:
    """By family: a folder with the pipeline's shards, its class, and what makes arguments for a call."""
    made: dict[str, tuple[Path, Any, Any]] = {}

    def save(family: str) -> tuple[Path, Any, Any]:
        if family not in made:
            pipe, call = FAMILIES[family]()
            folder = tmp_path_factory.mktemp(family)
            pipe.save_pretrained(folder, max_shard_size="20KB")
            made[family] = folder, type(pipe), call
        return made[family]

    return save


@pytest.fixture
def wan(tmp_path: Path) -> Path:
    """A folder of its own with a tiny Wan of two DiTs, each in one file."""
    tiny.build_wan()[0].save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def _no_warning_of_ours(request: pytest.FixtureRequest) -> Iterator[None]:
    """Nothing is loaded the ordinary way behind a test's back."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Some weights are loaded into memory")
        yield


def dits_of(pipe: Any) -> dict[str, nn.Module]:
    names = ("transformer", "transformer_2")
    return {name: getattr(pipe, name) for name in names if getattr(pipe, name, None) is not None}


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Non-persistent ones."""
    return {name: buffer for name, buffer in module.named_buffers() if name not in module.state_dict()}


def assert_views_of_files(module: nn.Module) -> None:
    found = remembered(module)
    assert found is not None and found.keys() == module.state_dict().keys()
    for path, tensor in stored_weights(module).items():
        ((file, start, _),) = found[path].segments
        assert file.is_viewed_by(tensor, start), path
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size(), path


def assert_same_model(mine: nn.Module, theirs: nn.Module) -> None:
    """Same class, configuration, mode, weights and buffers, down to what asks for a gradient."""
    assert type(mine) is type(theirs) and not mine.training
    assert dict(mine.config) == dict(theirs.config)
    assert [*mine.state_dict()] == [*theirs.state_dict()]
    for (path, found), expected in zip(stored_weights(mine).items(), stored_weights(theirs).values(), strict=True):
        assert (type(found), found.dtype, found.requires_grad) == (
            type(expected),
            expected.dtype,
            expected.requires_grad,
        )
        assert torch.equal(found, expected), path
    assert buffers_of(mine).keys() == buffers_of(theirs).keys()
    for (path, found), expected in zip(buffers_of(mine).items(), buffers_of(theirs).values(), strict=True):
        assert found.dtype == expected.dtype and torch.equal(found, expected), path


# What from_pretrained gives ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_weights_and_buffers_are_those_of_ordinary_loading(saved: Any, family: str) -> None:
    folder, cls, call = saved(family)
    mine, theirs = load_omni_pipeline(cls, folder), cls.from_pretrained(folder)
    assert type(mine) is cls and dict(mine.config) == dict(theirs.config)
    assert len(dits_of(mine)) == (2 if family == "wan" else 1)
    for name, dit in dits_of(mine).items():
        assert len(list((folder / name).glob("*.safetensors"))) > 2
        assert_same_model(dit, getattr(theirs, name))
        assert_views_of_files(dit)
    assert np.array_equal(tiny.run(mine, call), tiny.run(theirs, call))
    assert all(same_bytes(dit.state_dict()[path], source) for dit in dits_of(mine).values()
               for path, source in remembered(dit).items()), "a call edits nothing"  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_single_files_shards_and_variants(tmp_path: Path, form: str) -> None:
    pipe, _ = tiny.build_wan()
    pipe.save_pretrained(tmp_path, **FORMS[form])
    variant = FORMS[form].get("variant")
    mine = load_omni_pipeline(type(pipe), tmp_path, variant=variant)
    theirs = type(pipe).from_pretrained(tmp_path, variant=variant)
    for name, dit in dits_of(mine).items():
        assert_same_model(dit, getattr(theirs, name))
        assert_views_of_files(dit)


def test_a_component_without_the_variant_has_its_ordinary_files(wan: Path) -> None:
    dit = tiny.build_wan()[0].transformer
    with torch.no_grad():
        for parameter in dit.parameters():
            parameter.add_(1)
    dit.save_pretrained(wan / "transformer", variant="ema")
    mine = load_omni_pipeline(tiny_class("wan"), wan, variant="ema")
    theirs = tiny_class("wan").from_pretrained(wan, variant="ema")
    for name in ("transformer", "transformer_2"):
        assert_same_model(getattr(mine, name), getattr(theirs, name))
        assert_views_of_files(getattr(mine, name))


def tiny_class(family: str) -> Any:
    return type(FAMILIES[family]()[0])


def test_buffers_that_no_file_has_are_there(saved: Any) -> None:
    """Positions of rotary embeddings, for one: the test above compares them, this one sees that there are some."""
    folder, cls, _ = saved("wan")
    mine = load_omni_pipeline(cls, folder)
    assert len(buffers_of(mine.transformer)) >= 2
    assert not any(tensor.is_meta for tensor in buffers_of(mine.transformer).values())


def test_the_class_may_be_left_to_the_index(saved: Any) -> None:
    from diffusers import DiffusionPipeline

    folder, cls, _ = saved("wan")
    mine = load_omni_pipeline(DiffusionPipeline, str(folder))
    assert type(mine) is cls
    assert_views_of_files(mine.transformer_2)


def test_a_pipeline_without_declarations_is_known_by_its_names(tmp_path: Path) -> None:
    from tests.zoo.families.pixart import pixart_sigma

    pipe, _ = pixart_sigma()
    pipe.save_pretrained(tmp_path)
    mine = load_omni_pipeline(type(pipe), tmp_path)
    assert_same_model(mine.transformer, type(pipe).from_pretrained(tmp_path).transformer)
    assert_views_of_files(mine.transformer)


def test_what_is_given_is_taken(wan: Path) -> None:
    given = tiny.build_wan()[0].transformer
    mine = load_omni_pipeline(tiny_class("wan"), wan, transformer=given, transformer_2=None)
    assert mine.transformer is given and mine.transformer_2 is None and remembered(given) is None


def test_a_repository_is_downloaded_first(wan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cls, asked = tiny_class("wan"), []

    def download(cls: Any, name: str, **kwargs: Any) -> str:
        asked.append((name, kwargs))
        return str(wan)

    monkeypatch.setattr(cls, "download", classmethod(download))
    mine = load_omni_pipeline(cls, "someone/tiny-wan", revision="main", cache_dir="/nowhere")
    assert asked == [("someone/tiny-wan", {"cache_dir": "/nowhere", "revision": "main"})]
    assert mine.config._name_or_path == "someone/tiny-wan"
    assert_views_of_files(mine.transformer)


def test_memory_is_taken_by_what_is_read_only(tmp_path: Path) -> None:
    from diffusers import WanTransformer3DModel

    pipe, _ = tiny.build_wan()
    # About 100 MB.
    large = WanTransformer3DModel(num_attention_heads=8, attention_head_dim=64, num_layers=6, ffn_dim=2048,
                                  freq_dim=16, in_channels=4, out_channels=4, text_dim=32)  # fmt: skip
    nbytes = sum(parameter.nbytes for parameter in large.parameters())
    pipe.register_modules(transformer=large)
    pipe.save_pretrained(tmp_path)
    cls = type(pipe)
    del pipe, large
    load_omni_pipeline(cls, tmp_path)
    gc.collect()
    before = anonymous_bytes()
    mine = load_omni_pipeline(cls, tmp_path)
    assert anonymous_bytes() - before < nbytes / 8
    assert nbytes > 80e6
    weight = mine.transformer.blocks[0].ffn.net[0].proj.weight
    before = anonymous_bytes()
    with torch.no_grad():
        weight.mul_(2)
    assert abs(anonymous_bytes() - before - weight.nbytes) < 1e6, "an edit takes the memory of what is edited"


def is_in_block(path: str) -> bool:
    return "blocks." in path or "layers." in path


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


# Casts ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("on_disk", [torch.float32, torch.bfloat16])
def test_dtypes_are_those_of_ordinary_loading(tmp_path: Path, saved: Any, family: str, on_disk: torch.dtype) -> None:
    folder, cls, call = saved(family)
    if on_disk is not torch.float32:
        FAMILIES[family]()[0].to(on_disk).save_pretrained(tmp_path)
        folder = tmp_path
    mine = load_omni_pipeline(cls, folder, torch_dtype=torch.bfloat16)
    theirs = cls.from_pretrained(folder, dtype=torch.bfloat16)
    for name, dit in dits_of(mine).items():
        expected = stored_weights(getattr(theirs, name))
        withheld = []
        for path, tensor in stored_weights(dit).items():
            assert (tensor.dtype, tensor.shape) == (expected[path].dtype, expected[path].shape), path
            source = remembered(dit)[path]
            if is_withheld(tensor):
                withheld.append(path)
                assert source.is_cast and is_in_block(path)
            else:
                assert torch.equal(tensor, expected[path]), path
        assert withheld == [path for path, source in remembered(dit).items() if source.is_cast and is_in_block(path)]
        assert withheld or on_disk is torch.bfloat16
        read_withheld(dit)
        assert_same_model(dit, getattr(theirs, name))
    assert np.array_equal(tiny.run(mine, call), tiny.run(theirs, call))


def test_reading_a_withheld_weight_says_where_it_is(wan: Path) -> None:
    mine = load_omni_pipeline(tiny_class("wan"), wan, torch_dtype=torch.bfloat16)
    weight = mine.transformer.blocks[0].attn1.to_q.weight
    assert is_withheld(weight) and weight.dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match=r"transformer\.blocks\.0\.attn1\.to_q\.weight .* has it in torch.float32"):
        weight.sum()
    assert not is_withheld(mine.transformer.patch_embedding.weight), "it is in no block"
    mine.transformer.patch_embedding.weight.sum()


def test_a_dtype_for_each_component(wan: Path) -> None:
    dtypes = {"transformer": torch.bfloat16, "default": torch.float16}
    mine = load_omni_pipeline(tiny_class("wan"), wan, torch_dtype=dtypes)
    theirs = tiny_class("wan").from_pretrained(wan, dtype=dtypes)
    for name in ("transformer", "transformer_2"):
        read_withheld(getattr(mine, name))
        assert_same_model(getattr(mine, name), getattr(theirs, name))
    assert mine.transformer_2.dtype == torch.float16


def test_the_default_dtype_is_left_as_it_was(wan: Path) -> None:
    config = wan / "transformer" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "patch_size": None}))
    with pytest.raises(Exception):  # noqa: B017
        load_omni_pipeline(tiny_class("wan"), wan, torch_dtype=torch.bfloat16)
    assert torch.get_default_dtype() == torch.float32
    assert not nn.Linear(1, 1).weight.is_meta


# Declared layouts and hooks ------------------------------------------------------------------------------------------


def fuse(folder: Path, heads: int) -> None:
    """Write the projections of each self-attention of the DiT as one tensor: whole, or by groups of heads."""
    path = folder / "transformer" / f"{WEIGHTS}.safetensors"
    tensors = load_file(path)
    for key in [key for key in tensors if ".attn1.to_q." in key]:
        parts = [tensors.pop(key.replace("to_q", f"to_{name}")).chunk(heads) for name in "qkv"]
        tensors[key.replace("to_q", "qkv")] = torch.cat([part[head] for head in range(heads) for part in parts])
    save_file(tensors, path)


def with_plan(**fields: Any) -> Any:
    class Declared(tiny_class("wan")):
        _dit_modules = ["transformer", "transformer_2"]
        _encoder_modules = ["text_encoder"]
        _vae_modules = ["vae"]
        _offload_plan = OffloadPlan(block_attrs={"transformer": ("blocks",), "transformer_2": ("blocks",)}, **fields)

    return Declared


@pytest.mark.parametrize("heads", [1, 2])
def test_declared_layouts_are_applied(wan: Path, heads: int) -> None:
    theirs = tiny_class("wan").from_pretrained(wan, disable_mmap=True)
    fuse(wan, heads)
    layouts = {
        f"blocks.*.attn1.to_{name}.*": Stored("blocks.*.attn1.qkv.*", groups=heads, sizes=(1, 1, 1), parts=(part,))
        for part, name in enumerate("qkv")
    }
    mine = load_omni_pipeline(with_plan(checkpoint_layouts={"transformer": layouts}), wan)
    assert is_withheld(mine.transformer.blocks[0].attn1.to_k.weight) == (heads > 1)
    read_withheld(mine.transformer)
    assert_same_model(mine.transformer, theirs.transformer)
    assert_views_of_files(mine.transformer_2)


def test_hooks_run_once_the_weights_are_there(wan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cls = with_plan(post_load={"transformer": "fill_table", "vae": "eval"})
    seen: list[float] = []
    dit_class = type(tiny.build_wan()[0].transformer)
    monkeypatch.setattr(dit_class, "fill_table", lambda self: seen.append(float(self.proj_out.weight.sum())), False)
    mine = load_omni_pipeline(cls, wan)
    assert seen == [float(mine.transformer.proj_out.weight.sum())]
    with pytest.raises(ValueError, match=r"'transformer': 'fill' in post_load, but .*has no 'fill'"):
        load_omni_pipeline(with_plan(post_load={"transformer": "fill"}), wan)


# The ordinary way ----------------------------------------------------------------------------------------------------


def use_pickles(folder: Path) -> None:
    path = folder / "transformer" / f"{WEIGHTS}.safetensors"
    torch.save(load_file(path), path.with_suffix(".bin"))
    path.unlink()


def add_a_key(folder: Path) -> None:
    path = folder / "transformer" / f"{WEIGHTS}.safetensors"
    save_file({**load_file(path), "more": torch.ones(1)}, path)


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        (use_pickles, {}, ["transformer: ", "no diffusion_pytorch_model.safetensors"]),
        (add_a_key, {}, ["'more', which WanTransformer3DModel has no weight for"]),
        (None, {"disable_mmap": True}, ["transformer: disable_mmap=True was given.", "transformer_2: disable_mmap"]),
        (None, {"low_cpu_mem_usage": True, "use_flashpack": None}, []),
    ],
)
def test_what_cannot_be_proven_is_loaded_the_ordinary_way(
    wan: Path, change: Callable[[Path], None] | None, options: dict[str, Any], words: list[str]
) -> None:
    if change is not None:
        change(wan)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mine = load_omni_pipeline(tiny_class("wan"), wan, **options)
    ours = [str(warning.message) for warning in caught if "into memory" in str(warning.message)]
    assert len(ours) == bool(words) and all(word in ours[0] for word in words), ours
    theirs = tiny_class("wan").from_pretrained(wan, **options)
    for name, dit in dits_of(mine).items():
        assert (remembered(dit) is None) == any(f"{name}: " in sentence for sentence in ours)
        assert_same_model(dit, getattr(theirs, name))


def test_a_system_that_lacks_what_is_needed_loads_the_ordinary_way(wan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "preadv")
    with pytest.warns(UserWarning, match="no preadv"):
        mine = load_omni_pipeline(tiny_class("wan"), wan)
    assert remembered(mine.transformer) is None


def cut_a_file(folder: Path) -> str:
    path = folder / f"{WEIGHTS}.safetensors"
    os.truncate(path, path.stat().st_size - 8)
    return "was cut short"


def rename_a_key(folder: Path) -> str:
    tensors = load_file(folder / f"{WEIGHTS}.safetensors")
    tensors["proj.weight"] = tensors.pop("proj_out.weight")
    save_file(tensors, folder / f"{WEIGHTS}.safetensors")
    return "has no 'proj_out.weight'; the closest keys are 'proj.weight'"


def change_a_shape(folder: Path) -> str:
    tensors = load_file(folder / f"{WEIGHTS}.safetensors")
    tensors["proj_out.weight"] = tensors["proj_out.weight"][1:].contiguous()
    save_file(tensors, folder / f"{WEIGHTS}.safetensors")
    return "proj_out.weight has the shape"


def shard(folder: Path) -> Path:
    tiny.build_wan()[0].transformer_2.save_pretrained(folder, max_shard_size="20KB")
    (folder / f"{WEIGHTS}.safetensors").unlink()
    return folder / f"{WEIGHTS}.safetensors.index.json"


def lose_the_index(folder: Path) -> str:
    shard(folder).unlink()
    return f"shards .* but no {WEIGHTS}.safetensors.index.json"


def lose_a_shard(folder: Path) -> str:
    shard(folder)
    next(folder.glob("*-00002-of-*")).unlink()
    return "names the file .*-00002-of-"


def cut_a_shard(folder: Path) -> str:
    shard(folder)
    os.truncate(next(folder.glob("*-00002-of-*")), 500)
    return r"-00002-of-\d+.safetensors (was cut short|says that its header)"


def empty_a_key(folder: Path) -> str:
    """The index says that a shard has what it hasn't; ordinary loading then leaves the weight on meta."""
    shard(folder)
    path = next(folder.glob("*-00002-of-*"))
    tensors = load_file(path)
    tensors.pop(next(iter(tensors)))
    save_file(tensors, path)
    return "says that it has .* but it hasn't"


@pytest.mark.parametrize(
    "damage",
    [cut_a_file, rename_a_key, change_a_shape, lose_the_index, lose_a_shard, cut_a_shard, empty_a_key],
)
def test_damage_that_no_way_of_loading_can_mend_is_an_error(wan: Path, damage: Callable[[Path], str]) -> None:
    words = damage(wan / "transformer_2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(CheckpointError, match=words) as caught:
            load_omni_pipeline(tiny_class("wan"), wan)
    assert "transformer_2" in str(caught.value)


def test_the_class_has_to_be_one_of_diffusers() -> None:
    with pytest.raises(TypeError, match="takes a class such as WanPipeline; it was given"):
        load_omni_pipeline(nn.Linear, "somewhere")  # type: ignore[type-var]


def test_buffers_are_made_in_the_dtype_that_was_asked_for(wan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cls = type(tiny.build_wan()[0].transformer.condition_embedder)
    made = cls.__init__

    def with_table(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.register_buffer("table", torch.ones(3) / 3, persistent=False)

    monkeypatch.setattr(cls, "__init__", with_table)
    mine = load_omni_pipeline(tiny_class("wan"), wan, torch_dtype=torch.bfloat16)
    theirs = tiny_class("wan").from_pretrained(wan, dtype=torch.bfloat16)
    assert mine.transformer.condition_embedder.table.dtype == torch.bfloat16
    read_withheld(mine.transformer)
    assert_same_model(mine.transformer, theirs.transformer)


def test_models_with_a_way_of_their_own_are_left_to_it(wan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cls = type(tiny.build_wan()[0].transformer)
    ordinary = cls.from_pretrained
    monkeypatch.setattr(cls, "from_pretrained", classmethod(lambda cls, *args, **kwargs: ordinary(*args, **kwargs)))
    with pytest.warns(UserWarning, match="WanTransformer3DModel has a way of loading of its own"):
        mine = load_omni_pipeline(tiny_class("wan"), wan)
    assert remembered(mine.transformer) is None


def test_weights_that_are_cast_to_bytes_are_loaded_the_ordinary_way(wan: Path) -> None:
    dtypes = {"transformer": torch.float8_e4m3fn, "default": torch.float32}
    with pytest.warns(UserWarning, match="transformer: torch.float8_e4m3fn was asked for"):
        mine = load_omni_pipeline(tiny_class("wan"), wan, torch_dtype=dtypes)
    assert remembered(mine.transformer) is None and remembered(mine.transformer_2) is not None


def test_quantized_weights_are_left_to_their_library(wan: Path) -> None:
    config = wan / "transformer" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": {"quant_method": "none"}}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(CheckpointError, match="has quantized weights"):
            load_omni_pipeline(tiny_class("wan"), wan)
