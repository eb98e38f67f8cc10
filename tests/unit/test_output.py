"""The output file: a growing prefix that any crash can cut, and that goes on where it ends."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from redis import Redis

from queue_service.batches import LineRef
from queue_service.errors import ConfigurationError
from queue_service.output import BatchOutput, OutputFile
from queue_service.responses import failure_line, success_line, unanswered_line
from queue_service.results import BatchReader
from tests.cli_helpers import content_of, custom_ids_of, read_output

BATCH = "batch_0123456789abcdef01234567"
OTHER_BATCH = "batch_ffffffffffffffffffffffff"

Line = dict[str, Any]


class EndedLines(BatchReader):
    """The lines of a batch that have ended, by number, without a server."""

    def __init__(self, ended: Mapping[int, Line]) -> None:
        super().__init__(Redis(), BATCH)
        self.ended = dict(ended)

    def read(self, refs: Sequence[LineRef]) -> list[Line | None]:
        return [self.ended.get(ref.line) for ref in refs]


class FixedOrder:
    """Line numbers in the order in which they are written."""

    def __init__(self, lines: Sequence[int]) -> None:
        self._refs = [LineRef(line, f"c{line}") for line in lines]
        self._position = 0

    def peek(self, count: int) -> list[LineRef]:
        return self._refs[self._position : self._position + count]

    def skip(self, count: int) -> None:
        self._position += count


def answered(line: int, text: str = "an answer", batch: str = BATCH) -> Line:
    message = {"role": "assistant", "content": text}
    return success_line(f"{batch}-{line}", f"c{line}", {"choices": [{"message": message}]})


def failed(line: int) -> Line:
    error = {"message": "no", "type": "server_error", "param": None, "code": "no", "line": line}
    return failure_line(f"{BATCH}-{line}", f"c{line}", error)


def cancelled(line: int) -> Line:
    return unanswered_line(f"{BATCH}-{line}", f"c{line}", "batch_cancelled", "cancelled")


@contextmanager
def opened(
    reader: EndedLines, order: Sequence[int], path: Path, errors: Path | None = None
) -> Iterator[BatchOutput]:
    """An output on its files, not resumed yet."""
    with ExitStack() as stack:
        files = [stack.enter_context(closing(OutputFile(p))) for p in (path, errors) if p]
        yield BatchOutput(reader, FixedOrder(order), *files)


def write_all(
    reader: EndedLines, order: Sequence[int], path: Path, errors: Path | None = None
) -> int:
    """Resume and write what has ended; return how many lines the files hold."""
    with opened(reader, order, path, errors) as output:
        output.resume()
        while output.advance():
            pass
        return output.num_written


def test_lines_are_written_as_a_growing_prefix_of_the_input(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    reader = EndedLines({2: answered(2), 3: answered(3)})
    with opened(reader, range(1, 5), path) as output:
        assert output.resume() == 0
        assert output.advance() == 0
        assert path.read_bytes() == b""
        reader.ended[1] = answered(1)
        assert output.advance() == 3
        assert custom_ids_of(read_output(path)) == ["c1", "c2", "c3"]
        reader.ended[4] = failed(4)
        assert output.advance() == 1
        assert output.num_written == 4
    assert custom_ids_of(read_output(path)) == ["c1", "c2", "c3", "c4"]


def test_a_resumed_file_goes_on_where_it_ends_over_many_pages(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    reader = EndedLines({line: answered(line) for line in range(1, 651)})
    assert write_all(reader, range(1, 651), path) == 650
    reader.ended.update({line: answered(line) for line in range(651, 701)})
    with opened(reader, range(1, 701), path) as output:
        assert output.resume() == 650
        assert output.advance() == 50
    assert custom_ids_of(read_output(path)) == [f"c{line}" for line in range(1, 701)]


def test_a_torn_last_line_is_cut_off_and_written_again(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    reader = EndedLines({line: answered(line) for line in (1, 2, 3)})
    write_all(reader, (1, 2, 3), path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    with opened(reader, (1, 2, 3), path) as output:
        assert output.resume() == 2
        assert output.advance() == 1
    assert path.read_bytes() == whole


# Whole, also a line of the batch that does not belong here; torn; another format; not even text.
FOREIGN: list[bytes] = [
    json.dumps(answered(1, batch=OTHER_BATCH)).encode() + b"\n",
    json.dumps(answered(1, batch=OTHER_BATCH)).encode()[:-5],
    json.dumps(answered(2)).encode() + b"\n",
    b'{"custom_id": "c1", "body": {}}\n',
    b'["a", "list"]\n',
    b"name,price\napple,3\n",
    b"notes without an end of line",
    b"\x00\xff\xfe\n",
    b"\n",
]


@pytest.mark.parametrize("foreign", FOREIGN)
@pytest.mark.parametrize("num_own_lines", [0, 1])
def test_a_file_with_something_else_in_it_is_refused_and_left_as_it_is(
    tmp_path: Path, foreign: bytes, num_own_lines: int
) -> None:
    path = tmp_path / "out.jsonl"
    lines = [answered(9), answered(1)][:num_own_lines]
    path.write_bytes(b"".join(json.dumps(line).encode() + b"\n" for line in lines) + foreign)
    before = path.read_bytes()
    order = [*[9][:num_own_lines], 1, 2]
    refused = pytest.raises(ConfigurationError, match=r"out\.jsonl holds something else")
    with opened(EndedLines({}), order, path) as output, refused:
        output.resume()
    assert path.read_bytes() == before


def test_neither_file_is_cut_when_one_of_the_two_is_refused(tmp_path: Path) -> None:
    path, errors = tmp_path / "out.jsonl", tmp_path / "errors.jsonl"
    reader = EndedLines({1: answered(1), 2: answered(2)})
    write_all(reader, (1, 2), path)
    torn = path.read_bytes()[:-3]
    path.write_bytes(torn)
    errors.write_text("my own notes\n")
    refused = pytest.raises(ConfigurationError, match=r"errors\.jsonl")
    with opened(reader, (1, 2), path, errors) as output, refused:
        output.resume()
    assert path.read_bytes() == torn


def test_results_and_errors_cannot_go_to_one_file_under_two_names(tmp_path: Path) -> None:
    path, link = tmp_path / "out.jsonl", tmp_path / "link.jsonl"
    write_all(EndedLines({1: answered(1)}), (1,), path)
    link.symlink_to(path)
    with pytest.raises(ConfigurationError, match="two files"):
        write_all(EndedLines({1: answered(1)}), (1,), path, link)
    assert custom_ids_of(read_output(path)) == ["c1"]


@pytest.mark.parametrize("path", ["missing/out.jsonl", "."])
def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, path: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot write"):
        OutputFile(tmp_path / path)


def test_lines_without_an_answer_go_to_the_errors_file_when_there_is_one(tmp_path: Path) -> None:
    path, errors = tmp_path / "out.jsonl", tmp_path / "errors.jsonl"
    reader = EndedLines({1: answered(1), 2: failed(2), 3: cancelled(3), 4: answered(4)})
    assert write_all(reader, (1, 2, 3, 4), path, errors) == 4
    assert custom_ids_of(read_output(path)) == ["c1", "c4"]
    assert custom_ids_of(read_output(errors)) == ["c2", "c3"]


@pytest.mark.parametrize("make", [answered, failed])
def test_both_files_exist_also_when_all_lines_end_the_same_way(
    tmp_path: Path, make: Callable[[int], Line]
) -> None:
    path, errors = tmp_path / "out.jsonl", tmp_path / "errors.jsonl"
    write_all(EndedLines({1: make(1), 2: make(2)}), (1, 2), path, errors)
    assert len(read_output(path)) + len(read_output(errors)) == 2
    assert not read_output(path) or not read_output(errors)


@pytest.mark.parametrize("behind", ["out.jsonl", "errors.jsonl"])
def test_a_crash_between_the_two_writes_leaves_nothing_out_and_nothing_twice(
    tmp_path: Path, behind: str
) -> None:
    path, errors = tmp_path / "out.jsonl", tmp_path / "errors.jsonl"
    lines = range(1, 13)
    make = {0: failed, 1: answered, 2: cancelled}
    reader = EndedLines({line: make[line % 3](line) for line in lines})
    write_all(reader, lines, path, errors)
    whole = path.read_bytes(), errors.read_bytes()
    file = tmp_path / behind
    kept = file.read_bytes().split(b"\n")[:1]
    file.write_bytes(b"".join(line + b"\n" for line in kept))
    assert write_all(reader, lines, path, errors) == 12
    assert (path.read_bytes(), errors.read_bytes()) == whole


def test_any_text_stays_one_object_a_line_in_valid_utf8(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    texts = [
        "two\nlines\r\n",
        "a\u2028b\u2029c\x85d\x0be",
        "half \ud83d a pair",
        "null \x00",
        "é😀",
    ]
    reader = EndedLines({i: answered(i, text) for i, text in enumerate(texts, 1)})
    write_all(reader, range(1, 6), path)
    written = [content_of(line) for line in read_output(path)]
    assert written[:2] == texts[:2]
    assert written[3:] == texts[3:]
    written[2].encode("utf-8", "strict")
    assert written[2].startswith("half ")
    assert written[2].endswith(" a pair")


def test_every_line_has_the_same_keys(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write_all(EndedLines({1: answered(1), 2: failed(2), 3: cancelled(3)}), (1, 2, 3), path)
    good, bad, never_ran = read_output(path)
    assert set(good) == set(bad) == set(never_ran) == {"id", "custom_id", "response", "error"}
    assert good["error"] is None
    assert never_ran["response"] is None
    assert set(good["response"]) == set(bad["response"])
    assert set(bad["error"]) == set(never_ran["error"])


def test_unordered_lines_are_written_as_they_end_and_resumed_in_that_order(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    order = [3, 1, 2]
    reader = EndedLines({line: answered(line) for line in order})
    assert write_all(reader, order, path) == 3
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    order.append(4)
    reader.ended[4] = answered(4)
    assert write_all(reader, order, path) == 4
    assert path.read_bytes().startswith(whole)
    assert custom_ids_of(read_output(path)) == ["c3", "c1", "c2", "c4"]


@given(
    ends=st.lists(st.sampled_from(["answer", "failure", "cancel"]), min_size=1, max_size=8),
    text=st.text(max_size=20),
    cut=st.floats(0, 1),
    errors_cut=st.floats(0, 1),
    shuffled=st.randoms(use_true_random=False),
)
@example(ends=["answer"], text="\u2028", cut=0.999, errors_cut=1.0, shuffled=None)
@settings(max_examples=60, deadline=None)
def test_a_file_cut_at_any_byte_becomes_the_undisturbed_one(
    ends: list[str], text: str, cut: float, errors_cut: float, shuffled: Any
) -> None:
    make = {"answer": lambda line: answered(line, text), "failure": failed, "cancel": cancelled}
    order = list(range(1, len(ends) + 1))
    if shuffled is not None:
        shuffled.shuffle(order)
    reader = EndedLines({line: make[end](line) for line, end in enumerate(ends, 1)})
    with tempfile.TemporaryDirectory() as folder:
        path, errors = Path(folder) / "out.jsonl", Path(folder) / "errors.jsonl"
        for files, cuts in (([path], [cut]), ([path, errors], [cut, errors_cut])):
            path.unlink(missing_ok=True)
            assert write_all(reader, order, *files) == len(ends)
            whole = [file.read_bytes() for file in files]
            for file, content, part in zip(files, whole, cuts, strict=True):
                file.write_bytes(content[: int(part * len(content))])
            assert write_all(reader, order, *files) == len(ends)
            assert [file.read_bytes() for file in files] == whole


@pytest.mark.parametrize("path", ["-", "/dev/null", "pipe"])
def test_standard_output_and_pipes_cannot_take_results(tmp_path: Path, path: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigurationError, match=r"results go to a file.* name one with -o"):
        OutputFile(Path(path) if path == "-" else tmp_path / path)
