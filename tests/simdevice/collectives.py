"""torch.distributed on the simulated device: a backend, `simccl`, whose ranks exchange the device's bytes over gloo.

`dist.init_process_group(install_collectives(), ...)`. As with NCCL, a collective is work of a stream, in modelled time
and for the race checker: see `csrc/collectives.h`.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from . import api

NAME = "simccl"
BACKENDS = f"cpu:gloo,sim:{NAME}"
"""What `init_process_group` takes as its backend: gloo for the CPU's tensors, this one for the device's."""


def install_collectives() -> str:
    """Register the backend with torch (once in a process, for good) and return `BACKENDS`.

    The device has to be installed. `init_process_group` without a backend takes the two from then on.
    """
    library = api._lib()
    if NAME not in dist.Backend.backend_list:
        library.sim_register_collectives()
        dist.Backend.register_backend(NAME, _make_backend, devices=["sim"])
    return BACKENDS


def _make_backend(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    """The backend of one process group: gloo, which gets CPU views of the device's tensors."""
    return dist.ProcessGroupGloo(store, rank, size, timeout)
