"""Every setting of qsvc, and the one place that reads the environment and the config file.

A value comes from, in this order: an explicit argument (a command-line flag), the environment
(``QSVC_<SECTION>_<NAME>``), the config file (``$QSVC_CONFIG``, else ``qsvc/config.toml`` in the
user's config folder), the default.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self
from urllib.parse import urlsplit

import platformdirs
from pydantic import (
    AfterValidator,
    ByteSize,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from queue_service.errors import ConfigurationError, RefusedArgument, SettingsRefused
from queue_service.sentinel_url import SentinelUrl

_VARIABLE_PREFIX = "QSVC_"
_NO_SIZE: Final = "is no size such as 500MB or 8GB"
# Where pydantic's words are for programmers.
_PROBLEMS: Final = {
    "byte_size": _NO_SIZE,
    "byte_size_unit": _NO_SIZE,
    "string_too_short": "must not be empty",
}


def _matching(pattern: str, problem: str) -> AfterValidator:
    """Return what refuses a text that a pattern does not match as a whole."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(problem)
        return text

    return AfterValidator(check)


Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1)]
Alias = Annotated[
    str,
    _matching(
        "[A-Za-z0-9][A-Za-z0-9._-]*",
        "must be of letters, digits, '.', '_' and '-', and begin with a letter or a digit",
    ),
]
DeviceSlot = Annotated[str, _matching(r"(gpu|cpu):\d+", "is no device slot such as gpu:0 or cpu:1")]


