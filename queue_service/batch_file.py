"""Reads a batch file line by line and checks each line; memory does not grow with the file."""

from __future__ import annotations

import gzip
import hashlib
import io
import shutil
import sqlite3
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol, Self

import zstandard

from queue_service.errors import BatchFileError, LineError, RequestError
from queue_service.json_text import load_json, quoted, shortened
from queue_service.requests import HARMLESS_FIELDS, Endpoint, parse_request

MAX_LINE_BYTES = 16 * 2**20
MAX_CUSTOM_ID_CHARS = 512
STANDARD_INPUT = "-"

_ENDPOINTS = {endpoint.value: endpoint for endpoint in Endpoint}
_ENVELOPE_FIELDS = ("custom_id", "method", "url", "body")
_UTF8_BOM = b"\xef\xbb\xbf"
_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_DIGEST_BYTES = 32
_BUFFER_BYTES = 256 * 1024
# One KiB of zstd can stand for 32 MiB of text, and all of it is decompressed at once.
_ZSTD_CHUNK_BYTES = 1024
_ID_CACHE_KIB = 8 * 1024
# Some 30,000 ids, for which a dict takes some 5 MB and a tenth of a table's time.
_FIRST_IDS_CHARS = 2**22
_CHARS_OF_AN_ID = 128


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One good line of a batch file.

    Args:
        line: the line's number in the file, counted from 1, blank lines included.
        custom_id: the line's own id, unique in the file; ``line-<n>`` for a bare body.
        endpoint: the same for every good line of a file.
        body: the request as it came (checked; lone surrogates replaced by U+FFFD).
    """

    line: int
    custom_id: str
    endpoint: Endpoint
    body: dict[str, Any]


class BatchFile:
    """An open batch file that can be read more than once, one pass at a time.

    The file stays open between the passes, so both read the same file even when another one
    takes its name. Close it, or use it as a context manager.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self.name = name

    def stream(self) -> BinaryIO:
        """Return the decompressed bytes from the start; ends the pass before.

        Reading raises BatchFileError when the file cannot be read or is no valid gzip or zstd,
        or a cut one.
        """
        try:
            self._file.seek(0)
            magic = self._file.read(len(_ZSTD_MAGIC))
            self._file.seek(0)
        except OSError as exc:
            raise _unreadable(self.name, exc) from exc
        source: _Source = self._file
        if magic.startswith(_GZIP_MAGIC) or self.name.endswith(".gz"):
            source = gzip.GzipFile(fileobj=self._file, mode="rb")
        elif magic == _ZSTD_MAGIC or self.name.endswith(".zst"):
            source = _ZstdSource(self._file)
        return io.BufferedReader(_NamedSource(source, self.name), _BUFFER_BYTES)

    def close(self) -> None:
        """Close the file; what was spooled from standard input is gone."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def open_batch(path: str | Path) -> BatchFile:
    """Open a batch file: plain, ``.gz`` or ``.zst`` (by suffix or content), ``-`` for stdin.

    Standard input and pipes are first copied to a temporary file, since a batch is read twice.

    Raises:
        BatchFileError: there is no such file, or it cannot be read; names the path and reason.
    """
    name = str(path)
    try:
        if name == STANDARD_INPUT:
            return BatchFile(_spooled(sys.stdin.buffer), "standard input")
        file: BinaryIO = Path(path).open("rb")  # noqa: SIM115 (BatchFile owns it)
        if not file.seekable():
            with file:
                file = _spooled(file)
        return BatchFile(file, name)
    except (OSError, ValueError) as exc:
        raise _unreadable(name, exc) from exc


def digest_file(file: BatchFile) -> str:
    """Return the blake2b-256 digest (64 hex digits) of the decompressed content, in one pass.

    A file that can't be read to its end shows here, before any line of it was used.

    Raises:
        BatchFileError: the file cannot be read to its end.
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    stream = file.stream()
    while chunk := stream.read(_BUFFER_BYTES):
        digest.update(chunk)
    return digest.hexdigest()


def read_batch(
    file: BatchFile, *, max_line_bytes: int = MAX_LINE_BYTES, max_lines: int | None = None
) -> Iterator[BatchLine | LineError]:
    """Yield what `read_lines` yields for the file.

    Raises:
        BatchFileError: the file cannot be read to its end, is a JSON list instead (code
            ``json_document``), or (code ``empty_file``) has no line but blank ones; this is found
            at the end.
    """
    _, first = next(_numbered(file.stream(), max_line_bytes), (0, None))
    if first is not None and first.startswith(b"["):
        raise BatchFileError(
            f"{file.name} is one JSON list, not one JSON object on each line; "
            "`jq -c '.[]'` makes lines of it",
            code="json_document",
        )
    is_empty = True
    for line in read_lines(file.stream(), max_line_bytes=max_line_bytes, max_lines=max_lines):
        is_empty = False
        yield line
    if is_empty:
        raise BatchFileError(f"{file.name}: there is no request in the file", code="empty_file")


