"""Answers held to their constraint: which tokens may come, when they may end, what is refused."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

import workers.structured
from queue_service.constraints import (
    SUPPORTED_FORMATS,
    SUPPORTED_KEYWORDS,
    Constraint,
    ConstraintKind,
    choice,
    grammar,
    json_object,
    json_schema,
    regex,
)
from queue_service.errors import RequestError
from workers.gguf import read_gguf
from workers.grammar_check import find_fault
from workers.models import demo_file
from workers.structured import (
    MAX_WHITESPACE_RUN,
    ConstraintCompiler,
    ConstraintError,
    Matcher,
    validate,
)
from workers.tokenizer import Tokenizer

# More than the demo tokenizer has, as padded embeddings give it, and no multiple of 32.
VOCAB_SIZE = 49152 + 71
EOS = 2
WORDS = -(-VOCAB_SIZE // 32)

Tokens = NDArray[np.int64]


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    return Tokenizer(read_gguf(demo_file(), None).tokenizer)


@pytest.fixture(scope="module")
def compiler(smollm: Tokenizer) -> ConstraintCompiler:
    return ConstraintCompiler(smollm, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])


@pytest.fixture(scope="module")
def closing(smollm: Tokenizer) -> Tokens:
    """Tokens with which a random text has a chance to come to an end."""
    return tokens_like(smollm, r'[\]}",:0-9]+')


@pytest.fixture(scope="module")
def blank(smollm: Tokenizer) -> Tokens:
    return tokens_like(smollm, r"[ \t\r\n]+")


def tokens_like(tokenizer: Tokenizer, pattern: str) -> Tokens:
    texts = (tokenizer.decode([i], skip_special_tokens=False) for i in range(tokenizer.vocab_size))
    return np.array([i for i, text in enumerate(texts) if re.fullmatch(pattern, text)])


def allowed(matcher: Matcher, vocab_size: int = VOCAB_SIZE) -> list[int]:
    return [int(token_id) for token_id in allowed_array(matcher, vocab_size)]


def allowed_array(matcher: Matcher, vocab_size: int = VOCAB_SIZE) -> Tokens:
    row = np.full(-(-vocab_size // 32), 0xFFFFFFFF, dtype=np.uint32)
    matcher.fill(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    assert not bits[vocab_size:].any()
    return np.flatnonzero(bits)


def feed(matcher: Matcher, tokenizer: Tokenizer, text: str) -> Matcher:
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        matcher.accept(token_id)
    return matcher


def walk(
    matcher: Matcher,
    *,
    seed: int,
    prefer: Tokens,
    preference: float = 0.5,
    ending: float = 0.5,
    limit: int = 300,
) -> tuple[list[int], bool]:
    """Draw tokens until an end token or the limit; return them, and whether the text ended."""
    draw = random.Random(seed)
    drawn: list[int] = []
    while len(drawn) < limit:
        ids = allowed_array(matcher)
        assert (EOS in ids) == matcher.is_accepting
        assert ids[-1] < 49152
        if matcher.is_finished:
            assert list(ids) == [EOS]
        if EOS in ids and (len(ids) == 1 or draw.random() < ending):
            matcher.accept(EOS)
            assert matcher.is_finished
            return drawn, True
        ids = ids[ids != EOS]
        preferred = np.intersect1d(ids, prefer, assume_unique=True)
        is_preferred = len(preferred) > 0 and draw.random() < preference
        token_id = int(draw.choice(preferred if is_preferred else ids))
        matcher.accept(token_id)
        drawn.append(token_id)
    return drawn, False


TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 5},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["name"],
            "additionalProperties": False,
        }
    },
}

SCHEMAS: dict[str, dict[str, Any]] = {
    "integer": {"type": "integer", "minimum": -5, "maximum": 1200},
    "number": {"type": "number", "exclusiveMinimum": 0, "maximum": 2.5},
    "multiple": {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 100},
    "types": {"type": ["null", "boolean", "integer"]},
    "enum": {"enum": ["a", 1, None, True, {"k": [1.5, "é"]}, []]},
    "const": {"const": {"ключ": ['qu"ote\\', "日本\n語", "🙂"]}},
    "string": {"type": "string", "minLength": 2, "maxLength": 4},
    "pattern": {"type": "string", "pattern": "^[a-z]{2,4}-[0-9]+$", "maxLength": 9},
    "searched": {"type": "string", "pattern": r"\d[x-z]", "maxLength": 12},
    "arrays": {
        "type": "array",
        "minItems": 1,
        "maxItems": 3,
        "items": {"type": "array", "maxItems": 2, "items": {"type": "boolean"}},
    },
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "integer"}, {"type": "null"}],
        "items": False,
        "minItems": 2,
    },
    "object": {
        "type": "object",
        "properties": {
            "a b": {"type": "integer"},
            'naïve "q" / \\': {"type": "boolean"},
            "list": {"type": "array", "items": {"enum": ["x", "y"]}},
        },
        "required": ['naïve "q" / \\'],
        "additionalProperties": False,
    },
    "open object": {
        "type": "object",
        "properties": {"id": {"type": "integer"}, "it\n": {"type": "null"}},
        "required": ["id"],
    },
    "map": {
        "type": "object",
        "additionalProperties": {"type": "integer"},
        "minProperties": 1,
        "maxProperties": 3,
    },
    "pattern map": {
        "type": "object",
        "patternProperties": {"^n_": {"type": "null"}, "^i_": {"type": "integer"}},
        "additionalProperties": False,
    },
    "any of": {
        "anyOf": [
            {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]},
            {"type": "array", "items": {"type": "null"}, "maxItems": 3},
        ]
    },
    "tagged": {
        "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
        "$defs": {
            "cat": {
                "type": "object",
                "properties": {
                    "kind": {"const": "cat"},
                    "friend": {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]},
                },
                "required": ["kind"],
                "additionalProperties": False,
            },
            "dog": {
                "type": "object",
                "properties": {"kind": {"enum": ["dog", "hound"]}, "age": {"type": "integer"}},
                "required": ["kind", "age"],
                "additionalProperties": False,
            },
        },
    },
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"n": {"type": "integer"}}},
            {"properties": {"n": {"minimum": 3, "maximum": 40}}, "required": ["n"]},
        ],
        "additionalProperties": False,
        "properties": {"n": True},
    },
    "tree": TREE,
    "formats": {
        "type": "object",
        "properties": {name: {"type": "string", "format": name} for name in ("date", "uuid")},
        "required": ["date", "uuid"],
        "additionalProperties": False,
    },
    "anything": {},
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_whatever_is_drawn_ends_valid_or_is_cut_where_it_could_go_on(
    name: str, compiler: ConstraintCompiler, smollm: Tokenizer, closing: Tokens
) -> None:
    compiled = compiler.compile(json_schema(SCHEMAS[name]))
    num_ended = 0
    for seed in range(6):
        ids, has_ended = walk(compiled.matcher(), seed=seed, prefer=closing)
        text = smollm.decode(ids, skip_special_tokens=False)
        if has_ended:
            num_ended += 1
            assert validate(compiled.constraint, text) is None, text
        else:
            # Said in the tokens that the text itself is made of, it is as good a beginning.
            feed(compiled.matcher(), smollm, text.rstrip("\ufffd"))
    assert num_ended > 0


@pytest.mark.parametrize("name", ["object", "open object", "arrays", "tagged", "map"])
def test_no_run_of_whitespace_outside_strings_is_longer_than_allowed(
    name: str, compiler: ConstraintCompiler, smollm: Tokenizer, blank: Tokens
) -> None:
    compiled = compiler.compile(json_schema(SCHEMAS[name]))
    longest = 0
    for seed in range(8):
        ids, _ = walk(compiled.matcher(), seed=seed, prefer=blank, preference=0.95, limit=120)
        text = smollm.decode(ids, skip_special_tokens=False)
        outside = re.sub(r'"(?:\\.|[^"\\])*("|$)', '""', text, flags=re.DOTALL)
        runs = re.findall(r"[ \t\r\n]+", outside)
        longest = max([longest, *map(len, runs)])
    assert 0 < longest <= MAX_WHITESPACE_RUN


@pytest.mark.parametrize("text", [" {}", "{} ", "\n{}"])
def test_no_whitespace_is_around_json(
    text: str, compiler: ConstraintCompiler, smollm: Tokenizer
) -> None:
    with pytest.raises(ConstraintError):
        feed(compiler.compile(json_object()).matcher(), smollm, text)


def test_a_property_has_one_spelling_so_none_dodges_its_schema(
    compiler: ConstraintCompiler, smollm: Tokenizer
) -> None:
    compiled = compiler.compile(json_schema({"properties": {"a": {"type": "integer"}}}))
    feed(compiled.matcher(), smollm, '{"a":1,"b":"x"}')
    with pytest.raises(ConstraintError):
        feed(compiled.matcher(), smollm, '{"a":1,"\\u0061":"x"}')


EXAMPLES: dict[str, Any] = {
    "$defs": {"$defs": {"a": {"type": "null"}}, "$ref": "#/$defs/a"},
    "$ref": {"$ref": "#/definitions/a", "definitions": {"a": {"items": {"$ref": "#"}}}},
    "additionalProperties": {"additionalProperties": False},
    "allOf": {"allOf": [{"type": "string"}, {"minLength": 2}]},
    "anyOf": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "const": {"const": 3},
    "definitions": {"definitions": {"a": True}},
    "enum": {"enum": [1, "a"]},
    "exclusiveMaximum": {"exclusiveMaximum": 3},
    "exclusiveMinimum": {"exclusiveMinimum": 3},
    "format": {"format": "date"},
    "items": {"items": {"type": "null"}},
    "maxItems": {"maxItems": 2},
    "maxLength": {"maxLength": 2},
    "maxProperties": {"maxProperties": 2},
    "maximum": {"maximum": 2.5},
    "minItems": {"minItems": 2},
    "minLength": {"minLength": 2},
    "minProperties": {"minProperties": 1},
    "minimum": {"minimum": -2},
    "multipleOf": {"multipleOf": 0.1},
    "oneOf": {"oneOf": [{"type": "string"}, {"type": "null"}]},
    "pattern": {"pattern": "a"},
    "patternProperties": {"patternProperties": {"^a": False}},
    "prefixItems": {"prefixItems": [{"type": "null"}]},
    "properties": {"properties": {"a": {"type": "null"}}},
    "required": {"required": ["a"]},
    "type": {"type": "object"},
}


@pytest.mark.parametrize("keyword", sorted(SUPPORTED_KEYWORDS))
def test_every_supported_keyword_compiles(keyword: str, compiler: ConstraintCompiler) -> None:
    compiler.compile(json_schema(EXAMPLES[keyword]))


def test_every_supported_format_compiles(compiler: ConstraintCompiler) -> None:
    for name in sorted(SUPPORTED_FORMATS):
        compiler.compile(json_schema({"type": "string", "format": name}))


@pytest.mark.parametrize(
    ("schema", "wrong"),
    [
        ({"minLength": 2}, '"é"'),
        ({"maxLength": 1}, '"ab"'),
        ({"pattern": "^a"}, '"ba"'),
        ({"format": "date"}, '"2024-13-01"'),
        ({"minimum": 3}, "2"),
        ({"exclusiveMaximum": 3}, "3"),
        ({"multipleOf": 0.1}, "0.25"),
        ({"type": "integer"}, "1.5"),
        ({"minItems": 2}, "[1]"),
        ({"maxItems": 1}, "[1,2]"),
        ({"prefixItems": [{"type": "null"}]}, "[1]"),
        ({"required": ["a"]}, '{"b":1}'),
        ({"additionalProperties": False, "properties": {"a": {}}}, '{"b":1}'),
        ({"patternProperties": {"^a": {"type": "null"}}}, '{"ab":1}'),
        ({"minProperties": 1}, "{}"),
        ({"maxProperties": 1}, '{"a":1,"b":2}'),
        ({"const": {"a": 1}}, '{"a":2}'),
        ({"enum": [1, "x"]}, '"y"'),
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, "1"),
        (TREE, '{"name":"a","children":[{"name":"toolong"}]}'),
    ],
    ids=str,
)
def test_a_text_that_breaks_the_schema_cannot_be_generated_nor_passes_the_check(
    schema: dict[str, Any], wrong: str, compiler: ConstraintCompiler, smollm: Tokenizer
) -> None:
    constraint = json_schema(schema)
    with pytest.raises(ConstraintError):
        feed(compiler.compile(constraint).matcher(), smollm, wrong).accept(EOS)
    if "format" not in schema:
        assert validate(constraint, wrong) is not None


@pytest.mark.parametrize(
    ("constraint", "texts"),
    [
        (choice(["a", "ab", 'q"\\|.*', "é🙂\n"]), ["a", "ab", 'q"\\|.*', "é🙂\n"]),
        (regex(r"(?i)yes|no{1,3}!"), ["YES", "noOo!"]),
        (regex(r"^[\p{L} ]+\.$"), ["Ça alors."]),
        (grammar('start: "[" item ("," item)* "]"\nitem: /[0-9]+/'), ["[1]", "[1,22,3]"]),
        (json_object(), ["{}", '{"a": [1, {"b": null}]}']),
    ],
    ids=lambda value: value.kind if isinstance(value, Constraint) else "",
)
def test_every_kind_of_constraint_takes_its_texts_and_only_then_the_end(
    constraint: Constraint, texts: list[str], compiler: ConstraintCompiler, smollm: Tokenizer
) -> None:
    for text in texts:
        matcher = compiler.compile(constraint).matcher()
        for token_id in smollm.encode(text, add_special_tokens=False):
            assert token_id in allowed(matcher)
            matcher.accept(token_id)
        assert EOS in allowed(matcher)
        assert matcher.is_accepting
        matcher.accept(EOS)
        assert matcher.is_finished
        assert allowed(matcher) == [EOS]
        assert validate(constraint, text) is None


def test_the_end_is_forced_as_soon_as_nothing_else_may_come(
    compiler: ConstraintCompiler, smollm: Tokenizer
) -> None:
    matcher = compiler.compile(choice(["yes", "yes!"])).matcher()
    feed(matcher, smollm, "yes")
    assert (matcher.is_accepting, matcher.is_finished) == (True, False)
    feed(matcher, smollm, "!")
    assert matcher.is_finished
    assert allowed(matcher) == [EOS]
    with pytest.raises(ConstraintError, match="ended"):
        feed(matcher, smollm, "!")


def test_the_end_is_refused_before_the_text_may_end(compiler: ConstraintCompiler) -> None:
    with pytest.raises(ConstraintError, match="cannot end"):
        compiler.compile(json_object()).matcher().accept(EOS)


@pytest.mark.parametrize("token_id", [-1, 49152, VOCAB_SIZE, 10**6, 0, 81])
def test_a_token_that_may_not_come_next_is_refused(
    token_id: int, compiler: ConstraintCompiler
) -> None:
    with pytest.raises(ConstraintError):
        compiler.compile(json_object()).matcher().accept(token_id)


def test_special_tokens_never_come(compiler: ConstraintCompiler, smollm: Tokenizer) -> None:
    matcher = feed(compiler.compile(json_object()).matcher(), smollm, '{"a')
    assert not {0, 1, EOS} & set(allowed(matcher))


def test_a_copy_goes_its_own_way(compiler: ConstraintCompiler, smollm: Tokenizer) -> None:
    matcher = feed(compiler.compile(choice(["abc", "abd"])).matcher(), smollm, "a")
    copy = matcher.copy()
    before = allowed(matcher)
    feed(copy, smollm, "bd")
    copy.accept(EOS)
    assert copy.copy().is_finished
    assert allowed(matcher) == before
    feed(matcher, smollm, "bc")
    assert matcher.is_finished


def test_an_end_token_that_is_also_text_is_only_ever_the_end(smollm: Tokenizer) -> None:
    (letter,) = smollm.encode("a", add_special_tokens=False)
    compiler = ConstraintCompiler(smollm, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS, letter])
    matcher = compiler.compile(json_schema({"type": "string"})).matcher()
    feed(matcher, smollm, '"b')
    assert not {EOS, letter} & set(allowed(matcher))
    feed(matcher, smollm, '"')
    assert allowed(matcher) == [EOS, letter]


def test_logits_may_be_fewer_than_the_tokenizer_has_tokens(smollm: Tokenizer) -> None:
    compiler = ConstraintCompiler(smollm, vocab_size=1001, eos_token_ids=[EOS])
    matcher = compiler.compile(json_schema({"type": "string"})).matcher()
    ids = allowed(feed(matcher, smollm, '"'), 1001)
    assert 500 < len(ids) < 1001


@pytest.mark.parametrize(
    "row",
    [
        np.empty(WORDS - 1, dtype=np.uint32),
        np.empty(WORDS, dtype=np.int64),
        np.empty(2 * WORDS, dtype=np.uint32)[::2],
    ],
    ids=["short", "wide", "scattered"],
)
def test_a_mask_of_another_shape_is_refused(row: Any, compiler: ConstraintCompiler) -> None:
    with pytest.raises(ValueError, match="mask row"):
        compiler.compile(json_object()).matcher().fill(row)


def sentencepiece(*, adds_space: bool) -> Tokenizer:
    """A tokenizer as Llama 2 has one (with a space in front of all), or Gemma (without)."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["▁", "a", "b", "l", "o", "{", "}", '"', ":", "lo", "▁b", '"▁', "é", "▁▁"]
    vocab = {piece: i for i, piece in enumerate(["<unk>", "<s>", "</s>", *bytes_, *pieces])}
    merges = [("l", "o"), ("▁", "b"), ('"', "▁"), ("▁", "▁")]
    fast = FastTokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    replace = normalizers.Replace(" ", "▁")
    prepend = [normalizers.Prepend("▁")] if adds_space else []
    fast.normalizer = normalizers.Sequence([*prepend, replace])
    strip = [decoders.Strip(" ", 1, 0)] if adds_space else []
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    fast.add_tokens([AddedToken(word, special=True) for word in ("<unk>", "<s>", "</s>")])
    hf = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=fast, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    return Tokenizer(hf)


