"""What was measured on this machine before, kept in a small file: so that the next session needn't measure it again."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from diffusers_omni_offload.messages import logger
from diffusers_omni_offload.planning.costs import ComponentCost, Rates
from diffusers_omni_offload.planning.measured import Measured, MeasuredComponent

PROFILE_VARIABLE = "DIFFUSERS_OMNI_OFFLOAD_PROFILE"
"""Environment variable: the path of the profile; empty for none."""

_VERSION = 1


def default_path() -> Path | None:
    """Where the profile of this machine is: as the environment says, or in the user's cache folder. None if there is to
    be none."""
    chosen = os.environ.get(PROFILE_VARIABLE)
    if chosen is not None:
        return Path(chosen) if chosen else None
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "diffusers_omni_offload" / "profile.json"


class Profile:
    """Figures of devices and of pipelines. A file that can't be read or written is done without.

    Args:
        path: the file; None keeps nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def rates(self, device: str) -> Rates | None:
        """The link to a device, by the device's name; None if it wasn't measured."""
        found = self._read()["devices"].get(device)
        with suppress(TypeError, ValueError, KeyError):
            rate, latency = _number(found["link_bytes_per_s"]), _number(found["copy_latency_s"])
            return Rates(rate, latency, "profile") if rate else None
        return None

    def keep_rates(self, device: str, rates: Rates) -> None:
        """Keep what was measured of the link to a device."""
        content = self._read()
        content["devices"][device] = {
            "link_bytes_per_s": rates.link_bytes_per_s,
            "copy_latency_s": rates.copy_latency_s,
        }
        self._write(content)

    def measured(self, key: str) -> Measured | None:
        """What was measured of a pipeline, by `pipeline_key`; None if nothing was."""
        found = self._read()["pipelines"].get(key)
        with suppress(TypeError, ValueError, KeyError, AttributeError):
            components = {
                str(path): MeasuredComponent(**{name: _figure(value) for name, value in figures.items()})
                for path, figures in found["components"].items()
            }
            others = {name: _number(value) for name, value in found.items() if name != "components"}
            return Measured(components, **others)
        return None

    def keep_measured(self, key: str, measured: Measured) -> None:
        """Keep what was measured of a pipeline."""
        content = self._read()
        content["pipelines"][key] = asdict(measured)
        self._write(content)

    def _read(self) -> dict[str, Any]:
        content: Any = None
        if self.path is not None:
            try:
                content = json.loads(self.path.read_text())
            except FileNotFoundError:
                pass
            except (OSError, ValueError) as error:
                logger.warning("The profile %s can't be read (%s), so it is begun anew.", self.path, str(error))
        if not _is_ours(content):
            content = {"version": _VERSION, "devices": {}, "pipelines": {}}
        return content

    def _write(self, content: Mapping[str, Any]) -> None:
        if self.path is None:
            return
        # Another process may do the same: each file is whole, and the last one stays.
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(content, indent=1))
            temporary.replace(self.path)
        except OSError as error:
            logger.warning("The profile %s can't be written: %s.", self.path, str(error))
            temporary.unlink(missing_ok=True)


def pipeline_key(device: str, components: tuple[ComponentCost, ...], workload: Mapping[str, Any]) -> str:
    """Tells pipelines apart that take other times: by device, sizes of all blocks and components, and what the call is
    said to be (its resolution, say)."""
    sizes = [
        (component.path, component.class_name, component.nbytes, [block.nbytes for block in component.blocks])
        for component in components
    ]
    text = json.dumps([device, sizes, sorted(workload.items())])
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _is_ours(content: Any) -> bool:
    return (
        isinstance(content, dict)
        and content.get("version") == _VERSION
        and all(isinstance(content.get(name), dict) for name in ("devices", "pipelines"))
    )


def _figure(value: Any) -> Any:
    return tuple(map(_number, value)) if isinstance(value, list) else _number(value)


def _number(value: Any) -> Any:
    """A finite number that isn't negative, as all figures are. TypeError or ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{value!r} is no number.")
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{value!r} is no figure.")
    return value
