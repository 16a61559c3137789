"""Declarations for diffusers' own pipelines and a few others, one file a model family. Importing this package registers
them all: every file beside this one."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