@pytest.mark.parametrize("adds_space", [True, False])
def test_the_tokens_of_sentencepiece_stand_for_their_bytes(adds_space: bool) -> None:
    tokenizer = sentencepiece(adds_space=adds_space)
    compiler = ConstraintCompiler(
        tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=tokenizer.eos_token_ids
    )
    text = 'a lo  b: é"🙂\n"'
    for seed in range(5):
        matcher = compiler.compile(choice([text, "{"])).matcher()
        draw = random.Random(seed)
        # From the second token on, so that no space in front of all is stripped.
        matcher.accept(tokenizer.encode("xa", add_special_tokens=False)[-1])
        drawn = tokenizer.encode("{a", add_special_tokens=False)[-2:]
        while not matcher.is_finished:
            drawn.append(draw.choice(allowed(matcher, tokenizer.vocab_size)))
            matcher.accept(drawn[-1])
        assert tokenizer.decode(drawn) == "{" + text


def test_a_tokenizer_that_cannot_be_read_refuses_constraints() -> None:
    fast = FastTokenizer(models.WordLevel({"a": 0, "<unk>": 1}, "<unk>"))
    hf = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=fast, unk_token="<unk>"
    )
    compiler = ConstraintCompiler(Tokenizer(hf), vocab_size=2, eos_token_ids=[1])
    with pytest.raises(RequestError) as caught:
        compiler.compile(json_object())
    assert caught.value.code == "unsupported_constraint"


