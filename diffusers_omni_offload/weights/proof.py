"""Whether a checkpoint's files hold a module's weights: each in exactly one place, or a sentence that says why not."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import nn

from diffusers_omni_offload.declarations import Stored
from diffusers_omni_offload.weights.checkpoint import Checkpoint, CheckpointError, Entry, variants_in
from diffusers_omni_offload.weights.kinds import PLAIN_TYPES
from diffusers_omni_offload.weights.sources import LeafSource, Segment, same_bytes
from diffusers_omni_offload.weights.withheld import give_back, is_withheld

Sources = Mapping[str, LeafSource]
"""Path of a parameter or persistent buffer, relative to the module -> where its bytes are."""

#: How many weights are compared to tell checkpoints of one model from each other.
_SAMPLES = 4

_proofs: WeakKeyDictionary[nn.Module, Sources] = WeakKeyDictionary()


class _Unproven(Exception):
    """The reason, as one sentence."""


def prove(
    module: nn.Module,
    checkpoint: Checkpoint,
    *,
    layouts: Mapping[str, Stored] | None = None,
    casts: bool = False,
) -> dict[str, LeafSource] | str:
    """Find the one source of each parameter and persistent buffer of `module`. Reads no weights.

    Args:
        module: may be on the meta device.
        checkpoint: the files.
        layouts: what the files have in another form, by patterns of paths relative to the module.
        casts: whether any floating point dtype may be stored; otherwise only where a layout says so.

    Returns:
        A source for each path; tied weights have the same one under all of their paths. Or the reason why there is
        none, as one sentence.
    """
    try:
        return _prove(module, checkpoint, layouts or {}, casts)
    except _Unproven as reason:
        return str(reason)


def find_checkpoint(
    module: nn.Module, *, layouts: Mapping[str, Stored] | None = None, casts: bool = False
) -> Checkpoint | str:
    """The checkpoint that a module's weights were loaded from in the ordinary way, or the reason why there is none.

    Where several of a folder prove (variants), it is the one whose values the module has.
    """
    origin = getattr(getattr(module, "config", None), "_name_or_path", None) or getattr(module, "name_or_path", None)
    if not origin:
        return f"The {type(module).__name__} doesn't say where it was loaded from (it has no `name_or_path`)."
    if not Path(origin).is_dir():
        return f"The {type(module).__name__} was loaded from {origin!r}, which isn't a folder of this machine."
    proven: list[tuple[Checkpoint, Sources]] = []
    reasons: list[str] = []
    for folder in _folders(Path(origin), module):
        for name, variant in variants_in(folder):
            try:
                checkpoint = Checkpoint.find(folder, variant=variant, names=(name,))
            except CheckpointError as error:
                reasons.append(str(error))
                continue
            sources = prove(module, checkpoint, layouts=layouts, casts=casts)
            if isinstance(sources, str):
                reasons.append(sources)
                checkpoint.close()
            else:
                proven.append((checkpoint, sources))
    if len(proven) > 1:
        proven = [
            (checkpoint, sources) for checkpoint, sources in proven if _samples_are_same(module, sources)
        ] or proven
    if not proven:
        return reasons[0] if reasons else f"{origin} has no safetensors files of {type(module).__name__}."
    return proven[0][0]


def remember(module: nn.Module, sources: Sources) -> None:
    """Keep what was proven of a module, as long as it lives."""
    _proofs[module] = sources


def remembered(module: nn.Module) -> Sources | None:
    """What was proven of a module when it was loaded."""
    return _proofs.get(module)


def read_withheld(module: nn.Module) -> None:
    """Give the withheld weights of a module that was loaded from the checkpoint their bytes, cast and put together."""
    sources = remembered(module) or {}
    for path, tensor in stored_weights(module).items():
        if path in sources and is_withheld(tensor):
            give_back(tensor, sources[path].read())


def forget(module: nn.Module) -> None:
    """Keep nothing of what was proven of a module, and so nothing open for it."""
    _proofs.pop(module, None)


def stored_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and persistent buffers below `module` by path; tied ones under each of their paths."""
    return {
        f"{path}.{name}" if path else name: tensor
        for path, child in module.named_modules(remove_duplicate=False)
        for name, tensor in (*child._parameters.items(), *child._buffers.items())
        if tensor is not None and name not in child._non_persistent_buffers_set
    }


def _prove(
    module: nn.Module, checkpoint: Checkpoint, layouts: Mapping[str, Stored], casts: bool
) -> dict[str, LeafSource]:
    weights = stored_weights(module)
    stored = {path: _stored(path, layouts) for path in weights}
    by_tensor: dict[int, list[str]] = {}
    for path, tensor in weights.items():
        by_tensor.setdefault(id(tensor), []).append(path)
    used = {stored[path].key for path in weights}
    spare = [key for key in checkpoint.entries if key not in used]
    sources: dict[str, LeafSource] = {}
    for paths in by_tensor.values():
        there = [path for path in paths if stored[path].key in checkpoint.entries]
        keys = list(dict.fromkeys(stored[path].key for path in there))
        if not keys:
            raise _Unproven(_missing(paths[0], stored[paths[0]].key, checkpoint, spare))
        if len(keys) > 1:
            raise _Unproven(
                f"{' and '.join(paths)} are one tied weight, but {_where(checkpoint)} has a tensor for each "
                f"({', '.join(map(repr, keys))}), which may differ."
            )
        source = _source(there[0], weights[there[0]], checkpoint.entries[keys[0]], stored[there[0]], casts)
        sources.update(dict.fromkeys(paths, source))
    _require_no_more(module, checkpoint, spare)
    _require_disjoint({paths[0]: sources[paths[0]] for paths in by_tensor.values()})
    return {path: sources[path] for path in weights}


