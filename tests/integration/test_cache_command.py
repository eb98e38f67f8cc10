"""qsvc cache, on stores that tests fill."""

from __future__ import annotations

import io
import json
import os
import subprocess
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from queue_service.settings import CheckpointSettings
from tests.checkpoints import IDENTITY, OTHER_IDENTITY, assert_is_of, keep
from tests.cli_helpers import run_qsvc
from workers.checkpoints.directory import DirectoryStore

LARGE = 1 << 30
PROMPT = [token * 7 % 5000 for token in range(1500)]
OTHER_PROMPT = [*PROMPT[:1300], *range(6000, 6500)]
Cache = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def filled(root: Path) -> Path:
    """A store of two namespaces: four segments in one, one in the other."""
    store = DirectoryStore(root, IDENTITY, LARGE)
    keep(store, PROMPT, max_bytes=40_000)
    keep(store, OTHER_PROMPT)
    keep(DirectoryStore(root, OTHER_IDENTITY, LARGE), PROMPT[:300], identity=OTHER_IDENTITY)
    return root


@pytest.fixture
def cache(root: Path) -> Cache:
    def run(*args: str | Path) -> subprocess.CompletedProcess[str]:
        return run_qsvc("cache", *args, env={"QSVC_CHECKPOINTS_FOLDER": str(root)})

    return run


