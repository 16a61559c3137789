"""Open checkpoint files: what is believed of them, reads, edits of the mapping, and finding a model's files."""

from __future__ import annotations

import gc
import json
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from diffusers_omni_offload.weights import checkpoint as module
from diffusers_omni_offload.weights import pagemap
from diffusers_omni_offload.weights.checkpoint import Checkpoint, CheckpointError, CheckpointFile, variants_in

PAGE = pagemap.PAGE


def some_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "wide": torch.randn(300, 500, generator=generator),
        "half": torch.randn(7, 11, generator=generator).to(torch.bfloat16),
        "count": torch.tensor(5),
        "flags": torch.tensor([True, False, True]),
        "none": torch.empty(0, 4),
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(some_tensors(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


# Reading -------------------------------------------------------------------------------------------------------------


def test_every_tensor_is_read_and_seen_through_the_mapping(path: Path) -> None:
    tensors = some_tensors()
    with CheckpointFile(path) as file:
        assert file.entries.keys() == tensors.keys()
        for key, entry in file.entries.items():
            assert (entry.dtype, entry.shape) == (tensors[key].dtype, tuple(tensors[key].shape))
            target = bytearray(entry.nbytes)
            file.read(entry.start, [memoryview(target)])
            assert bytes(target) == bytes_of(tensors[key])
            view = file.view(entry.start, entry.nbytes)
            assert torch.equal(view.view(entry.dtype).view(entry.shape), tensors[key])
            assert view.untyped_storage().nbytes() == entry.nbytes


def test_one_read_fills_many_buffers(path: Path) -> None:
    with CheckpointFile(path) as file:
        entry = file.entries["wide"]
        # More buffers than one system call takes, and empty ones among them.
        sizes = [size % 5 for size in range(3000)]
        targets = [bytearray(size) for size in sizes]
        file.read(entry.start, [memoryview(target) for target in targets])
        assert b"".join(targets) == bytes_of(some_tensors()["wide"])[: sum(sizes)]


def test_a_partial_read_goes_on_where_it_stopped(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: whole(fd, [buffers[0][:1000]], at))
    with CheckpointFile(path) as file:
        entry = file.entries["wide"]
        first, second = bytearray(1500), bytearray(entry.nbytes - 1500)
        file.read(entry.start, [memoryview(first), memoryview(second)])
        assert bytes(first + second) == bytes_of(some_tensors()["wide"])


def test_a_read_behind_the_end_is_an_error(path: Path) -> None:
    with CheckpointFile(path) as file, pytest.raises(CheckpointError, match=r"model\.safetensors ends at byte"):
        file.read(file.nbytes - 10, [memoryview(bytearray(11))])


def test_a_closed_file_says_so(path: Path) -> None:
    file = CheckpointFile(path)
    file.close()
    with pytest.raises(CheckpointError, match="was closed"):
        file.read(8, [memoryview(bytearray(1))])


# Files that change ---------------------------------------------------------------------------------------------------


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def written_to(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")


def touched(path: Path) -> None:
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize(
    ("change", "words"), [(cut_short, "had .* bytes and has"), (written_to, "written to"), (touched, "written to")]
)
def test_a_changed_file_is_an_error_that_names_it(path: Path, change: Callable[[Path], None], words: str) -> None:
    with CheckpointFile(path) as file:
        file.require_unchanged()
        time.sleep(0.02)
        change(path)
        entry = file.entries["wide"]
        for use in (
            file.require_unchanged,
            lambda: file.read(entry.start, [memoryview(bytearray(8))]),
            lambda: file.view(entry.start, entry.nbytes),
        ):
            with pytest.raises(CheckpointError, match=words) as caught:
                use()
            assert str(path) in str(caught.value)


def test_a_change_during_the_read_is_noticed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.preadv

    def read_and_change(*arguments: Any) -> int:
        count = whole(*arguments)
        touched(path)
        return count

    monkeypatch.setattr(os, "preadv", read_and_change)
    with CheckpointFile(path) as file, pytest.raises(CheckpointError, match="written to"):
        file.read(file.entries["wide"].start, [memoryview(bytearray(8))])


def test_a_file_that_was_replaced_is_still_the_one_that_was_opened(path: Path) -> None:
    with CheckpointFile(path) as file:
        other = path.with_name("other")
        save_file({"wide": torch.zeros(300, 500)}, other)
        os.replace(other, path)
        entry = file.entries["wide"]
        target = bytearray(entry.nbytes)
        file.read(entry.start, [memoryview(target)])
        assert bytes(target) == bytes_of(some_tensors()["wide"])


# Headers that lie ----------------------------------------------------------------------------------------------------


def described(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"not json", "can't be read"),
        ([1], "isn't a table"),
        (b'{"a": {}, "a": {}}', "comes twice"),
        ({"a": 3}, "'a' in a way"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "'a' in a way"),
        ({"a": described(offsets=[0])}, "'a' in a way"),
        ({"a": described(dtype="F7")}, "dtype 'F7', which isn't known"),
        ({"a": described(dtype=[])}, "isn't known"),
        ({"a": described(shape=[-2], offsets=[0, 8])}, "aren't sizes"),
        ({"a": described(shape=[2.0])}, "aren't sizes"),
        ({"a": described(offsets=["0", "8"])}, "aren't sizes"),
        ({"a": described(shape=[3])}, "takes 12"),
        ({"a": described(shape=[1], offsets=[4, 8])}, "the header and 'a' are 4 bytes apart"),
        ({"a": described(), "b": described(shape=[1], offsets=[4, 8])}, "'a' and 'b' overlap"),
        ({"a": described(), "b": described(offsets=[8, 16])}, "cut short: 'b' ends at byte"),
        ({}, "8 bytes at its end"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, header: Any, words: str) -> None:
    path = write(tmp_path / "m.safetensors", header, bytes(8))
    with pytest.raises(CheckpointError, match=words) as caught:
        CheckpointFile(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"1234567", struct.pack("<Q", 1 << 62) + b"{}"])
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"m\.safetensors"):
        CheckpointFile(tmp_path / "m.safetensors")


def test_a_truncated_file_is_refused(path: Path) -> None:
    cut_short(path)
    with pytest.raises(CheckpointError, match=r"model\.safetensors was cut short"):
        CheckpointFile(path)


def test_nothing_stays_open_after_a_refusal(path: Path) -> None:
    cut_short(path)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointError) as caught:
        CheckpointFile(path)
    assert len(os.listdir("/proc/self/fd")) == before, caught


