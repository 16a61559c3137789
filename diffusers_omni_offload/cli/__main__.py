"""`python -m diffusers_omni_offload.cli`: the same as `omni-offload`."""

from __future__ import annotations

import sys

from diffusers_omni_offload.cli import main

if __name__ == "__main__":
    sys.exit(main())
