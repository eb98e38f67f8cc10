"""Compiles a stranger's grammar in a process of its own first, where it may run away or crash.

The compiler cannot be interrupted, and some small grammars make it compute for minutes, take
gigabytes, or overflow its stack, which ends the process. What passes here is safe to compile in
the worker.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from workers.errors import TransientError

MAX_CPU_SECONDS = 1.5
# Far beyond the CPU's: a busy machine refuses no grammar.
_TIMEOUT_SECONDS = 60.0
# Less than any thread of the worker has, so that a recursion which fits here fits there.
_STACK_BYTES = 1536 * 1024

# More than one answer's text may need, far less than the defaults: a row keeps its own.
_MAX_LEXER_STATES = 20_000
# An object of a thousand optional properties starts a row of four thousand items.
_MAX_ROW_ITEMS_OF_JSON = 8_000
# Other grammars may be ambiguous, where long rows cost seconds a token.
_MAX_ROW_ITEMS = 1_000
_MAX_STEP_ITEMS = 10_000


def parser_limits(*, is_json: bool) -> LLParserLimits:
    """Return what one compilation and one token may cost; JSON grammars are never ambiguous."""
    return LLParserLimits(
        max_items_in_row=_MAX_ROW_ITEMS_OF_JSON if is_json else _MAX_ROW_ITEMS,
        step_max_items=50_000 if is_json else _MAX_STEP_ITEMS,
        max_lexer_states=_MAX_LEXER_STATES,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


def byte_tokenizer() -> LLTokenizer:
    """Return a tokenizer whose ids 0 to 255 are the bytes."""
    return LLTokenizer(TokenizerWrapper(_Bytes()), slices=[])


def find_fault(grammar: str, *, is_json: bool) -> str | None:
    """Return why ``grammar`` cannot be used, None when it can; takes about 0.2 seconds.

    Raises:
        TransientError: the machine was too busy to tell.
    """
    try:
        finished = subprocess.run(
            [sys.executable, "-m", "workers.grammar_check", "json" if is_json else "text"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            input=grammar.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise TransientError(
            f"a constraint was not compiled within {_TIMEOUT_SECONDS:.0f} seconds: the machine "
            "is too busy"
        ) from exc
    if finished.returncode == -signal.SIGPROF:
        return f"compiling it takes more than {MAX_CPU_SECONDS} seconds: make it simpler"
    if finished.returncode != 0:
        return "it is nested too deeply: make it simpler"
    return finished.stdout.decode("utf-8", "replace") or None


def first_line(error: str) -> str:
    """Return what the compiler says is wrong in one line, without the trace below it."""
    first, *others = error.strip().split("\n")
    told = next((line for line in others if line.startswith("error: ")), "")
    return f"{first[:300]} {told[:100]}".strip()


class _Bytes:
    """The tokenizer that `byte_tokenizer` wraps."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<eos>")
    special_token_ids = (256,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def _compile(grammar: str, limits: LLParserLimits) -> None:
    # The alarm's default action ends this process, in whatever code it is.
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_SECONDS)
    matcher = LLMatcher(byte_tokenizer(), grammar, limits=limits, log_level=0)
    fault = first_line(matcher.get_error())
    if not fault:
        # The first token costs most. What is wrong with it depends on the model's own tokens.
        matcher.compute_bitmask()
    signal.setitimer(signal.ITIMER_PROF, 0)
    sys.stdout.buffer.write(fault.encode())
    sys.stdout.flush()


def main() -> None:
    """Compile the grammar on standard input; what is wrong with it goes to standard output."""
    grammar = sys.stdin.buffer.read().decode()
    limits = parser_limits(is_json=sys.argv[1] == "json")
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_compile, args=(grammar, limits))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