# Edits ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def pages(tmp_path: Path) -> CheckpointFile:
    """A file of many pages, of which the tensor begins somewhere in the first."""
    save_file({"a": torch.arange(64 * PAGE, dtype=torch.int64).to(torch.uint8)}, tmp_path / "pages.safetensors")
    return CheckpointFile(tmp_path / "pages.safetensors")


@pytest.fixture(params=["ioctl", "pagemap"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to ask the kernel."""
    if request.param == "pagemap":

        def missing(*arguments: Any) -> int:
            raise OSError(25, "no such ioctl")

        monkeypatch.setattr(pagemap.fcntl, "ioctl", missing)
    elif not has_ioctl():
        pytest.skip("this kernel is older than 6.7 and has no PAGEMAP_SCAN")


def has_ioctl() -> bool:
    with open("/proc/self/pagemap", "rb") as file:
        try:
            list(pagemap._scanned(file.fileno(), 0, PAGE))
        except OSError:
            return False
    return True


@pytest.mark.usefixtures("way")
def test_only_pages_that_were_written_to_count_as_edited(pages: CheckpointFile) -> None:
    entry = pages.entries["a"]
    ranges = [(number * PAGE, PAGE) for number in range(1, 64)]
    view = pages.view(entry.start, entry.nbytes)
    assert not any(pages.edited(ranges))
    view.sum()
    assert not any(pages.edited(ranges)), "reading isn't editing"
    for page in (5, 6, 40):
        view[page * PAGE - entry.start] += 1
    assert [number for number, is_edited in enumerate(pages.edited(ranges), 1) if is_edited] == [5, 6, 40]
    assert pages.edited([(5 * PAGE - 1, 1), (5 * PAGE - 1, 2), (7 * PAGE, 33 * PAGE), (7 * PAGE, 33 * PAGE + 1)]) == [
        False,
        True,
        False,
        True,
    ]
    assert pages.edited([(5 * PAGE, 0)]) == [False]
    # The end of a range lies in the middle of a page.
    assert pages.edited([(0, 5 * PAGE + 1), (6 * PAGE + 9, 1), (0, 5 * PAGE)]) == [True, True, False]


@pytest.mark.usefixtures("way")
def test_many_edits_are_all_found(tmp_path: Path) -> None:
    count = 2 * pagemap._REGIONS + 3
    save_file({"a": torch.zeros(2 * count * PAGE, dtype=torch.uint8)}, tmp_path / "m.safetensors")
    file = CheckpointFile(tmp_path / "m.safetensors")
    view = file.view(0, file.nbytes)
    view[PAGE :: 2 * PAGE] = 1
    found = file.edited([(number * PAGE, PAGE) for number in range(2 * count)])
    assert found == [bool(number % 2) for number in range(2 * count)]


@pytest.mark.usefixtures("way")
def test_forgotten_edits_show_the_file_again(pages: CheckpointFile) -> None:
    entry = pages.entries["a"]
    view = pages.view(entry.start, entry.nbytes)
    before = view.clone()
    view.zero_()
    pages.forget_edits(3 * PAGE + 1, 4 * PAGE)
    inside = slice(4 * PAGE - entry.start, 7 * PAGE - entry.start)
    assert torch.equal(view[inside], before[inside])
    assert not view[: inside.start].any() and not view[inside.stop :].any()
    assert pages.edited([(3 * PAGE, PAGE), (4 * PAGE, 3 * PAGE), (7 * PAGE, PAGE)]) == [True, False, True]
    pages.forget_edits(8 * PAGE + 1, PAGE)
    assert pages.edited([(8 * PAGE, PAGE)]) == [True]


def test_edits_stay_in_the_process(pages: CheckpointFile) -> None:
    content = pages.path.read_bytes()
    pages.view(0, pages.nbytes).zero_()
    assert pages.path.read_bytes() == content
    target = bytearray(pages.nbytes)
    pages.read(0, [memoryview(target)])
    assert bytes(target) == content
    pages.require_unchanged()


def test_without_views_nothing_is_mapped_or_edited(pages: CheckpointFile) -> None:
    def mapped() -> bool:
        return str(pages.path) in Path("/proc/self/maps").read_text()

    assert pages.edited([(0, PAGE)]) == [False] and not mapped()
    pages.forget_edits(0, pages.nbytes)
    view = pages.view(0, 9)
    assert mapped() and pages.is_viewed_by(view, 0) and not pages.is_viewed_by(view, 1)
    pages.close()
    assert mapped() and bytes(view[:8].tolist()) == pages.path.read_bytes()[:8], "views outlive the file object"
    del view
    gc.collect()
    assert not mapped()


@pytest.mark.timing
def test_a_mapping_that_was_never_touched_is_cheap_to_ask(tmp_path: Path) -> None:
    nbytes = 28 << 30
    header = json.dumps({"a": described("U8", [nbytes], [0, nbytes])}).encode()
    path = write(tmp_path / "sparse.safetensors", header)
    os.truncate(path, 8 + len(header) + nbytes)
    file = CheckpointFile(path)
    file.view(file.entries["a"].start, nbytes)
    ranges = [(number * (nbytes // 40), nbytes // 40) for number in range(40)]
    began = time.perf_counter()
    assert not any(file.edited(ranges))
    assert time.perf_counter() - began < (0.02 if has_ioctl() else 1)


@pytest.mark.timing
def test_the_page_cache_is_read_as_fast_as_memory_is_copied(tmp_path: Path) -> None:
    nbytes = 64 << 20
    source = torch.randint(256, (nbytes,), dtype=torch.uint8)
    save_file({"a": source}, tmp_path / "m.safetensors")
    file, target = CheckpointFile(tmp_path / "m.safetensors"), torch.zeros(nbytes, dtype=torch.uint8)
    buffers, start = [memoryview(target.numpy())], file.entries["a"].start

    def seconds(action: Callable[[], Any]) -> float:
        began = time.perf_counter()
        action()
        return time.perf_counter() - began

    copies, reads = [], []
    for _ in range(10):
        copies.append(seconds(lambda: target.copy_(source)))
        reads.append(seconds(lambda: file.read(start, buffers)))
    assert torch.equal(target, source)
    assert min(reads) <= min(copies) / 0.8


# Systems without what is needed --------------------------------------------------------------------------------------


def test_a_system_without_pagemap_gives_a_reason(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pagemap, "_PAGEMAP", "/nowhere/pagemap")
    with pytest.raises(CheckpointError, match="doesn't say which pages") as caught:
        CheckpointFile(path)
    assert "Load the weights the ordinary way" in str(caught.value)


def test_a_system_without_preadv_gives_a_reason(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(module.os, "preadv")
    with pytest.raises(CheckpointError, match="no preadv"):
        CheckpointFile(path)


# Finding a model's files ---------------------------------------------------------------------------------------------


def save(folder: Path, variant: str | None = None, *, sharded: bool, legacy: bool = False) -> None:
    tensors = {"a": torch.ones(3), "b": torch.zeros(2, 2)}
    middle = f".{variant}" if variant else ""
    name = "diffusion_pytorch_model"
    if not sharded:
        save_file(tensors, folder / f"{name}{middle}.safetensors")
        return
    files = {key: f"{name}{middle}-0000{number}-of-00002.safetensors" for number, key in enumerate(tensors, 1)}
    for key, file in files.items():
        save_file({key: tensors[key]}, folder / file)
    index = f"{name}.safetensors{middle}.index.json" if legacy else f"{name}.safetensors.index{middle}.json"
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": files}))


@pytest.mark.parametrize("variant", [None, "fp16"])
@pytest.mark.parametrize(("sharded", "legacy"), [(False, False), (True, False), (True, True)])
def test_single_files_shards_and_variants_are_found(
    tmp_path: Path, variant: str | None, sharded: bool, legacy: bool
) -> None:
    save(tmp_path, variant, sharded=sharded, legacy=legacy)
    checkpoint = Checkpoint.find(tmp_path, variant=variant)
    assert checkpoint.entries.keys() == {"a", "b"}
    assert len(checkpoint.files) == (2 if sharded else 1)
    assert checkpoint.nbytes == 28
    assert list(variants_in(tmp_path)) == [("diffusion_pytorch_model", variant)]
    with pytest.raises(CheckpointError, match="other"):
        Checkpoint.find(tmp_path, variant="other")


def test_files_of_diffusers_are_found(tmp_path: Path) -> None:
    from diffusers import AutoencoderTiny

    model = AutoencoderTiny(num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1), encoder_block_out_channels=(4, 4),
                            decoder_block_out_channels=(4, 4))  # fmt: skip
    for variant, size in ((None, "10GB"), ("fp16", "2KB")):
        model.save_pretrained(tmp_path, variant=variant, max_shard_size=size)
        checkpoint = Checkpoint.find(tmp_path, variant=variant)
        assert checkpoint.entries.keys() == model.state_dict().keys()
        assert (len(checkpoint.files) > 1) == (variant is not None)
    assert set(variants_in(tmp_path)) == {("diffusion_pytorch_model", None), ("diffusion_pytorch_model", "fp16")}


def test_the_index_goes_before_a_single_file(tmp_path: Path) -> None:
    save(tmp_path, sharded=False)
    save(tmp_path, sharded=True)
    assert len(Checkpoint.find(tmp_path).files) == 2


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no diffusion_pytorch_model\.safetensors or model\.safetensors"):
        Checkpoint.find(tmp_path)
    save(tmp_path, sharded=True)
    (tmp_path / "diffusion_pytorch_model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"names the file diffusion_pytorch_model-00002-of-00002\.safetensors"):
        Checkpoint.find(tmp_path)


def test_a_missing_index_is_named(tmp_path: Path) -> None:
    save(tmp_path, sharded=True)
    (tmp_path / "diffusion_pytorch_model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"2 shards .* but no diffusion_pytorch_model\.safetensors\.index\.json"):
        Checkpoint.find(tmp_path)


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ({"a": 1, "b": 2, "c": 1}, "says that it has 'c', but it hasn't"),
        ({"a": 1}, None),
        ({"a": 2, "b": 2}, "says that it has 'a', but it hasn't"),
        ({"a": 1, "b": "../x.safetensors"}, "isn't in the same folder"),
    ],
)
def test_an_index_and_its_shards_have_to_agree(tmp_path: Path, places: dict[str, Any], words: str | None) -> None:
    save(tmp_path, sharded=True)
    files = {
        key: f"diffusion_pytorch_model-0000{n}-of-00002.safetensors" if n in (1, 2) else n for key, n in places.items()
    }
    (tmp_path / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    if words is None:
        assert Checkpoint.find(tmp_path).entries.keys() == {"a"}
        return
    with pytest.raises(CheckpointError, match=words):
        Checkpoint.find(tmp_path)


def test_a_shard_with_a_key_that_the_index_lacks_is_refused(tmp_path: Path) -> None:
    save(tmp_path, sharded=True)
    shard = tmp_path / "diffusion_pytorch_model-00001-of-00002.safetensors"
    save_file({"a": torch.ones(3), "z": torch.ones(1)}, shard)
    with pytest.raises(CheckpointError, match="doesn't say that it has 'z', but it has"):
        Checkpoint.find(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": {"a": 3}}'])
def test_an_index_that_cannot_be_read_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        Checkpoint.find(tmp_path)
