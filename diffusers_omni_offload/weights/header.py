"""The header of a safetensors file: which tensor lies where. Nothing in it is believed before it was checked."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

#: The format's own limit, in bytes.
_LONGEST_HEADER = 100_000_000

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class CheckpointError(RuntimeError):
    """A checkpoint's files are missing, damaged or changed; the message names the file."""


class Described(NamedTuple):
    """A tensor as the header describes it: bytes [start, start + nbytes) of the file."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int


def read_header(descriptor: int, path: Path, size: int) -> list[Described]:
    """The tensors of an open file, in the order of their bytes.

    Args:
        descriptor: the open file.
        path: its path, for messages.
        size: its size in bytes.

    Raises:
        CheckpointError: the file is cut short, isn't in the format, or its header can't be true.
    """
    if size < 8:
        raise CheckpointError(f"{path} has {size} bytes, which is too short for a safetensors file; fetch it anew.")
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if length > min(_LONGEST_HEADER, size - 8):
        raise CheckpointError(
            f"{path} says that its header has {length} bytes, but the file has {size}; it isn't a safetensors file or "
            "was cut short. Fetch it anew."
        )
    described = sorted(_described(_parsed(os.pread(descriptor, length, 8), path), path, 8 + length), key=_place)
    end, previous = 8 + length, "the header"
    for tensor in described:
        if tensor.start + tensor.nbytes > size:
            raise CheckpointError(
                f"{path} was cut short: {tensor.key!r} ends at byte {tensor.start + tensor.nbytes}, but the file has "
                f"{size} bytes. Fetch it anew."
            )
        if tensor.start != end:
            what = "overlap" if tensor.start < end else f"are {tensor.start - end} bytes apart"
            raise CheckpointError(f"{path} is damaged: {previous} and {tensor.key!r} {what}. Fetch it anew.")
        end, previous = tensor.start + tensor.nbytes, repr(tensor.key)
    if end != size:
        raise CheckpointError(f"{path} is damaged: {size - end} bytes at its end belong to no tensor. Fetch it anew.")
    return described


def _place(tensor: Described) -> tuple[int, int]:
    return tensor.start, tensor.nbytes


def _parsed(text: bytes, path: Path) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            raise ValueError("a key comes twice")
        return table

    try:
        header = json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} has a header that can't be read ({error}); fetch it anew.") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} has a header that isn't a table of tensors; fetch it anew.")
    header.pop("__metadata__", None)
    return header


def _described(header: dict[str, Any], path: Path, data: int) -> Iterator[Described]:
    for key, entry in header.items():
        try:
            name, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            numbers = (first, last, *shape)
        except (TypeError, KeyError, ValueError) as error:
            raise CheckpointError(
                f"{path} describes {key!r} in a way that isn't safetensors'; fetch it anew."
            ) from error
        dtype = _DTYPES.get(name) if isinstance(name, str) else None
        if dtype is None:
            raise CheckpointError(
                f"{path} has {key!r} in the dtype {name!r}, which isn't known here; known are {', '.join(_DTYPES)}."
            )
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise CheckpointError(f"{path} describes {key!r} by numbers that aren't sizes; fetch it anew.")
        needed = math.prod(shape) * dtype.itemsize
        if last - first != needed:
            raise CheckpointError(
                f"{path} gives {key!r} {last - first} bytes, but {name} of shape {list(shape)} takes {needed}; fetch "
                "it anew."
            )
        yield Described(key, dtype, shape, data + first, needed)
