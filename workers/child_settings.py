"""What a supervisor tells its worker child."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from queue_service import keys
from queue_service.settings import (
    CheckpointSettings,
    RedisSettings,
    RetentionSettings,
    WorkerSettings,
)

_OWN = ("alias", "name", "burst", "begun_file", "tells_jobs")


@dataclass(frozen=True, slots=True)
class ChildSettings:
    """Everything a child is told by its supervisor, as one line of JSON on its standard input.

    Attributes:
        begun_file: the number of an open file for ``BegunNotes``; None where nobody reads them.
        tells_jobs: whether the child tells its supervisor the times of each job that has ended.
    """

    redis: RedisSettings
    worker: WorkerSettings
    retention: RetentionSettings
    alias: str
    name: str
    burst: bool
    begun_file: int | None = None
    tells_jobs: bool = False
    checkpoints: CheckpointSettings = field(default_factory=CheckpointSettings.load)

    def to_json(self) -> str:
        """Return the line; it may hold a password, so it goes through a pipe only."""
        sections = {
            "redis": self.redis.model_dump(mode="json"),
            "worker": self.worker.model_dump(mode="json"),
            "retention": self.retention.model_dump(mode="json"),
            "checkpoints": self.checkpoints.model_dump(mode="json"),
        }
        own = {name: getattr(self, name) for name in _OWN}
        return json.dumps({**sections, **own})

    @classmethod
    def from_json(cls, line: str) -> ChildSettings:
        """Read the line that ``to_json`` wrote."""
        fields = json.loads(line)
        return cls(
            redis=RedisSettings.load(**fields["redis"]),
            worker=WorkerSettings.load(**fields["worker"]),
            retention=RetentionSettings.load(**fields["retention"]),
            checkpoints=CheckpointSettings.load(**fields["checkpoints"]),
            **{name: fields[name] for name in _OWN},
        )

    @property
    def queues(self) -> list[str]:
        """The queues to serve, in their order."""
        names = keys.queue_names(self.alias) + list(self.worker.queues)
        if self.worker.serve_default:
            names.append(keys.DEFAULT_QUEUE)
        return list(dict.fromkeys(names))