class Section(BaseSettings):
    """One table of the config file. Build it with :meth:`load`; it does not change afterwards."""

    # hide_input_in_errors: a URL in an error's text would put its password in a log.
    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_ignore_empty=True, hide_input_in_errors=True
    )
    table: ClassVar[str]

    @classmethod
    def load(cls, **overrides: Any) -> Self:
        """Read this section; an override of None counts as not given.

        Raises:
            SettingsRefused: a value is not allowed.
            ConfigurationError: a key of the config file is unknown, or the file cannot be read.
            TypeError: an override that is no field of this section.
        """
        given = {name: value for name, value in overrides.items() if value is not None}
        if unknown := given.keys() - cls.model_fields.keys():
            raise TypeError(f"{cls.__name__} has no setting {', '.join(sorted(unknown))}")
        try:
            return cls(**given)
        except ValidationError as exc:
            problems = [cls._explain(error, given) for error in exc.errors(include_url=False)]
            raise SettingsRefused(problems) from exc

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources, strongest first; there are no .env files and no secret folders."""
        table = _read_config_file().get(cls.table, {})
        return init_settings, env_settings, InitSettingsSource(settings_cls, table)

    @classmethod
    def env_name(cls, field: str) -> str:
        """Return the environment variable of a field, such as ``QSVC_WORKER_SLOTS``."""
        return f"{cls.model_config['env_prefix']}{field}".upper()

    @classmethod
    def _explain(cls, error: ErrorDetails, given: dict[str, Any]) -> str | RefusedArgument:
        """Return what is wrong with one value, where it came from, and the value."""
        if error["type"] == "value_error":
            problem = str(error["ctx"]["error"])
        elif error["type"] in _PROBLEMS:
            problem = _PROBLEMS[error["type"]]
        else:
            message = error["msg"].removeprefix("Input ")
            problem = message[0].lower() + message[1:]
        if not error["loc"]:
            return f"[{cls.table}]: {problem}"
        field = str(error["loc"][0])
        value = str(error["input"]) if cls.model_fields[field].repr else None
        if field in given:
            return RefusedArgument(field, value, problem)
        shown = "" if value is None else f"={value}"
        if cls.env_name(field) in {name.upper() for name in os.environ}:
            return f"environment variable {cls.env_name(field)}{shown}: {problem}"
        return f"{config_path()}: [{cls.table}] {field}{shown}: {problem}"


class RedisSettings(Section):
    """Where the Redis server is and how long we wait for it."""

    model_config = SettingsConfigDict(env_prefix="QSVC_REDIS_")
    table: ClassVar[str] = "redis"

    url: str = Field(
        "redis://127.0.0.1:6379/0",
        repr=False,
        description="Server as redis://, rediss:// (TLS) or unix://, with user and password if it"
        " has them; or redis+sentinel://host:port,host:port/service.",
    )
    connect_timeout_seconds: Seconds = Field(
        2.0, description="How long connecting may take before the server counts as away."
    )
    socket_timeout_seconds: Seconds = Field(
        5.0, description="How long one answer may take before the server counts as away."
    )

    @field_validator("url")
    @classmethod
    def _can_be_connected_to(cls, url: str) -> str:
        if problem := _url_problem(url):
            raise ValueError(problem)
        return url


class WorkerSettings(Section):
    """What one worker serves, how much it takes on, and when its jobs count as abandoned."""

    model_config = SettingsConfigDict(env_prefix="QSVC_WORKER_")
    table: ClassVar[str] = "worker"

    model: Name | None = Field(
        None, description="Model to serve: a hub id, a folder, a .gguf file, or smollm2-135m."
    )
    alias: Alias | None = Field(
        None, description="Name of the model's queues; unset: made from the model's name."
    )
    queues: Annotated[tuple[Name, ...], NoDecode] = Field(
        (), description="More queues to claim from, after the model's own (comma-separated)."
    )
    callbacks: Annotated[tuple[Name, ...], NoDecode] = Field(
        (),
        description="Callbacks that jobs may name, as module.function (comma-separated); every"
        " other is refused.",
    )
    serve_default: bool = Field(True, description="Also claim jobs from the queue qsvc:default.")
    name: Name | None = Field(
        None, description="Worker's name in Redis; unset: host, alias and slot."
    )
    slots: PositiveInt = Field(32, description="Rows in one batch.")
    claim_ahead: NonNegativeInt = Field(
        8,
        description="Jobs claimed beyond the rows, so that they are prepared when one ends. Where"
        " more end in a tenth of a second, so many are claimed, up to 256.",
    )
    lease_seconds: PositiveInt = Field(
        10, description="How long a claimed job stays ours without a heartbeat."
    )
    beat_seconds: Seconds = Field(2.0, description="Time between heartbeats.")
    reap_seconds: Seconds = Field(3.0, description="Time between looks for abandoned jobs.")
    grace_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        10.0, description="Time that running jobs get to finish after SIGTERM."
    )
    crash_retries: PositiveInt = Field(
        2,
        description="Workers that may die with a job, in company and before it generates anything,"
        " until it runs alone; one more death, alone, fails it.",
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16", "stored"] = Field(
        "auto", description="Type of weights and activations; auto: what suits model and device."
    )
    blas_threads: PositiveInt | None = Field(
        None, description="CPU threads for matrix products; unset: cores - 1."
    )
    max_tokens_ceiling: PositiveInt | None = Field(
        None, description="Most tokens that one answer may have, whatever the request asks."
    )
    default_max_tokens: PositiveInt | None = Field(
        None,
        description="Tokens for a request that sets no limit; unset: until stop or context end.",
    )
    prefill_step: PositiveInt = Field(
        1024, description="Most prompt tokens that one step takes in, over all rows."
    )
    prefill_pause_seconds: Seconds = Field(
        0.7,
        description="How long a step may keep rows that are being decoded waiting while it takes"
        " prompt tokens in.",
    )
    kv_memory: ByteSize | None = Field(
        None,
        description="Memory for keys and values of all rows, such as 8GB; unset: most of what the"
        " device has left beside the model.",
    )
    device_slot: DeviceSlot | None = Field(
        None, description="Device slot to take, such as gpu:0 or cpu:1; unset: gpu:0, else cpu:0."
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "INFO", description="Least severe level that is logged."
    )
    engine_stall_seconds: Seconds = Field(
        300.0, description="Time without engine progress after which the worker is restarted."
    )
    trace_every: NonNegativeInt = Field(
        0,
        description="Of so many jobs one is traced, for `qsvc trace`; 0 for those submitted with"
        " --trace alone.",
    )
    metrics_port: Annotated[int, Field(ge=0, le=65_535)] | None = Field(
        None, description="Port for Prometheus's /metrics, 0 for a free one; unset: no metrics."
    )
    metrics_host: Name = Field(
        "127.0.0.1",
        description="Address that metrics are served on. Anybody who reaches it reads them.",
    )
    publish_interval_seconds: Seconds = Field(
        0.075, description="Time between two writes of new text to a job's stream."
    )
    progress_interval_seconds: Seconds = Field(
        0.5, description="Time between two writes of the tokens so far."
    )

    @field_validator("queues", "callbacks", mode="before")
    @classmethod
    def _split_at_commas(cls, queues: object) -> object:
        if not isinstance(queues, str):
            return queues
        return tuple(name for part in queues.split(",") if (name := part.strip()))

    @field_validator("log_level", mode="before")
    @classmethod
    def _in_capitals(cls, level: object) -> object:
        return level.upper() if isinstance(level, str) else level

    @property
    def most_with_engine(self) -> int:
        """How many jobs the engine has at a time: those in its rows, and the next ones."""
        return self.slots + self.claim_ahead

    @model_validator(mode="after")
    def _survives_a_missed_beat(self) -> Self:
        if self.lease_seconds < 2 * self.beat_seconds:
            raise ValueError(
                f"lease_seconds ({self.lease_seconds}) must be at least twice beat_seconds"
                f" ({self.beat_seconds:g}), or one late heartbeat loses the jobs"
            )
        return self


class RetentionSettings(Section):
    """How long Redis keeps what is finished."""

    model_config = SettingsConfigDict(env_prefix="QSVC_RETENTION_")
    table: ClassVar[str] = "retention"

    result_seconds: PositiveInt = Field(
        7 * 86400, description="How long results are kept, from the end of their batch."
    )
    failure_seconds: PositiveInt = Field(
        7 * 86400, description="How long failed jobs are kept, from the end of their batch."
    )
    stream_seconds: PositiveInt = Field(
        600, description="How long a job's token stream is kept after its last entry."
    )


class SubmitSettings(Section):
    """How a batch file is put into the queue."""

    model_config = SettingsConfigDict(env_prefix="QSVC_SUBMIT_")
    table: ClassVar[str] = "submit"

    chunk_lines: PositiveInt = Field(200, description="Lines enqueued in one round trip.")
    window_lines: PositiveInt = Field(
        50_000,
        description="Lines of one batch that wait in Redis at a time; submit feeds the rest.",
    )
    max_lines: PositiveInt | None = Field(
        None, description="Most lines a file may have; unset: no limit."
    )
    plan: bool = Field(
        True,
        description="Whether lines that begin alike are looked for, so that workers keep what they"
        " share.",
    )


class PathSettings(Section):
    """Where qsvc keeps files on this machine."""

    model_config = SettingsConfigDict(env_prefix=_VARIABLE_PREFIX)
    table: ClassVar[str] = "paths"

    cache_folder: Path = Field(
        default_factory=lambda: platformdirs.user_cache_path("qsvc"),
        description="State of `qsvc run` and device locks; unset: qsvc in the user's cache folder.",
    )

    @field_validator("cache_folder")
    @classmethod
    def _absolute(cls, folder: Path) -> Path:
        return folder.expanduser().absolute()


class CheckpointSettings(Section):
    """Keys and values of prompts' beginnings that workers keep on disk, to compute each once."""

    model_config = SettingsConfigDict(env_prefix="QSVC_CHECKPOINTS_")
    table: ClassVar[str] = "checkpoints"

    enabled: bool = Field(True, description="Whether workers keep and use them.")
    folder: Path = Field(
        default_factory=lambda: PathSettings.load().cache_folder / "checkpoints",
        description="Where they are; workers may share it. Unset: checkpoints in cache_folder.",
    )
    budget: ByteSize | None = Field(
        None,
        description="What all of them may take on disk, such as 20GB; unset: a tenth of the"
        " volume, at most 50GB. A tenth of the volume stays free in any case.",
    )
    at_rest: Literal["exact", "8bit"] = Field(
        "exact",
        description="How keys and values are written: exact, bit for bit, or with 8 bits a number,"
        " which takes about a quarter of the room (half for 16-bit models), and makes answers after"
        " a hit differ in rare cases from those after a miss.",
    )
    write_rate: ByteSize = Field(
        ByteSize(150_000_000),
        gt=0,
        description="Bytes of keys and values written each second while rows are decoded.",
    )
    daily_writes: ByteSize = Field(
        ByteSize(100_000_000_000),
        description="Most bytes that one worker writes to disk in 24 hours.",
    )
    verify_every: NonNegativeInt = Field(
        0,
        description="Of so many prefixes read one is computed again and compared; 0 for none. The"
        " worker's card counts checkpoint_verified and checkpoint_mismatches.",
    )

    @field_validator("folder")
    @classmethod
    def _absolute(cls, folder: Path) -> Path:
        return folder.expanduser().absolute()


