"""MODEL: a folder, a name on the Hub, or "demo"; its class, its pipeline and what a call of it takes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline, WanPipeline

from diffusers_omni_offload.cli.errors import BadInput, input_is_to_blame, one_line
from diffusers_omni_offload.demo.tiny_wan import build_pipeline
from diffusers_omni_offload.loading import load_omni_pipeline

DEMO = "demo"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SOURCES = ("memory", "checkpoint")

_ON_THE_HUB = re.compile(r"[\w.-]+/[\w.-]+")
#: The demo's weights are random; these make its calls take no time.
_DEMO_ARGUMENTS = {"height": 16, "width": 16, "num_frames": 5, "num_inference_steps": 4, "max_sequence_length": 16}
_SIZES = ("height", "width", "num_frames", "num_inference_steps")
#: A video's pipeline has one of these, one for sound another.
_LENGTHS_OF_VIDEOS = ("num_frames", "video_length")
_LENGTHS_OF_SOUNDS = ("audio_length_in_s", "audio_duration_s", "audio_end_in_s")


@dataclass(frozen=True)
class CallFlags:
    """What a call is asked for besides its prompt; None is the pipeline's own default. Sizes in pixels."""

    negative_prompt: str | None = None
    steps: int | None = None
    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    guidance_scale: float | None = None

    def given(self) -> dict[str, tuple[str, Any]]:
        """Parameter of a pipeline -> (flag, value), of those that were given."""
        names = {"steps": "num_inference_steps"}
        values = vars(self).items()
        return {
            names.get(name, name): (f"--{name.replace('_', '-')}", value) for name, value in values if value is not None
        }


@dataclass(frozen=True)
class Model:
    """MODEL, before its weights are read.

    Attributes:
        name: as it was given.
        cls: the pipeline's class.
    """

    name: str
    cls: Any

    @property
    def is_demo(self) -> bool:
        """Whether it is built in."""
        return self.name == DEMO

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """Of the pipeline's call."""
        return inspect.signature(self.cls.__call__).parameters

    @property
    def makes(self) -> str:
        """What a call makes: "video", "image" or "sound"."""
        for kind, names in (("video", _LENGTHS_OF_VIDEOS), ("sound", _LENGTHS_OF_SOUNDS)):
            if any(name in self.parameters for name in names):
                return kind
        return "image"

    def arguments(self, flags: CallFlags) -> dict[str, Any]:
        """Arguments of each call, less prompt and generator.

        Raises:
            BadInput: the pipeline takes no such argument, or needs one that no flag gives.
        """
        arguments: dict[str, Any] = dict(_DEMO_ARGUMENTS) if self.is_demo else {}
        parameters = self.parameters
        takes_more = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        if "prompt" not in parameters:
            raise BadInput(f"{self.cls.__name__} takes no prompt; call it from Python.")
        for name, (flag, value) in flags.given().items():
            if name not in parameters and not takes_more:
                raise BadInput(f"{self.cls.__name__} has no {name!r} in its call; leave {flag} out.")
            arguments[name] = value
        if "output_type" in parameters:
            arguments["output_type"] = "pil"
        for name, parameter in parameters.items():
            is_variable = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            if parameter.default is parameter.empty and not is_variable and name not in ("self", "prompt", *arguments):
                raise BadInput(
                    f"{self.cls.__name__} needs {name!r} in its call, which no flag gives; call it from Python."
                )
        return arguments

    def size(self, flags: CallFlags) -> dict[str, Any]:
        """Of `height`, `width`, `num_frames` and `num_inference_steps`, those that are given, or that the demo has."""
        given = {name: value for name, (_, value) in flags.given().items()}
        chosen = {**(_DEMO_ARGUMENTS if self.is_demo else {}), **given}
        return {name: chosen[name] for name in _SIZES if name in chosen}

    def request_of(self, prompt: str, seed: int) -> dict[str, Any]:
        """Arguments of a call for one prompt, with noise of its own."""
        request: dict[str, Any] = {"prompt": prompt}
        if "generator" in self.parameters:
            # The CPU's noise is the same wherever the call runs.
            request["generator"] = torch.Generator("cpu").manual_seed(seed)
        return request

    def load(self, dtype: str | None, source: str = SOURCES[0]) -> Any:
        """The pipeline, on the CPU.

        Args:
            dtype: a key of `DTYPES`; None is bfloat16, and for the demo that of its weights, float32.
            source: "memory" reads the weights, "checkpoint" leaves those of the DiTs in their files.

        Raises:
            BadInput: it can't be loaded.
        """
        if self.is_demo:
            if source != SOURCES[0]:
                raise BadInput(f"The demo is in no files; leave --source {source} out.")
            pipe, _ = build_pipeline()
            return pipe if dtype is None else pipe.to(DTYPES[dtype])
        wanted = DTYPES[dtype or "bfloat16"]
        with input_is_to_blame(f"{self.name} can't be loaded"):
            if source == "checkpoint":
                return load_omni_pipeline(self.cls, self.name, torch_dtype=wanted)
            return self.cls.from_pretrained(self.name, dtype=wanted)


def find_model(name: str) -> Model:
    """MODEL's class, from its `model_index.json` alone.

    Raises:
        BadInput: there is no such pipeline.
    """
    if name == DEMO:
        return Model(name, WanPipeline)
    if Path(name).is_dir() and not (Path(name) / "model_index.json").is_file():
        raise BadInput(f"The folder {name} has no model_index.json; give that of a pipeline that was saved whole.")
    if not Path(name).is_dir() and not _ON_THE_HUB.fullmatch(name):
        raise BadInput(
            f"There is no folder {name!r}; give that of a pipeline, owner/name of one on the Hub, or {DEMO!r}."
        )
    try:
        index = DiffusionPipeline.load_config(name)
    except (OSError, ValueError) as error:
        raise BadInput(f"{name} can't be had from the Hub, and there is no such folder: {one_line(error)}") from error
    class_name = str(index.get("_class_name"))
    cls = getattr(diffusers, class_name, None)
    if not (isinstance(cls, type) and issubclass(cls, DiffusionPipeline)):
        raise BadInput(
            f"{name} is a {class_name}, which diffusers {diffusers.__version__} doesn't have; load it in Python, and "
            "call enable_omni_offload on it."
        )
    return Model(name, cls)


def one_of(flag: str, value: str | None, choices: tuple[str, ...] | Mapping[str, Any]) -> None:
    """BadInput unless `value` is None or among the choices."""
    if value is not None and value not in choices:
        raise BadInput(f"{flag} is {value!r}, which is unknown; choose from {', '.join(choices)}.")
