"""Every command and program in a document is run by a test, or says why not and is checked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli_helpers import ROOT, processes
from tests.document_code import (
    LANGUAGES,
    Block,
    all_blocks,
    assert_prints,
    check_program,
    check_shell,
    code_blocks,
    documents,
    open_page,
    parse_qsvc,
    shell_commands,
)
from tests.harness import eventually

# What nobody pastes into a shell or an interpreter.
OTHER_LANGUAGES = ("", "json", "mermaid", "redis", "text", "toml")
NOT_RUN = [
    block for name in documents() for block in code_blocks(name) if block.why_not_run is not None
]


@pytest.mark.parametrize("document", documents())
def test_a_document_writes_code_in_a_language_that_is_looked_at(document: str) -> None:
    blocks = all_blocks(document)
    fences = re.findall(r"^ *```", (ROOT / document).read_text(encoding="utf-8"), re.MULTILINE)
    assert len(fences) == 2 * len(blocks), "a fence that is not understood"
    known = (*LANGUAGES, *OTHER_LANGUAGES)
    assert [block.place for block in blocks if block.language not in known] == []
    # A command in a block of another language would be run by nobody.
    others = [block for block in blocks if block.language in OTHER_LANGUAGES]
    assert [block.place for block in others if block.text.startswith("$ ")] == []


@pytest.mark.parametrize("block", NOT_RUN, ids=lambda block: block.place)
def test_a_block_that_is_not_run_could_be(block: Block) -> None:
    assert block.why_not_run is not None
    assert len(block.why_not_run) > 8, "the reason"
    if block.language == "python":
        check_program(block.text)
        return
    for command, _ in block.commands():
        check_shell(command)


@pytest.mark.parametrize(
    "text",
    [
        "qsvc submitt jobs.jsonl",
        "qsvc submit jobs.jsonl --modle x",
        "qsvc submit",
        "qsvc submit jobs.jsonl --priority middle",
        "qsvc dead",
        "qsvc dead show",
        "A=1 .venv/bin/qsvc status",
        "cd x && qsvc top --json --nothing",
        'b=$(qsvc submit jobs.jsonl --nothing); echo "$b"',
        "qsvc submit \\\n  jobs.jsonl --nothing",
        "scripts/nothing",
        "if true; then qsvc batches",
    ],
)
def test_a_command_that_is_wrong_is_found(text: str) -> None:
    with pytest.raises(Exception):  # noqa: B017, PT011 - click's errors and ours
        check_shell(text)


@pytest.mark.parametrize(
    "text",
    [
        "qsvc submit jobs.jsonl --model x 2> log &",
        "qsvc results batch_0a1b… -o results.jsonl --follow   # and so on",
        'batch=$(qsvc submit jobs.jsonl) && qsvc status "$batch" --json | head -1',
        "qsvc cache import kv.tar",
        "qsvc dead retry --all --code timeout",
        "echo qsvc nothing",
        "qsvc submit --help",
    ],
)
def test_a_command_that_is_right_passes(text: str) -> None:
    check_shell(text)


def test_redirections_and_variables_are_no_words_of_a_command() -> None:
    text = "A=1 B=$C one two > file 2>&1 | three; x=$(four five) && six 2>> log &"
    assert list(shell_commands(text)) == [["one", "two"], ["three"], ["four", "five"], ["six"]]


def test_a_program_whose_imports_are_wrong_is_found() -> None:
    check_program("from rq import Queue\nimport os.path\n")
    with pytest.raises(AssertionError, match="no Quue"):
        check_program("from rq import Quue\n")
    with pytest.raises(ModuleNotFoundError):
        check_program("def f():\n    import nothing_of_this_name\n")
    with pytest.raises(SyntaxError):
        check_program("print(\n")


def test_printed_numbers_may_differ_and_words_may_not() -> None:
    output = "one  12 lines\n\nthe batch is batch_1f\ntwo 3.5 s\n"
    assert_prints(output, "one 7 lines\n\nthe batch is batch_…\n…\ntwo 1,000 s\n", "here")
    for wrong in ("one 7 words\n", "two 1 s\none 1 lines\n", "the batch is\n", "three\n"):
        with pytest.raises(AssertionError, match="not printed"):
            assert_prints(output, wrong, "here")


def test_options_of_groups_are_parsed() -> None:
    parse_qsvc(["cache", "prune", "--to", "10GB"])
    with pytest.raises(AssertionError, match="no qsvc cache prun"):
        parse_qsvc(["cache", "prun"])


def block(text: str, language: str = "sh") -> Block:
    return Block("a page", 1, language, text)


def test_the_blocks_of_a_page_share_a_shell_and_a_folder(tmp_path: Path) -> None:
    with open_page(tmp_path, {"FROM_OUTSIDE": "here"}) as page:
        page.run(block("mkdir inner && cd inner\nname=value\nexport OTHER=$FROM_OUTSIDE\n"))
        shown = page.run(block('sh -c \'echo "$OTHER"\'; echo "$name" > file; cat file; pwd\n'))
    assert shown.split() == ["here", "value", str(tmp_path / "inner")]


def test_what_a_page_leaves_running_is_ended_with_it(tmp_path: Path) -> None:
    with open_page(tmp_path, {}) as page:
        pid = int(page.run(block("sleep 600 &\necho $!\n")))
    eventually(lambda: str(pid) not in map(str, processes("sleep", "600")), "it has ended")


@pytest.mark.parametrize(
    "text", ["false\n", "false | true\n", 'echo "$NO_SUCH_NAME"\n', "no-such-command\n", "exit 0\n"]
)
def test_a_block_that_fails_or_ends_the_shell_is_told(text: str, tmp_path: Path) -> None:
    with open_page(tmp_path, {}) as page, pytest.raises(AssertionError, match="a page:1: failed"):
        page.run(block(f"echo before\n{text}echo after\n"))


def test_a_console_block_prints_what_it_shows(tmp_path: Path) -> None:
    text = "$ echo one 1\none 2\n$ echo two \\\n    three\ntwo three\n"
    with open_page(tmp_path, {}) as page:
        page.run(block(text, "console"))
        with pytest.raises(AssertionError, match="not printed"):
            page.run(block(text.replace("two three\n", "two four\n"), "console"))