def read_lines(
    stream: BinaryIO, *, max_line_bytes: int = MAX_LINE_BYTES, max_lines: int | None = None
) -> Iterator[BatchLine | LineError]:
    """Yield one BatchLine or LineError for every line that is not blank, in order.

    The errors are values: nothing is raised for a bad line. An id counts as used even when its
    line is refused. The first good line decides the url of the file.

    Args:
        stream: decompressed bytes; lines end in LF or CRLF.
        max_line_bytes: a longer line (its end included) is refused without being held.
        max_lines: every line that is not blank beyond this many is refused.
    """
    with closing(_CustomIds()) as ids:
        reader = _LineReader(ids, max_lines)
        for line, raw in _numbered(stream, max_line_bytes):
            yield reader.read(line, raw)


def raw_lines(
    file: BatchFile, *, max_line_bytes: int = MAX_LINE_BYTES
) -> Iterator[tuple[int, bytes | None]]:
    """Yield the number and the bytes of every line that is not blank; None if it is too long.

    Raises:
        BatchFileError: the file cannot be read to its end.
    """
    return _numbered(file.stream(), max_line_bytes)


class _LineReader:
    """Checks the lines of one file; remembers what they must agree on."""

    def __init__(self, ids: _CustomIds, max_lines: int | None) -> None:
        self._ids = ids
        self._max_lines = max_lines
        self._num_lines = 0
        self._endpoint: Endpoint | None = None

    def read(self, line: int, raw: bytes | None) -> BatchLine | LineError:
        """Check one line; ``raw`` is None for a line that was too long to keep."""
        self._num_lines += 1
        custom_id: str | None = None
        try:
            fields = _fields(raw)
            is_bare = _is_bare(fields)
            custom_id = f"line-{line}" if is_bare else _custom_id(fields)
            self._check_first_use(custom_id, line)
            if self._max_lines is not None and self._num_lines > self._max_lines:
                raise RequestError(
                    f"the file has more than {self._max_lines} requests", code="too_many_tasks"
                )
            endpoint = _bare_endpoint(fields) if is_bare else _endpoint(fields)
            if self._endpoint not in (None, endpoint):
                raise RequestError(
                    f"the url is '{endpoint}', but the file began with '{self._endpoint}'",
                    code="url_mismatch",
                    param="url",
                )
            body = fields if is_bare else _body(fields)
            if parse_request(endpoint, body, is_clean=True).stream:
                raise RequestError("'stream' cannot be used in a batch file", param="stream")
        except RequestError as exc:
            return LineError(
                exc.message, line=line, custom_id=custom_id, code=exc.code, param=exc.param
            )
        self._endpoint = endpoint
        return BatchLine(line, custom_id, endpoint, body)

    def _check_first_use(self, custom_id: str, line: int) -> None:
        first_line = self._ids.first_line(custom_id, line)
        if first_line != line:
            raise RequestError(
                f"custom_id {quoted(custom_id)} of line {line} was used on line {first_line}",
                code="duplicate_custom_id",
                param="custom_id",
            )


class _CustomIds:
    """The ids seen so far, exact and in bounded memory.

    The first ones are in a dict. One of a million ids would take 150 MB: the others are in a table
    in a temporary file that SQLite deletes by itself; a journal and syncs would protect what is
    worth nothing after a crash.
    """

    def __init__(self) -> None:
        self._first: dict[str, int] = {}
        self._room_chars = _FIRST_IDS_CHARS
        self._db = sqlite3.connect("")
        self._db.execute("PRAGMA journal_mode = OFF")
        self._db.execute("PRAGMA synchronous = OFF")
        self._db.execute(f"PRAGMA cache_size = -{_ID_CACHE_KIB}")
        self._db.execute("CREATE TABLE ids (id TEXT PRIMARY KEY, line INTEGER) WITHOUT ROWID")

    def first_line(self, custom_id: str, line: int) -> int:
        """Return the line that used the id first: this one unless the id was seen before."""
        known = self._first.get(custom_id)
        if known is not None:
            return known
        if self._room_chars > 0:
            self._room_chars -= _CHARS_OF_AN_ID + len(custom_id)
            self._first[custom_id] = line
            return line
        try:
            added = self._db.execute("INSERT OR IGNORE INTO ids VALUES (?, ?)", (custom_id, line))
            if added.rowcount:
                return line
            found = self._db.execute("SELECT line FROM ids WHERE id = ?", (custom_id,)).fetchone()
        except sqlite3.Error as exc:
            raise BatchFileError(f"cannot keep the table of custom_ids: {exc}") from exc
        return int(found[0])

    def close(self) -> None:
        self._db.close()