def test_a_choice_with_bytes_that_no_token_has_is_refused(compiler: ConstraintCompiler) -> None:
    with pytest.raises(RequestError, match="no tokens"):
        compiler.compile(choice(["a\x04b"]))


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"allOf": [{"type": "integer"}, {"type": "string"}]}, "incompatible types"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        ({"$ref": "#"}, "no token can come first"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"patternProperties": {"^a": {}, "b": {}}}, "not disjoint"),
    ],
    ids=str,
)
def test_what_only_the_compiler_can_tell_is_refused_in_one_line(
    schema: dict[str, Any], said: str, compiler: ConstraintCompiler
) -> None:
    for _ in range(2):
        with pytest.raises(RequestError, match=said) as caught:
            compiler.compile(json_schema(schema))
        assert caught.value.code == "invalid_schema"
        assert "\n" not in caught.value.message


def deep(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def chain(length: int, link: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    links = {f"d{i}": link(f"#/$defs/d{i + 1}") for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{length}": {"type": "null"}}}


def both(reference: str) -> dict[str, Any]:
    names = ("x", "y")
    options = [
        {"type": "object", "properties": {name: {"$ref": reference}}, "required": [name]}
        for name in names
    ]
    return {"anyOf": options}


HOSTILE: dict[str, Callable[[], Constraint]] = {
    "deep": lambda: json_schema(deep(45)),
    "many values": lambda: json_schema({"enum": [f"value {i * 7919}" for i in range(3000)]}),
    "many objects": lambda: json_schema({"enum": [{"a": i} for i in range(900)]}),
    "many properties": lambda: json_schema({"properties": {f"p{i}": {} for i in range(990)}}),
    "a property of many": lambda: json_schema(
        {
            "properties": {f"p{i}": {"type": "null"} for i in range(900)},
            "additionalProperties": False,
            "minProperties": 1,
        }
    ),
    "long chain": lambda: json_schema(
        chain(450, lambda ref: {"type": "object", "properties": {"a": {"$ref": ref}}})
    ),
    "2^n any of": lambda: json_schema(chain(150, both)),
    "2^n all of": lambda: json_schema(
        {"allOf": [{"anyOf": [{"required": [f"{i} {j}"]} for j in range(9)]} for i in range(50)]}
    ),
    "patterns at once": lambda: json_schema(
        {"allOf": [{"pattern": f"a.{{{i}}}b"} for i in range(1, 40)]}
    ),
    "multiple": lambda: json_schema({"type": "integer", "multipleOf": 99999989}),
    "counted": lambda: json_schema({"pattern": "^(([a-z]{1,100}){1,100}){1,100}$"}),
    "many items": lambda: json_schema({"items": {}, "minItems": 10**6, "maxItems": 10**9}),
    "backtracking": lambda: regex("((a+)+b|(a*)*c)*"),
    "automaton": lambda: regex("(a|b)*a(a|b){1000}"),
    "nested regex": lambda: regex("(" * 20_000 + "a" + ")" * 20_000),
    "alternatives": lambda: regex("|".join(f".*{i}" for i in range(9000))),
    "long rules": lambda: grammar(
        "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(3500)) + '\na3500: "x"'
    ),
    "2^n rules": lambda: grammar(
        "start: A0\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(60)) + '\nA60: "x"'
    ),
    "ambiguous": lambda: grammar('start: s\ns: s s s | s s | "a" |'),
    "nested grammar": lambda: grammar("start: " + "(" * 30_000 + '"a"' + ")" * 30_000),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_no_constraint_keeps_the_compiler_or_a_row_busy(
    name: str, compiler: ConstraintCompiler, closing: Tokens
) -> None:
    compiler.compile(json_object())
    constraint = HOSTILE[name]()
    before = time.process_time()
    said = ""
    try:
        walk(compiler.compile(constraint).matcher(), seed=1, prefer=closing, limit=30)
    except (RequestError, ConstraintError) as exc:
        said = str(exc)
    assert len(said) < 500
    assert "\n" not in said
    # The compiler's own process is not counted here: it has an alarm.
    assert time.process_time() - before < 2


def test_compiling_in_a_process_of_its_own_survives_what_would_crash_this_one() -> None:
    schema = chain(5000, lambda ref: {"type": "object", "properties": {"a": {"$ref": ref}}})
    fault = find_fault(f"start: %json {json.dumps(schema)}", is_json=False)
    assert fault == "it is nested too deeply: make it simpler"


def counted(
    monkeypatch: pytest.MonkeyPatch, outcome: Sequence[str | Exception | None]
) -> list[str]:
    """Have constraints checked with these outcomes, slowly; return the grammars checked."""
    checked: list[str] = []
    outcomes = iter(outcome)

    def check(text: str, *, is_json: bool) -> str | None:
        checked.append(text)
        told = next(outcomes)
        threading.Event().wait(0.1)
        if isinstance(told, Exception):
            raise told
        return told

    monkeypatch.setattr(workers.structured, "find_fault", check)
    return checked


def test_threads_that_ask_for_one_constraint_compile_it_once(
    smollm: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = counted(monkeypatch, [None])
    compiler = ConstraintCompiler(smollm, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])
    with ThreadPoolExecutor(8) as pool:
        compiled = list(pool.map(lambda _: compiler.compile(json_object()), range(8)))
    assert len(checked) == 1
    assert len({id(one) for one in compiled}) == 1


def test_a_refusal_is_found_out_once_and_a_failure_of_the_machine_again(
    smollm: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = counted(monkeypatch, [OSError("no process"), "too slow", None])
    compiler = ConstraintCompiler(smollm, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])
    with pytest.raises(OSError, match="no process"):
        compiler.compile(json_object())
    for _ in range(3):
        with pytest.raises(RequestError, match="too slow"):
            compiler.compile(json_object())
    assert len(checked) == 2


def test_only_so_many_constraints_are_remembered(
    smollm: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = counted(monkeypatch, [None] * 4)
    compiler = ConstraintCompiler(smollm, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS], max_entries=2)
    first, second, third = (choice([letter]) for letter in "abc")
    for constraint in (first, second, first, third, first, second):
        assert compiler.compile(constraint).constraint == constraint
    assert len(checked) == 4


def test_matchers_of_many_threads_do_not_meet(
    compiler: ConstraintCompiler, closing: Tokens
) -> None:
    compiled = compiler.compile(json_schema(TREE))

    def one(seed: int) -> tuple[list[int], bool]:
        return walk(compiled.matcher(), seed=seed, prefer=closing, limit=60)

    alone = [one(seed) for seed in range(6)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(one, range(6))) == alone


@pytest.mark.parametrize(
    ("schema", "text", "is_right"),
    [
        ({"type": "number", "multipleOf": 0.01}, "1.1", True),
        ({"type": "number", "multipleOf": 0.01}, "1.105", False),
        ({"type": "integer"}, "9" * 5000, True),
        ({"type": "integer"}, "1.5", False),
        ({"type": "number"}, "1e999999", True),
        ({"maximum": 5}, "1e400", False),
        ({"type": "string", "pattern": r"^\p{Lu}\d$"}, '"É1"', True),
        ({"type": "string", "pattern": "^(a+)+$"}, '"' + "a" * 60 + '!"', False),
        ({"type": "object"}, "NaN", False),
        ({"type": "object"}, '{"a":', False),
        ({"type": "array"}, "[" * 100_000, False),
    ],
    ids=lambda value: str(value)[:30],
)
def test_the_check_is_exact_and_never_stuck(
    schema: dict[str, Any], text: str, is_right: bool
) -> None:
    assert (validate(json_schema(schema), text) is None) == is_right


def test_the_check_of_a_recursive_schema_ends() -> None:
    def option(ref: str, last: str) -> dict[str, Any]:
        return {"properties": {"a": {"$ref": ref}, "z": {"const": last}}}

    schema = chain(40, lambda ref: {"anyOf": [option(ref, "x"), option(ref, "y")]})
    text = '{"a":' * 40 + "1" + "}" * 40
    before = time.process_time()
    validate(json_schema(schema), text)
    assert time.process_time() - before < 20


def test_the_check_says_where_and_not_what_the_text_says() -> None:
    fault = validate(json_schema({"items": {"type": "null"}}), '[null, "secret"]')
    assert fault == "the text breaks 'type' of its schema at $[1]"


@pytest.mark.parametrize(
    ("constraint", "text"),
    [(regex("a+"), "ab"), (regex("ab"), "xab"), (choice(["a", "b"]), "ab"), (json_object(), "[]")],
    ids=lambda value: value.kind if isinstance(value, Constraint) else value,
)
def test_the_check_names_a_text_of_another_kind(constraint: Constraint, text: str) -> None:
    assert validate(constraint, text) is not None


def test_a_grammar_was_enforced_and_is_not_checked_again() -> None:
    constraint = grammar('start: "a"')
    assert constraint.kind is ConstraintKind.GRAMMAR
    assert validate(constraint, "a") is None
