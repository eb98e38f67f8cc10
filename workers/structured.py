"""Holds an answer to its constraint: which tokens may come next, and whether the text is right."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from decimal import Decimal, DecimalException, localcontext
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from jsonschema import Draft202012Validator, validators
from jsonschema.exceptions import ValidationError
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from queue_service.constraints import Constraint, ConstraintKind
from queue_service.errors import QsvcError, RequestError
from queue_service.json_text import quoted
from workers.grammar_check import byte_tokenizer, find_fault, first_line, parser_limits
from workers.tokenizer import Tokenizer

MAX_WHITESPACE_RUN = 8

_JSON_KINDS = frozenset({ConstraintKind.JSON_OBJECT, ConstraintKind.JSON_SCHEMA})

# No \u escape: with one a model could write the name of a property in a second way, which the
# grammar takes for another property.
_JSON_ESCAPES = 'nrbtf\\"'

# References that one check of a text may follow: schemas exist for which it would be 2^n.
_MAX_REFERENCES = 20_000
_CHECK_DIGITS = 1000

Mask = NDArray[np.uint32]


class ConstraintError(QsvcError):
    """A row cannot go on under its constraint; its matcher must not be used any more."""


class Matcher:
    """Where one row's text stands in its constraint. One thread at a time; copies are apart.

    Made by `Compiled.matcher`.
    """

    __slots__ = ("_has_ended", "_inner", "_vocabulary")

    def __init__(
        self, inner: LLMatcher, vocabulary: _Vocabulary, *, has_ended: bool = False
    ) -> None:
        self._inner = inner
        self._vocabulary = vocabulary
        self._has_ended = has_ended

    @property
    def is_accepting(self) -> bool:
        """Whether the text may end here."""
        return self._has_ended or self._inner.is_accepting()

    @property
    def is_finished(self) -> bool:
        """Whether nothing can come but the end; known at the latest after `fill`."""
        return self._has_ended or (self._inner.is_stopped() and not self._inner.is_error())

    def fill(self, mask_row: Mask) -> None:
        """Set the bit of every token that may come next and clear the others.

        An end token's is set exactly when the text may end. Other threads run meanwhile.

        Args:
            mask_row: ``ceil(vocab_size / 32)`` words in one piece; bit ``i % 32`` of word
                ``i // 32`` is token ``i``.

        Raises:
            ConstraintError: no token may come next, or finding them costs too much.
        """
        vocabulary = self._vocabulary
        vocabulary.check(mask_row)
        is_accepting = self.is_accepting
        if not self.is_finished:
            self._compute(mask_row, is_accepting=is_accepting)
        if self.is_finished:
            mask_row.fill(0)
        for word, bits in vocabulary.eos_bits.items():
            if is_accepting:
                mask_row[word] |= bits
            else:
                mask_row[word] &= ~bits
        if not mask_row.any():
            raise ConstraintError("constraint: this model has no token for what must come next")

    def _compute(self, mask_row: Mask, *, is_accepting: bool) -> None:
        vocabulary = self._vocabulary
        target = mask_row
        if vocabulary.num_matcher_words != mask_row.size:
            target = np.empty(vocabulary.num_matcher_words, dtype=np.uint32)
        self._inner.unsafe_compute_mask_ptr(target.ctypes.data, target.nbytes)
        if self._inner.is_error():
            if not is_accepting:
                raise self._error("no token may come next")
            self._has_ended = True
        if target is not mask_row:
            mask_row[:] = target[: mask_row.size]
        mask_row[-1] &= vocabulary.last_word

    def accept(self, token_id: int) -> None:
        """Go on by one token, or end with an end token.

        Raises:
            ConstraintError: it is not among those that may come next.
        """
        if token_id in self._vocabulary.eos_token_ids:
            if not self.is_accepting:
                raise ConstraintError("the text cannot end here under its constraint")
            self._has_ended = True
            return
        if self.is_finished:
            raise ConstraintError("the constraint's text has ended")
        is_known = 0 <= token_id < self._vocabulary.num_tokens
        if not is_known or not self._inner.consume_token(token_id):
            raise self._error(f"token {token_id} may not come next")

    def copy(self) -> Matcher:
        """Return a matcher at the same place that goes its own way from here."""
        return Matcher(self._inner.deep_copy(), self._vocabulary, has_ended=self._has_ended)

    def _error(self, otherwise: str) -> ConstraintError:
        return ConstraintError(f"constraint: {first_line(self._inner.get_error()) or otherwise}")


@dataclass(frozen=True, slots=True)
class Compiled:
    """A constraint made ready for one model; any thread may take matchers from it."""

    constraint: Constraint
    _start: Matcher

    def matcher(self) -> Matcher:
        """Return a new matcher that stands before the first token."""
        return self._start.copy()

    def check(self, text: str) -> str | None:
        """Return what is wrong with a finished text, None when nothing is; see `validate`."""
        return validate(self.constraint, text)


class ConstraintCompiler:
    """Compiles constraints for one model and remembers them; for threads that prepare jobs.

    Args:
        vocab_size: how many logits the model gives; ids from the tokenizer's size on never come.
        eos_token_ids: the tokens that end an answer, whether or not they are also text.
        max_entries: how many constraints are remembered, refused ones included.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        max_entries: int = 128,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_entries = max_entries
        self._lock = threading.Lock()
        self._entries: OrderedDict[Constraint, Future[Compiled | _Refusal]] = OrderedDict()
        self._vocabulary_lock = threading.Lock()

    def compile(self, constraint: Constraint) -> Compiled:
        """Return ``constraint`` compiled; threads that ask for the same one wait for one of them.

        Takes some 0.2 seconds for a new one, and one or two more for the first of all.

        Raises:
            RequestError: it cannot be enforced, or compiling it costs too much.
            TransientError: the machine is too busy to compile anything.
        """
        with self._lock:
            entry = self._entries.get(constraint)
            is_new = entry is None
            if entry is None:
                entry = self._entries[constraint] = Future()
                if len(self._entries) > self._max_entries:
                    self._entries.popitem(last=False)
            self._entries.move_to_end(constraint)
        if is_new:
            self._settle(entry, constraint)
        outcome = entry.result()
        if isinstance(outcome, _Refusal):
            raise RequestError(outcome.message, code=outcome.code)
        return outcome

    def _settle(self, entry: Future[Compiled | _Refusal], constraint: Constraint) -> None:
        """Put what becomes of ``constraint`` into its entry."""
        try:
            entry.set_result(self._compile(constraint))
        except RequestError as exc:
            entry.set_result(_Refusal(exc.message, exc.code))
        except BaseException as exc:
            with self._lock:
                if self._entries.get(constraint) is entry:
                    del self._entries[constraint]
            entry.set_exception(exc)

    def _compile(self, constraint: Constraint) -> Compiled:
        is_json = constraint.kind in _JSON_KINDS
        grammar = _grammar_of(constraint)
        fault = find_fault(grammar, is_json=is_json)
        if fault is not None:
            raise _refused(constraint, fault)
        with self._vocabulary_lock:
            vocabulary = self._vocabulary
        limits = parser_limits(is_json=is_json)
        inner = LLMatcher(vocabulary.tokenizer, grammar, limits=limits, log_level=0)
        if inner.is_error():
            raise _refused(constraint, first_line(inner.get_error()))
        start = Matcher(inner, vocabulary)
        try:
            # Copies start with what this learns about the first token.
            start.fill(np.empty(vocabulary.num_words, dtype=np.uint32))
        except ConstraintError as exc:
            raise _refused(constraint, f"no token can come first ({exc})") from exc
        if constraint.kind is ConstraintKind.CHOICE:
            _check_choices(constraint, vocabulary.tokenizer)
        return Compiled(constraint, start)

    @cached_property
    def _vocabulary(self) -> _Vocabulary:
        serialized = self._tokenizer.to_json()
        if serialized is None:
            raise RequestError(
                "this model's tokenizer is code of its own, so its answers cannot be constrained",
                code="unsupported_constraint",
            )
        try:
            tokenizer = LLTokenizer(
                serialized,
                n_vocab=max(self._vocab_size, self._tokenizer.vocab_size),
                eos_token=sorted(self._eos_token_ids),
            )
        except ValueError as exc:
            raise RequestError(
                f"this model's answers cannot be constrained: {first_line(str(exc))}",
                code="unsupported_constraint",
            ) from exc
        return _Vocabulary(tokenizer, self._vocab_size, self._eos_token_ids)


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Why a constraint is refused, kept so that it is found out once."""

    message: str
    code: str


class _Vocabulary:
    """The tokens of one model and the shape of its masks."""

    def __init__(
        self, tokenizer: LLTokenizer, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self.tokenizer = tokenizer
        self.num_tokens = vocab_size
        self.num_words = -(-vocab_size // 32)
        self.num_matcher_words = -(-tokenizer.vocab_size // 32)
        self.eos_token_ids = eos_token_ids
        self.last_word = np.uint32(0xFFFFFFFF >> (-vocab_size % 32))
        self.eos_bits: dict[int, np.uint32] = {}
        for token_id in eos_token_ids:
            bit = np.uint32(1 << (token_id % 32))
            self.eos_bits[token_id // 32] = self.eos_bits.get(token_id // 32, np.uint32(0)) | bit

    def check(self, mask_row: Mask) -> None:
        """Refuse memory that a mask would not fit: it is written by address."""
        is_right = mask_row.dtype == np.uint32 and mask_row.shape == (self.num_words,)
        if not (is_right and mask_row.flags.c_contiguous and mask_row.flags.writeable):
            raise ValueError(f"a mask row must be {self.num_words} uint32 in one piece")


def validate(constraint: Constraint, text: str) -> str | None:
    """Return what is wrong with a finished text, by place and never by its words; None if right.

    Schemas are checked by another library than the one that generated the text. Formats and
    grammars were enforced then and are not checked again.
    """
    match constraint.kind:
        case ConstraintKind.JSON_OBJECT | ConstraintKind.JSON_SCHEMA:
            return _validate_json(constraint.source, text)
        case ConstraintKind.REGEX:
            is_match = _accepts(LLMatcher.grammar_from_regex(constraint.source), text)
            return None if is_match else "the text does not match the regex as a whole"
        case ConstraintKind.CHOICE:
            is_choice = text in json.loads(constraint.source)
            return None if is_choice else "the text is none of the choices"
        case ConstraintKind.GRAMMAR:
            return None


def _grammar_of(constraint: Constraint) -> str:
    match constraint.kind:
        case ConstraintKind.JSON_OBJECT | ConstraintKind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(
                constraint.source,
                overrides={
                    "whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{MAX_WHITESPACE_RUN}}}",
                    "json_allowed_escapes": _JSON_ESCAPES,
                },
            )
        case ConstraintKind.REGEX:
            return LLMatcher.grammar_from_regex(constraint.source)
        case ConstraintKind.CHOICE:
            options = "|".join(re.escape(option) for option in json.loads(constraint.source))
            return LLMatcher.grammar_from_regex(options)
        case ConstraintKind.GRAMMAR:
            return LLMatcher.grammar_from_lark(constraint.source)


def _refused(constraint: Constraint, fault: str) -> RequestError:
    what = constraint.kind.replace("_", " ")
    is_schema = constraint.kind is ConstraintKind.JSON_SCHEMA
    return RequestError(
        f"the {what} cannot be enforced: {fault}",
        code="invalid_schema" if is_schema else "invalid_request",
    )


def _check_choices(constraint: Constraint, tokenizer: LLTokenizer) -> None:
    for option in json.loads(constraint.source):
        if tokenizer.decode_bytes(tokenizer.tokenize_str(option)) != option.encode():
            raise _refused(constraint, f"this model has no tokens for {quoted(option)}")


def _validate_json(source: str, text: str) -> str | None:
    references_left = iter(range(_MAX_REFERENCES))

    def follow(validator: Any, ref: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
        if next(references_left, None) is None:
            raise _TooMuch
        yield from Draft202012Validator.VALIDATORS["$ref"](validator, ref, instance, schema)

    checker = validators.extend(_SchemaValidator, {"$ref": follow})  # type: ignore[no-untyped-call]
    try:
        answer = json.loads(
            text, parse_float=Decimal, parse_int=_integer, parse_constant=_refuse_constant
        )
    except ValueError:
        return "the text is not JSON"
    except RecursionError:
        return "the text is nested too deeply"
    schema = json.loads(source, parse_float=Decimal)
    try:
        with localcontext(prec=_CHECK_DIGITS):
            error = next(checker(schema).iter_errors(answer), None)
    except (_TooMuch, RecursionError, DecimalException):
        # Cannot be told at a bounded price; every token was checked when it was generated.
        return None
    if error is None:
        return None
    return f"the text breaks {error.validator!r} of its schema at {error.json_path}"


class _TooMuch(Exception):
    """A check follows more references than it may."""


def _integer(digits: str) -> int | Decimal:
    """Return the number; Python converts no int of thousands of digits."""
    return int(digits) if len(digits) < _CHECK_DIGITS else Decimal(digits)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _is_integer(_: Any, value: Any) -> bool:
    if isinstance(value, Decimal):
        return value == value.to_integral_value()
    return isinstance(value, int) and not isinstance(value, bool)


# jsonschema matches patterns with a backtracking engine, which some patterns keep busy forever,
# and reads them in another dialect.
def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if isinstance(instance, str) and not _finds(pattern, instance):
        yield ValidationError("pattern")


def _pattern_properties(
    validator: Any, patterns: Mapping[str, Any], instance: Any, schema: Any
) -> Iterator[ValidationError]:
    for name, value in instance.items() if isinstance(instance, dict) else ():
        for pattern, subschema in patterns.items():
            if _finds(pattern, name):
                yield from validator.descend(value, subschema, path=name, schema_path=pattern)


def _additional_properties(
    validator: Any, subschema: Any, instance: Any, schema: Any
) -> Iterator[ValidationError]:
    patterns = schema.get("patternProperties", {})
    for name, value in instance.items() if isinstance(instance, dict) else ():
        is_named = name in schema.get("properties", {})
        if not is_named and not any(_finds(pattern, name) for pattern in patterns):
            yield from validator.descend(value, subschema, path=name)


_SchemaValidator = validators.extend(  # type: ignore[no-untyped-call]
    Draft202012Validator,
    {
        "pattern": _pattern,
        "patternProperties": _pattern_properties,
        "additionalProperties": _additional_properties,
    },
    type_checker=Draft202012Validator.TYPE_CHECKER.redefine("integer", _is_integer),
)


def _finds(pattern: str, text: str) -> bool:
    """Whether a schema's pattern is found in ``text``."""
    schema = json.dumps({"type": "string", "pattern": pattern})
    return _accepts(
        LLMatcher.grammar_from_json_schema(schema), json.dumps(text, ensure_ascii=False)
    )


def _accepts(grammar: str, text: str) -> bool:
    """Whether ``text`` is one of the grammar's; in time that grows with its length only."""
    matcher = _byte_matcher(grammar).deep_copy()
    data = text.encode()
    return matcher.try_consume_tokens(list(data)) == len(data) and matcher.is_accepting()


@lru_cache(maxsize=256)
def _byte_matcher(grammar: str) -> LLMatcher:
    limits = parser_limits(is_json=False)
    return LLMatcher(byte_tokenizer(), grammar, limits=limits, log_level=0)
