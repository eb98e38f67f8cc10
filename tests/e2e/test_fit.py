"""What `qsvc fit` tells of a model is what loading it would give, and nothing is loaded for it."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten
from mlx_lm.models.llama import Model, ModelArgs

from queue_service.errors import ConfigurationError, ModelUnavailable
from tests.cli_helpers import run_qsvc
from tests.families import FAMILIES, Family
from tests.model_shapes import GB, model_shape
from workers.fit import DeviceSpeed, Fit, estimate_speed, measure_device, read_shape
from workers.gguf_header import read_header
from workers.memory import divide_memory
from workers.models import demo_file, load_model
from workers.self_test import choose_runner

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
# Two layers of keys and values of two heads with 16 numbers each.
NUMBERS_PER_TOKEN = 2 * 2 * 2 * 16
# One of each kind of cache; building all of them is for the slow tier.
FAST = frozenset({"llama", "gpt_oss", "deepseek_v3", "mamba", "falcon_h1", "qwen3_next", "dbrx"})
# Their configuration alone does not say that the head is the embedding.
TIED_BY_THEIR_WEIGHTS = frozenset({"gemma3_text", "recurrent_gemma"})


def folder_of(path: Path, config: dict[str, Any] = CONFIG) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


def folder_with_weights(path: Path, dtype: mx.Dtype, *, bits: int | None = None) -> Path:
    args: Any = ModelArgs.from_dict(CONFIG)  # type: ignore[no-untyped-call]
    model = Model(args)
    model.set_dtype(dtype)
    config = dict(CONFIG)
    if bits is not None:
        config["quantization"] = {"group_size": 32, "bits": bits}
        quantize(model, group_size=32, bits=bits)
    weights: Any = tree_flatten(model.parameters())
    folder_of(path, config)
    mx.save_safetensors(str(path / "model.safetensors"), dict(weights))
    return path


def num_parameters() -> int:
    args: Any = ModelArgs.from_dict(CONFIG)  # type: ignore[no-untyped-call]
    weights: Any = tree_flatten(Model(args).parameters())
    return sum(array.size for _, array in weights)


# Shapes -----------------------------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.parametrize("dtype", ["auto", "stored", "bfloat16"])
def test_the_demo_models_shape_is_that_of_the_loaded_one(dtype: str) -> None:
    shape, loaded = read_shape("smollm2-135m", dtype=dtype), load_model("smollm2-135m", dtype=dtype)
    assert shape.weight_bytes == loaded.num_bytes
    assert (shape.context_length, shape.dtype) == (loaded.info.context_length, loaded.info.dtype)
    _, runner = choose_runner(loaded.model)
    assert shape.row_bytes(700) == runner.row_bytes(700)
    assert shape.num_parameters == 134_515_008
    assert read_shape(str(demo_file()), dtype=dtype).weight_bytes == shape.weight_bytes


@pytest.mark.parametrize(
    ("dtype", "bytes_of_weight", "described"),
    [("float32", 4, "float32"), ("bfloat16", 2, "bfloat16"), ("stored", 2, "float16")],
)
def test_weights_take_what_their_type_says(
    tmp_path: Path, dtype: str, bytes_of_weight: int, described: str
) -> None:
    shape = read_shape(str(folder_with_weights(tmp_path / "m", mx.float16)), dtype=dtype)
    assert shape.num_parameters == num_parameters()
    assert shape.weight_bytes == num_parameters() * bytes_of_weight
    assert shape.kv_bytes_per_token == NUMBERS_PER_TOKEN * bytes_of_weight
    assert (shape.dtype, shape.context_length, shape.family) == (described, 512, "llama")
    assert shape.file_bytes is not None
    assert shape.file_bytes > num_parameters() * 2


def test_quantised_weights_are_counted_packed_or_as_they_are_unpacked(tmp_path: Path) -> None:
    folder = str(folder_with_weights(tmp_path / "m", mx.float16, bits=4))
    packed, dense = read_shape(folder, dtype="stored"), read_shape(folder, dtype="float32")
    assert (packed.dtype, dense.dtype) == ("float16 4-bit", "float32")
    assert dense.weight_bytes == num_parameters() * 4
    assert packed.weight_bytes < num_parameters() * 0.7
    assert packed.num_parameters == dense.num_parameters == num_parameters()


def test_a_configuration_is_enough(tmp_path: Path) -> None:
    shape = read_shape(str(folder_of(tmp_path / "m")), dtype="stored")
    assert (shape.weight_bytes, shape.file_bytes) == (num_parameters() * 2, None)
    assert (shape.dtype, shape.kv_bytes_per_token) == ("bfloat16", NUMBERS_PER_TOKEN * 2)
    quantised = folder_of(tmp_path / "q", {**CONFIG, "quantization": {"group_size": 32, "bits": 4}})
    told = read_shape(str(quantised), dtype="stored")
    assert (told.dtype, told.weight_bytes) == ("bfloat16 4-bit", int(num_parameters() * 0.625))


def test_the_tokenizers_limit_bounds_the_context(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m")
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 400}')
    assert read_shape(str(folder)).context_length == 400


def test_no_weights_are_read(tmp_path: Path) -> None:
    """The file is a header and a hole of 40 GB."""
    side = 100_000
    config = {**CONFIG, "vocab_size": side, "hidden_size": side, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 1000, "num_key_value_heads": 10}
    folder = folder_of(tmp_path / "m", config)
    num_bytes = 4 * side * side
    tensor = {"dtype": "F32", "shape": [side, side], "data_offsets": [0, num_bytes]}
    header = json.dumps({"model.embed_tokens.weight": tensor}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + num_bytes)
    mx.reset_peak_memory()
    shape = read_shape(str(folder))
    assert shape.file_bytes is not None
    assert shape.file_bytes > num_bytes
    assert mx.get_peak_memory() - mx.get_active_memory() < 1_000_000


def family_folder(family: Family, path: Path) -> str:
    return str(folder_of(path / "m", family.full_config))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_familys_configuration_is_enough(family: Family, tmp_path: Path) -> None:
    shape = read_shape(family_folder(family, tmp_path))
    assert shape.kv_bytes_per_token + shape.fixed_bytes_per_row > 0
    assert shape.num_parameters > 10_000


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(f, id=f.name, marks=() if f.name in FAST else pytest.mark.slow)
        for f in FAMILIES
    ],
)
def test_a_familys_rows_take_what_the_runner_counts(family: Family, tmp_path: Path) -> None:
    shape = read_shape(family_folder(family, tmp_path))
    model = family.build()
    _, runner = choose_runner(model)
    assert [shape.row_bytes(n) for n in (1, 300, 5000)] == [
        runner.row_bytes(n) for n in (1, 300, 5000)
    ]
    weights: Any = tree_flatten(model.parameters())  # type: ignore[no-untyped-call]
    if family.name not in TIED_BY_THEIR_WEIGHTS:
        assert shape.weight_bytes == sum(array.nbytes for _, array in weights)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "no_such_family"}, "no_such_family not supported"),
        ({"model_file": "own.py", **CONFIG}, "own.py"),
        ({"model_type": "llama"}, "cannot tell what"),
    ],
)
def test_a_configuration_that_cannot_be_used_says_why(
    tmp_path: Path, config: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelUnavailable, match=reason):
        read_shape(str(folder_of(tmp_path / "m", config)))


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUX" + bytes(20), b"GGUF\x07" + bytes(19)])
def test_a_damaged_gguf_file_says_so(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    with pytest.raises(ModelUnavailable, match=r"it is (no GGUF|cut off|GGUF of version)"):
        read_shape(str(file))


@pytest.mark.model
def test_a_gguf_header_that_is_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = demo_file().read_bytes()[:100_000]
    file = tmp_path / "m.gguf"
    for length in range(0, 100_000, 9_973):
        file.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="it is"):
            read_header(file)


def test_a_dtype_that_there_is_none_of_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="float64"):
        read_shape(str(folder_of(tmp_path / "m")), dtype="float64")


# What fits --------------------------------------------------------------------------------------


@given(
    limit=st.integers(3 * GB, 200 * GB),
    per_token=st.integers(1, 2_000_000),
    fixed=st.integers(0, GB),
    num_rows=st.integers(1, 256),
)
def test_what_is_said_to_fit_fits_and_one_more_does_not(
    limit: int, per_token: int, fixed: int, num_rows: int
) -> None:
    shape = model_shape(kv_bytes_per_token=per_token, fixed_bytes_per_row=fixed)
    memory = divide_memory(limit, model_bytes=shape.weight_bytes, kv_bytes=None)
    fit = Fit(shape, memory)
    rows = fit.num_rows(1000)
    assert rows * shape.row_bytes(1000) <= memory.kv_bytes < (rows + 1) * shape.row_bytes(1000)
    context = fit.context(num_rows)
    if context:
        assert num_rows * shape.row_bytes(context) <= memory.kv_bytes
    if context < shape.context_length:
        assert num_rows * shape.row_bytes(context + 1) > memory.kv_bytes
    assert memory.kv_bytes + memory.prefix_bytes + shape.weight_bytes <= limit


def test_speeds_follow_from_what_is_read_and_multiplied() -> None:
    speed = DeviceSpeed(bytes_per_second=100e9, operations_per_second=4e12)
    estimate = estimate_speed(model_shape(), speed, num_rows=10, context=1024)
    assert estimate is not None
    assert estimate.alone == pytest.approx(100 / 2.1024, rel=1e-6)
    assert estimate.batch == pytest.approx(10 * 100 / 3.024, rel=1e-6)
    assert estimate.prefill == 2000


def test_a_batch_is_no_faster_than_the_device_multiplies() -> None:
    slow = DeviceSpeed(bytes_per_second=100e9, operations_per_second=4e10)
    estimate = estimate_speed(model_shape(), slow, num_rows=100, context=1)
    assert estimate is not None
    assert estimate.batch == estimate.prefill == 20


def test_a_mixture_of_experts_gets_no_estimate() -> None:
    speed = DeviceSpeed(1.0, 1.0)
    assert estimate_speed(model_shape(is_mixture=True), speed, num_rows=1, context=1) is None


def test_this_device_has_a_speed() -> None:
    speed = measure_device()
    assert speed.bytes_per_second > 1e8
    assert speed.operations_per_second > 1e8


# The command ------------------------------------------------------------------------------------


def test_the_command_tells_of_a_folder_without_weights(tmp_path: Path) -> None:
    done = run_qsvc("fit", folder_of(tmp_path / "tiny"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].endswith("tiny: llama, 0 million parameters")
    assert "32 rows of 512 tokens" in done.stdout
    assert "tokens/s alone" in done.stdout
    assert "rough" in done.stdout


def test_the_commands_json_answers_what_was_asked(tmp_path: Path) -> None:
    asked = ("--context", "300", "--batch", "7", "--kv-memory", "10MB", "--dtype", "float32")
    done = run_qsvc("fit", folder_of(tmp_path / "tiny"), *asked, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["kv_bytes_per_token"] == NUMBERS_PER_TOKEN * 4
    assert told["asked"]["bytes"] == 7 * 512 * NUMBERS_PER_TOKEN * 4
    assert (told["fits"], told["asked"]["fits"]) == (True, True)
    assert told["rows"] == [{"context": 512, "rows": told["kv_bytes"] // (512 * 512)}]
    assert set(told["rough_tokens_per_second"]) == {"alone", "batch", "prefill"}


def test_what_does_not_fit_is_told_by_the_exit_code(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "tiny")
    done = run_qsvc("fit", folder, "--batch", "100", "--kv-memory", "1MB")
    assert (done.returncode, "do not fit at once" in done.stdout) == (1, True)
    done = run_qsvc("fit", folder, "--kv-memory", "1000TB")
    assert (done.returncode, "it does not fit" in done.stderr) == (1, True)


def test_more_context_than_the_model_has_is_a_mistake(tmp_path: Path) -> None:
    done = run_qsvc("fit", folder_of(tmp_path / "tiny"), "--context", "513")
    assert (done.returncode, "has 512 tokens" in done.stderr) == (2, True)


def test_a_name_in_the_cache_of_hugging_face_is_found_there_and_no_other_is_fetched(
    tmp_path: Path,
) -> None:
    model = tmp_path / "models--someone--tiny"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("0" * 40)
    (model / "snapshots").mkdir()
    folder_of(model / "snapshots" / ("0" * 40))
    env = {"HF_HUB_CACHE": str(tmp_path)}
    done = run_qsvc("fit", "someone/tiny", "--json", env=env)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["name"] == "someone/tiny"
    done = run_qsvc("fit", "someone/other", env=env)
    assert (done.returncode, "not on this machine" in done.stderr) == (5, True)
