"""The glue to diffusers: hooks at the innermost place of its registry, and the `_hf_hook` that pipelines read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, cast

import torch
from diffusers.hooks.hooks import HookFunctionReference, HookRegistry, ModelHook
from torch import nn

from diffusers_omni_offload.nested import any_tensor, map_tensors
from diffusers_omni_offload.regions import CompileRules, Region

BLOCK_HOOK = "omni_offload_block"
COMPONENT_HOOK = "omni_offload_component"
ENTRY_HOOK = "omni_offload_entry"
OWN_HOOKS = (BLOCK_HOOK, COMPONENT_HOOK, ENTRY_HOOK)

#: Names under which diffusers registers hooks that move weights.
_FOREIGN_HOOKS = ("group_offloading", "lazy_prefetch_group_offloading")


#: Names under which diffusers registers hooks that call parts of a block before they call the block.
_READING_HOOKS = ("text_kv_cache_block",)


class _OwnedHook(ModelHook):
    """A hook that belongs to one module of one pipeline and can't be copied with it."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        #: What `module.forward` was when the hook was the outermost one, if it ever was.
        self.installed: Callable[..., Any] | None = None
        self._run: Callable[..., Any] | None = None

    def retire(self) -> None:
        """Pass through from now on, and hold nothing: somebody's closure may still call this hook."""
        self._run = None

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise RuntimeError(self._cannot("copied"))

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RuntimeError(self._cannot("pickled"))

    def _cannot(self, done: str) -> str:
        return (
            f"{self.path} is offloaded and can't be {done}: a copy would share its host memory and slots. "
            "Call disable_omni_offload() first, or use its state_dict() or save_pretrained(), which work as they are."
        )


class BlockHook(_OwnedHook):
    """Runs a block's forward through `run(block, forward, args, kwargs)`."""

    def __init__(self, path: str, block: int, run: Callable[..., Any]) -> None:
        super().__init__(path)
        self.block = block
        self._run = run

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run, inner = self._run, cast(Callable[..., Any], self.fn_ref.original_forward)
        if run is None:
            return inner(*args, **kwargs)
        return run(self.block, inner, args, kwargs)


class ComponentHook(_OwnedHook):
    """Runs a component's forward through `run(path, forward, args, kwargs)`, with inputs on the execution device."""

    def __init__(self, path: str, device: torch.device, run: Callable[..., Any]) -> None:
        super().__init__(path)
        self.owner: object = None
        self._device = device
        self._run = run

    def retire(self) -> None:
        super().retire()
        self.owner = None

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run, inner = self._run, cast(Callable[..., Any], self.fn_ref.original_forward)
        if run is None:
            return inner(*args, **kwargs)
        args = move_to_device(args, self._device)
        kwargs = move_to_device(kwargs, self._device)
        return run(self.path, inner, args, kwargs)


class EntryHook(_OwnedHook):
    """Runs the forward of a part of a component through `run(forward, args, kwargs)`, if it is called from outside.

    Args:
        path: the part's path.
        device: the execution device.
        run: runs the forward with what the component needs on the device.
        is_inside: whether the component is running, so that the call comes from within.
    """

    def __init__(self, path: str, device: torch.device, run: Callable[..., Any], is_inside: Callable[[], bool]) -> None:
        super().__init__(path)
        self._device, self._run, self._is_inside = device, run, is_inside

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        inner = cast(Callable[..., Any], self.fn_ref.original_forward)
        # What is being compiled is the component around this part, which is running then.
        if torch.compiler.is_compiling() or self._run is None or self._is_inside():
            return inner(*args, **kwargs)
        return self._run(inner, move_to_device(args, self._device), move_to_device(kwargs, self._device))


