"""Thousands of bodies from the queue to their end: each is an answer or an error with a name.

Everything that a worker does with a request is real but the model: reading the payload or the
line of a file, validation, a chat template, preparation, the engine thread, the text of the
answer, and what is written for it. Each answer is made once more from the tokens that an execution
lost at any moment would have left. The engine echoes; constraints are compiled by a stand-in, since
`tests/unit/test_structured.py` has the real one.
"""

from __future__ import annotations

import copy
import io
import json
import math
import pickle
import queue
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from queue_service.batch_file import BatchLine, read_lines
from queue_service.constraints import Constraint
from queue_service.errors import LineError, RequestError
from queue_service.payload import Encoding, decode_value, encode_call, encoding_of
from queue_service.progress import TokenScores, encode_scores, encode_tokens, join_elements
from queue_service.requests import FIELD_USES, HARMLESS_FIELDS, Endpoint, FieldUse
from queue_service.settings import RetentionSettings
from tests.chat_templates import QWEN3, chat_tokenizer
from tests.fakes import CONTEXT, EOS, VOCABULARY, FakeEngine, FakeTokenizer, fake_parts
from tests.harness import make_claimed
from workers.answer_forms import AnswerForms, Piece, PieceKind
from workers.engine import TokenLogprobs
from workers.generation import NO_TOKEN, GenerationThread
from workers.outcomes import OutcomeWriter
from workers.preparation import Limits, Preparer
from workers.reasoning import find_format
from workers.requests import Generated, PreparedRequest, Refused, Result
from workers.tool_calls import find_tool_format

NUM_BODIES = 5_000
SEED = 20_240_607
# No answer may take longer: the engine makes a step in a few microseconds.
SECONDS_WITHOUT_AN_ENDING = 60.0

Make = Callable[["Bodies"], Any]

