"""What the device has for keys and values, and whether it runs short."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any

import mlx.core as mx

from queue_service.errors import ConfigurationError

logger = logging.getLogger(__name__)

# Of what the device has: the rest is for activations, the system and other programs.
_USABLE_ON_GPU = 0.9
_USABLE_ON_CPU = 0.6
_KV_SHARE = 0.8
# Of the memory for keys and values, what shared prefixes may take: one part in so many.
_PREFIX_SHARE = 8
_SEVERE = 1.05
_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


class Pressure(Enum):
    """How short memory is."""

    NONE = auto()
    TIGHT = auto()
    SEVERE = auto()


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How a worker divides its memory, in bytes: the keys and values of rows, and of prefixes."""

    limit_bytes: int
    model_bytes: int
    kv_bytes: int
    prefix_bytes: int


def plan_memory(*, model_bytes: int, kv_bytes: int | None) -> MemoryPlan:
    """Divide what the device has between the model, keys and values, and the rest.

    See `divide_memory`.
    """
    return divide_memory(device_limit(), model_bytes=model_bytes, kv_bytes=kv_bytes)


def divide_memory(limit_bytes: int, *, model_bytes: int, kv_bytes: int | None) -> MemoryPlan:
    """Divide what may be used between the model, keys and values, and the rest.

    Args:
        model_bytes: what the weights take.
        kv_bytes: what was asked for keys and values; None takes most of what is left.

    Raises:
        ConfigurationError: the model and what was asked do not fit.
    """
    left = limit_bytes - model_bytes
    if kv_bytes is None:
        kv_bytes = int(left * _KV_SHARE)
    if kv_bytes <= 0 or kv_bytes > left:
        raise ConfigurationError(
            f"the model takes {_mb(model_bytes)} and its rows would take {_mb(max(kv_bytes, 0))} "
            f"of the {_mb(limit_bytes)} that may be used here; choose a smaller --kv-memory or "
            "model"
        )
    prefix_bytes = kv_bytes // _PREFIX_SHARE
    return MemoryPlan(limit_bytes, model_bytes, kv_bytes - prefix_bytes, prefix_bytes)


def device_limit() -> int:
    """Return the bytes that a worker may use here in all.

    Raises:
        ConfigurationError: the device does not say what it has.
    """
    if mx.default_device() == mx.Device(mx.cpu):
        return int(host_bytes() * _USABLE_ON_CPU)
    info: Any = mx.device_info()
    # The first is Metal's, the second CUDA's.
    size = info.get("max_recommended_working_set_size") or info.get("total_memory")
    if not size:
        raise ConfigurationError(
            "MLX does not say how much memory this GPU has; it cannot be shared out safely"
        )
    return int(min(size, info.get("free_memory", size)) * _USABLE_ON_GPU)


def describe_device() -> str:
    """Return where MLX computes, for a person: ``the CPU (AMD EPYC)``."""
    info: Any = mx.device_info()
    kind = "CPU" if mx.default_device() == mx.Device(mx.cpu) else "GPU"
    name = info.get("device_name")
    return f"the {kind} ({name})" if name else f"the {kind}"


def apply_limits(plan: MemoryPlan) -> None:
    """Tell MLX's allocator what it may use; on Metal, keep the weights resident."""
    mx.set_memory_limit(plan.limit_bytes)
    # Freed buffers kept for reuse: as much as rows may take.
    mx.set_cache_limit(plan.kv_bytes)
    if mx.metal.is_available():
        mx.set_wired_limit(plan.limit_bytes)


@dataclass(frozen=True, slots=True)
class MemoryGuard:
    """Says when MLX's live memory comes near the limit.

    Attributes:
        limit_bytes: above it memory is tight.
        active_bytes: what is in use now.
    """

    limit_bytes: int
    active_bytes: Callable[[], int] = mx.get_active_memory

    def check(self) -> Pressure:
        """Return the pressure, after giving back what the allocator keeps for reuse."""
        active = self.active_bytes()
        if active <= self.limit_bytes:
            return Pressure.NONE
        mx.clear_cache()
        logger.warning("memory is tight in_use=%s limit=%s", _mb(active), _mb(self.limit_bytes))
        return Pressure.SEVERE if active > self.limit_bytes * _SEVERE else Pressure.TIGHT


def host_bytes() -> int:
    """Return the memory of this machine, or what its container may use of it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in _CGROUP_LIMITS:
        try:
            total = min(total, int(file.read_text()))
        except (OSError, ValueError):
            continue  # not there, or "max"
    return total


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.0f} MB"
