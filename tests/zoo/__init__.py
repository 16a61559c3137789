"""Small offline builds of every DiT class and as many pipeline classes of diffusers as can be built: one file a family.

`TRANSFORMERS` and `PIPELINES` have them all by class name.
"""

from tests.zoo.registry import PIPELINES, TRANSFORMERS, load_families

load_families()

__all__ = ["PIPELINES", "TRANSFORMERS"]