def _numbered(stream: BinaryIO, max_line_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """Yield the number and the bytes of every line that is not blank; None if it is too long."""
    line = 0
    while raw := stream.readline(max_line_bytes + 1):
        line += 1
        if line == 1:
            raw = raw.removeprefix(_UTF8_BOM)
        if len(raw) > max_line_bytes:
            while raw and not raw.endswith(b"\n"):
                raw = stream.readline(_BUFFER_BYTES)
            yield line, None
        elif raw := raw.strip(b" \t\r\n"):
            yield line, raw


def _fields(raw: bytes | None) -> dict[str, Any]:
    if raw is None:
        raise _not_json("the line is too long")
    try:
        fields = load_json(raw.decode())
    except UnicodeDecodeError as exc:
        raise _not_json(f"not valid UTF-8 at byte {exc.start + 1}") from None
    except ValueError as exc:
        raise _not_json(str(exc)) from None
    if not isinstance(fields, dict):
        raise _not_json("the line is not a JSON object")
    return fields


def _is_bare(fields: dict[str, Any]) -> bool:
    return ("messages" in fields or "prompt" in fields) and not any(
        name in fields for name in _ENVELOPE_FIELDS
    )


def _bare_endpoint(fields: dict[str, Any]) -> Endpoint:
    return Endpoint.CHAT if "messages" in fields else Endpoint.COMPLETIONS


def _custom_id(fields: dict[str, Any]) -> str:
    value = _required(fields, "custom_id")
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_CUSTOM_ID_CHARS:
        raise RequestError(
            f"'custom_id' must be a string of 1 to {MAX_CUSTOM_ID_CHARS} characters",
            param="custom_id",
        )
    return value


def _endpoint(fields: dict[str, Any]) -> Endpoint:
    method, url = _required(fields, "method"), _required(fields, "url")
    if method != "POST":
        raise RequestError("'method' must be 'POST'", param="method")
    try:
        return _ENDPOINTS[url]
    except (KeyError, TypeError):
        urls = " or ".join(f"'{endpoint}'" for endpoint in Endpoint)
        raise RequestError(f"'url' must be {urls}", param="url") from None


def _body(fields: dict[str, Any]) -> dict[str, Any]:
    body = _required(fields, "body")
    if not isinstance(body, dict):
        raise RequestError("'body' must be an object", param="body")
    for name in fields:
        if name not in _ENVELOPE_FIELDS and name not in HARMLESS_FIELDS:
            raise RequestError(f"unknown field {quoted(name)} beside 'body'", param=shortened(name))
    return body


def _required(fields: dict[str, Any], name: str) -> Any:
    value = fields.get(name)
    if value is None:
        raise RequestError(f"'{name}' is missing", code="missing_field", param=name)
    return value


def _not_json(reason: str) -> RequestError:
    return RequestError(reason, code="invalid_json_line")


def _unreadable(name: str, exc: Exception) -> BatchFileError:
    reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else exc
    return BatchFileError(f"cannot read {name}: {reason}")


def _spooled(pipe: BinaryIO) -> BinaryIO:
    spool = tempfile.TemporaryFile()  # noqa: SIM115 (the caller owns it)
    try:
        shutil.copyfileobj(pipe, spool)
    except BaseException:
        spool.close()
        raise
    return spool


class _Source(Protocol):
    """Bytes from the start to the end of a file; b"" at the end."""

    def read(self, size: int, /) -> bytes: ...


class _NamedSource(io.RawIOBase):
    """Gives every failure of the source below it the name of the file."""

    def __init__(self, source: _Source, name: str) -> None:
        self._source = source
        self._name = name

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        try:
            data = self._source.read(len(buffer))
        except (OSError, EOFError, zlib.error, zstandard.ZstdError) as exc:
            raise _unreadable(self._name, exc) from exc
        buffer[: len(data)] = data
        return len(data)


class _ZstdSource:
    """Decompresses the frames of a zstd file; zstandard's own reader takes a cut file as whole."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._compressed = b""
        self._text = memoryview(b"")

    def read(self, size: int, /) -> bytes:
        while not self._text:
            chunk = self._compressed or self._file.read(_ZSTD_CHUNK_BYTES)
            if not chunk and self._frame is None:
                return b""
            if not chunk:
                raise EOFError("the last zstd frame is cut off")
            if self._frame is None:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            self._text = memoryview(self._frame.decompress(chunk))
            self._compressed = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        text, self._text = self._text[:size], self._text[size:]
        return bytes(text)