class ExecutionDeviceHook:
    """What stock pipelines look for on a component to learn where it runs.

    `vae.encode` and `vae.decode` call `pre_forward` too. It is no accelerate hook, so that nothing that looks for those
    mistakes it for one.

    Args:
        path: the component's path.
        device: the execution device.
        before: called whenever an entry point announces itself.
    """

    def __init__(self, path: str, device: torch.device, before: Callable[[], None]) -> None:
        self.path = path
        self.execution_device = device
        self._before = before
        self._is_attached = True

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self._before()
        return move_to_device(args, self.execution_device), move_to_device(kwargs, self.execution_device)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        if self._is_attached:
            raise RuntimeError(
                f"{self.path} is offloaded by omni offload, which this would take apart. "
                "Call disable_omni_offload() on the pipeline first."
            )
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise RuntimeError(f"{self.path} is offloaded and can't be copied: call disable_omni_offload() first.")

    @classmethod
    def attach(cls, module: nn.Module, path: str, device: torch.device, before: Callable[[], None]) -> None:
        """Put a hook on `module`."""
        module._hf_hook = cls(path, device, before)  # type: ignore[assignment]

    @staticmethod
    def detach(module: nn.Module) -> None:
        """Take our hook off `module`, and leave anybody else's."""
        hook = vars(module).get("_hf_hook")
        if isinstance(hook, ExecutionDeviceHook):
            hook._is_attached = False
            del module._hf_hook


def move_to_device(value: Any, device: torch.device) -> Any:
    """`value` with the tensors in it moved to `device`; one whose tensors are there already is the same object."""
    if isinstance(value, Mapping) and type(value) is not dict and hasattr(value, "to"):
        # What tokenizers and processors return knows how to move itself.
        is_elsewhere = any_tensor(value, lambda tensor: tensor.device != device)
        return value.to(device) if is_elsewhere else value
    return map_tensors(value, lambda tensor: tensor if tensor.device == device else tensor.to(device))


def install_innermost(
    module: nn.Module, hook: BlockHook | ComponentHook | EntryHook, name: str, rules: CompileRules
) -> None:
    """Register `hook` so that it runs inside every other hook of `module`, registered before or after.

    A cache's hook that answers without running the block then skips our hook with it, and the block's transfer. Only
    hooks that use the module's weights themselves are inside. What is compiled of the module, before or after, by the
    `rules`, is inside of our hook.
    """
    place, traceable = _place(module), _traceable(module, hook) if isinstance(hook, EntryHook) else None
    # An interrupt from here on leaves nothing that `remove_owned` doesn't put right.
    registry = HookRegistry.check_if_exists_or_initialize(module)
    if name in registry.hooks:
        raise ValueError(f"A hook named {name!r} is registered on this {type(module).__name__} already.")
    references: list[HookFunctionReference] = registry._fn_refs
    if place == len(references):
        registry.register_hook(hook, name)
        if traceable is not None:
            module.forward = traceable
        hook.installed = module.forward
        reference: Any = hook.fn_ref
        reference.original_forward = _region(module, reference.original_forward, hook, rules)
    else:
        outer = references[place]
        attribute = "original_forward" if outer.original_forward is not None else "forward"
        original = _region(module, getattr(outer, attribute), hook, rules)
        reference = HookFunctionReference()
        reference.pre_forward, reference.post_forward = hook.pre_forward, hook.post_forward
        reference.original_forward = original
        reference.forward = functools.update_wrapper(functools.partial(hook.new_forward, module), original)
        hook.fn_ref = reference
        setattr(outer, attribute, reference.forward)
        registry.hooks[name] = hook
        registry._hook_order.insert(place, name)
        references.insert(place, reference)
    _registry_changed(registry)


def _place(module: nn.Module) -> int:
    """How many hooks of a module stay inside of one of ours."""
    registry = vars(module).get("_diffusers_hook")
    if registry is None:
        return 0
    return max((registry._hook_order.index(reader) + 1 for reader in _readers(registry)), default=0)


