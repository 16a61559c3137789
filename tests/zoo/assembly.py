"""Put pipelines together from a family's components, and make the arguments of their calls."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from tests.zoo.building import generator
from tests.zoo.registry import Arguments, pipeline


def assemble(pipeline_class: type, components: Mapping[str, Any], **more: Any) -> Any:
    """A pipeline of those `components` that its class takes, and of `more`."""
    taken = inspect.signature(pipeline_class.__init__).parameters
    return pipeline_class(**{name: value for name, value in {**components, **more}.items() if name in taken})


def arguments(**fixed: Any) -> Arguments:
    """What makes arguments for one call: copies of `fixed`, and a generator as if new."""
    return lambda: {**copy.deepcopy(fixed), "generator": generator()}


def register_all(make: Callable[[type], Any], calls: Mapping[str, Mapping[str, Any]]) -> None:
    """Register a builder for each class of diffusers in `calls`.

    Args:
        make: makes a pipeline of a class.
        calls: the class's name -> the fixed arguments of its call.
    """
    for class_name, fixed in calls.items():
        pipeline(class_name)(_builder(make, class_name, fixed))


def _builder(make: Callable[[type], Any], class_name: str, fixed: Mapping[str, Any]) -> Callable[[], Any]:
    def build() -> tuple[Any, Arguments]:
        import diffusers

        return make(getattr(diffusers, class_name)), arguments(**fixed)

    return build
