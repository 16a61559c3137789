"""Loading a pipeline without ever having its DiTs' weights in memory: they are views of the checkpoint's files."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import diffusers
import torch
from accelerate import init_empty_weights
from diffusers import DiffusionPipeline, ModelMixin
from diffusers.models.modeling_utils import no_init_weights
from diffusers.pipelines.pipeline_loading_utils import simple_get_class_obj
from torch import nn

from diffusers_omni_offload.config import OffloadConfig
from diffusers_omni_offload.declarations import OFFLOAD_PLAN_ATTRIBUTE, OffloadPlan, Stored
from diffusers_omni_offload.progress import progress
from diffusers_omni_offload.registry import adapter_for
from diffusers_omni_offload.topology.paths import MissingPathError, is_inside, lookup
from diffusers_omni_offload.topology.resolver import resolve_offload_plan
from diffusers_omni_offload.topology.roles import roles_of
from diffusers_omni_offload.weights.checkpoint import Checkpoint, CheckpointError
from diffusers_omni_offload.weights.proof import Sources, prove, remember, stored_weights
from diffusers_omni_offload.weights.sources import LeafSource
from diffusers_omni_offload.weights.withheld import withhold

P = TypeVar("P", bound=DiffusionPipeline)

#: Arguments of `from_pretrained` that ask for another way of loading weights: what they are without an effect.
_OTHER_WAYS: Mapping[str, Any] = {
    "device_map": None,
    "quantization_config": None,
    "use_flashpack": False,
    "disable_mmap": False,
    "low_cpu_mem_usage": True,
    "use_safetensors": True,
}

#: Arguments of `from_pretrained` that say what is downloaded and how.
_DOWNLOAD = (
    *("cache_dir", "force_download", "proxies", "local_files_only", "token", "revision", "use_safetensors", "use_onnx"),
    *("custom_pipeline", "custom_revision", "load_connected_pipeline", "trust_remote_code"),
)


class _Unmapped(Exception):
    """Why a model is loaded the ordinary way, as one sentence."""


def load_omni_pipeline(
    cls: type[P],
    path: str | Path,
    *,
    torch_dtype: torch.dtype | dict[str, torch.dtype] | None = None,
    variant: str | None = None,
    **kwargs: Any,
) -> P:
    """What `cls.from_pretrained(path, ...)` gives, but the DiTs' weights stay in the checkpoint's files.

    They are views of the mapped files: memory is taken by what is read or edited only. Weights of streamed blocks that
    the files have in another dtype or form can't be views; they are read once offload is enabled. A DiT whose weights
    can't be proven to be in the files as they are needed is loaded the ordinary way, with a warning that says why.

    Args:
        cls: the pipeline's class.
        path: a folder, or the name of a repository, which is downloaded as `from_pretrained` does it.
        torch_dtype: as of `from_pretrained`; so is `dtype`.
        variant: as of `from_pretrained`.
        kwargs: the rest of its arguments.

    Returns:
        The pipeline.

    Raises:
        CheckpointError: files are missing or damaged. The message names them.
        TypeError: `cls` is no class of a diffusers pipeline.
    """
    if not (isinstance(cls, type) and issubclass(cls, DiffusionPipeline)):
        raise TypeError(f"load_omni_pipeline takes a class such as WanPipeline; it was given {cls!r}.")
    if torch_dtype is not None:
        kwargs["torch_dtype" if "dtype" in kwargs else "dtype"] = torch_dtype
    if variant is not None:
        kwargs["variant"] = variant
    folder = _folder_of(cls, path, kwargs)
    index = cls.load_config(str(folder))
    if cls is DiffusionPipeline and kwargs.get("custom_pipeline") is None:
        # Given to the general class, models that are optional to the pipeline's own would be loaded once more.
        cls = getattr(diffusers, str(index.get("_class_name")), cls)
    dits, plan = _declared(cls, index)
    mapped: dict[str, tuple[nn.Module, Sources]] = {}
    why: dict[str, str] = {}
    names = [
        name
        for name in dict.fromkeys(dit.split(".")[0] for dit in dits)
        if name not in kwargs and isinstance(index.get(name), (list, tuple)) and index[name][0]
    ]
    with progress("Mapping DiTs", len(names), unit="DiT") as bar:
        for name in names:
            try:
                mapped[name] = _load_mapped(name, folder, index[name], kwargs, _layouts(name, dits, plan))
            except (_Unmapped, CheckpointError) as reason:
                why[name] = str(reason)
            bar.advance(1)
    if why:
        warnings.warn(
            f"Some weights are loaded into memory, not read from the checkpoint. {_listed(why)}", stacklevel=2
        )
    models = {name: model for name, (model, _) in mapped.items()}
    try:
        pipe = cls.from_pretrained(path if Path(path).is_dir() else str(folder), **kwargs, **models)
    except Exception as error:
        if why:
            raise CheckpointError(f"{_listed(why)} Loading the ordinary way failed, too: {error}") from error
        raise
    for name, sentence in why.items():
        _require_loaded(name, getattr(pipe, name, None), sentence)
    if not Path(path).is_dir():
        pipe.register_to_config(_name_or_path=str(path))
    # A pipeline may hold something else than what it was given; that was loaded by whoever made it.
    sources = {name: found for name, (model, found) in mapped.items() if getattr(pipe, name, None) is model}
    _finish(pipe, sources)
    for name, found in sources.items():
        for dit in dits:
            if is_inside(dit, name):
                _remember(pipe, dit, name, found)
    _run_post_load(pipe, plan)
    return pipe


def _folder_of(cls: type[DiffusionPipeline], path: str | Path, kwargs: Mapping[str, Any]) -> Path:
    """The local folder of a pipeline; what isn't one is downloaded."""
    if Path(path).is_dir():
        return Path(path)
    wanted = {name: kwargs[name] for name in (*_DOWNLOAD, "variant") if name in kwargs}
    return Path(cls.download(str(path), **wanted))


