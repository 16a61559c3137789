"""Dotted paths: looking a module up, and telling a missing attribute from one that is None."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from diffusers_omni_offload.declarations import a_type


class MissingPathError(LookupError):
    """A step of a dotted path isn't there. `found` is how far the path goes, `missing` the step that isn't there."""

    def __init__(self, path: str, found: str, missing: str, owner: Any) -> None:
        self.path, self.found, self.missing, self.owner = path, found, missing, owner
        where = f"{found!r} ({a_type(owner)})" if found else f"{type(owner).__name__}"
        super().__init__(f"{where} has no {missing!r}")


def lookup(root: Any, path: str) -> Any:
    """The object at a dotted `path` below `root`, which "" stands for. A step is an attribute, a key or an index. None
    on the way gives None.

    Raises MissingPathError.
    """
    current = root
    steps = path.split(".") if path else []
    for position, step in enumerate(steps):
        if current is None:
            return None
        try:
            current = _step(current, step)
        except (AttributeError, KeyError, IndexError, TypeError) as error:
            raise MissingPathError(path, ".".join(steps[:position]), step, current) from error
    return current


def _step(owner: Any, step: str) -> Any:
    try:
        return getattr(owner, step)
    except AttributeError:
        if isinstance(owner, Mapping):
            return owner[step]
        if isinstance(owner, Sequence) and step.isdigit():
            return owner[int(step)]
        raise


def is_inside(path: str, outer: str) -> bool:
    """True if `path` is `outer` or below it."""
    return path == outer or path.startswith(outer + ".") or outer == ""


def prefixes(paths: Iterable[str]) -> list[str]:
    """What lies on the way to the paths, each once: "pipe" and "pipe.nets" of "pipe.nets.0"."""
    return sorted({path[:end] for path in paths for end, character in enumerate(path) if character == "."})


def last_name(path: str) -> str:
    """The last step of a path that isn't a number: "nets" of "nets.0"."""
    return next((step for step in reversed(path.split(".")) if not step.isdigit()), path)