SECTIONS: tuple[type[Section], ...] = (
    RedisSettings,
    WorkerSettings,
    RetentionSettings,
    SubmitSettings,
    PathSettings,
    CheckpointSettings,
)


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting as the reference documents it; ``default`` is written as in TOML, or unset."""

    section: str
    field: str
    env_name: str
    default: str
    description: str


def describe_settings() -> list[Setting]:
    """Return every setting, section by section, the same on every machine."""
    return [
        Setting(
            section=section.table,
            field=name,
            env_name=section.env_name(name),
            default=_as_toml(None if field.default_factory else field.default),
            description=field.description or "",
        )
        for section in SECTIONS
        for name, field in section.model_fields.items()
    ]


def unknown_variables() -> list[str]:
    """Return, for each environment variable that looks like a setting and is none, what to say.

    Others may have variables that begin with ``QSVC_`` too, so none is refused.
    """
    known = [setting.env_name for setting in describe_settings()]
    # The sections whose names are in those of their variables.
    prefixes = tuple(
        prefix
        for section in SECTIONS
        if (prefix := section.model_config["env_prefix"]) != _VARIABLE_PREFIX
    )
    found = []
    for name in sorted(map(str.upper, os.environ)):
        if not name.startswith(_VARIABLE_PREFIX) or name in known:
            continue
        if name.startswith(prefixes) or difflib.get_close_matches(name, known, cutoff=0.85):
            found.append(f"environment variable {name} is no setting; {_nearest(name, known)}")
    return found


def _as_toml(default: object) -> str:
    """Return a default as one would write it in the config file."""
    return "unset" if default is None else json.dumps(default)


def config_path() -> Path:
    """Return the config file's path: ``$QSVC_CONFIG``, else the user's own; it need not exist."""
    named = os.environ.get("QSVC_CONFIG")
    return Path(named) if named else platformdirs.user_config_path("qsvc") / "config.toml"


def redact_url(url: str) -> str:
    """Return a Redis URL without its passwords, also when it is malformed."""
    # Up to the last @, since a password may hold one that should have been escaped.
    url = re.sub(r"^([\w+]+://)(?!/)([^:@]*:)?.*@", r"\1\2***@", url)
    return re.sub(r"([?&][^=&]*password=)[^&]*", r"\1***", url, flags=re.IGNORECASE)


def _url_problem(url: str) -> str | None:
    """Return why redis-py could not use a URL or would misread it, None when it is fine.

    Nothing of the URL is repeated: where the password ends is what may be unclear.
    """
    if SentinelUrl.matches(url):
        try:
            SentinelUrl.parse(url)
        except ValueError as exc:
            return str(exc)
        return None
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return "no valid URL (in a password, write / as %2F, @ as %40, # as %23, ? as %3F)"
    if parts.scheme not in ("redis", "rediss", "unix"):
        return "must start with redis://, rediss://, unix:// or redis+sentinel://"
    if parts.scheme == "unix":
        if parts.hostname or not parts.path:
            return "a unix URL needs an absolute path: unix:///folder/server.sock"
    elif not re.fullmatch(r"/?\d*", parts.path):
        return "the path must be a database number: redis://host:6379/0"
    return None


def _read_config_file() -> dict[str, dict[str, Any]]:
    """Return the tables of the config file, checked for unknown names; {} where there is none.

    Raises:
        ConfigurationError: the file cannot be read, is no TOML, holds an unknown table or key, or
            was named by ``QSVC_CONFIG`` and does not exist.
    """
    path = config_path()
    try:
        with path.open("rb") as file:
            tables = tomllib.load(file)
    except FileNotFoundError as exc:
        if os.environ.get("QSVC_CONFIG"):
            raise ConfigurationError(f"QSVC_CONFIG names {path}, which does not exist") from exc
        return {}
    except OSError as exc:
        raise ConfigurationError(f"cannot read {path}: {exc.strerror}") from exc
    except ValueError as exc:
        raise ConfigurationError(f"{path} is no valid TOML: {exc}") from exc
    sections = {section.table: section for section in SECTIONS}
    for table, values in tables.items():
        if table not in sections:
            raise ConfigurationError(f"{path}: unknown name {table}; {_nearest(table, sections)}")
        if not isinstance(values, dict):
            raise ConfigurationError(f"{path}: {table} must be a table, written [{table}]")
        fields = sections[table].model_fields
        for key in values:
            if key not in fields:
                raise ConfigurationError(
                    f"{path}: [{table}] has no setting {key}; {_nearest(key, fields)}"
                )
    return tables


def _nearest(word: str, known: Iterable[str]) -> str:
    """Return a hint that names the known word most like this one."""
    [match] = difflib.get_close_matches(word, list(known), n=1, cutoff=0)
    return f"did you mean {match}?"