def answer(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def listed(cache: Cache) -> list[dict[str, Any]]:
    done = cache("ls", "--json")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def segment_files(root: Path) -> list[Path]:
    return sorted(root.glob("v1/*/*.qkv"))


def on_disk(root: Path) -> int:
    return sum(path.stat().st_size for path in segment_files(root))


def test_where_there_is_no_store_every_command_says_so(cache: Cache, tmp_path: Path) -> None:
    assert answer(cache("stats", "--json"))["data"] == []
    assert listed(cache) == []
    assert "no checkpoints" in cache("ls").stderr
    assert "no checkpoints" in cache("stats").stderr
    assert answer(cache("verify", "--json")) == {"num_good": 0, "num_removed": 0, "bad": []}
    assert answer(cache("prune", "--to", "0", "--json")) == {"num_segments": 0, "num_bytes": 0}
    assert answer(cache("export", tmp_path / "a.tar", "--json")) == {"num_segments": 0}


def test_the_folder_is_that_of_the_settings_unless_it_is_named(
    filled: Path, cache: Cache, tmp_path: Path
) -> None:
    assert answer(cache("stats", "--json"))["root"] == str(filled)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert answer(cache("stats", "--json", "--root", elsewhere))["root"] == str(elsewhere)
    in_cache_folder = CheckpointSettings.load().folder
    assert in_cache_folder == Path(os.environ["QSVC_CACHE_FOLDER"]) / "checkpoints"


@pytest.mark.parametrize(
    "command", [("stats",), ("ls",), ("verify",), ("prune", "--to", "0"), ("export", "a.tar")]
)
def test_a_folder_that_is_named_and_not_there_is_an_error(
    cache: Cache, tmp_path: Path, command: tuple[str, ...]
) -> None:
    done = cache(*command, "--root", tmp_path / "nowhere")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"there is no folder {tmp_path / 'nowhere'}; name another with --root" in done.stderr


def test_stats_name_the_models_as_workers_called_them_first(root: Path, cache: Cache) -> None:
    for identity, name in ((IDENTITY, "org/\x1b[31mmodel"), (OTHER_IDENTITY, None)):
        keep(DirectoryStore(root, identity, LARGE, model=name), PROMPT[:300], identity=identity)
    DirectoryStore(root, IDENTITY, LARGE, model="another name for it")
    told = {one["namespace"]: one["model"] for one in answer(cache("stats", "--json"))["data"]}
    assert told == {IDENTITY.namespace: "org/\x1b[31mmodel", OTHER_IDENTITY.namespace: None}
    lines = sorted(cache("stats").stdout.splitlines(), key=lambda line: "unnamed" in line)
    assert lines[0].startswith(f"{IDENTITY.namespace}  org/\\x1b[31mmodel: 1 segments")
    assert lines[1].startswith(f"{OTHER_IDENTITY.namespace}  unnamed: 1 segments")
    assert cache("verify").returncode == 0


def test_stats_show_the_beginning_of_a_name_that_fills_the_disk(root: Path, cache: Cache) -> None:
    keep(DirectoryStore(root, IDENTITY, LARGE), PROMPT[:300])
    (root / "v1" / IDENTITY.namespace / "model.txt").write_text("m" * 1_000_000)
    [told] = answer(cache("stats", "--json"))["data"]
    assert told["model"] == "m" * 1024


def test_stats_add_up_to_what_is_on_the_disk(filled: Path, cache: Cache) -> None:
    told = answer(cache("stats", "--json"))
    assert told["num_bytes"] == on_disk(filled)
    by_namespace = {one["namespace"]: one for one in told["data"]}
    assert by_namespace.keys() == {IDENTITY.namespace, OTHER_IDENTITY.namespace}
    ours = by_namespace[IDENTITY.namespace]
    assert ours["num_segments"] == len(segment_files(filled)) - 1
    assert ours["num_tokens"] == len(PROMPT) + len(OTHER_PROMPT) - 1280
    assert ours["facts"]["model"] == "tests"
    done = cache("stats")
    assert "segments" in done.stdout
    assert str(filled) in done.stderr


def test_a_list_names_every_segment(filled: Path, cache: Cache) -> None:
    found = listed(cache)
    assert {one["digest"] for one in found} == {path.stem for path in segment_files(filled)}
    assert all(one["is_reachable"] and one["start"] < one["end"] for one in found)
    assert len(cache("ls").stdout.splitlines()) == len(found)


def test_a_bad_file_is_found_and_deleted_when_asked(filled: Path, cache: Cache) -> None:
    assert cache("verify").returncode == 0
    files = segment_files(filled)
    flipped = bytearray(files[0].read_bytes())
    flipped[len(flipped) // 2] ^= 1
    files[0].write_bytes(flipped)
    files[1].write_bytes(b"no segment")
    (files[2].parent / "ns.json").write_text("{}")
    done = cache("verify", "--json")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert {bad["path"] for bad in report["bad"]} >= {str(files[0]), str(files[1])}
    assert any(bad["path"].endswith("ns.json") for bad in report["bad"])
    assert len(segment_files(filled)) == len(files)
    done = cache("verify", "--remove")
    assert done.returncode == 0, done.stdout
    assert len(segment_files(filled)) == len(files) - 2
    assert cache("verify").returncode == 0


def test_pruning_to_a_size_leaves_what_can_still_be_reached(filled: Path, cache: Cache) -> None:
    goal = on_disk(filled) // 2
    removed = answer(cache("prune", "--to", f"{goal}B", "--json"))
    assert 0 < on_disk(filled) <= goal
    assert removed["num_segments"] > 0
    assert all(one["is_reachable"] for one in listed(cache))


def test_pruning_by_age_leaves_what_was_used_since(filled: Path, cache: Cache) -> None:
    old = time.time() - 40 * 86_400
    for path in segment_files(filled):
        os.utime(path, (old, old))
    store = DirectoryStore(filled, IDENTITY, LARGE)
    store.note_use(store.match(PROMPT))
    answer(cache("prune", "--older-than", "30d", "--json"))
    left = DirectoryStore(filled, IDENTITY, LARGE)
    assert left.match(PROMPT).length == len(PROMPT) - 1
    assert left.match(OTHER_PROMPT).length < 1400
    assert DirectoryStore(filled, OTHER_IDENTITY, LARGE).match(PROMPT).length == 0


@pytest.mark.parametrize(
    "args", [(), ("--to", "much"), ("--older-than", "30"), ("--older-than", "d")]
)
def test_pruning_wants_to_know_how_far(cache: Cache, args: tuple[str, ...]) -> None:
    assert cache("prune", *args).returncode == 2


def test_an_archive_brings_checkpoints_to_another_store(
    filled: Path, cache: Cache, tmp_path: Path
) -> None:
    archive, elsewhere = tmp_path / "all.tar", tmp_path / "elsewhere"
    count = len(segment_files(filled))
    assert answer(cache("export", archive, "--json")) == {"num_segments": count}
    told = answer(cache("import", archive, "--root", elsewhere, "--json"))
    assert told["num_added"] == count
    assert told["bad"] == []
    store = DirectoryStore(elsewhere, IDENTITY, LARGE)
    for prompt in (PROMPT, OTHER_PROMPT):
        assert_is_of(store.read(store.match([*prompt, 1])), prompt)
    told = answer(cache("import", archive, "--root", elsewhere, "--json"))
    assert (told["num_added"], told["num_present"]) == (0, count)


def test_names_in_an_archive_lead_nowhere(filled: Path, cache: Cache, tmp_path: Path) -> None:
    good = segment_files(filled)[0]
    content = good.read_bytes()
    archive, elsewhere = tmp_path / "evil.tar", tmp_path / "deep" / "elsewhere"
    namespace = good.parent.name
    names = [
        "../../evil.qkv",
        f"/{tmp_path}/evil.qkv",
        f"{namespace}/../../../evil.qkv",
        f"{namespace}/{'0' * 32}.qkv",
        f"{namespace}/evil.qkv",
        f"./{namespace}/{good.name}",
        f"{'0' * 32}/{good.name}",
        f"{namespace}/ns.json",
    ]
    with tarfile.open(archive, "w") as tar:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        link = tarfile.TarInfo(f"{namespace}/{good.name}")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    done = cache("import", archive, "--root", elsewhere, "--json")
    assert done.returncode == 1
    told = json.loads(done.stdout)
    assert told["num_added"] == 0
    assert len(told["bad"]) == len(names) + 1
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in written if not path.is_relative_to(filled)] == [archive]


def test_a_damaged_member_is_left_out_with_what_follows_it(
    filled: Path, cache: Cache, tmp_path: Path
) -> None:
    archive, elsewhere = tmp_path / "all.tar", tmp_path / "elsewhere"
    answer(cache("export", archive, "--json"))
    with tarfile.open(archive) as tar:
        first = next(member for member in tar if member.name.endswith(".qkv"))
    content = bytearray(archive.read_bytes())
    content[first.offset_data + first.size // 2] ^= 1
    archive.write_bytes(content)
    done = cache("import", archive, "--root", elsewhere, "--json")
    assert done.returncode == 1
    told = json.loads(done.stdout)
    assert [bad["name"] for bad in told["bad"]] == [first.name]
    assert told["num_added"] + told["num_without_parent"] == len(segment_files(filled)) - 1
    assert cache("verify", "--root", elsewhere).returncode == 0


def test_an_import_makes_no_room(
    filled: Path, cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive, elsewhere = tmp_path / "all.tar", tmp_path / "elsewhere"
    answer(cache("export", archive, "--json"))
    budget = on_disk(filled) * 2 // 3
    monkeypatch.setenv("QSVC_CHECKPOINTS_BUDGET", str(budget))
    told = answer(cache("import", archive, "--root", elsewhere, "--json"))
    assert told["num_without_room"] > 0
    assert 0 < on_disk(elsewhere) <= budget


@pytest.mark.parametrize("content", [b"", b"no archive at all"])
def test_what_is_no_archive_is_refused(cache: Cache, tmp_path: Path, content: bytes) -> None:
    archive = tmp_path / "file.tar"
    archive.write_bytes(content)
    done = cache("import", archive)
    assert done.returncode == 2
    assert done.stderr == f"qsvc: {archive} is no archive of `qsvc cache export`\n"
    assert cache("import", tmp_path / "nothing.tar").returncode == 2


def test_an_archive_that_cannot_be_written_leaves_nothing(
    filled: Path, cache: Cache, tmp_path: Path
) -> None:
    done = cache("export", tmp_path / "missing" / "all.tar")
    assert done.returncode == 2
    assert "cannot be written" in done.stderr
    assert cache("export", tmp_path).returncode == 2
