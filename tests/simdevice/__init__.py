"""A simulated accelerator for PyTorch: `from tests import simdevice; device = simdevice.install()`."""

from .api import (
    DEFAULTS,
    STATS,
    advance_host,
    check,
    clear_hazards,
    configure,
    get_config,
    hazards,
    host_register,
    host_unregister,
    install,
    reset_clock,
    restore_defaults,
    stats,
    stream_time,
    trace,
)

__all__ = [
    "DEFAULTS",
    "STATS",
    "advance_host",
    "check",
    "clear_hazards",
    "configure",
    "get_config",
    "hazards",
    "host_register",
    "host_unregister",
    "install",
    "reset_clock",
    "restore_defaults",
    "stats",
    "stream_time",
    "trace",
]
