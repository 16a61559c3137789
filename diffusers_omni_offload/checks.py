"""Checks of what a user wrote: keys, choices, numbers. They say what was found and allowed, and what may be meant."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any

from diffusers_omni_offload.declarations import a_type


def check_keys(name: str, mapping: Any, choices: Collection[str]) -> None:
    """TypeError or ValueError unless `mapping` is one from strings among `choices`."""
    if not isinstance(mapping, Mapping):
        raise TypeError(f"{name} is {a_type(mapping)}, but a mapping is needed, with any of {', '.join(choices)}.")
    for key in mapping:
        if not isinstance(key, str):
            raise TypeError(
                f"{name} has the key {key!r} ({a_type(key)}), but keys must be strings: {', '.join(choices)}."
            )
    for key in mapping:
        if key not in choices:
            raise ValueError(
                f"{name} has {key!r}, which is unknown; choose from {', '.join(choices)}.{_closest(key, choices)}"
            )


def one_of(name: str, value: Any, choices: Collection[str]) -> str:
    """`value` as a plain string; TypeError if it is none, ValueError if it isn't among `choices`."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r} ({a_type(value)}), but a string is needed: {', '.join(choices)}.")
    plain = value.value if isinstance(value, Enum) else value
    if plain not in choices:
        raise ValueError(
            f"{name} has {plain!r}, which is unknown; choose from {', '.join(choices)}.{_closest(plain, choices)}"
        )
    return str(plain)


#: Words that belong elsewhere, and what to say of them.
_ELSEWHERE = {
    "transformer": "The DiT is called 'dit' here, whatever the pipeline calls it.",
    "unet": "The denoising model is called 'dit' here, whatever the pipeline calls it.",
    "vae": "The VAE stays on the device; components={..., 'vae': 'module'} swaps it.",
    "resident_layers": "It is an option of a component: layer_options={'dit': {'resident_layers': ...}}.",
    "resident_policy": "It is an argument of its own, beside layer_options.",
    "slots": "It is an argument of its own, beside layer_options.",
    "pin_memory": "It is an argument of its own, beside layer_options.",
}


def _closest(value: str, choices: Collection[str]) -> str:
    if value in _ELSEWHERE:
        return f" {_ELSEWHERE[value]}"
    matches = difflib.get_close_matches(
        value.lower().replace("_", "-"), [c.replace("_", "-") for c in choices], n=1, cutoff=0.5
    )
    if not matches:
        return ""
    match = next(choice for choice in choices if choice.replace("_", "-") == matches[0])
    return f" Did you mean {match!r}?"


def integer(name: str, value: Any, *, minimum: int, maximum: int | None = None) -> int:
    """`value`; TypeError if it is no int (a bool isn't one), ValueError if it is out of range."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r} ({a_type(value)}), but an int is needed.")
    if value < minimum or (maximum is not None and value > maximum):
        allowed = f"at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        raise ValueError(f"{name} is {value}, but it must be {allowed}.")
    return value


def gibibytes(name: str, value: Any) -> float:
    """`value` as a float; TypeError if it is no number, ValueError if it is negative or not finite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r} ({a_type(value)}), but a number of GiB is needed.")
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} is {value}, but it must be finite and at least 0.")
    return float(value)


_UNITS = {"B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("iB", 1024), ("B", 1000))
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def parse_bytes(name: str, value: Any) -> int:
    """A number of bytes, from an int or from text such as "12GiB", "900 MB" or "1.5TiB".

    Raises:
        TypeError: it is neither.
        ValueError: it isn't positive, or the text has another form.
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise TypeError(
            f"{name} is {value!r} ({a_type(value)}), but bytes are needed: an int, or text such as '12GiB'."
        )
    nbytes = value
    if isinstance(value, str):
        found = _SIZE.fullmatch(value.strip())
        unit = None if found is None else next((unit for unit in _UNITS if unit.lower() == found[2].lower()), None)
        if found is None or unit is None:
            raise ValueError(
                f"{name} is {value!r}, but a number with one of the units {', '.join(_UNITS)} is needed, "
                "such as '12GiB'."
            )
        nbytes = int(float(found[1]) * _UNITS[unit])
    if int(nbytes) <= 0:
        raise ValueError(f"{name} is {value!r}, but more than 0 bytes are needed.")
    return int(nbytes)