def _traceable(module: nn.Module, hook: EntryHook) -> Callable[..., Any]:
    """What `register_hook` puts at `forward`, in a form that the compiler knows again when offload is enabled anew.

    Of a function it looks at the code, of a `functools.partial` at the object.
    """

    @functools.wraps(module.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return hook.new_forward(module, *args, **kwargs)

    return forward


def is_misplaced(module: nn.Module, name: str) -> bool:
    """Whether a hook that uses the module's weights itself was registered outside of ours."""
    registry = vars(module).get("_diffusers_hook")
    if registry is None or name not in registry.hooks:
        return False
    order = registry._hook_order
    return any(order.index(reader) > order.index(name) for reader in _readers(registry))


def _readers(registry: HookRegistry) -> list[str]:
    return [name for name in _READING_HOOKS if name in registry.hooks]


def _region(module: nn.Module, forward: Callable[..., Any], hook: _OwnedHook, rules: CompileRules) -> Region:
    if isinstance(forward, Region):
        forward.restrict(rules)
        return forward
    return Region(module, forward, hook.path, rules)


def remove_owned(module: nn.Module, name: str) -> None:
    """Take our hook off `module` and join what was inside it to what was outside; nothing happens if it isn't there.

    `HookRegistry.remove_hook` would overwrite the `forward` of the next hook even if that has a `new_forward` of its
    own: a cache would then run every block while it says that it is on.
    """
    registry = vars(module).get("_diffusers_hook")
    if registry is None or name not in registry.hooks:
        return
    index = registry._hook_order.index(name)
    hook, reference = registry.hooks[name], registry._fn_refs[index]
    region = reference.original_forward
    if isinstance(region, Region) and sum(other in OWN_HOOKS for other in registry.hooks) == 1:
        reference.original_forward = region.forward
        region.give_back()
    if index + 1 < len(registry._fn_refs):
        outer = registry._fn_refs[index + 1]
        # Both: `HookRegistry.remove_hook` may have put ours at `forward` although `original_forward` was its place.
        for attribute in ("forward", "original_forward"):
            function = getattr(outer, attribute)
            if function is not None and function in (reference.forward, hook.installed):
                setattr(outer, attribute, reference.original_forward)
    elif vars(module).get("forward") not in (hook.installed, reference.forward):
        pass  # Somebody wrapped or replaced `forward` since: that stays, and what it may call of ours passes through.
    elif _is_class_forward(module, reference.original_forward):
        vars(module).pop("forward", None)
    else:
        module.forward = reference.original_forward
    hook.retire()
    del registry.hooks[name]
    registry._hook_order.pop(index)
    registry._fn_refs.pop(index)
    _registry_changed(registry)
    if not registry.hooks:
        del module._diffusers_hook


def remove_leftovers(module: nn.Module) -> None:
    """Take every hook of ours off `module` and what is below it, whoever put it there."""
    for child in module.modules():
        for name in OWN_HOOKS:
            remove_owned(child, name)
        ExecutionDeviceHook.detach(child)


def owned_hook(module: nn.Module, name: str) -> Any:
    """Our hook of that name on `module`, or None."""
    registry = vars(module).get("_diffusers_hook")
    return None if registry is None else registry.hooks.get(name)


def foreign_offload(modules: Sequence[nn.Module]) -> str | None:
    """Who else moves the weights of one of `modules`: a phrase for a message, or None."""
    for module in modules:
        hook = vars(module).get("_hf_hook")
        if hook is not None and not isinstance(hook, ExecutionDeviceHook):
            return f"accelerate's {type(hook).__name__}"
        registry = vars(module).get("_diffusers_hook")
        if registry is not None and any(name in registry.hooks for name in _FOREIGN_HOOKS):
            return "diffusers' group offload"
    return None


def _is_class_forward(module: nn.Module, forward: Callable[..., Any]) -> bool:
    return getattr(forward, "__func__", None) is type(module).forward and getattr(forward, "__self__", None) is module


def _registry_changed(registry: HookRegistry) -> None:
    # Registries above cache which registries are below them.
    registry.invalidate_child_registries_cache()
