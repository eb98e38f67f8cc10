"""Redis Sentinel: the server is found through it, and found again after a failover."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from queue_service.connection import check_server, connect, open_url
from queue_service.errors import ConfigurationError, ServerUnavailable
from queue_service.local_server import server_program
from queue_service.settings import RedisSettings
from tests.harness import answer, enqueue_chat, eventually, running_worker, worker_settings

SERVICE = "main"
PASSWORD = "for-the-server"
SENTINEL_PASSWORD = "for-the-sentinel"


def free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


class Cluster:
    """A primary, a replica of it and a sentinel that watches both.

    Attributes:
        url: how the service is named by the sentinel.
    """

    def __init__(self, folder: Path) -> None:
        self.primary, self.replica, self.sentinel = free_ports(3)
        self.url = (
            f"redis+sentinel://:{PASSWORD}@127.0.0.1:{self.sentinel}/{SERVICE}"
            f"?sentinel_password={SENTINEL_PASSWORD}"
        )
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start all three; returns when the sentinel knows the replica."""
        server = f"requirepass {PASSWORD}\nprimaryauth {PASSWORD}\nrepl-diskless-sync-delay 0\n"
        self._start("primary", self.primary, server)
        replica = f"{server}replicaof 127.0.0.1 {self.primary}\n"
        self._start("replica", self.replica, replica)
        watch = (
            f"requirepass {SENTINEL_PASSWORD}\n"
            f"sentinel monitor {SERVICE} 127.0.0.1 {self.primary} 1\n"
            f"sentinel auth-pass {SERVICE} {PASSWORD}\n"
            f"sentinel down-after-milliseconds {SERVICE} 2000\n"
            f"sentinel failover-timeout {SERVICE} 5000\n"
        )
        self._start("sentinel", self.sentinel, watch, "--sentinel")
        eventually(lambda: self.state()["num-slaves"] == 1, "the sentinel knows the replica")
        eventually(lambda: self.link() == "up", "the replica has the primary's data")

    def stop(self) -> None:
        """End whatever lives of the three."""
        for process in self._processes:
            process.kill()
            process.wait()

    def kill_primary(self) -> None:
        """Kill -9 the primary and wait for its end."""
        self._processes[0].kill()
        self._processes[0].wait()

    def state(self) -> dict[str, object]:
        """What the sentinel says of the service."""
        with redis.Redis(port=self.sentinel, password=SENTINEL_PASSWORD) as client:
            told: dict[str, object] = client.sentinel_master(SERVICE)  # type: ignore[assignment]
            return told

    def link(self) -> object:
        """Whether the replica follows its primary."""
        with redis.Redis(port=self.replica, password=PASSWORD) as client:
            return client.info("replication")["master_link_status"]

    def _start(self, name: str, port: int, lines: str, *options: str) -> None:
        folder = self._folder / name
        folder.mkdir()
        conf = folder / "server.conf"
        log = folder / "log"
        conf.write_text(f"port {port}\nbind 127.0.0.1\ndir {folder}\nlogfile {log}\n{lines}")
        self._processes.append(subprocess.Popen([server_program(), str(conf), *options]))
        password = SENTINEL_PASSWORD if options else PASSWORD

        def answers() -> bool:
            with redis.Redis(port=port, password=password) as client:
                try:
                    return bool(client.ping())
                except redis.ConnectionError:
                    return False

        eventually(answers, f"the {name} answers ({log})")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    try:
        made.start()
        yield made
    finally:
        made.stop()


def test_a_service_is_found_by_its_name(cluster: Cluster) -> None:
    with connect(RedisSettings.load(url=f"{cluster.url}&db=2")) as connection:
        connection.set("key", "value")
        assert connection.info("keyspace").keys() == {"db2"}
        assert connection.info("server")["tcp_port"] == cluster.primary
        assert check_server(connection)


def test_a_worker_goes_on_at_the_replica_when_the_primary_dies(cluster: Cluster) -> None:
    with open_url(cluster.url) as client, running_worker(worker_settings(cluster.url)):
        before = enqueue_chat(client, "before")
        eventually(lambda: before.get_status() == "finished", "a job runs on the primary")
        # What a replica has not got yet is lost with the primary; this is not about that.
        assert client.wait(1, 5000) == 1
        cluster.kill_primary()

        def runs_on_the_replica() -> bool:
            try:
                return client.info("server")["tcp_port"] == cluster.replica
            except (redis.ConnectionError, redis.TimeoutError, redis.ReadOnlyError):
                return False

        eventually(runs_on_the_replica, "the sentinel promotes the replica", seconds=30)
        after = enqueue_chat(client, "after")
        eventually(lambda: after.get_status() == "finished", "a job runs on the replica")
        assert (answer(client, before), answer(client, after)) == ("before", "after")


def test_an_unknown_service_is_named_with_what_to_do(cluster: Cluster) -> None:
    url = cluster.url.replace(f"/{SERVICE}", "/other")
    with pytest.raises(ServerUnavailable, match="No master found for 'other'") as caught:
        connect(RedisSettings.load(url=url))
    assert PASSWORD not in str(caught.value)
    assert SENTINEL_PASSWORD not in str(caught.value)


def test_a_dead_sentinel_among_others_does_no_harm(cluster: Cluster) -> None:
    [dead] = free_ports(1)
    url = cluster.url.replace("@127.0.0.1", f"@127.0.0.1:{dead},127.0.0.1")
    with connect(RedisSettings.load(url=url)) as connection:
        assert connection.ping()


def test_a_wrong_option_in_a_sentinel_url_is_a_configuration_error(cluster: Cluster) -> None:
    with pytest.raises(ConfigurationError, match="nope"):
        connect(RedisSettings.load(url=f"{cluster.url}&nope=1"))