def _stored(path: str, layouts: Mapping[str, Stored]) -> Stored:
    """How the weight at `path` is stored, with its key written out."""
    for pattern, stored in layouts.items():
        steps = [r"([^.]+)" if step == "*" else re.escape(step) for step in pattern.split(".")]
        found = re.fullmatch(r"\.".join(steps), path)
        if found is not None:
            filled = iter(found.groups())
            key = ".".join(next(filled) if step == "*" else step for step in stored.key.split("."))
            return Stored(key, stored.groups, stored.sizes, stored.parts, stored.cast)
    return Stored(path)


def _source(path: str, tensor: torch.Tensor, entry: Entry, stored: Stored, casts: bool) -> LeafSource:
    if type(tensor) not in PLAIN_TYPES:
        raise _Unproven(f"{path} is a {type(tensor).__name__}, whose bytes aren't the checkpoint's.")
    if not tensor.is_contiguous():
        raise _Unproven(f"{path} has the strides {tuple(tensor.stride())}, but the checkpoint has it contiguous.")
    rows = _rows(path, entry, stored)
    shape = entry.shape if rows is None else (sum(count for _, count in rows), *entry.shape[1:])
    where = f"{entry.file.path.name} has {entry.key!r}"
    if shape != tuple(tensor.shape):
        gives = "" if shape == entry.shape else f", which gives {list(shape)}"
        raise _Unproven(f"{path} has the shape {list(tensor.shape)}, but {where} of {list(entry.shape)}{gives}.")
    if entry.dtype != tensor.dtype:
        if not (entry.dtype.is_floating_point and tensor.dtype.is_floating_point):
            raise _Unproven(f"{path} is {_name(tensor.dtype)}, but {where} in {_name(entry.dtype)}.")
        if not (casts or stored.cast):
            raise _Unproven(
                f"{path} is {_name(tensor.dtype)}, but {where} in {_name(entry.dtype)}, and no cast is declared."
            )
    return LeafSource(tuple(_segments(entry, rows)), entry.dtype, tensor.dtype, tensor.shape)


def _rows(path: str, entry: Entry, stored: Stored) -> list[tuple[int, int]] | None:
    """(first, count) of the rows of the stored tensor that make up the parameter, in order; None for all of it."""
    if stored.groups == 1 and len(stored.sizes) == 1:
        return None
    count, total = (entry.shape or (0,))[0], sum(stored.sizes)
    group = count // stored.groups
    sizes = [group * size // total for size in stored.sizes]
    if not count or group * stored.groups != count or any(group * size % total for size in stored.sizes):
        raise _Unproven(
            f"{path} is declared as part of {entry.key!r}, but that has the shape {list(entry.shape)}, which can't be "
            f"divided into {stored.groups} groups of parts in the proportion {':'.join(map(str, stored.sizes))}."
        )
    return [
        (number * group + sum(sizes[:part]), sizes[part]) for part in stored.parts for number in range(stored.groups)
    ]


def _segments(entry: Entry, rows: list[tuple[int, int]] | None) -> Iterator[Segment]:
    if rows is None:
        rows, row = [(0, 1)], entry.nbytes
    else:
        row = math.prod(entry.shape[1:]) * entry.dtype.itemsize
    start = end = rows[0][0]
    for first, count in (*rows, (-1, 0)):
        if first != end:
            if end > start and row:
                yield Segment(entry.file, entry.start + start * row, (end - start) * row)
            start = first
        end = first + count


def _require_no_more(module: nn.Module, checkpoint: Checkpoint, spare: list[str]) -> None:
    ignored = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or []
    patterns = [ignored] if isinstance(ignored, str) else ignored
    extra = [key for key in spare if not any(re.search(pattern, key) for pattern in patterns)]
    if extra:
        raise _Unproven(f"{_where(checkpoint)} has {_listed(extra)}, which {type(module).__name__} has no weight for.")


def _require_disjoint(sources: Mapping[str, LeafSource]) -> None:
    """Two weights that would read the same bytes, and aren't tied, are a slip in a declaration."""
    taken = sorted(
        (str(segment.file.path), segment.start, segment.nbytes, path)
        for path, source in sources.items()
        for segment in source.segments
    )
    for (file, start, nbytes, path), (next_file, next_start, _, next_path) in pairwise(taken):
        if file == next_file and next_start < start + nbytes:
            raise _Unproven(f"{path} and {next_path} would be read from the same bytes of {Path(file).name}.")


def _missing(path: str, key: str, checkpoint: Checkpoint, spare: list[str]) -> str:
    close = difflib.get_close_matches(key, spare, n=3) or difflib.get_close_matches(key, checkpoint.entries, n=3)
    hint = f"; the closest keys are {', '.join(map(repr, close))}" if close else ""
    of = "" if path == key else f", which {path} is declared to come from"
    return f"{_where(checkpoint)} has no {key!r}{of}{hint}."


def _where(checkpoint: Checkpoint) -> str:
    return str(checkpoint.files[0].path if len(checkpoint.files) == 1 else checkpoint.files[0].path.parent)


def _listed(keys: list[str]) -> str:
    return ", ".join(map(repr, keys[:3])) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _folders(origin: Path, module: nn.Module) -> Iterable[Path]:
    """The folder itself, and those in it that have a model of this class: what `subfolder=` may have named."""
    yield origin
    for config in sorted(origin.glob("*/config.json")):
        try:
            content = json.loads(config.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(content, dict) and content.get("_class_name") == type(module).__name__:
            yield config.parent


def _samples_are_same(module: nn.Module, sources: Sources) -> bool:
    weights = stored_weights(module)
    paths = [path for path in sources if weights[path].device.type == "cpu"]
    return all(same_bytes(weights[path], sources[path]) for path in paths[:: max(1, len(paths) // _SAMPLES)])
