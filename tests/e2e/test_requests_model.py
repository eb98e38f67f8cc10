"""What requests ask for, by the demo model: seeds, text in pieces, secrets, forms of answers."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest

from queue_service import tasks
from queue_service.payload import encode_call
from queue_service.responses import FinishReason
from tests.harness import eventually, make_claimed
from workers.answer import text_of
from workers.answer_forms import Piece
from workers.batch_engine import BatchEngine
from workers.engine import TokenLogprobs
from workers.generation import EngineParts, GenerationThread
from workers.main import answer_forms
from workers.model_info import DEMO_MODEL
from workers.models import LoadedModel, load_model
from workers.packed import PackedRunner
from workers.preparation import Limits, Preparer
from workers.requests import Generated, PreparedRequest
from workers.scheduler import Policy
from workers.structured import ConstraintCompiler

pytestmark = pytest.mark.model

PLENTY = 1 << 30


@cache
def loaded() -> LoadedModel:
    return load_model(DEMO_MODEL, dtype="float32")


@cache
def preparer() -> Preparer:
    model = loaded()
    compiler = ConstraintCompiler(
        model.tokenizer,
        vocab_size=model.info.vocab_size,
        eos_token_ids=model.info.eos_token_ids,
    )
    return Preparer(
        model.tokenizer,
        Limits(model.info.context_length, model.info.vocab_size, model.info.eos_token_ids),
        model=DEMO_MODEL,
        forms=answer_forms(model.tokenizer, compiler),
    )


def prepared(name: str, content: str, **fields: Any) -> PreparedRequest:
    body = {"messages": [{"role": "user", "content": content}], **fields}
    claimed = make_claimed(job_id=name, execution_id=name, data=encode_call(tasks.CHAT, body))
    return preparer().prepare(claimed)


class Collector:
    """A sink that keeps everything."""

    def __init__(self) -> None:
        self.texts: dict[str, list[str]] = {}
        self.ended: dict[str, Generated] = {}
        self.failed: dict[str, Exception] = {}

    def begin(self, request: PreparedRequest) -> None:
        self.texts[request.execution_id] = []

    def resume(
        self, execution_id: str, choice: int, token_ids: Sequence[int], pieces: Sequence[Piece]
    ) -> None:
        self.texts[execution_id].append(text_of(pieces))

    def note_cached(self, execution_id: str, num_tokens: int) -> None: ...

    def advance(
        self,
        execution_id: str,
        choice: int,
        token_id: int,
        pieces: Sequence[Piece],
        logprobs: TokenLogprobs | None = None,
    ) -> None:
        self.texts[execution_id].append(text_of(pieces))

    def end(self, generated: Generated) -> None:
        self.ended[generated.request.execution_id] = generated

    def fail(self, execution_id: str, error: Exception) -> None:
        self.failed[execution_id] = error

    def drop(self, execution_id: str) -> None: ...


def run(requests: Sequence[PreparedRequest], *, rows: int = 8, kv_bytes: int = PLENTY) -> Collector:
    """Run requests to their ends on an engine of their own."""
    model, sink = loaded(), Collector()
    failures: list[BaseException] = []

    def make_parts() -> EngineParts:
        engine = BatchEngine(
            PackedRunner(model.model, budget_bytes=kv_bytes),
            vocab_size=model.info.vocab_size,
            eos_token_ids=model.info.eos_token_ids,
            policy=Policy(kv_budget_bytes=kv_bytes, max_rows=rows, expected_tokens=8),
        )
        return EngineParts(engine, model.tokenizer)

    thread = GenerationThread(make_parts, sink, on_failure=failures.append, max_rows=rows)
    thread.start()
    thread.submit(requests)
    try:
        eventually(
            lambda: failures or len(sink.ended) + len(sink.failed) == len(requests),
            "every answer",
            seconds=3000,
        )
    finally:
        thread.stop()
    assert not failures
    return sink


def answers(sink: Collector) -> dict[str, str]:
    assert sink.failed == {}
    return {name: generated.choices[0].text for name, generated in sink.ended.items()}


SEEDED = {"temperature": 1.0, "top_p": 0.9, "seed": 7, "max_tokens": 40}
# About a hundred tokens, so that the row leaves its first slot of 128 at about token 20.
LONG_QUESTION = "Write a story about " + ", ".join(f"animal number {i}" for i in range(12))


def test_a_seeded_answer_is_the_same_in_any_company() -> None:
    def seeded() -> PreparedRequest:
        return prepared("seeded", LONG_QUESTION, **SEEDED)

    wishes: list[dict[str, Any]] = [
        {"seed": 8},
        {"seed": 7},
        {},
        {"temperature": 0},
        {"top_k": 5},
        {"min_p": 0.1},
        {},
    ]
    neighbours = [
        prepared(f"other-{i}", f"Tell me about the number {i}.", max_tokens=40, **options)
        for i, options in enumerate(wishes)
    ]
    alone = answers(run([seeded()]))["seeded"]
    assert len(alone) > 40
    crowd = answers(run([*neighbours, seeded()]))
    assert crowd["seeded"] == alone
    assert answers(run([seeded(), *reversed(neighbours)])) == crowd


def test_a_seeded_answer_is_the_same_after_it_was_pre_empted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    requests = [prepared(f"row-{i}", LONG_QUESTION, **{**SEEDED, "seed": i}) for i in range(2)]
    alone = {k: v for r in requests for k, v in answers(run([r])).items()}
    kv_bytes = 3 * PackedRunner(loaded().model).row_bytes(128)
    with caplog.at_level("INFO"):
        assert answers(run(requests, kv_bytes=kv_bytes)) == alone
    assert "row waits again" in caplog.text


def test_unseeded_answers_to_one_question_differ() -> None:
    requests = [prepared(f"job-{i}", "Name a colour.", max_tokens=12) for i in range(4)]
    assert len(set(answers(run(requests)).values())) > 1


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 64])
def test_pieces_of_any_script_join_to_the_answer(max_tokens: int) -> None:
    questions = {
        "emoji": "Repeat exactly: 👩‍👩‍👧‍👦 🏳️‍🌈 🙂🙃",
        "cjk": "请用中文回答, 你好吗",
        "marks": "Repeat exactly: é ñ ā̈ नमस्ते ภาษาไทย",
        "joined": "Write ten different emoji in a row.",
    }
    requests = [
        prepared(name, text, max_tokens=max_tokens, temperature=1.2, seed=3)
        for name, text in questions.items()
    ]
    sink = run(requests)
    for name, answer in answers(sink).items():
        assert "".join(sink.texts[name]) == answer
        assert sink.ended[name].choices[0].completion_tokens <= max_tokens


@pytest.mark.slow
def test_no_answer_holds_the_secret_of_another() -> None:
    words = [f"{a}{b}" for a in ("zor", "mik", "tal", "ven") for b in ("ax", "ob", "ul", "em")]
    secrets = [f"{word}-{i}" for i, word in enumerate(words * 2)]

    def ask(i: int, secret: str) -> PreparedRequest:
        question = f"The secret word is {secret}. What is the secret word? Say it and nothing else."
        return prepared(f"job-{i}", question, temperature=0, max_tokens=16)

    requests = [ask(i, secret) for i, secret in enumerate(secrets)]
    together = answers(run(requests, rows=32))
    for i, secret in enumerate(secrets):
        named = {other for other in secrets if re.search(rf"{other}(?!\d)", together[f"job-{i}"])}
        assert named <= {secret}
    assert sum(secret in together[f"job-{i}"] for i, secret in enumerate(secrets)) > 16
    for i in (0, 9, 31):
        assert answers(run([requests[i]]))[f"job-{i}"] == together[f"job-{i}"]


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def test_answers_follow_their_schemas_beside_free_ones() -> None:
    free = prepared("free", "Tell me about Ada Lovelace.", temperature=0, max_tokens=24)
    alone = answers(run([free]))["free"]
    bound = prepared(
        "bound",
        "Describe Ada Lovelace as JSON.",
        response_format=schema_format(PERSON),
        seed=5,
        max_tokens=120,
        logprobs=True,
        top_logprobs=2,
    )
    choice = prepared(
        "choice",
        "Is Paris in France?",
        structured_outputs={"choice": ["yes", "no"]},
        max_tokens=8,
    )
    sink = run([bound, free, choice])
    found = answers(sink)
    assert found["free"] == alone
    assert found["choice"] in ("yes", "no")
    made = sink.ended["bound"].choices[0]
    assert made.logprobs is not None
    assert len(made.logprobs) == made.completion_tokens
    if made.finish_reason is FinishReason.STOP:
        person = json.loads(made.text)
        assert set(person) == {"name", "age"}
        assert isinstance(person["age"], int)


def growing_schemas() -> Iterator[dict[str, Any]]:
    """Yield twenty schemas, each harder than the one before or hard in another way."""
    string, integer, boolean = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
    short = {"type": "string", "maxLength": 12}

    def obj(**properties: Any) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }

    def array(items: dict[str, Any], most: int = 3, least: int = 0) -> dict[str, Any]:
        return {"type": "array", "items": items, "minItems": least, "maxItems": most}

    yield boolean
    yield integer
    yield {"enum": ["red", "green", "blue"]}
    yield {"const": {"a": [1, None, "x"]}}
    yield short
    yield {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}
    yield {"type": "integer", "minimum": 10, "maximum": 99}
    yield array(integer)
    yield obj(name=short)
    yield obj(name=short, age=integer, member=boolean)
    yield obj(tags=array(short), kind={"enum": ["a", "b"]})
    yield array(obj(x=integer, y=integer), most=2, least=1)
    yield {"anyOf": [integer, short, obj(value=boolean)]}
    yield obj(größe=integer, 名前=short)
    yield obj(inner=obj(inner=obj(leaf=short)))
    yield {"type": ["string", "null"], "maxLength": 8}
    yield obj(matrix=array(array(integer, most=2), most=2))
    yield {
        "$defs": {
            "node": {
                **obj(value=integer),
                "properties": {
                    "value": integer,
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                },
            }
        },
        "$ref": "#/$defs/node",
    }
    yield {"type": "object", "properties": {"id": string}, "additionalProperties": integer}
    yield obj(when={"type": "string", "format": "date"}, items=array(obj(n=integer, t=short), 2))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_five_hundred_answers_follow_twenty_schemas() -> None:
    schemas = list(growing_schemas())
    assert len(schemas) == 20
    source = random.Random(1)
    requests = [
        prepared(
            f"{i}",
            f"Give me an example, number {source.randrange(1000)}, as JSON.",
            response_format=schema_format(schemas[i % 20]),
            temperature=1.0,
            max_tokens=160,
        )
        for i in range(500)
    ]
    sink = run(requests, rows=32)
    assert sink.failed == {}
    num_whole = 0
    for name, generated in sink.ended.items():
        [choice] = generated.choices
        if choice.finish_reason is FinishReason.LENGTH:
            continue
        num_whole += 1
        json.loads(choice.text)
        assert generated.request.form.check(choice) is None, (name, choice.text)
    assert num_whole > 350
