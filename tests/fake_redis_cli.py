"""A redis-cli for documents' commands: ``python -m tests.fake_redis_cli COMMAND …``.

The server is that of ``QSVC_REDIS_URL``; replies are printed one element a line.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from redis import Redis


def lines(reply: Any) -> list[str]:
    """Return a reply as redis-cli prints it where its output is no terminal."""
    if isinstance(reply, dict):
        return [line for pair in reply.items() for one in pair for line in lines(one)]
    if isinstance(reply, list | tuple):
        return [line for one in reply for line in lines(one)]
    return [reply.decode() if isinstance(reply, bytes) else str(reply)]


if __name__ == "__main__":
    with Redis.from_url(os.environ["QSVC_REDIS_URL"]) as connection:
        print("\n".join(lines(connection.execute_command(*sys.argv[1:]))))
