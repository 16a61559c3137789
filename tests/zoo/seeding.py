"""Calls of pipelines that draw random numbers without the generator that they are given."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.registry import Arguments


def seeded(call: Arguments) -> Arguments:
    """`call`, which seeds torch's global generators, too, each time that it makes arguments."""

    def arguments() -> dict[str, Any]:
        torch.manual_seed(0)
        return call()

    return arguments
