"""URLs of Redis Sentinel: what they say, and what is refused."""

from __future__ import annotations

import re

import pytest

from queue_service.errors import ConfigurationError
from queue_service.sentinel_url import SentinelUrl
from queue_service.settings import RedisSettings, redact_url


def test_a_url_names_sentinels_service_database_and_options() -> None:
    named = SentinelUrl.parse("redis+sentinel://me:s%40cret@a,b:26380,[::1]:1/main/3?protocol=2")
    assert named.sentinels == (("a", 26379), ("b", 26380), ("::1", 1))
    assert named.service == "main"
    assert named.sentinel_login == {}
    assert named.server_url == "redis://me:s%40cret@sentinel/3?protocol=2"


def test_the_sentinels_login_is_kept_from_the_server() -> None:
    url = "redis+sentinel://a/main?sentinel_username=s&sentinel_password=p%26q&db=1"
    named = SentinelUrl.parse(url)
    assert named.sentinel_login == {"username": "s", "password": "p&q"}
    assert named.server_url == "redis://sentinel/?db=1"
    assert "p&q" not in repr(named)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis+sentinel://a:26379", "must name the service"),
        ("redis+sentinel://a:26379/?db=1", "must name the service"),
        ("redis+sentinel:///main", "each sentinel must be host:port"),
        ("redis+sentinel://a,,b/main", "each sentinel must be host:port"),
        ("redis+sentinel://a:port/main", "each sentinel must be host:port"),
        ("redis+sentinel://a:99999/main", "each sentinel must be host:port"),
        ("redis+sentinel://a/main/zero", "a database number"),
        ("rediss+sentinel://a/main", "must start with"),
    ],
)
def test_a_malformed_url_is_a_configuration_error(url: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        RedisSettings.load(url=url)


def test_a_malformed_url_is_refused_without_showing_its_password() -> None:
    with pytest.raises(ConfigurationError) as caught:
        RedisSettings.load(url="redis+sentinel://me:hunter2@a:port/main")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "redacted"),
    [
        ("redis+sentinel://me:secret@a,b/main", "redis+sentinel://me:***@a,b/main"),
        (
            "redis+sentinel://a/main?sentinel_password=secret&db=1",
            "redis+sentinel://a/main?sentinel_password=***&db=1",
        ),
    ],
)
def test_a_redacted_url_hides_both_passwords(url: str, redacted: str) -> None:
    assert redact_url(url) == redacted
