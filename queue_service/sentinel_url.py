"""URLs that name a service of Redis Sentinel, whose server may change, instead of one server.

``redis+sentinel://[user:password@]host:port[,host:port…]/service[/database][?option=value…]``
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

SCHEME = "redis+sentinel"
_PORT = 26379
# Options that are meant for the sentinels; all others are for the server.
_LOGIN = {"sentinel_username": "username", "sentinel_password": "password"}


@dataclass(frozen=True, slots=True)
class SentinelUrl:
    """What such a URL says.

    Attributes:
        sentinels: host and port of each.
        service: what the sentinels call the server.
        sentinel_login: ``username`` and ``password`` for the sentinels, as far as they are given.
        server_url: a ``redis://`` URL with everything that concerns the server but its address.
    """

    sentinels: tuple[tuple[str, int], ...]
    service: str
    sentinel_login: dict[str, str] = field(repr=False)
    server_url: str = field(repr=False)

    @staticmethod
    def matches(url: str) -> bool:
        """Whether a URL is one of these, right or wrong."""
        return url.startswith(f"{SCHEME}://")

    @classmethod
    def parse(cls, url: str) -> Self:
        """Read a URL.

        Raises:
            ValueError: it is malformed; the message repeats nothing of it.
        """
        rest, _, query = url.removeprefix(f"{SCHEME}://").partition("?")
        authority, _, path = rest.partition("/")
        login, at, hosts = authority.rpartition("@")
        service, _, database = path.partition("/")
        if not service:
            raise ValueError(f"must name the service: {SCHEME}://host:{_PORT}/service")
        if database and not database.isdecimal():
            raise ValueError("what follows the service must be a database number")
        options = parse_qsl(query, keep_blank_values=True)
        others = urlencode([(name, value) for name, value in options if name not in _LOGIN])
        return cls(
            sentinels=tuple(_address(host) for host in hosts.split(",")),
            service=unquote(service),
            sentinel_login={_LOGIN[name]: value for name, value in options if name in _LOGIN},
            # The name is never connected to: it only makes a URL that redis-py reads.
            server_url=f"redis://{login}{at}sentinel/{database}" + (f"?{others}" if others else ""),
        )


def _address(host: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{host}")
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if not parts.hostname or "@" in host:
        raise ValueError(
            "each sentinel must be host:port, separated by commas (in a password, write / as %2F,"
            " @ as %40, # as %23, ? as %3F)"
        )
    return parts.hostname, _PORT if port is None else port
