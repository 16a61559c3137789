"""The class of an offloaded pipeline: its own, with a call scope, the execution device and refusals in front."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from diffusers.callbacks import MultiPipelineCallbacks, PipelineCallback

from diffusers_omni_offload.backends.mediation import MERGING_METHODS
from diffusers_omni_offload.handle import OffloadHandle, require_handle
from diffusers_omni_offload.messages import logger
from diffusers_omni_offload.registry import adapter_for

#: Arguments of a pipeline's call that it calls after a step.
_CALLBACKS = ("callback_on_step_end", "callback")


def _refuse(what: str, instead: str = "") -> NoReturn:
    raise RuntimeError(
        f"{what} isn't possible while the pipeline is offloaded by omni offload, which owns its weights. "
        f"{instead + ', or call' if instead else 'Call'} disable_omni_offload() first."
    )


def _refused(name: str) -> Callable[..., NoReturn]:
    def method(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused while offloaded."""
        _refuse(name)

    return method


class OffloadedPipeline:
    """What an offloaded pipeline's class is composed with: a call scope, the execution device, and refusals."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Whoever constructs `type(pipe)` wants another pipeline, which isn't offloaded."""
        return stock_class(cls)(*args, **kwargs)

    @property
    def device(self) -> torch.device:
        """The execution device: inputs and generators belong there, wherever the weights are."""
        return require_handle(self).backend.device

    _execution_device = device

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Casts pass; the pipeline itself isn't moved while it is offloaded."""
        device = kwargs.get("device")
        others = [value for value in args if isinstance(value, torch.dtype)]
        for value in args:
            if value is not None and not isinstance(value, torch.dtype):
                device = value
        if device is not None:
            if torch.device(device) != torch.device("cpu"):
                raise ValueError(
                    f"This pipeline is offloaded and runs on {str(self._execution_device)!r} as it is; "
                    f".to({str(device)!r}) would move every weight. Leave it out, or call disable_omni_offload() first."
                )
            if self._execution_device.type != "cpu":
                logger.warning(
                    "The pipeline is offloaded and stays so; disable_omni_offload() moves every weight to the CPU."
                )
        dtype = kwargs.get("dtype", others[0] if others else None)
        if dtype is None:
            return self
        require_handle(self).backend.refuse_cast(dtype)
        return super().to(dtype=dtype)  # type: ignore[misc]

    enable_model_cpu_offload = _refused("enable_model_cpu_offload()")
    enable_sequential_cpu_offload = _refused("enable_sequential_cpu_offload()")
    enable_group_offload = _refused("enable_group_offload()")
    remove_all_hooks = _refused("remove_all_hooks()")
    reset_device_map = _refused("reset_device_map()")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        _refuse("A deep copy", "Use from_pipe() for another pipeline with the same components")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse("Pickling", "Use save_pretrained(), which works as it is")


@functools.cache
def composed_class(cls: type) -> type:
    """`cls` with `OffloadedPipeline` before and its adapter behind it, under the same name, so that saving works."""
    adapter = adapter_for(cls)
    declared_by_itself = adapter is None or issubclass(cls, adapter)
    bases: tuple[Any, ...] = (OffloadedPipeline, cls) if declared_by_itself else (OffloadedPipeline, cls, adapter)

    @functools.wraps(cls.__call__)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        handle = require_handle(self)
        if handle.automatic is not None:
            handle.automatic.renew()
        args = tuple(_with_edits(value, handle) if i in positions else value for i, value in enumerate(args))
        kwargs = {name: _with_edits(value, handle) if name in _CALLBACKS else value for name, value in kwargs.items()}
        agree = functools.partial(handle.backend.agree_on_call, cls.__name__, signature, args, kwargs)
        with handle.call(agree):
            return cls.__call__(self, *args, **kwargs)

    methods = {name: _merging(getattr(cls, name)) for name in MERGING_METHODS if hasattr(cls, name)}
    signature = inspect.signature(cls.__call__)
    names = list(signature.parameters)[1:]
    positions = {names.index(name) for name in _CALLBACKS if name in names}
    copied = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(cls.__name__, bases, {"__call__": __call__, **methods, **copied})


def _merging(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def merging(self: Any, *args: Any, **kwargs: Any) -> Any:
        with require_handle(self).merging():
            return method(self, *args, **kwargs)

    return merging


def stock_class(cls: type) -> type:
    """The class that `cls` was composed from; a class that wasn't composed is returned as it is."""
    return cls.__bases__[1] if OffloadedPipeline in cls.__bases__ else cls


class _EditingCallbacks(MultiPipelineCallbacks):
    """A callback object of diffusers, called so that it may edit weights. Pipelines ask for its class."""

    def __init__(self, callback: PipelineCallback | MultiPipelineCallbacks, handle: OffloadHandle) -> None:
        super().__init__(callback.callbacks if isinstance(callback, MultiPipelineCallbacks) else [callback])
        self._callback, self._handle = callback, handle

    @property
    def tensor_inputs(self) -> list[str]:
        return self._callback.tensor_inputs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._handle.backend.edits():
            return self._callback(*args, **kwargs)


def _with_edits(callback: Any, handle: OffloadHandle) -> Any:
    """`callback`, called so that it may edit weights."""
    if isinstance(callback, (PipelineCallback, MultiPipelineCallbacks)):
        return _EditingCallbacks(callback, handle)
    if not callable(callback):
        return callback

    def edited(*args: Any, **kwargs: Any) -> Any:
        with handle.backend.edits():
            return callback(*args, **kwargs)

    return edited
