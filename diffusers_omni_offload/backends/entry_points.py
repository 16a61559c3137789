"""The ways into a component besides its forward: methods that use its weights, and parts that are called directly."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from diffusers_omni_offload import hooks
from diffusers_omni_offload.declarations import a_type
from diffusers_omni_offload.regions import MOVED, UNMOVED
from diffusers_omni_offload.topology.paths import MissingPathError, lookup

#: Methods of diffusers' and transformers' models that pipelines call.
KNOWN_METHODS = (
    "encode",
    "decode",
    "tiled_encode",
    "tiled_decode",
    "decode_latent",
    "generate",
    "sample",
    "get_text_features",
    "get_image_features",
    "get_video_features",
    "get_audio_features",
    "get_image_tokens",
    "encode_text",
    "encode_image",
    "encode_prompt",
)


class EntryPoints:
    """Stands in every way into a component, so that what it needs is on the device and what has to leave has left.

    Methods are replaced on the instance. Parts get a hook each: everything that can be reached without going through an
    element of a list, and those elements; what is inside of a block is called by nobody else.

    Args:
        module: the component.
        path: its path.
        device: the execution device.
        declared: names of methods, relative to the component ("forward_model", "head.sample").
        run: `run(function, args, kwargs)` with the component on the device.
        is_inside: whether the component is running.
        is_still: whether all of the component's weights keep their addresses.
    """

    def __init__(
        self,
        module: nn.Module,
        path: str,
        device: torch.device,
        declared: Sequence[str],
        run: Callable[..., Any],
        is_inside: Callable[[], bool],
        *,
        is_still: bool,
    ) -> None:
        self._module, self._path, self._device = module, path, device
        self._declared = declared
        self._run, self._is_inside = run, is_inside
        self._rules = UNMOVED if is_still else MOVED
        self._methods: list[tuple[nn.Module, str, Any, Any]] = []
        #: What has a hook of ours.
        self.parts: list[nn.Module] = []

    def install(self) -> None:
        """Stand in every way."""
        known = [name for name in KNOWN_METHODS if callable(getattr(type(self._module), name, None))]
        for name in dict.fromkeys((*known, *self._declared)):
            holder, _, method = name.rpartition(".")
            if method == "forward":
                continue  # Every part has a hook that is in its way already.
            owner = lookup(self._module, holder)
            before = vars(owner).get(method)
            ours = self._wrapped(getattr(owner, method))
            self._methods.append((owner, method, before, ours))
            vars(owner)[method] = ours
        for name, part in _parts(self._module):
            if hooks.owned_hook(part, hooks.ENTRY_HOOK) is not None:
                continue  # Another component that is swapped holds it, too.
            self.parts.append(part)
            hook = hooks.EntryHook(f"{self._path}.{name}", self._device, self._run, self._is_inside)
            hooks.install_innermost(part, hook, hooks.ENTRY_HOOK, self._rules)

    def remove(self) -> None:
        """Leave every way as it was."""
        with ExitStack() as steps:
            for part in self.parts:
                steps.callback(hooks.remove_owned, part, hooks.ENTRY_HOOK)
            for method in self._methods:
                steps.callback(_put_back, *method)

    def _wrapped(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def entered(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside():
                return method(*args, **kwargs)
            args = hooks.move_to_device(args, self._device)
            return self._run(method, args, hooks.move_to_device(kwargs, self._device))

        return entered


def _put_back(owner: nn.Module, method: str, before: Any, ours: Any) -> None:
    if vars(owner).get(method) is ours:
        del vars(owner)[method]
        if before is not None:
            vars(owner)[method] = before


def require_methods(module: nn.Module, path: str, declared: Sequence[str]) -> None:
    """Refuse declared entry points that aren't there.

    Raises:
        ValueError: it names the method.
    """
    for name in declared:
        try:
            method = lookup(module, name)
        except MissingPathError as error:
            raise ValueError(
                f"The offload plan names the entry point {name!r} of {path!r}, but {error}; correct it."
            ) from None
        if not callable(method) or isinstance(method, nn.Module):
            raise ValueError(
                f"The entry point {name!r} of {path!r} is {a_type(method)} and not a method; correct the offload plan."
            )


def _parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name, part) below `module`, each once, not below the elements of lists."""
    seen = {module}
    pending = [("", module)]
    while pending:
        prefix, owner = pending.pop()
        for name, child in owner.named_children():
            if child in seen:
                continue
            seen.add(child)
            is_container = isinstance(child, (nn.ModuleList, nn.ModuleDict))
            if not is_container:
                yield f"{prefix}{name}", child
            if is_container or not isinstance(owner, (nn.ModuleList, nn.ModuleDict)):
                pending.append((f"{prefix}{name}.", child))