def _listed(why: Mapping[str, str]) -> str:
    return " ".join(f"{name}: {reason}" for name, reason in why.items())


def _declared(cls: type[DiffusionPipeline], index: Mapping[str, Any]) -> tuple[tuple[str, ...], OffloadPlan]:
    """The paths of the DiTs, and the plan, of the pipeline that will be loaded."""
    owner: Any = cls
    if getattr(cls, "_dit_modules", None) is None:
        owner = adapter_for(cls)
    plan = getattr(owner, OFFLOAD_PLAN_ATTRIBUTE, None) or OffloadPlan()
    if owner is not None:
        return tuple(owner._dit_modules), plan
    names = [name for name, entry in index.items() if isinstance(entry, (list, tuple)) and entry and entry[0]]
    roles = roles_of(names, getattr(cls, "model_cpu_offload_seq", None))
    return tuple(name for name, role in roles.items() if role == "dit"), plan


def _layouts(name: str, dits: tuple[str, ...], plan: OffloadPlan) -> dict[str, Stored]:
    """The layouts of all DiTs in a component, by patterns relative to the component."""
    return {
        f"{dit}.{pattern}"[len(name) + 1 :]: stored
        for dit in dits
        if is_inside(dit, name)
        for pattern, stored in plan.checkpoint_layouts.get(dit, {}).items()
    }


# One model -----------------------------------------------------------------------------------------------------------


def _load_mapped(
    name: str, folder: Path, entry: Any, kwargs: Mapping[str, Any], layouts: Mapping[str, Stored]
) -> tuple[nn.Module, Sources]:
    """A model whose weights are views, or on meta where there is no view; and where they all are.

    Raises:
        _Unmapped, CheckpointError: why it can't be had.
    """
    for argument, neutral in _OTHER_WAYS.items():
        if kwargs.get(argument) not in (neutral, None):
            raise _Unmapped(f"{argument}={kwargs[argument]!r} was given.")
    cls = _class_of(entry)
    dtype = _dtype_of(name, kwargs)
    if dtype is not None and dtype.itemsize == 1:
        raise _Unmapped(f"{dtype} was asked for, to which weights are cast after loading.")
    config, unused, _ = cls.load_config(str(folder / name), return_unused_kwargs=True, return_commit_hash=True)
    if config.get("quantization_config") is not None:
        raise _Unmapped(f"{folder / name} has quantized weights.")
    checkpoint = Checkpoint.find(
        folder / name, variant=_variant_of(folder / name, kwargs.get("variant")), names=("diffusion_pytorch_model",)
    )
    model = _build_on_meta(cls, config, unused, dtype)
    sources = prove(model, checkpoint, layouts=layouts, casts=True)
    if isinstance(sources, str):
        checkpoint.close()
        raise _Unmapped(sources)
    _bind(model, sources)
    model.register_to_config(_name_or_path=str(folder / name))
    return model.eval(), sources


def _class_of(entry: Any) -> Any:
    library, class_name = entry
    try:
        cls = simple_get_class_obj(library, class_name)
    except (AttributeError, ImportError, ValueError) as error:
        raise _Unmapped(f"Its class {class_name} isn't found in {library!r}.") from error
    if not (isinstance(cls, type) and issubclass(cls, ModelMixin)):
        raise _Unmapped(f"{class_name} isn't a model of diffusers.")
    if cls.from_pretrained.__func__ is not ModelMixin.from_pretrained.__func__:  # type: ignore[attr-defined]
        raise _Unmapped(f"{class_name} has a way of loading of its own.")
    return cls


def _dtype_of(name: str, kwargs: Mapping[str, Any]) -> torch.dtype | None:
    asked = kwargs.get("dtype")
    if isinstance(asked, Mapping):
        asked = asked.get(name, asked.get("default", torch.float32))
    return asked if asked is None or isinstance(asked, torch.dtype) else torch.float32


