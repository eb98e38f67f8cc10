"""A server behind TLS: certificates are checked, and a client shows its own when it has one.

The server program of the tests speaks no TLS, so a thread does it in front of its socket.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from queue_service.connection import check_server, connect
from queue_service.errors import ServerUnavailable
from queue_service.settings import RedisSettings
from tests.harness import answer, enqueue_chat, eventually, running_worker, worker_settings


class Certificates:
    """An authority and what it has signed, for ``localhost`` and for a client."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.authority = self._make("authority", "-x509")
        self.server = self._signed("server", "DNS:localhost")
        self.client = self._signed("client", "DNS:worker")

    def key_of(self, certificate: Path) -> Path:
        """The private key of a certificate."""
        return certificate.with_suffix(".key")

    def _make(self, name: str, *options: str) -> Path:
        made = self._folder / f"{name}.pem"
        key = ["-newkey", "rsa:2048", "-nodes", "-keyout", str(self.key_of(made))]
        self._openssl("req", *key, "-subj", f"/CN={name}", "-out", str(made), *options)
        return made

    def _signed(self, name: str, alternative: str) -> Path:
        request, made = self._make(f"{name}-request"), self._folder / f"{name}.pem"
        extensions = self._folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName={alternative}\n")
        authority = ["-CA", str(self.authority), "-CAkey", str(self.key_of(self.authority))]
        self._openssl(
            *["x509", "-req", "-in", str(request), "-out", str(made), *authority],
            *["-set_serial", "1", "-days", "2", "-extfile", str(extensions)],
        )
        self.key_of(request).rename(self.key_of(made))
        return made

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True)


class TlsFront:
    """Speaks TLS on a port of its own and hands everything on to a Unix socket."""

    def __init__(self, context: ssl.SSLContext, socket_path: str) -> None:
        self._context = context
        self._socket_path = socket_path
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self.port = self._listener.getsockname()[1]

    def __enter__(self) -> TlsFront:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        # Closing alone would not wake a thread that waits in accept or recv.
        for one in [self._listener, *self._open]:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join(10)
            assert not thread.is_alive()
        for one in [self._listener, *self._open]:
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                plain, _ = self._listener.accept()
                with contextlib.suppress(OSError):
                    self._serve(plain)

    def _serve(self, plain: socket.socket) -> None:
        self._open.append(plain)
        client = self._context.wrap_socket(plain, server_side=True)
        server = socket.socket(socket.AF_UNIX)
        self._open += [client, server]
        server.connect(self._socket_path)
        for source, target in ((client, server), (server, client)):
            thread = threading.Thread(target=_copy, args=(source, target))
            self._threads.append(thread)
            thread.start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make certificates with")
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def front(certificates: Certificates, redis_url: str) -> Iterator[TlsFront]:
    """The shared server behind TLS that asks for no certificate of the client."""
    with TlsFront(server_context(certificates), redis_url.removeprefix("unix://")) as front:
        yield front


def server_context(certificates: Certificates) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.server, certificates.key_of(certificates.server))
    return context


def test_a_worker_runs_jobs_behind_tls(front: TlsFront, certificates: Certificates) -> None:
    url = f"rediss://localhost:{front.port}/0?ssl_ca_certs={certificates.authority}"
    with connect(RedisSettings.load(url=url)) as connection:
        assert check_server(connection)
        job = enqueue_chat(connection, "sealed")
        with running_worker(worker_settings(url)):
            eventually(lambda: job.get_status() == "finished", "the job runs")
        assert answer(connection, job) == "sealed"


def test_a_server_of_an_unknown_authority_is_refused(front: TlsFront) -> None:
    url = f"rediss://localhost:{front.port}/0"
    with pytest.raises(ServerUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
        connect(RedisSettings.load(url=url))


def test_a_certificate_for_another_host_is_refused(
    front: TlsFront, certificates: Certificates
) -> None:
    url = f"rediss://127.0.0.1:{front.port}/0?ssl_ca_certs={certificates.authority}"
    with pytest.raises(ServerUnavailable, match="IP address mismatch"):
        connect(RedisSettings.load(url=url))


def test_a_client_shows_its_certificate_where_the_server_asks_for_one(
    certificates: Certificates, redis_url: str
) -> None:
    context = server_context(certificates)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(certificates.authority)
    with TlsFront(context, redis_url.removeprefix("unix://")) as front:
        url = f"rediss://localhost:{front.port}/0?ssl_ca_certs={certificates.authority}"
        with pytest.raises(ServerUnavailable):
            connect(RedisSettings.load(url=url))
        own = certificates.client
        url += f"&ssl_certfile={own}&ssl_keyfile={certificates.key_of(own)}"
        with connect(RedisSettings.load(url=url)) as connection:
            assert connection.ping()
