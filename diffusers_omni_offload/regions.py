"""What torch.compile compiles of an offloaded module: its own forward, inside of our hook.

Compiled from outside, as `module.compile()` does it, our hook would be traced, and would break the graph. Inside of it
nothing moves, so a block is one graph, and one for all blocks of its class.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Function = Callable[..., Any]
Compiler = Callable[[Function], Function]

#: Modes of torch.compile that record CUDA graphs, which read the same addresses each time.
_CAPTURING_MODES = ("reduce-overhead", "max-autotune")
_CAPTURING_BACKEND = "cudagraphs"


@dataclass(frozen=True)
class CompileRules:
    """How a module may be compiled.

    Attributes:
        blocks: blocks inside of it that have hooks of ours: they are compiled in its place, each as one graph.
        captured: whether with CUDA graphs: its weights have fixed addresses.
    """

    blocks: tuple[nn.Module, ...] = ()
    captured: bool = False

    def require(self, path: str, *, fullgraph: bool, captured: bool) -> None:
        """Refuse what the rules don't allow.

        Raises:
            TypeError: it says what to do instead.
        """
        if fullgraph and self.blocks:
            raise TypeError(
                f"{path} can't be compiled with fullgraph=True while its blocks are offloaded: they are loaded between "
                "its parts. Compile the blocks as full graphs, by compile_repeated_blocks(fullgraph=True), or all of "
                "it with fullgraph=False."
            )
        if captured and not self.captured:
            raise TypeError(
                f"{path} can't be compiled with CUDA graphs (mode 'reduce-overhead' or 'max-autotune') while it is "
                "offloaded: they read their weights at fixed addresses. Use another mode, such as "
                "'max-autotune-no-cudagraphs', or leave it resident."
            )


#: Of a module that stays where it is, with all that is in it, and of one that moves as a whole.
UNMOVED, MOVED = CompileRules(captured=True), CompileRules()


class Region:
    """The innermost forward of a module with a hook of ours, compiled or not. Called as the forward itself.

    Args:
        module: the module.
        forward: its forward.
        path: its path, for messages.
        rules: how it may be compiled.
    """

    def __init__(self, module: nn.Module, forward: Function, path: str, rules: CompileRules) -> None:
        functools.update_wrapper(self, forward)
        self.forward = forward
        self.__self__ = module  # As a bound method has it, by which others tell whose forward this is.
        self._path, self._rules = path, rules
        self._run = forward
        self._compiler = compiler_of(module)
        self._compile_with(self._compiler)
        vars(module).pop("_compiled_call_impl", None)
        vars(module)["compile"] = self._compile

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def restrict(self, rules: CompileRules) -> None:
        """Another hook of ours stands around the module, too: both have to allow what is compiled."""
        blocks = self._rules.blocks or rules.blocks
        self._rules = CompileRules(blocks, self._rules.captured and rules.captured)

    def give_back(self) -> None:
        """The last hook of ours is gone: the module is compiled as it would be without us."""
        module = self.__self__
        if vars(module).get("compile") == self._compile:
            del vars(module)["compile"]
        if self._compiler is not None:
            module._compiled_call_impl = self._compiler(module._call_impl)

    def _compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the module's forward; arguments are those of `torch.compile`."""
        captured = _asks_for_capture(kwargs)
        self._rules.require(self._path, fullgraph=bool(kwargs.get("fullgraph")), captured=captured)
        self._compiler = lambda function: torch.compile(function, *args, **kwargs)
        self._compile_with(self._compiler)

    def _compile_with(self, compiler: Compiler | None) -> None:
        if compiler is None:
            return
        if not self._rules.blocks:
            self._run = compiler(self.forward)
        for block in self._rules.blocks:
            inner = getattr(vars(block).get("compile"), "__self__", None)
            # One that was compiled for itself stays so.
            if isinstance(inner, Region) and inner._compiler is None:
                inner._compile_with(compiler)


def compiler_of(module: nn.Module) -> Compiler | None:
    """What `module.compile()` was done with: it compiles another function in the same way. None if it wasn't done."""
    compiled = _compiled(module)
    return None if compiled is None else _context_of(compiled)


def require_compilable(module: nn.Module, path: str, rules: CompileRules) -> None:
    """Refuse a module that was compiled in a way that the rules don't allow, or that can't be known.

    Raises:
        TypeError: it says what to do instead.
    """
    compiled = _compiled(module)
    if compiled is None:
        return
    context = _context_of(compiled)
    if context is None:
        raise TypeError(
            f"{path} is compiled in a way that can't be continued while it is offloaded. Enable offload first, then "
            "compile it."
        )
    backend = torch._dynamo.eval_frame.innermost_backend(context.callback)
    captured = getattr(backend, "compiler_name", None) == _CAPTURING_BACKEND or _captures(
        getattr(backend, "config", {})
    )
    rules.require(path, fullgraph=bool(getattr(context, "fullgraph", False)), captured=captured)


def _compiled(module: nn.Module) -> Function | None:
    compiled: Function | None = vars(module).get("_compiled_call_impl")
    # `compile(disable=True)` leaves the module's own method there.
    return None if compiled == module._call_impl else compiled


def _context_of(compiled: Function) -> Any:
    # torch keeps what it compiled with in the closure of the function that it returns.
    code, cells = getattr(compiled, "__code__", None), getattr(compiled, "__closure__", None)
    if code is None or cells is None:
        return None
    found = dict(zip(code.co_freevars, cells, strict=True)).get("self")
    if found is None or not isinstance(found.cell_contents, torch._dynamo.eval_frame._TorchDynamoContext):
        return None
    return found.cell_contents


def _asks_for_capture(arguments: Mapping[str, Any]) -> bool:
    """Whether arguments of `torch.compile` ask for CUDA graphs."""
    is_by_name = arguments.get("mode") in _CAPTURING_MODES or arguments.get("backend") == _CAPTURING_BACKEND
    return is_by_name or _captures(arguments.get("options") or {})


def _captures(options: Mapping[str, Any]) -> bool:
    return bool(options.get("triton.cudagraphs"))
