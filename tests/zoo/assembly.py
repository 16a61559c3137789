"""Put a pipeline together from a family's components, and make the arguments of its calls."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

from tests.zoo.building import generator
from tests.zoo.registry import Arguments


def assemble(pipeline_class: type, components: Mapping[str, Any], **more: Any) -> Any:
    """A pipeline of those `components` that its class takes, and of `more`."""
    taken = inspect.signature(pipeline_class.__init__).parameters
    return pipeline_class(**{name: value for name, value in {**components, **more}.items() if name in taken})


def arguments(**fixed: Any) -> Arguments:
    """What makes arguments for one call: copies of `fixed`, and a generator as if new."""
    return lambda: {**copy.deepcopy(fixed), "generator": generator()}
