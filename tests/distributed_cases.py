"""Pipelines for runs on several ranks: tiny, each with a prompt of its own by rank, built in code or saved to a folder.

A rank builds its pipeline itself: the weights are functions of seeds, so all ranks have the same. `reference` gives
what one plain process gives for a rank's prompt. Other arguments, the noise among them, are the same on all ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tests import tiny
from tests.equality import Build, Call
from tests.living import with_arguments


def flux2() -> tuple[Any, Call]:
    """With room for the prompt behind the system's message, of which each byte is a token."""
    pipe, call = tiny.build_flux2()
    return pipe, with_arguments(call, max_sequence_length=400)


BUILDS: dict[str, Build] = {
    "wan": lambda: tiny.build_wan(num_layers=3),
    "flux2": flux2,
    "qwen_image": lambda: tiny.build_qwen_image(num_layers=3),
    "sd3": lambda: tiny.build_sd3(num_layers=3),
    "cosmos3_omni": lambda: tiny.build_cosmos3_omni(num_layers=3),
    "cosmos3_split": tiny.STANDINS["cosmos3_split"],
    "minimax_h3": lambda: tiny.build_minimax_h3(num_layers=3),
    "minimax_h3_spec": tiny.STANDINS["minimax_h3_spec"],
}
SAVED = ("wan", "flux2", "qwen_image", "sd3", "cosmos3_omni")
"""Those that `save_pretrained` and `from_pretrained` take whole: no modular pipelines, and no stand-ins."""

PROMPTS = ("a cat", "dance monkey", "little queen of the sea", "A squirrel")
SHARD_NBYTES = 20_000
"""Small enough that each DiT is saved in several files."""


def prompt_of(rank: int) -> str:
    """The prompt of a rank; those of `len(PROMPTS)` ranks differ."""
    return PROMPTS[rank % len(PROMPTS)]


def build(name: str, rank: int, dtype: torch.dtype | None = None) -> tuple[Any, Call]:
    """The pipeline of `BUILDS`, on the CPU, and fresh arguments with the rank's prompt."""
    pipe, call = BUILDS[name]()
    if hasattr(pipe, "set_progress_bar_config"):
        pipe.set_progress_bar_config(disable=True)
    return (pipe if dtype is None else pipe.to(dtype)), with_arguments(call, prompt=prompt_of(rank))


def reference(name: str, rank: int, device: torch.device | str, dtype: torch.dtype | None = None) -> np.ndarray:
    """The output for the rank's prompt with everything on the device, as stock diffusers runs it."""
    pipe, call = build(name, rank, dtype)
    return tiny.run(pipe.to(device), call)


def dits(pipe: Any) -> dict[str, nn.Module]:
    """The pipeline's denoisers by their attribute names."""
    names = ("transformer", "transformer_2", "transformers_ref")
    return {name: module for name in names if isinstance(module := getattr(pipe, name, None), nn.Module)}


def save(name: str, folder: Path, shard_nbytes: int = SHARD_NBYTES) -> Path:
    """Save a pipeline of `SAVED` with `save_pretrained`: every DiT in several files with an index."""
    pipe, _ = BUILDS[name]()
    pipe.save_pretrained(folder, safe_serialization=True, max_shard_size=shard_nbytes)
    return folder


def load(name: str, folder: Path, rank: int, dtype: torch.dtype | None = None) -> tuple[Any, Call]:
    """A saved pipeline as `build` gives it, loaded by stock diffusers; its parameters are moved to aligned memory."""
    fresh, call = BUILDS[name]()
    kind = type(fresh)
    pipe = kind.from_pretrained(folder, local_files_only=True, **({} if dtype is None else {"torch_dtype": dtype}))
    pipe.set_progress_bar_config(disable=True)
    return tiny.align_parameters(pipe), with_arguments(call, prompt=prompt_of(rank))
