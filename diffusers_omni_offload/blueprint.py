"""A pipeline without weights, made from its configurations alone."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline, ModelMixin, SchedulerMixin
from diffusers.models.modeling_utils import no_init_weights
from diffusers.pipelines.pipeline_loading_utils import simple_get_class_obj
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from diffusers_omni_offload.weights.proof import stored_weights

INDEX = "model_index.json"

_JSON = (INDEX, "*/config.json", "*/scheduler_config.json")
"""The files of a repository that say what a pipeline is made of."""


def build_blueprint(
    path: str | Path, *, dtype: torch.dtype | Mapping[str, torch.dtype] | None = None
) -> DiffusionPipeline:
    """The pipeline at `path` with all of its weights on the meta device: it has shapes and dtypes, and can't run.

    Only configurations are read: of a repository on the hub nothing else is fetched, and weights that lie in the folder
    aren't opened. Schedulers are made; tokenizers and processors are left out.

    Args:
        path: a folder that `save_pretrained` wrote, or the name of a repository on the hub.
        dtype: of the weights, as `from_pretrained` would load them; or one for each component by its name, and
            "default". None means float32.

    Returns:
        A pipeline of the class that the configuration names.

    Raises:
        FileNotFoundError: a configuration isn't there, or can't be fetched.
        ValueError: the pipeline or a component is of a class that isn't known, or has code or a quantization of its
            own.
    """
    folder = _folder_of(path)
    index = _read(folder / INDEX)
    cls = _pipeline_class(index, path)
    entries = {name: entry for name, entry in index.items() if _is_component(entry)}
    components = {name: _component(folder, name, entry, _dtype_of(name, dtype)) for name, entry in entries.items()}
    settings = {name: value for name, value in index.items() if not name.startswith("_") and name not in entries}
    pipe: Any = _assembled(cls, components, settings)
    pipe.register_to_config(_name_or_path=str(path))
    return pipe


def _assembled(
    cls: type[DiffusionPipeline], components: Mapping[str, Any], settings: Mapping[str, Any]
) -> DiffusionPipeline:
    taken = inspect.signature(cls.__init__).parameters
    # What an index doesn't have is absent, too: it may be older than that component.
    needed = [name for name, parameter in taken.items() if parameter.default is parameter.empty and name != "self"]
    given = {name: value for name, value in {**settings, **components}.items() if name in taken}
    arguments = {**dict.fromkeys(needed), **given}
    try:
        return cls(**arguments)
    except (AttributeError, TypeError, ValueError):
        # Its constructor asks a tokenizer for something. Without it the components are there all the same.
        pipe: Any = cls.__new__(cls)
        pipe.register_modules(**{name: value for name, value in arguments.items() if name not in settings})
        pipe.register_to_config(**{name: value for name, value in arguments.items() if name in settings})
        return pipe


def _folder_of(path: str | Path) -> Path:
    """Where the configurations lie; those of a repository are fetched."""
    if Path(path).is_dir():
        if not (Path(path) / INDEX).is_file():
            raise FileNotFoundError(
                f"{str(path)!r} has no {INDEX}, so it isn't the folder of a diffusers pipeline. Give the folder that "
                "pipe.save_pretrained wrote, or the name of a repository."
            )
        return Path(path)
    if not _may_be_repository(str(path)):
        raise FileNotFoundError(
            f"{str(path)!r} is no folder, and no name of a repository ('owner/name'). "
            "Give the folder that pipe.save_pretrained wrote, or such a name."
        )
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(str(path), allow_patterns=list(_JSON)))
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise FileNotFoundError(
            f"{str(path)!r} is no folder here, and its configurations can't be had from the Hub: {reason}"
        ) from error
    if not (folder / INDEX).is_file():
        raise FileNotFoundError(f"The repository {str(path)!r} has no {INDEX}, so it holds no diffusers pipeline.")
    return folder


def _may_be_repository(name: str) -> bool:
    owner, slash, repository = name.partition("/")
    return bool(owner and slash and repository) and "/" not in repository and not owner.startswith((".", "~"))


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise FileNotFoundError(f"{file} isn't there, and says what the pipeline is made of. Download it, too.")
    try:
        content = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} isn't valid JSON: {error}. Download it anew.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds {type(content).__name__}, but a mapping is needed. Download it anew.")
    return content


def _pipeline_class(index: Mapping[str, Any], path: str | Path) -> type[DiffusionPipeline]:
    name = index.get("_class_name")
    if isinstance(name, (list, tuple)):
        raise ValueError(
            f"{str(path)!r} has code of its own ({name[0]}), which isn't run here. Load the pipeline, and plan for "
            "that."
        )
    cls = getattr(diffusers, str(name), None)
    if not (isinstance(cls, type) and issubclass(cls, DiffusionPipeline)):
        raise ValueError(
            f"The pipeline at {str(path)!r} is a {name}, which diffusers {diffusers.__version__} doesn't have. Load it "
            "with the code that it comes with, and plan for that."
        )
    return cls


def _is_component(entry: Any) -> bool:
    return isinstance(entry, (list, tuple)) and len(entry) == 2 and all(x is None or isinstance(x, str) for x in entry)


def _dtype_of(name: str, dtype: torch.dtype | Mapping[str, torch.dtype] | None) -> torch.dtype:
    if isinstance(dtype, Mapping):
        return dtype.get(name, dtype.get("default", torch.float32))
    return torch.float32 if dtype is None else dtype


def _component(folder: Path, name: str, entry: Any, dtype: torch.dtype) -> Any:
    """A model on meta, a scheduler, or None."""
    library, class_name = entry
    if library is None or class_name is None:
        return None
    try:
        cls = simple_get_class_obj(library, class_name)
    except (AttributeError, ImportError, ValueError) as error:
        raise ValueError(
            f"The component {name!r} is a {class_name} of {library!r}, which isn't installed or has code of its own. "
            "Load the pipeline, and plan for that."
        ) from error
    if isinstance(cls, type) and issubclass(cls, SchedulerMixin):
        file = folder / name / "scheduler_config.json"
        return cls.from_config(_read(file)) if file.is_file() else cls()
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        return None
    config = _read(folder / name / "config.json")
    if config.get("quantization_config") is not None:
        raise ValueError(
            f"The component {name!r} has quantized weights, whose sizes its configuration doesn't have. Load the "
            "pipeline, and plan for that."
        )
    try:
        return build_on_meta(cls, config, dtype)
    except Exception as error:
        raise ValueError(
            f"The component {name!r} ({class_name}) can't be made from {folder / name / 'config.json'}: {error}"
        ) from error


def build_on_meta(cls: type[nn.Module], config: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
    """A model of diffusers or transformers with all of its tensors on meta, in the dtypes that loading gives them.

    Args:
        cls: its class.
        config: what its config.json holds.
        dtype: what it is loaded in.
    """
    with ExitStack() as contexts:
        contexts.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(dtype)
        contexts.enter_context(torch.device("meta"))
        if issubclass(cls, PreTrainedModel):
            model: nn.Module = cls._from_config(_config_of(cls, config), dtype=dtype)
        elif issubclass(cls, ModelMixin):
            contexts.enter_context(no_init_weights())
            model = cls.from_config(dict(config))
        else:
            raise ValueError(f"{cls.__name__} is no model of diffusers or transformers.")
    kept = _kept_in_float32(model, dtype)
    for path, tensor in stored_weights(model).items():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32 if kept.intersection(path.split(".")) else dtype)
    return model.eval()


def _config_of(cls: type[PreTrainedModel], config: Mapping[str, Any]) -> PretrainedConfig:
    config_class = cls.config_class
    assert config_class is not None
    return config_class.from_dict(dict(config))


def _kept_in_float32(model: nn.Module, dtype: torch.dtype) -> set[str]:
    """Names of modules whose weights loading leaves in float32."""
    kept = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    if isinstance(model, PreTrainedModel):
        # transformers keeps these in float16 only, and others in bfloat16 too.
        kept = kept if dtype is torch.float16 else set()
        if dtype in (torch.float16, torch.bfloat16):
            kept |= set(model._keep_in_fp32_modules_strict or ())
    return kept
