"""Keys and values are shared by what computes the same ones, and by nothing else."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from queue_service.errors import ConfigurationError
from workers.checkpoints.identity import (
    Adapter,
    CacheFacts,
    adapter_files,
    describe,
    files_digest,
    read_config,
    weight_files,
)

CACHE = CacheFacts("KVCache", ("float32", "float32"), ((3, 64), (3, 64)))
FACTS: dict[str, Any] = {
    "weights": "ab" * 32,
    "dtype": "float32",
    "config": {"model_type": "llama", "rope_theta": 1e4},
    "caches": [CACHE] * 2,
    "versions": {"mlx": "0.32.4", "mlx_lm": "0.32.2"},
    "device": "x86_64",
}


def much_later() -> float:
    return 1e12


@pytest.fixture
def digest(tmp_path: Path) -> Callable[..., str]:
    def of(*files: Path, clock: Callable[[], float] = much_later) -> str:
        return files_digest(files, tmp_path / "memos", clock=clock)

    return of


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(range(256)) * 1000)
    return file


def memos(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "memos").glob("*"))


def test_the_same_facts_have_the_same_namespace_in_any_order() -> None:
    turned = {**FACTS, "config": {"rope_theta": 1e4, "model_type": "llama"}}
    assert describe(**FACTS).namespace == describe(**turned).namespace
    assert len(describe(**FACTS).namespace) == 32


@pytest.mark.parametrize(
    "change",
    [
        {"weights": "cd" * 32},
        {"dtype": "bfloat16"},
        {"config": {"model_type": "llama", "rope_theta": 1e5}},
        {"caches": [CACHE]},
        {"caches": [CACHE, CacheFacts("KVCache", ("bfloat16", "float32"), CACHE.shapes)]},
        {"caches": [CACHE, CacheFacts("KVCache", CACHE.dtypes, ((3, 64), (3, 32)))]},
        {"caches": [CACHE, CacheFacts("RotatingKVCache", CACHE.dtypes, CACHE.shapes)]},
        {"caches": [CACHE, CacheFacts("KVCache", CACHE.dtypes, CACHE.shapes, {"bits": 8})]},
        {"versions": {"mlx": "0.32.5", "mlx_lm": "0.32.2"}},
        {"device": "applegpu_g14s"},
        {"adapter": Adapter("ef" * 32, 1.0)},
        {"salt": "tenant"},
    ],
    ids=str,
)
def test_another_fact_is_another_namespace(change: dict[str, Any]) -> None:
    assert describe(**{**FACTS, **change}).namespace != describe(**FACTS).namespace


def test_an_adapter_of_another_scale_is_another_namespace() -> None:
    one, other = (describe(**FACTS, adapter=Adapter("ef" * 32, scale)) for scale in (1.0, 2.0))
    assert one.namespace != other.namespace


def test_the_facts_are_json() -> None:
    identity = describe(**FACTS, adapter=Adapter("ef" * 32, 1.0))
    assert json.loads(identity.canonical())["caches"][0]["cls"] == "KVCache"


def test_any_byte_of_the_weights_changes_their_digest(
    weights: Path, digest: Callable[..., str]
) -> None:
    digests = {digest(weights)}
    for at in (0, 1, 127_999, 255_999):
        data = bytearray(weights.read_bytes())
        data[at] ^= 1
        weights.write_bytes(data)
        digests.add(digest(weights))
    assert len(digests) == 5


def test_a_copy_of_the_weights_has_their_digest(
    weights: Path, digest: Callable[..., str], tmp_path: Path
) -> None:
    copy = tmp_path / "elsewhere.safetensors"
    copy.write_bytes(weights.read_bytes())
    assert digest(copy) == digest(weights)


def test_a_second_file_changes_the_digest(
    weights: Path, digest: Callable[..., str], tmp_path: Path
) -> None:
    more = tmp_path / "model2.safetensors"
    more.write_bytes(b"")
    assert digest(weights, more) == digest(more, weights) != digest(weights)


def test_a_file_is_read_once_while_it_stays_the_same(
    weights: Path, digest: Callable[..., str], tmp_path: Path
) -> None:
    first = digest(weights)
    [memo] = memos(tmp_path)
    told = {**json.loads(memo.read_text()), "sha256": "0" * 64}
    memo.write_text(json.dumps(told))
    assert digest(weights) != first  # it believes what is kept
    os.utime(weights, ns=(1, 1))
    assert digest(weights) == first
    assert memos(tmp_path) == [memo]


def test_a_replaced_file_of_the_same_size_and_time_is_read_again(
    weights: Path, digest: Callable[..., str], tmp_path: Path
) -> None:
    os.utime(weights, ns=(1, 1))
    first = digest(weights)
    other = tmp_path / "other"
    other.write_bytes(bytes(weights.stat().st_size))
    os.utime(other, ns=(1, 1))
    other.replace(weights)
    assert digest(weights) != first


def test_a_file_that_has_just_changed_is_not_remembered(
    weights: Path, digest: Callable[..., str], tmp_path: Path
) -> None:
    digest(weights, clock=lambda: weights.stat().st_ctime + 1)
    assert memos(tmp_path) == []
    digest(weights, clock=lambda: weights.stat().st_ctime + 10)
    assert len(memos(tmp_path)) == 1


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"sha256": "x"}', "[" * 100_000])
def test_a_damaged_memo_is_written_anew(
    content: str, weights: Path, digest: Callable[..., str], tmp_path: Path
) -> None:
    first = digest(weights)
    [memo] = memos(tmp_path)
    good = memo.read_text()
    memo.write_text(content)
    assert digest(weights) == first
    assert memo.read_text() == good


def test_a_folder_that_takes_no_memo_costs_time_only(
    weights: Path, digest: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "memos").write_text("a file")
    assert digest(weights) == digest(weights)


def test_a_file_of_a_hugging_face_cache_is_not_read(
    digest: Callable[..., str], tmp_path: Path
) -> None:
    name = "5d" * 32
    blob = tmp_path / "models--a--b" / "blobs" / name
    snapshot = tmp_path / "models--a--b" / "snapshots" / "1234"
    blob.parent.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    blob.write_bytes(b"anything")
    link = snapshot / "model.safetensors"
    link.symlink_to(Path("..", "..", "blobs", name))
    first = digest(link)
    blob.write_bytes(b"unread")
    assert digest(link) == first
    assert memos(tmp_path) == []


def test_a_cached_file_has_the_digest_of_its_copy(
    weights: Path, digest: Callable[..., str], tmp_path: Path
) -> None:
    digest(weights)
    name = json.loads(memos(tmp_path)[0].read_text())["sha256"]
    blob = tmp_path / "blobs" / name
    blob.parent.mkdir()
    blob.write_bytes(weights.read_bytes())
    assert digest(blob) == digest(weights)


def test_missing_weights_are_an_error(digest: Callable[..., str], tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"gone\.safetensors"):
        digest(tmp_path / "gone.safetensors")
    with pytest.raises(ConfigurationError, match="no files"):
        digest()


def test_the_files_of_a_model_and_of_an_adapter_are_found(tmp_path: Path) -> None:
    for name in ("b.safetensors", "a.safetensors", "config.json", "adapter_config.json"):
        (tmp_path / name).write_text("{}")
    assert [file.name for file in weight_files(tmp_path)] == ["a.safetensors", "b.safetensors"]
    assert weight_files(tmp_path / "x.gguf") == [tmp_path / "x.gguf"]
    assert [file.name for file in adapter_files(tmp_path)] == [
        "adapter_config.json",
        "a.safetensors",
        "b.safetensors",
    ]


def test_a_folder_has_a_configuration_and_a_file_has_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert read_config(tmp_path) == {"model_type": "llama"}
    assert read_config(tmp_path / "x.gguf") == {}


@pytest.mark.parametrize("content", ["[]", "{", None])
def test_a_configuration_that_cannot_be_read_is_an_error(
    content: str | None, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        read_config(tmp_path)
