"""Starts what the benchmarks measure: programs that load their BLAS first, servers, clients."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

ROOT = Path(__file__).resolve().parents[1]

# MLX takes the BLAS that is there at its import, so everything on MLX is started through this.
_LAUNCH = """
import runpy, sys
from workers.blas import load_blas
print(load_blas(int(sys.argv[1])), file=sys.stderr)
sys.argv = sys.argv[2:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
_PROGRAMS = "scripts.bench_peers"
_MODEL_NAME = "default_model"
_READY_SECONDS = 600
_ANSWER_SECONDS = 4 * 3600
_END_SECONDS = 30
# Of one row; llama-server divides its context among the rows.
_CONTEXT_TOKENS = 2560

# Where the two peers are that cannot live in this environment: a server's program, and a Python
# that has vllm-mlx (its range of mlx-lm excludes ours).
_LLAMA_VARIABLE = "LLAMA_SERVER"
_VLLM_VARIABLE = "VLLM_MLX_PYTHON"


class PeerFailed(Exception):
    """A measured process ended early or answered with an error; the message quotes its end."""


class NotInstalled(Exception):
    """There is nothing to measure; the message names what was looked for."""


@dataclass(frozen=True, slots=True)
class Run:
    """What one peer did with a file.

    Attributes:
        seconds: wall time, model loading left out.
        tokens: completion tokens, end tokens left out where the peer tells them apart.
        texts: the answers, in the order of the file.
        figures: what else it measured.
    """

    seconds: float
    tokens: int
    texts: list[str]
    figures: dict[str, Any]


def launch(
    threads: int, module: str, *arguments: str, python: str = sys.executable
) -> Sequence[str]:
    """Return the command that loads a BLAS of so many threads and then runs a module."""
    return [python, "-c", _LAUNCH, str(threads), module, *arguments]


def run_program(threads: int, *arguments: str, module: str = _PROGRAMS) -> Any:
    """Run a program of a module, `bench_peers` first, and return the JSON that it prints last.

    Raises:
        PeerFailed: it ended with an error.
    """
    command = launch(threads, module, *arguments)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PeerFailed(f"{arguments[0]}: {_show(done.stderr)}")
    return json.loads(done.stdout.splitlines()[-1])


def measure_program(name: str, file: Path, *, slots: int, threads: int) -> Run:
    """Run ``ours``, ``reference`` or ``script`` on a file in a process of its own."""
    return Run(**run_program(threads, name, str(file), str(slots)))


def measure_server(name: str, file: Path, *, exports: Path, slots: int, threads: int) -> Run:
    """Start a server afresh and send it a file from as many clients as it has rows.

    Args:
        name: ``server``, ``vllm-mlx`` or ``llama``.
        exports: the folder that keeps the exported weights for all servers of this run.

    Raises:
        NotInstalled: there is no such server here.
        PeerFailed: it did not start, or refused a request.
    """
    port = _free_port()
    make_command = {"server": _mlx_lm, "vllm-mlx": _vllm_mlx, "llama": _llama}[name]
    command = make_command(exports, port=port, slots=slots, threads=threads)
    bodies = [json.loads(line)["body"] for line in file.read_text().splitlines()]
    with _serving(command, port, log=exports / f"{name}.log") as address:
        hello = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "temperature": 0}
        _ask(address, hello)
        started = time.perf_counter()
        with ThreadPoolExecutor(slots) as clients:
            answers = list(clients.map(lambda body: _ask(address, body), bodies))
        seconds = time.perf_counter() - started
    return Run(
        seconds=seconds,
        tokens=sum(answer["usage"]["completion_tokens"] for answer in answers),
        texts=[answer["choices"][0]["message"].get("content") or "" for answer in answers],
        figures=_prompt_figures([answer["usage"] for answer in answers]),
    )