def _variant_of(folder: Path, variant: str | None) -> str | None:
    """A component without files of the variant has its ordinary ones loaded."""
    if variant is None or not folder.is_dir():
        return None
    names = [file.name.split(".") for file in folder.iterdir()]
    return variant if any(len(parts) > 1 and parts[1].startswith(variant) for parts in names) else None


def _build_on_meta(cls: Any, config: Any, unused: Any, dtype: torch.dtype | None) -> Any:
    """The model with parameters on meta, in the dtypes that loading gives them, and buffers as eager construction makes
    them."""
    with ExitStack() as contexts:
        if dtype is not None:
            contexts.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(dtype)
        contexts.enter_context(no_init_weights())
        contexts.enter_context(init_empty_weights())
        model = cls.from_config(config, **unused)
    kept = set(cls._keep_in_fp32_modules or ())
    for path, tensor in stored_weights(model).items():
        if dtype is not None and tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32 if kept.intersection(path.split(".")) else dtype)
    return model


def _bind(model: nn.Module, sources: Sources) -> None:
    """Make the weights views of the files; without a view they stay on meta."""
    made: dict[int, torch.Tensor] = {}
    for path, old in stored_weights(model).items():
        new = made.get(id(old))
        if new is None:
            view = sources[path].view()
            if view is None:
                new = old if old.is_meta else torch.empty_like(old, device="meta")
            else:
                new = nn.Parameter(view, old.requires_grad) if isinstance(old, nn.Parameter) else view
            made[id(old)] = new
        _set(model, path, new)


def _set(model: nn.Module, path: str, tensor: torch.Tensor) -> None:
    parent, _, name = path.rpartition(".")
    owner = model.get_submodule(parent)
    table: dict[str, Any] = owner._parameters if name in owner._parameters else owner._buffers
    table[name] = tensor


# The pipeline --------------------------------------------------------------------------------------------------------


def _finish(pipe: Any, sources: Mapping[str, Sources]) -> None:
    """Nothing stays on meta: what is without a view is read, unless it belongs to a streamed block."""
    left: dict[int, tuple[torch.Tensor, list[tuple[str, str]]]] = {}
    for name in sources:
        for path, tensor in stored_weights(getattr(pipe, name)).items():
            if tensor.is_meta:
                left.setdefault(id(tensor), (tensor, []))[1].append((name, path))
    if not left:
        return
    blocks = _streamed_blocks(pipe)
    with progress("Loading weights", sum(meta.nbytes for meta, _ in left.values())) as bar:
        for meta, places in left.values():
            name, path = places[0]
            source = sources[name][path]
            is_streamed = all(any(is_inside(f"{name}.{path}", block) for block in blocks) for name, path in places)
            with torch.inference_mode(False):
                data = torch.empty(source.shape, dtype=source.dtype) if is_streamed else source.read()
                new = nn.Parameter(data, meta.requires_grad) if isinstance(meta, nn.Parameter) else data
            if is_streamed:
                withhold(new, _why_withheld(f"{name}.{path}", source))
            for name, path in places:
                _set(getattr(pipe, name), path, new)
            bar.advance(meta.nbytes)


def _streamed_blocks(pipe: Any) -> list[str]:
    """Paths of the blocks that layer mode would stream."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            plan = resolve_offload_plan(pipe, OffloadConfig.from_options("layer"), declarations=adapter_for(type(pipe)))
        except (ValueError, TypeError):
            # Enabling will say what is wrong; until then nothing is withheld.
            return []
    return [f"{stack.component}.{path}" for stack in plan.stacks for path in stack.block_paths]


def _why_withheld(path: str, source: LeafSource) -> str:
    form = f"in {source.stored_dtype}" if source.is_cast else "in several pieces"
    return (
        f"{path} can't be read while it is in the checkpoint only, which has it {form}. It is read in calls once "
        "`enable_omni_offload` was called; load the pipeline by `from_pretrained` to have it in memory."
    )


def _remember(pipe: Any, dit: str, name: str, sources: Sources) -> None:
    module = lookup(pipe, dit)
    if isinstance(module, nn.Module):
        prefix = f"{dit}."[len(name) + 1 :]
        remember(module, {path[len(prefix) :]: s for path, s in sources.items() if path.startswith(prefix)})


def _require_loaded(name: str, model: Any, reason: str) -> None:
    """Ordinary loading leaves weights without a source where they are: on meta."""
    if isinstance(model, nn.Module):
        missing = [path for path, parameter in model.named_parameters() if parameter.is_meta]
        if missing:
            raise CheckpointError(f"{name} has no weights for {', '.join(missing[:3])}: {reason}")


def _run_post_load(pipe: Any, plan: OffloadPlan) -> None:
    for path, method in plan.post_load.items():
        try:
            component = lookup(pipe, path)
            call = None if component is None else lookup(component, method)
        except MissingPathError as error:
            raise ValueError(
                f"The offload plan has {path!r}: {method!r} in post_load, but {error}; correct it."
            ) from error
        if call is not None:
            call()
