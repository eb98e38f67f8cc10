"""Finds the commands and programs that documents show, and runs them as they are there.

A block of sh, console or python is run, with the others of its page and in their order, unless a
comment right above it says why it is not::

    <!-- not run: it takes hours -->

In a console block the lines after a command are what it prints: any number stands for any other,
and … for anything. Where a comment ``<!-- output: … -->`` says why, only the command is run.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from cli.main import cli
from tests.cli_helpers import ROOT

LANGUAGES = ("sh", "console", "python")
TUTORIAL = "docs/tutorial.md"
STRUCTURED = "docs/how-to/structured-output.md"
PREFIXES = "docs/how-to/shared-prefixes.md"
# Here the answers of a model are the point, so that the fake engine will not do.
MODEL_PAGES = (TUTORIAL, STRUCTURED, PREFIXES)
_FENCE = re.compile(
    r"(?:^<!-- (?P<word>not run|output): (?P<why>[^>]+?) -->\n)?"
    r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
_SEPARATORS = frozenset("();<>|&") | {"&&", "||", "$(", ">>", "<<", ">&", ";;"}
_END = "@@ the end of the block @@"


@dataclass(frozen=True)
class Block:
    """A fenced block of a document.

    Attributes:
        why_not_run: the reason that the document gives, None for one that is run.
        has_output: whether what a console block prints is compared.
    """

    document: str
    line: int
    language: str
    text: str
    why_not_run: str | None = None
    has_output: bool = True

    @property
    def place(self) -> str:
        """Where it is, for a message."""
        return f"{self.document}:{self.line}"

    def commands(self) -> list[tuple[str, str]]:
        """Return a console block's commands, each with what it prints; of sh, all as one."""
        if self.language == "sh":
            return [(self.text, "")]
        assert self.text.startswith("$ "), f"{self.place}: a console block begins with a command"
        # A command goes on in the next line where its line ends with a backslash.
        found = re.findall(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", self.text, re.MULTILINE)
        return [(command, output) for command, output in found]


def documents() -> list[str]:
    """Return the names of all documents for people, from the root of the repository."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path.relative_to(ROOT).as_posix() for path in found]


def all_blocks(document: str) -> list[Block]:
    """Return every fenced block of a document, in any language or none."""
    text = (ROOT / document).read_text(encoding="utf-8")
    blocks = []
    for match in _FENCE.finditer(text):
        indent = match["indent"]
        lines = match["text"].splitlines(keepends=True)
        blocks.append(
            Block(
                document,
                line=text.count("\n", 0, match.start("language")) + 1,
                language=match["language"],
                text="".join(line.removeprefix(indent) for line in lines),
                why_not_run=match["why"] if match["word"] == "not run" else None,
                has_output=match["word"] != "output",
            )
        )
    return blocks


def code_blocks(document: str) -> list[Block]:
    """Return the blocks of a document that a reader may run."""
    return [block for block in all_blocks(document) if block.language in LANGUAGES]


def blocks_to_run(document: str) -> list[Block]:
    """Return the blocks of a document that a test has to run."""
    return [block for block in code_blocks(document) if block.why_not_run is None]


def python_blocks(document: str) -> list[str]:
    """Return the programs of a document."""
    return [block.text for block in code_blocks(document) if block.language == "python"]


# Without running ----------------------------------------------------------------------------


def check_program(source: str) -> None:
    """Fail unless a program compiles and everything that it imports is there."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                importlib.import_module(name.name)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            module = importlib.import_module(node.module)
            missing = [name.name for name in node.names if not hasattr(module, name.name)]
            assert not missing, f"{node.module} has no {', '.join(missing)}"


def check_shell(text: str) -> None:
    """Fail unless the shell can read a text, and its qsvc commands and scripts are there."""
    done = subprocess.run(["bash", "-n", "-c", text], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for words in shell_commands(text):
        program, arguments = words[0], words[1:]
        if Path(program).name == "qsvc":
            parse_qsvc(arguments)
        for word in words[:2]:
            if re.fullmatch(r"(\./)?(scripts|docker|examples)/\S+", word):
                assert (ROOT / word).exists(), f"there is no {word}"


def shell_commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each simple command, without redirections and variables before it."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
        lexer.whitespace_split = True
        lexer.commenters = "#"
        words: list[str] = []
        is_file = False
        for token in [*lexer, ";"]:
            if set(token) <= set("<>&") and set(token) & set("<>"):
                is_file = True  # what follows is a file's name
                if words and words[-1].isdigit():
                    words.pop()
            elif set(token) <= set("();|&"):
                if words:
                    yield words
                words = []
            elif is_file:
                is_file = False
            elif words or not re.fullmatch(r"\w+=.*\$?|\$", token):
                words.append(token)


def parse_qsvc(arguments: list[str]) -> None:
    """Fail unless the words after ``qsvc`` are a command with options that it has."""
    command: click.Command = cli
    words = list(arguments)
    name = "qsvc"
    while isinstance(command, click.Group):
        assert words, f"{name} needs a command"
        with click.Context(command, info_name=name) as ctx:
            child = command.get_command(ctx, words[0])
        assert child is not None, f"there is no {name} {words[0]}"
        name, command, words = f"{name} {words[0]}", child, words[1:]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            command.make_context(name, words)
    except click.exceptions.Exit:
        pass  # --help
    except click.BadParameter as error:
        # The files of an example need not be there.
        if error.param is None or not isinstance(error.param.type, click.Path):
            raise


# Running ------------------------------------------------------------------------------------


class Page:
    """Runs the blocks of one page one after the other: commands in one shell, programs here.

    Args:
        folder: where the shell begins.
        env: added to this process's environment.
        redis_url: the server of programs that say ``Redis()``.
    """

    def __init__(self, folder: Path, env: Mapping[str, str], redis_url: str = "") -> None:
        self._redis_url = redis_url
        self._source = folder / ".block.sh"
        self._shell = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            cwd=folder,
            env={**os.environ, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, block: Block, *, seconds: float = 60) -> str:
        """Run a block and return what it prints; a console block must print what it shows."""
        if block.language == "python":
            return run_block(block.text, self._redis_url, {})
        shown = []
        for command, expected in block.commands():
            output = self._run(command, block.place, seconds)
            if block.has_output:
                assert_prints(output, expected, block.place)
            shown.append(output)
        return "".join(shown)

    def close(self) -> None:
        """End the shell and everything that it left running."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._shell.pid, signal.SIGKILL)
        self._shell.communicate()

    def _run(self, command: str, place: str, seconds: float) -> str:
        # Sourced with errors fatal, as a person would stop at the first that fails.
        self._source.write_text(f"set -euo pipefail\n{command}\nset +euo pipefail\n")
        stdin, stdout = self._shell.stdin, self._shell.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(f". {shlex.quote(str(self._source))} </dev/null; echo; echo '{_END}'\n")
        stdin.flush()
        timer = threading.Timer(seconds, os.killpg, (self._shell.pid, signal.SIGKILL))
        timer.start()
        lines: list[str] = []
        try:
            for line in stdout:
                if line.rstrip("\n") == _END:
                    return "".join(lines).removesuffix("\n")
                lines.append(line)
        finally:
            timer.cancel()
        raise AssertionError(
            f"{place}: failed, or took {seconds:g} s\n$ {command}\n{''.join(lines)}"
        )


def assert_prints(output: str, expected: str, place: str) -> None:
    """Fail unless the expected lines are in the output, in this order."""
    lines = iter(output.splitlines())
    for wanted in expected.splitlines():
        if wanted.strip() in ("", "…"):
            continue
        pattern = re.compile(_pattern(wanted))
        assert any(pattern.fullmatch(line.strip()) for line in lines), (
            f"{place}: not printed, or not in this place:\n{wanted}\nIt printed:\n{output}"
        )


def _pattern(line: str) -> str:
    parts = re.split(r"(…|\d[\d,.]*|\s+)", line.strip())
    kinds = {"…": ".*", " ": r"\s+"}
    return "".join(
        kinds.get(part[:1], r"\d[\d,.]*" if part[:1].isdigit() else re.escape(part))
        for part in parts
    )


def run_block(block: str, redis_url: str, names: dict[str, Any]) -> str:
    """Run a program against a server and return what it prints; its names stay in ``names``.

    The server of the program, ``Redis()``, becomes that of the test.
    """
    shown = io.StringIO()

    def show(*values: object, **options: Any) -> None:
        print(*values, **{**options, "file": shown})

    names.update({"__name__": "__main__", "print": show})
    exec(block.replace("Redis()", f"Redis.from_url({redis_url!r})"), names)  # noqa: S102 - ours
    return shown.getvalue()


@contextlib.contextmanager
def open_page(folder: Path, env: Mapping[str, str], redis_url: str = "") -> Iterator[Page]:
    """Run a page for the length of the block."""
    page = Page(folder, env, redis_url)
    try:
        yield page
    finally:
        page.close()


def copy_repository(folder: Path) -> Path:
    """Make a copy of this repository as a checkout has it, without what was built in it."""
    without = shutil.ignore_patterns(".?*", "__pycache__", "shared", "build", "dist", "*.egg-info")
    return Path(shutil.copytree(ROOT, folder, ignore=without))


def program_folder(folder: Path, **programs: list[str]) -> str:
    """Make programs of these names that run a command with their arguments; return a PATH."""
    folder.mkdir()
    for name, command in programs.items():
        path = folder / name.replace("_", "-")
        path.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
        path.chmod(0o755)
    return os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