def _prompt_figures(usages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what was computed of the prompts, nothing where the server does not tell."""
    details = [usage.get("prompt_tokens_details") for usage in usages]
    cached = [detail.get("cached_tokens") for detail in details if detail]
    if len(cached) < len(usages) or None in cached:
        return {}
    num_tokens = sum(usage["prompt_tokens"] for usage in usages)
    return {"computed_tokens": num_tokens - sum(cached), "cached_tokens": sum(cached)}


def llama_program() -> str | None:
    """Return the llama-server to measure, None when there is none."""
    return shutil.which(os.environ.get(_LLAMA_VARIABLE) or "llama-server")


# The servers --------------------------------------------------------------------------------


def _mlx_lm(exports: Path, *, port: int, slots: int, threads: int) -> Sequence[str]:
    options = ["--model", str(_exported_folder(exports, threads)), "--port", str(port)]
    options += ["--decode-concurrency", str(slots), "--log-level", "WARNING"]
    return launch(threads, "mlx_lm", "server", *options)


def _vllm_mlx(exports: Path, *, port: int, slots: int, threads: int) -> Sequence[str]:
    python = os.environ.get(_VLLM_VARIABLE)
    if python is None:
        if find_spec("vllm_mlx") is None:
            raise NotInstalled(f"no module vllm_mlx, and {_VLLM_VARIABLE} names no Python with it")
        python = sys.executable
    options = [str(_exported_folder(exports, threads)), "--port", str(port)]
    options += ["--served-model-name", _MODEL_NAME, "--continuous-batching"]
    options += ["--max-num-seqs", str(slots), "--completion-batch-size", str(slots)]
    return launch(threads, "vllm_mlx.cli", "serve", *options, python=python)


def _llama(exports: Path, *, port: int, slots: int, threads: int) -> Sequence[str]:
    program = llama_program()
    if program is None:
        raise NotInstalled(f"no llama-server on PATH, and {_LLAMA_VARIABLE} names none")
    file = exports / "float32.gguf"
    if not file.exists():
        run_program(threads, "export-gguf", str(file))
    command = [program, "--model", str(file), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--parallel", str(slots), "--ctx-size", str(slots * _CONTEXT_TOKENS), "--jinja"]
    command += ["--cache-type-k", "f32", "--cache-type-v", "f32"]
    return [*command, "--threads", str(threads), "--threads-batch", str(threads)]


def _exported_folder(exports: Path, threads: int) -> Path:
    folder = exports / "float32"
    if not folder.exists():
        run_program(threads, "export", str(folder))
    return folder


@contextmanager
def _serving(command: Sequence[str], port: int, *, log: Path) -> Iterator[str]:
    """Run a server until the block ends; it is ready inside, at the address given."""
    address = f"http://127.0.0.1:{port}"
    with log.open("w") as output:
        server = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + _READY_SECONDS
        while not _is_ready(address):
            if server.poll() is not None:
                raise PeerFailed(f"the server ended: {_show(log.read_text())}")
            if time.monotonic() > deadline:
                raise PeerFailed(f"not ready in {_READY_SECONDS} s: {_show(log.read_text())}")
            time.sleep(0.2)
        yield address
    finally:
        server.terminate()
        try:
            server.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


# HTTP ---------------------------------------------------------------------------------------

# Not urlopen, which would look for a proxy.
_open = build_opener(ProxyHandler({})).open


def _is_ready(address: str) -> bool:
    try:
        with _open(f"{address}/health", timeout=10) as response:
            return bool(json.load(response).get("model_loaded", True))
    except (OSError, ValueError):  # nobody listens, or 503 while it loads
        return False


def _ask(address: str, body: dict[str, Any]) -> Any:
    data = json.dumps({**body, "model": _MODEL_NAME}).encode()
    headers = {"Content-Type": "application/json"}
    request = Request(f"{address}/v1/chat/completions", data, headers)
    try:
        with _open(request, timeout=_ANSWER_SECONDS) as response:
            return json.load(response)
    except HTTPError as error:
        text = error.read().decode(errors="replace")
        raise PeerFailed(f"the server answered {error.code}: {text[:200]}") from error
    except URLError as error:
        raise PeerFailed(f"the server did not answer: {error.reason}") from error


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _show(output: str) -> str:
    """Print what a process that failed had to say; return its last line."""
    sys.stderr.write(output)
    return next((line for line in reversed(output.splitlines()) if line.strip()), "no output")
