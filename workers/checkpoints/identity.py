"""What must be the same for keys and values to be of use again: facts, and digests of weights."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from queue_service.errors import ConfigurationError
from workers.checkpoints.records import Identity, canonical_json

_SHA256 = re.compile("[0-9a-f]{64}")
# A file that changed so lately may change again without another time of change.
_SETTLED_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class CacheFacts:
    """One layer's cache.

    Attributes:
        cls: the name of its class.
        dtypes: MLX's names of its arrays' types.
        shapes: of its arrays, without the axes that grow or that differ between rows.
        options: what else it was made with: bits, group size, size of the window.
    """

    cls: str
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Adapter:
    """A low-rank change of the weights.

    Attributes:
        digest: of its files, as ``files_digest`` gives it.
    """

    digest: str
    scale: float


def describe(
    *,
    weights: str,
    dtype: str,
    config: Mapping[str, Any],
    caches: Sequence[CacheFacts],
    versions: Mapping[str, str],
    device: str,
    adapter: Adapter | None = None,
    salt: str | None = None,
    at_rest: Mapping[str, Any] | None = None,
) -> Identity:
    """Return what keys and values depend on besides the tokens.

    The tokenizer and the chat template are no part of it: prompts are compared as tokens.

    Args:
        weights: the digest of all weights, as ``files_digest`` gives it.
        dtype: what they were made into when they were loaded.
        config: the model's ``config.json``; empty where the weights' file says it all.
        caches: one a layer.
        versions: of the libraries that compute them.
        device: the architecture of what computes them.
        salt: keeps apart what must not be shared, such as the prompts of two tenants.
        at_rest: how numbers are written; None bit for bit.
    """
    exact = {} if at_rest is None else {"at_rest": dict(at_rest)}
    return Identity(
        exact
        | {
            "weights": weights,
            "dtype": dtype,
            "config": dict(config),
            "caches": [asdict(cache) for cache in caches],
            "versions": dict(versions),
            "device": device,
            "adapter": None if adapter is None else asdict(adapter),
            "salt": salt,
        }
    )


def read_config(path: Path) -> dict[str, Any]:
    """Return the ``config.json`` of a model's folder, nothing for a file.

    Raises:
        ConfigurationError: there is none, or it is no JSON object.
    """
    if not path.is_dir():
        return {}
    file = path / "config.json"
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError) as exc:
        raise ConfigurationError(f"cannot read {file}: {exc}") from exc
    if not isinstance(config, dict):
        raise ConfigurationError(f"{file} holds no JSON object")
    return config


def weight_files(path: Path) -> list[Path]:
    """Return the files with the weights of a model: the file itself, or those of a folder."""
    return sorted(path.glob("*.safetensors")) if path.is_dir() else [path]


def adapter_files(folder: Path) -> list[Path]:
    """Return the files of an adapter as MLX-LM writes them."""
    return [folder / "adapter_config.json", *sorted(folder.glob("*.safetensors"))]


def files_digest(
    files: Iterable[Path], memo_folder: Path, *, clock: Callable[[], float] = time.time
) -> str:
    """Return 64 hex digits over the whole contents of files, whatever their names and order.

    Each is read once: its digest is kept in ``memo_folder`` for
    as long as the file is the same. A file of a Hugging Face cache is named by its digest.

    Raises:
        ConfigurationError: there is no file, or one cannot be read.
    """
    try:
        contents = sorted(_file_digest(file, memo_folder, clock) for file in files)
    except OSError as exc:
        raise ConfigurationError(f"cannot read the weights: {exc}") from exc
    if not contents:
        raise ConfigurationError("there are no files with weights")
    return hashlib.sha256(canonical_json(contents).encode()).hexdigest()


def _file_digest(file: Path, memo_folder: Path, clock: Callable[[], float]) -> str:
    """Return the SHA-256 of a file's content."""
    real = file.resolve(strict=True)
    if real.parent.name == "blobs" and _SHA256.fullmatch(real.name):
        return real.name
    facts = _stat_facts(real)
    memo = memo_folder / f"{hashlib.sha256(os.fsencode(real)).hexdigest()}.json"
    known = _read_memo(memo)
    if known is not None and {**facts, "sha256": known.get("sha256")} == known:
        return str(known["sha256"])
    with real.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    changed = max(facts["mtime_ns"], facts["ctime_ns"]) / 1e9
    if _stat_facts(real) == facts and changed + _SETTLED_SECONDS < clock():
        _write_memo(memo, {**facts, "sha256": digest})
    return digest


def _stat_facts(file: Path) -> dict[str, Any]:
    stat = file.stat()
    return {
        "path": str(file),
        "size": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
        "ctime_ns": stat.st_ctime_ns,
        "inode": stat.st_ino,
    }


def _read_memo(memo: Path) -> dict[str, Any] | None:
    """Return what was kept, None where there is nothing of use."""
    try:
        value = json.loads(memo.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not _SHA256.fullmatch(str(value.get("sha256"))):
        return None
    return value


def _write_memo(memo: Path, value: Mapping[str, Any]) -> None:
    """Keep a digest, if it can be kept: without it the file is read again next time."""
    with suppress(OSError):
        memo.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=memo.parent)
        try:
            with open(descriptor, "w") as stream:
                stream.write(canonical_json(value))
            os.replace(temporary, memo)
        except BaseException:
            os.unlink(temporary)
            raise
