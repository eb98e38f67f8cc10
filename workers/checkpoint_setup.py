"""Opens the checkpoints of a loaded model: its namespace on disk, the writer, the histories."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import mlx.core as mx

from queue_service.errors import ConfigurationError
from queue_service.settings import CheckpointSettings
from workers.checkpoint_tier import CheckpointTier
from workers.checkpoints.announcements import Announcements
from workers.checkpoints.directory import DirectoryStore, default_budget
from workers.checkpoints.eight_bit import AT_REST, EightBitStore
from workers.checkpoints.identity import describe, files_digest, read_config, weight_files
from workers.checkpoints.records import Identity
from workers.checkpoints.store import CheckpointStore
from workers.checkpoints.write_behind import WriteBehind
from workers.memory import host_bytes
from workers.model_info import ModelInfo
from workers.runner import Runner
from workers.token_history import TokenHistory
from workers.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# What may wait to be written, and the part of the memory that it may be.
_MOST_WAITING_BYTES: Final = 1 << 30
_WAITING_SHARE: Final = 0.05
_MEMO_FOLDER: Final = "digests"
_SESSIONS: Final = 16


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """What a worker keeps beyond its process.

    Attributes:
        tier: for the engine.
        history: the tokens of chats that can go on.
    """

    tier: CheckpointTier
    history: TokenHistory

    def figures(self) -> Mapping[str, str]:
        """Return what happened so far, for the worker's card."""
        return {f"checkpoint_{name}": str(count) for name, count in self.tier.counts().items()}


def open_checkpoints(
    settings: CheckpointSettings,
    *,
    path: Path,
    info: ModelInfo,
    tokenizer: Tokenizer,
    runner: Runner,
    is_busy: Callable[[], bool],
) -> Checkpoints | None:
    """Return the checkpoints of a model; None where they are off or cannot be had.

    A worker without them computes everything itself, so nothing here is an error.

    Args:
        path: of the model's weights.
        is_busy: whether rows are decoded just now, for the writer.
    """
    if not settings.enabled:
        return None
    try:
        is_exact = settings.at_rest == "exact"
        identity = _identity(settings.folder, path, info, runner, is_exact=is_exact)
        budget = settings.budget or default_budget(settings.folder)
        store: CheckpointStore = DirectoryStore(
            settings.folder, identity, int(budget), model=info.name
        )
        if not is_exact:
            store = EightBitStore(store)
    except (ConfigurationError, OSError) as error:
        logger.warning("no checkpoints are kept: %s", error)
        return None
    writer = WriteBehind(
        store,
        max_bytes=min(_MOST_WAITING_BYTES, int(host_bytes() * _WAITING_SHARE)),
        is_busy=is_busy,
        bytes_per_second=int(settings.write_rate),
        bytes_per_day=int(settings.daily_writes),
    )
    history = TokenHistory(tokenizer)
    for tokens in reversed(store.latest(_SESSIONS)):  # the newest last, as if just kept
        history.remember(tokens)
    tier = CheckpointTier(
        store,
        writer,
        runner,
        announcements=Announcements(settings.folder, identity),
        verify_every=settings.verify_every,
    )
    return Checkpoints(tier, history)


def _identity(
    folder: Path, path: Path, info: ModelInfo, runner: Runner, *, is_exact: bool
) -> Identity:
    return describe(
        weights=files_digest(weight_files(path), folder / _MEMO_FOLDER),
        dtype=info.dtype,
        config=read_config(path),
        caches=runner.describe_layers(),
        versions={name: version(name) for name in ("mlx", "mlx-lm")},
        device=_architecture(info.device),
        at_rest=None if is_exact else AT_REST,
    )


def _architecture(device: str) -> str:
    """Return what computes: other processors round otherwise."""
    if device == "cpu":
        return f"cpu {platform.machine()}"
    facts: Any = mx.device_info()
    return f"gpu {facts.get('architecture', facts.get('device_name', 'unknown'))}"
