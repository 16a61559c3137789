"""What bitsandbytes does beside its work: it compiles kernels, for minutes, and warns in every call. Not in tests."""

from __future__ import annotations

import logging


def calm_bitsandbytes() -> None:
    """Let bitsandbytes run the Python that it would compile for a device that it doesn't know, and be silent."""
    from bitsandbytes.backends.default import ops

    for name in ("_dequantize_4bit_compute", "_dequantize_blockwise_compute"):
        function = getattr(ops, name)
        setattr(ops, name, getattr(function, "__wrapped__", function))
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