WORDS = (
    *(
        "yes",
        "Grüße aus Köln",
        "日本語",
        "🐈‍⬛",
        "\ud83d",
        "x\udc00y",
        "\x00",
        "\ufffd",
        "\u2028",
        " ",
    ),
    *("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    *('{"name": "look_up", "arguments": {}}', "{{ 7 * 7 }}", "{% raw %}", "..", "'\"\\", "-0"),
)
SCHEMAS: tuple[Any, ...] = (
    {},
    {"type": "object"},
    {"type": "array", "items": {"type": "integer", "minimum": 0}},
    {"type": "object", "properties": {"a": {"enum": ["x", None, 1e300]}}, "required": ["a"]},
    {"$ref": "#/$defs/node", "$defs": {"node": {"anyOf": [{"type": "null"}, {"type": "string"}]}}},
)
# Python's own values that a pickle or a careless JSON encoder can carry.
HOSTILE: tuple[Any, ...] = (
    *(
        math.nan,
        math.inf,
        -math.inf,
        -1,
        0,
        1,
        2.0,
        -0.0,
        1e308,
        5e-324,
        2**31,
        2**63,
        -(2**63) - 1,
    ),
    *(10**300, 10**400, True, False, "", "10", "null", [], {}, [[]], [{}], {"": None}, [None]),
    *("\ud800", "x" * 5_000, "é" * 100_000, list(range(3_000)), {str(i): i for i in range(500)}),
)
# What only a text can say, in the place of a string that names it.
HOSTILE_TEXTS = {
    "@lists@": "[" * 63 + "]" * 63,
    "@deep lists@": "[" * 200 + "]" * 200,
    "@deeper lists@": "[" * 100_000 + "]" * 100_000,
    "@deep objects@": '{"a":' * 100 + "1" + "}" * 100,
    "@digits@": "9" * 400,
    "@many digits@": "-" + "9" * 10_000,
    "@large@": "1e999",
    "@small@": "1e-999",
    "@not a number@": "NaN",
    "@infinity@": "-Infinity",
    "@half a pair@": '"\\ud83d"',
    "@twice@": '{"type": "text", "type": ["text"]}',
}


class Bodies:
    """Random bodies, the same ones for a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.pick = self.random.choice
        self.chance = self.random.random

    def text(self) -> str:
        return "".join(self.pick(WORDS) for _ in range(self.random.randrange(4)))

    def name(self) -> str:
        return self.pick(["look_up", "a", "B-2", "x" * 64])

    def number(self, low: float, high: float) -> float:
        return self.pick([low, high, self.random.uniform(low, high)])

    def integer(self, low: int, high: int) -> int:
        return self.pick([low, high, self.random.randint(low, high)])

    def some(self, make: Callable[[], Any], low: int, high: int) -> list[Any]:
        return [make() for _ in range(self.random.randint(low, high))]

    def token_id(self) -> int:
        return self.random.randrange(VOCABULARY)

    def value(self, levels: int = 3) -> Any:
        """Return any value of JSON."""
        kind = self.random.randrange(8 if levels else 6)
        match kind:
            case 6:
                return self.some(lambda: self.value(levels - 1), 0, 3)
            case 7:
                return {self.text(): self.value(levels - 1) for _ in range(2)}
        scalars = (
            None,
            self.chance() < 0.5,
            self.random.randint(-9, 9),
            self.chance(),
            self.text(),
        )
        return self.pick([*scalars, self.name()])

    def object(self) -> dict[str, Any]:
        return {self.pick(["a", "b", self.text()]): self.value() for _ in range(2)}

    def junk(self) -> Any:
        hostile = copy.deepcopy(self.pick(HOSTILE))  # it may be spoiled itself
        return self.pick([hostile, self.pick(list(HOSTILE_TEXTS)), self.value()])

    def body(self) -> tuple[Endpoint, dict[str, Any]]:
        endpoint = self.pick(list(Endpoint))
        body = copy.deepcopy(self._right(endpoint))
        if self.chance() < 0.55:
            for _ in range(self.random.randint(1, 2)):
                self._spoil(endpoint, body)
        return endpoint, body

    def _right(self, endpoint: Endpoint) -> dict[str, Any]:
        fields = {**FIELDS, **OWN_FIELDS[endpoint]}
        share = self.pick([0.05, 0.2, 0.4])
        body = {
            name: None if self.chance() < 0.05 else make(self)
            for name, make in fields.items()
            if self.chance() < share
        }
        if self.chance() < 0.15:
            # Excludes fields that ask for text beyond its end.
            bound = self.pick(list(FORMS))
            body[bound] = FORMS[bound](self)
            for name in ("min_tokens", "ignore_eos", "echo"):
                body.pop(name, None)
        if endpoint is Endpoint.COMPLETIONS:
            body["prompt"] = _prompt(self)
            if body.get("logprobs") is not None:
                body.pop("echo", None)
            if self.chance() < 0.2:
                body["best_of"] = body.get("n") or 1
            return body
        body["messages"] = [_turn(self) for _ in range(self.random.randint(1, 3))]
        if self.chance() < 0.3:
            names = self.random.sample(["look_up", "a", "B-2", "x" * 64], self.random.randint(1, 3))
            body["tools"] = [_tool(self, name) for name in names]
            named = {"type": "function", "function": {"name": names[0]}}
            body["tool_choice"] = self.pick(["none", "auto", None, named, "required"])
            if body["tool_choice"] not in ("none", "auto", None):
                for name in (*FORMS, "min_tokens", "ignore_eos"):
                    body.pop(name, None)
        if body.get("logprobs"):
            body["top_logprobs"] = self.pick([None, 0, 1, 20])
        if body["messages"][-1]["role"] == "assistant" and not body.get("add_generation_prompt"):
            body["continue_final_message"] = self.pick([True, False])
        return body

    def _spoil(self, endpoint: Endpoint, body: dict[str, Any]) -> None:
        """Make a value, a name or an entry another one than it should be."""
        *path, last = self.pick(list(_places(body)) or [("messages",)])
        parent: Any = body
        for step in path:
            parent = parent[step]
        match self.random.randrange(5):
            case 0:
                parent[last] = self.junk()
            case 1:
                parent.pop(last, None) if isinstance(parent, dict) else parent.pop(last)
            case 2 if isinstance(parent, dict):
                parent[self.pick([self.text(), "x" * 1_000, "role", "type"])] = self.junk()
            case _:
                body[self.pick(list(FIELD_USES[endpoint]))] = self.junk()


def _prompt(bodies: Bodies) -> Any:
    def text() -> str:
        return bodies.text() or "hello"

    def ids() -> list[Any]:
        return bodies.some(bodies.token_id, 1, 5)

    make = bodies.pick([text, ids])
    return make() if bodies.chance() < 0.6 else bodies.some(make, 1, 4)


def _turn(bodies: Bodies) -> dict[str, Any]:
    text = bodies.text()
    turn: dict[str, Any] = {
        "role": bodies.pick(["developer", "system", "user", "user", "assistant", "tool"]),
        "content": bodies.pick([text, [{"type": "text", "text": text}] * 2]),
    }
    extras: dict[str, Callable[[], Any]] = {
        "name": bodies.text,
        "tool_call_id": bodies.text,
        "reasoning_content": bodies.text,
        "reasoning": lambda: None,
        "refusal": bodies.value,
        "tool_calls": lambda: bodies.some(lambda: _call(bodies), 0, 2),
    }
    turn.update({name: make() for name, make in extras.items() if bodies.chance() < 0.1})
    return turn


def _call(bodies: Bodies) -> dict[str, Any]:
    arguments = bodies.pick([{}, "", '{"a": 1}', bodies.object()])
    return {"id": bodies.text(), "function": {"name": bodies.text(), "arguments": arguments}}


def _tool(bodies: Bodies, name: str) -> dict[str, Any]:
    function = {"name": name, "description": bodies.text(), "parameters": bodies.pick(SCHEMAS)}
    return {"type": "function", "function": function}


def _bias(bodies: Bodies) -> dict[str, float]:
    return {str(bodies.token_id()): bodies.number(-100, 100) for _ in range(3)}


def _choices(bodies: Bodies) -> int:
    return bodies.integer(1, 128) if bodies.chance() < 0.02 else bodies.integer(1, 4)


FIELDS: dict[str, Make] = {
    "model": lambda b: b.text() or "m",
    "n": _choices,
    "stream": lambda b: b.chance() < 0.2,
    "priority": lambda b: b.integer(-(2**31), 2**31),
    "session_id": Bodies.value,
    "prompt_cache_key": Bodies.value,
    "max_tokens": lambda b: b.integer(5, 2**40),
    "min_tokens": lambda b: b.integer(0, 5),
    "stop": lambda b: b.pick([b.text(), b.some(b.text, 0, 4)]),
    "stop_token_ids": lambda b: b.some(b.token_id, 0, 4),
    "ignore_eos": lambda b: b.chance() < 0.5,
    "temperature": lambda b: b.number(0, 2),
    "top_p": lambda b: b.number(0, 1),
    "top_k": lambda b: b.integer(-1, 2**40),
    "min_p": lambda b: b.number(0, 1),
    "xtc_probability": lambda b: b.number(0, 1),
    "xtc_threshold": lambda b: b.number(0, 0.5),
    "seed": lambda b: b.integer(-(2**63), 2**63 - 1),
    "frequency_penalty": lambda b: b.number(-2, 2),
    "presence_penalty": lambda b: b.number(-2, 2),
    "repetition_penalty": lambda b: b.number(1e-9, 10),
    "logit_bias": _bias,
    **dict.fromkeys(sorted(HARMLESS_FIELDS - {"session_id", "prompt_cache_key"}), Bodies.value),
}
OWN_FIELDS: dict[Endpoint, dict[str, Make]] = {
    Endpoint.CHAT: {
        "max_completion_tokens": lambda b: b.integer(5, 2**40),
        "logprobs": lambda b: b.chance() < 0.5,
        "parallel_tool_calls": lambda b: b.chance() < 0.5,
        "reasoning_effort": lambda b: b.pick(["none", "minimal", "low", "medium", "high"]),
        "thinking_budget": lambda b: b.integer(0, 2**40),
        "chat_template_kwargs": Bodies.object,
        "add_generation_prompt": lambda b: b.chance() < 0.5,
        "parse_special_tokens": lambda b: b.chance() < 0.5,
    },
    Endpoint.COMPLETIONS: {
        "echo": lambda b: b.chance() < 0.5,
        "logprobs": lambda b: b.integer(0, 5),
    },
}
FORMS: dict[str, Make] = {
    "response_format": lambda b: b.pick(
        [
            {"type": "text"},
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": b.pick(SCHEMAS)}},
        ]
    ),
    "structured_outputs": lambda b: b.pick(
        [
            {"json": b.pick(SCHEMAS)},
            {"json": json.dumps(b.pick(SCHEMAS))},
            {"regex": b.pick(["a", "[0-9]{2,4}", "(x|y)*z"])},
            {"choice": ["yes", "no"]},
            {"grammar": 'start: "yes" | "no"'},
            {"json_object": True},
        ]
    ),
}


def _places(value: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the path of everything in a value but what lies in long lists and objects."""
    if not isinstance(value, dict | list) or len(value) > 100:
        return
    for key, below in value.items() if isinstance(value, dict) else enumerate(value):
        yield (key,)
        for path in _places(below):
            yield (key, *path)


# How a body comes to a worker ------------------------------------------------------------------


def as_text(value: Any) -> str:
    """Return JSON as a careless client writes it: NaN, lone surrogates, numbers of any length."""
    text = json.dumps(value)
    for name, hostile in HOSTILE_TEXTS.items():
        text = text.replace(f'"{name}"', hostile)
    return text


def payload_of(endpoint: Endpoint, body: dict[str, Any], encoding: str) -> bytes:
    """Return what lies in the job's hash, as an application's RQ writes it."""
    if encoding == "pickle":
        return pickle.dumps((endpoint.function, None, (body,), {}))
    return as_text([endpoint.function, None, [body], {}]).encode()


def lines_of(bodies: Sequence[dict[str, Any]], endpoint: Endpoint) -> Iterator[bytes | LineError]:
    """Yield for each body what `qsvc submit` writes into the job's hash, or its refusal."""
    envelopes = [
        {"custom_id": str(i), "method": "POST", "url": endpoint.value, "body": body}
        for i, body in enumerate(bodies)
    ]
    for line in read_lines(io.BytesIO("\n".join(map(as_text, envelopes)).encode())):
        is_good = isinstance(line, BatchLine)
        yield encode_call(line.endpoint.function, line.body) if is_good else line


def arrivals(num_bodies: int) -> Iterator[tuple[Endpoint, dict[str, Any], bytes | LineError]]:
    """Yield bodies with their payload, or with the refusal of their line."""
    bodies = Bodies(SEED)
    in_files: dict[Endpoint, list[dict[str, Any]]] = {endpoint: [] for endpoint in Endpoint}
    for _ in range(num_bodies):
        endpoint, body = bodies.body()
        way = bodies.pick(["json", "json", "pickle", "file", "file"])
        if way == "file":
            in_files[endpoint].append(body)
        else:
            yield endpoint, body, payload_of(endpoint, body, way)
    for endpoint, filed in in_files.items():
        for body, line in zip(filed, lines_of(filed, endpoint), strict=True):
            yield endpoint, body, line


# What a worker does with it ---------------------------------------------------------------------


class Anything:
    """A constraint that every text follows."""

    def compile(self, constraint: Constraint) -> Anything:
        return self

    def matcher(self) -> Anything:
        return self

    def check(self, text: str) -> str | None:
        return None

    def fill(self, mask_row: npt.NDArray[np.uint32]) -> None:
        mask_row[:] = 0xFFFFFFFF

    def accept(self, token_id: int) -> None: ...


class TemplateTokenizer(FakeTokenizer):
    """One token a byte, and chats as a real template writes them."""

    def __init__(self) -> None:
        self.real = chat_tokenizer(QWEN3)

    def render_chat(self, messages: list[dict[str, Any]], /, **options: Any) -> str:
        return self.real.render_chat(messages, **options)


@dataclass
class Endings:
    """Takes what the engine thread produces; every text has to be one that can be sent."""

    ended: queue.SimpleQueue[Result | BaseException] = field(default_factory=queue.SimpleQueue)
    requests: dict[str, PreparedRequest] = field(default_factory=dict)
    tokens: dict[str, dict[int, list[int]]] = field(default_factory=dict)
    scores: dict[str, dict[int, list[TokenScores]]] = field(default_factory=dict)
    texts: dict[str, dict[tuple[int, PieceKind], str]] = field(default_factory=dict)

    def begin(self, request: PreparedRequest) -> None:
        self.requests[request.execution_id] = request
        self.tokens[request.execution_id] = defaultdict(list)
        self.scores[request.execution_id] = defaultdict(list)
        self.texts[request.execution_id] = {}

    def resume(
        self, execution_id: str, choice: int, token_ids: Sequence[int], pieces: Sequence[Piece]
    ) -> None:
        self._say(execution_id, choice, pieces)

    def note_cached(self, execution_id: str, num_tokens: int) -> None:
        raise AssertionError("this engine shares nothing")

    def advance(
        self,
        execution_id: str,
        choice: int,
        token_id: int,
        pieces: Sequence[Piece],
        logprobs: TokenLogprobs | None = None,
    ) -> None:
        self._say(execution_id, choice, pieces)
        if token_id != NO_TOKEN:
            self.tokens[execution_id][choice].append(token_id)
        if logprobs is not None:
            self.scores[execution_id][choice].append((logprobs.logprob, logprobs.top))

    def _say(self, execution_id: str, choice: int, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            piece.text.encode()
            said = self.texts[execution_id]
            said[choice, piece.kind] = said.get((choice, piece.kind), "") + piece.text

    def next(self) -> Result:
        result = self.ended.get(timeout=SECONDS_WITHOUT_AN_ENDING)
        if isinstance(result, BaseException):
            raise result
        return result

    def end(self, generated: Generated) -> None:
        self.ended.put(generated)

    def fail(self, execution_id: str, error: Exception) -> None:
        self.ended.put(Refused(self.requests[execution_id].claimed, error))

    def drop(self, execution_id: str) -> None:
        raise AssertionError("nothing was cancelled")


@dataclass
class Tally:
    """What became of the bodies: how many have an answer, and the errors' codes and fields."""

    num_answers: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    refused_fields: set[str] = field(default_factory=set)
    answered_fields: set[tuple[Endpoint, str]] = field(default_factory=set)

    def refuse(self, error: dict[str, Any]) -> None:
        json.dumps(error, ensure_ascii=False, allow_nan=False).encode()
        assert error["message"]
        assert len(error["message"]) < 2_000
        self.codes[error["code"]] += 1
        self.refused_fields.add((error["param"] or "").split(".")[0])


def run_to_the_end(num_bodies: int) -> Tally:
    tokenizer = TemplateTokenizer()
    template, vocabulary = tokenizer.real.chat_template, tokenizer.real.vocabulary
    preparer = Preparer(
        tokenizer,
        Limits(CONTEXT, VOCABULARY, frozenset({EOS}), ceiling_tokens=24),
        model="fake",
        forms=AnswerForms(
            reasoning=find_format(template, vocabulary),
            tool_format=find_tool_format(template, vocabulary),
            compiler=Anything(),
            closing_ids=tuple(b"</think>"),
            added_tokens=tokenizer.real.added_vocabulary,
        ),
    )
    endings = Endings()
    writer = OutcomeWriter(RetentionSettings.load(), fingerprint="fp", clock=lambda: 0.0)
    engine = GenerationThread(
        lambda: fake_parts(FakeEngine(max_rows=32)),
        endings,
        on_failure=endings.ended.put,
        max_rows=32,
    )
    engine.start()
    tally, bodies, num_running = Tally(), {}, 0
    try:
        for index, (endpoint, body, payload) in enumerate(arrivals(num_bodies)):
            if isinstance(payload, LineError):
                tally.refuse(payload.to_error())
                continue
            execution_id = f"e{index}"
            claimed = make_claimed(f"job-{index}", execution_id, data=payload)
            bodies[execution_id] = (endpoint, body)
            try:
                request = preparer.prepare(claimed)
            except RequestError as error:
                outcome = writer.outcome(Refused(claimed, error))
                assert outcome.error is not None
                tally.refuse(outcome.error)
            except Exception as error:
                error.add_note(f"body {index}: {body!r:.2000}")
                raise
            else:
                engine.submit([request])
                num_running += 1
        results = [endings.next() for _ in range(num_running)]
        for result in results:
            endpoint, body = bodies[result.claimed.execution_id]
            outcome = writer.outcome(result)
            assert outcome.error is None, (outcome.error, f"{body!r:.2000}")
            is_json = encoding_of(outcome.payload) is Encoding.JSON
            answer = (json.loads if is_json else decode_value)(outcome.payload)
            assert len(answer["choices"]) >= 1
            tally.num_answers += 1
            assert isinstance(result, Generated)
            check_that_it_goes_on(result, preparer, engine, endings)
            tally.answered_fields |= {(endpoint, name) for name in body if body[name] is not None}
    finally:
        engine.stop()
    return tally


def check_that_it_goes_on(
    whole: Generated, preparer: Preparer, engine: GenerationThread, endings: Endings
) -> None:
    """Lose a request at a moment of its way, and let another execution bring it to its end."""
    first, source = whole.claimed, random.Random(whole.claimed.job_id)
    tokens, scores = endings.tokens[first.execution_id], endings.scores[first.execution_id]
    elements = [whole.request.progress_header(cached_tokens=7).encode()]
    for choice, ids in tokens.items():
        cut = source.randint(0, len(ids))
        for start, stop in ((0, cut // 2), (cut // 2, cut)):
            elements.append(encode_tokens(choice, ids[start:stop]))
            if choice in scores:
                elements.append(encode_scores(choice, scores[choice][start:stop]))
    fields = {**first.fields, "qsvc_progress": join_elements(elements)}
    claimed = replace(first, execution_id=f"{first.execution_id} again", fields=fields)
    request = preparer.prepare(claimed)
    assert request.resumed is not None
    engine.submit([request])
    again = endings.next()
    assert isinstance(again, Generated), again
    assert again.choices == whole.choices
    assert again.cached_tokens == 7
    assert endings.requests[claimed.execution_id].resumed is not None
    assert endings.texts[claimed.execution_id] == endings.texts[first.execution_id]


@pytest.fixture(scope="module")
def tally() -> Tally:
    return run_to_the_end(NUM_BODIES)


def test_every_body_ends_in_an_answer_or_an_error_with_a_name(tally: Tally) -> None:
    num_errors = tally.codes.total()
    assert tally.num_answers + num_errors == NUM_BODIES
    assert set(tally.codes) <= {
        "context_length_exceeded",
        "invalid_json_line",
        "invalid_payload",
        "invalid_request",
        "invalid_schema",
    }
    # So that this can fail: neither is rare.
    assert tally.num_answers >= 0.3 * NUM_BODIES
    assert num_errors >= 0.3 * NUM_BODIES


@pytest.mark.parametrize("endpoint", Endpoint)
def test_every_supported_field_is_in_an_answered_body(tally: Tally, endpoint: Endpoint) -> None:
    supported = {name for name, use in FIELD_USES[endpoint].items() if use is FieldUse.SUPPORTED}
    assert supported <= {name for where, name in tally.answered_fields if where is endpoint}


def test_every_field_that_may_be_wrong_is_named_in_a_refusal(tally: Tally) -> None:
    known = {name for uses in FIELD_USES.values() for name in uses} - HARMLESS_FIELDS
    assert known <= tally.refused_fields
