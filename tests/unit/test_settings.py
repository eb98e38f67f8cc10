"""Where settings come from, what is refused, and that no password is ever shown."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import Any

import platformdirs
import pytest
from pydantic import ValidationError

from queue_service.errors import ConfigurationError, SettingsRefused
from queue_service.settings import (
    SECTIONS,
    CheckpointSettings,
    PathSettings,
    RedisSettings,
    RetentionSettings,
    SubmitSettings,
    WorkerSettings,
    config_path,
    describe_settings,
    redact_url,
    unknown_variables,
)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "config.toml"
    monkeypatch.setenv("QSVC_CONFIG", str(path))
    return path


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ({"argument": 1, "environment": "2", "file": "slots = 3"}, 1),
        ({"argument": 1, "file": "slots = 3"}, 1),
        ({"argument": 1, "environment": "2"}, 1),
        ({"environment": "2", "file": "slots = 3"}, 2),
        ({"environment": "2"}, 2),
        ({"environment": "", "file": "slots = 3"}, 3),
        ({"file": "slots = 3"}, 3),
        ({}, 32),
    ],
)
def test_an_argument_wins_over_the_environment_over_the_file_over_the_default(
    config: Path, monkeypatch: pytest.MonkeyPatch, sources: dict[str, Any], expected: int
) -> None:
    config.write_text(f"[worker]\n{sources.get('file', '')}\n")
    if "environment" in sources:
        monkeypatch.setenv("QSVC_WORKER_SLOTS", sources["environment"])
    assert WorkerSettings.load(slots=sources.get("argument")).slots == expected


def test_values_of_one_section_may_come_from_every_source(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.write_text("[worker]\nlease_seconds = 7\nqueues = ['a', 'b']\nserve_default = false\n")
    monkeypatch.setenv("QSVC_WORKER_BEAT_SECONDS", "0.5")
    settings = WorkerSettings.load(slots=4)
    assert (settings.slots, settings.beat_seconds, settings.lease_seconds) == (4, 0.5, 7)
    assert settings.queues == ("a", "b")
    assert settings.serve_default is False
    assert settings.claim_ahead == 8


def test_every_section_reads_its_own_table(config: Path) -> None:
    config.write_text(
        "[redis]\nurl = 'redis://elsewhere:1/2'\n[retention]\nresult_seconds = 5\n"
        "[submit]\nmax_lines = 6\n[paths]\ncache_folder = '/somewhere'\n"
    )
    assert RedisSettings.load().url == "redis://elsewhere:1/2"
    assert RetentionSettings.load().result_seconds == 5
    assert SubmitSettings.load().max_lines == 6


def test_queues_in_the_environment_are_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QSVC_WORKER_QUEUES", "one, two,")
    assert WorkerSettings.load().queues == ("one", "two")


def test_the_log_level_may_be_written_small() -> None:
    assert WorkerSettings.load(log_level="debug").log_level == "DEBUG"


def test_the_cache_folder_is_absolute_and_knows_the_home_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QSVC_CACHE_FOLDER", "~/cache")
    assert PathSettings.load().cache_folder == Path.home() / "cache"
    assert PathSettings.load(cache_folder=Path("here")).cache_folder == Path.cwd() / "here"
    monkeypatch.delenv("QSVC_CACHE_FOLDER")
    assert PathSettings.load().cache_folder == platformdirs.user_cache_path("qsvc")


def test_settings_do_not_change() -> None:
    with pytest.raises(ValidationError):
        WorkerSettings.load().slots = 3


def test_an_override_that_is_no_setting_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(TypeError, match="slotz"):
        WorkerSettings.load(slotz=3)


def test_a_bad_environment_variable_is_named_with_its_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QSVC_WORKER_SLOTS", "many")
    with pytest.raises(ConfigurationError, match=r"QSVC_WORKER_SLOTS=many: .*valid integer"):
        WorkerSettings.load()


def test_a_bad_value_in_the_file_is_named_with_file_and_key(config: Path) -> None:
    config.write_text("[worker]\nslots = 0\n")
    expected = re.escape(f"{config}: [worker] slots=0: ") + ".*greater than 0"
    with pytest.raises(ConfigurationError, match=expected):
        WorkerSettings.load()


def test_a_bad_argument_is_named_and_every_problem_is_listed() -> None:
    with pytest.raises(ConfigurationError) as caught:
        WorkerSettings.load(dtype="int3", device_slot="tpu:0", beat_seconds=float("inf"))
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "argument beat_seconds=inf",
        "argument dtype=int3",
        "argument device_slot=tpu",
    ]
    assert "'bfloat16'" in str(caught.value)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"kv_memory": "lots"}, "argument kv_memory=lots: is no size such as 500MB or 8GB"),
        ({"kv_memory": "8 dozen"}, "argument kv_memory=8 dozen: is no size such as 500MB or 8GB"),
        ({"device_slot": "foo"}, "argument device_slot=foo: is no device slot such as gpu:0"),
        ({"model": ""}, "argument model=: must not be empty"),
        ({"alias": "-x"}, "argument alias=-x: must be of letters, digits"),
        ({"slots": 0}, "argument slots=0: should be greater than 0"),
    ],
    ids=str,
)
def test_what_is_allowed_is_told_in_a_persons_words(given: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingsRefused, match=f"^{re.escape(told)}"):
        WorkerSettings.load(**given)


def test_a_size_that_is_none_is_told_wherever_it_comes_from(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.write_text("[checkpoints]\nbudget = 'lots'\n")
    with pytest.raises(ConfigurationError, match=r"\] budget=lots: is no size such as 500MB"):
        CheckpointSettings.load()
    monkeypatch.setenv("QSVC_CHECKPOINTS_BUDGET", "more")
    with pytest.raises(ConfigurationError, match="_BUDGET=more: is no size such as 500MB or 8GB"):
        CheckpointSettings.load()


def test_a_lease_that_one_late_heartbeat_would_lose_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"\[worker\]: lease_seconds \(3\) .* \(2\)"):
        WorkerSettings.load(lease_seconds=3)
    assert WorkerSettings.load(lease_seconds=1, beat_seconds=0.25).lease_seconds == 1


def test_an_alias_that_would_read_as_another_queue_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="alias=qwen:high"):
        WorkerSettings.load(alias="qwen:high")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[worker]\nslot = 3\n", r"\[worker\] has no setting slot; did you mean slots\?"),
        ("[wroker]\nslots = 3\n", r"unknown name wroker; did you mean worker\?"),
        ("worker = 3\n", r"worker must be a table, written \[worker\]"),
        ("[worker\n", "is no valid TOML"),
        ("[worker]\nname = '\udcff'\n", "is no valid TOML"),
    ],
)
def test_a_config_file_that_would_be_misread_is_refused(
    config: Path, text: str, message: str
) -> None:
    config.write_text(text, errors="surrogateescape")
    # Also by a section that does not need the broken part.
    with pytest.raises(ConfigurationError, match=re.escape(str(config)) + ".*" + message):
        RedisSettings.load()


def test_a_named_config_file_must_exist_and_be_readable(config: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"QSVC_CONFIG names .* does not exist"):
        RedisSettings.load()
    config.mkdir()
    with pytest.raises(ConfigurationError, match="cannot read"):
        RedisSettings.load()


def test_the_config_file_in_the_users_folder_may_be_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("QSVC_CONFIG")
    monkeypatch.setattr(platformdirs, "user_config_path", lambda app: tmp_path / app)
    assert WorkerSettings.load().slots == 32
    assert config_path() == tmp_path / "qsvc" / "config.toml"
    config_path().parent.mkdir()
    config_path().write_text("[worker]\nslots = 5\n")
    assert WorkerSettings.load().slots == 5


@pytest.mark.parametrize(
    ("url", "redacted"),
    [
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("redis://user:secret@host:6379/0", "redis://user:***@host:6379/0"),
        ("rediss://:secret@host", "rediss://:***@host"),
        ("redis://:sec@ret@host", "redis://:***@host"),
        ("redis://:sec/re?t#@host", "redis://:***@host"),
        ("redis://secret@host", "redis://***@host"),
        ("redis://host?password=secret&db=1", "redis://host?password=***&db=1"),
        ("unix:///a@b/server.sock", "unix:///a@b/server.sock"),
        ("unix://user:secret@/a/server.sock", "unix://user:***@/a/server.sock"),
        ("unix://me@/a?db=1&password=secret", "unix://***@/a?db=1&password=***"),
        ("rediss://host?ssl_password=secret", "rediss://host?ssl_password=***"),
    ],
)
def test_a_redacted_url_keeps_everything_but_the_password(url: str, redacted: str) -> None:
    assert redact_url(url) == redacted


@pytest.mark.parametrize(
    "url",
    [
        "host:6379",
        "http://user:secret@host",
        "redis://:sec/ret@host:6379",
        "redis://host/zero",
        "redis://[::1",
        "unix://var/run/server.sock",
        "unix://host",
    ],
)
def test_a_url_that_would_be_misread_is_refused_and_never_shown(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QSVC_REDIS_URL", url)
    with pytest.raises(ConfigurationError, match="environment variable QSVC_REDIS_URL: ") as caught:
        RedisSettings.load()
    # A log shows the whole chain of causes.
    assert url not in "".join(traceback.format_exception(caught.value))


def test_the_repr_of_the_redis_settings_holds_no_password() -> None:
    settings = RedisSettings.load(url="redis://user:secret@host")
    assert "secret" not in repr(settings) + str(settings)


def test_the_reference_describes_every_setting_the_same_on_every_machine() -> None:
    settings = describe_settings()
    assert len(settings) == sum(len(section.model_fields) for section in SECTIONS)
    assert all(setting.description for setting in settings)
    by_env_name = {setting.env_name: setting for setting in settings}
    assert len(by_env_name) == len(settings)
    assert by_env_name["QSVC_WORKER_SLOTS"].default == "32"
    assert by_env_name["QSVC_WORKER_DTYPE"].default == '"auto"'
    assert by_env_name["QSVC_WORKER_MODEL"].default == "unset"
    assert by_env_name["QSVC_CACHE_FOLDER"].default == "unset"
    assert by_env_name["QSVC_REDIS_URL"].section == "redis"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("QSVC_WORKER_SLOT", "QSVC_WORKER_SLOTS"),
        ("qsvc_worker_slot", "QSVC_WORKER_SLOTS"),
        ("QSVC_REDIS_ADDRESS", "QSVC_REDIS_"),
        ("QSVC_CACHE_FODLER", "QSVC_CACHE_FOLDER"),
        ("QSVC_CHECKPOINT_FOLDER", "QSVC_CHECKPOINTS_FOLDER"),
    ],
)
def test_a_variable_that_is_no_setting_is_named_with_what_was_meant(
    monkeypatch: pytest.MonkeyPatch, name: str, meant: str
) -> None:
    monkeypatch.setenv(name, "1")
    [mistake] = unknown_variables()
    assert name.upper() in mistake
    assert f"did you mean {meant}" in mistake


def test_variables_of_settings_and_of_others_are_no_mistakes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for setting in describe_settings():
        monkeypatch.setenv(setting.env_name, "1")
    for name in ("QSVC_DASHBOARD_PASSWORD", "QSVC_MODEL", "QSVC_VERSION", "OTHER_WORKER_SLOT"):
        monkeypatch.setenv(name, "1")
    assert unknown_variables() == []
