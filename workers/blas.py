"""Put OpenBLAS in front of the slow reference BLAS that MLX's Linux CPU wheel links."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from queue_service.errors import ConfigurationError

# (distribution, the library inside site-packages), the first one that works is taken.
_PACKAGED = (
    ("ngsolve-openblas", "ngsolve_openblas/libopenblasp-*.so"),
    ("cmeel-openblas", "cmeel.prefix/lib/libopenblas.so.0"),
)
_SYSTEM = "libopenblas.so.0"
_FORTRAN = "libgfortran.so.5"
_TRIAL_SECONDS = 30
NO_BLAS = (
    "BLAS: no usable OpenBLAS, float32 on this CPU will be about 20 times slower than it could "
    "be; pip install ngsolve-openblas, or install the system's (Debian: libopenblas0-pthread)"
)
_ROW_MAJOR, _NO_TRANSPOSE = 101, 111


def load_blas(threads: int | None = None) -> str | None:
    """Load OpenBLAS into this process, so that MLX's CPU products use it; call it before MLX.

    Takes the first library that survives a small product in a child process: a build for another
    processor would end this one with an illegal instruction. Sets ``OPENBLAS_NUM_THREADS``.

    Args:
        threads: how many threads a product may use; None means cores - 1, at least 1, since
            OpenBLAS spins and slows down badly when it has every core of a busy machine.

    Returns:
        One line for the log: the library and its threads, or NO_BLAS when none works. None where
        MLX has a fast BLAS of its own (anything but Linux).

    Raises:
        ConfigurationError: MLX is imported already, so its BLAS is bound, or ``threads`` < 1.
    """
    if sys.platform != "linux":
        return None
    if "mlx.core" in sys.modules:
        raise ConfigurationError("load_blas must be called before the first import of mlx")
    if threads is None:
        threads = max(1, len(os.sched_getaffinity(0)) - 1)
    elif threads < 1:
        raise ConfigurationError(f"BLAS threads must be at least 1, not {threads}")
    os.environ["OPENBLAS_NUM_THREADS"] = str(threads)
    for library in _candidates():
        if _survives(library):
            blas = _open(library, mode=ctypes.RTLD_GLOBAL)
            return f"BLAS: {library}, {blas.openblas_get_num_threads()} threads"
    return NO_BLAS


def _candidates() -> Iterator[str]:
    for distribution, pattern in _PACKAGED:
        try:
            site = Path(str(metadata.distribution(distribution).locate_file("")))
        except metadata.PackageNotFoundError:
            continue
        yield from map(str, sorted(site.glob(pattern)))
    yield _SYSTEM


def _survives(library: str) -> bool:
    try:
        subprocess.run(
            [sys.executable, "-m", "workers.blas", library],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TRIAL_SECONDS,
            check=True,
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return False
    return True


def _open(library: str, *, mode: int) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(library, mode=mode)
    except OSError:
        if not _lend_fortran_runtime():
            raise
        return ctypes.CDLL(library, mode=mode)


def _lend_fortran_runtime() -> bool:
    """Let OpenBLAS find the Fortran runtime inside MLX's wheel; return False when there is none.

    Both packaged libraries ask for ``libgfortran.so.5``, which slim systems lack. MLX's wheel
    carries it under a hashed name, and the loader matches by the name inside the file: so a
    copy that has its usual name back is loaded first.
    """
    try:
        wheel = metadata.files("mlx-cpu") or []
    except metadata.PackageNotFoundError:
        return False
    parts = {file.name.split("-")[0]: Path(str(file.locate())) for file in wheel}
    fortran, quadmath = parts.get("libgfortran"), parts.get("libquadmath")
    if fortran is None or quadmath is None:
        return False
    ctypes.CDLL(str(quadmath))
    hashed = fortran.name.encode() + b"\0"
    with tempfile.NamedTemporaryFile(suffix=f"-{_FORTRAN}") as copy:
        copy.write(
            fortran.read_bytes().replace(hashed, _FORTRAN.encode().ljust(len(hashed), b"\0"))
        )
        copy.flush()
        ctypes.CDLL(copy.name)
    return True


def _multiply_once(library: str) -> None:
    side = 64
    blas = _open(library, mode=ctypes.RTLD_LOCAL)
    matrix = (ctypes.c_float * (side * side))(*([1.0] * (side * side)))
    product = (ctypes.c_float * (side * side))()
    blas.cblas_sgemm(
        *(_ROW_MAJOR, _NO_TRANSPOSE, _NO_TRANSPOSE, side, side, side, ctypes.c_float(1.0)),
        *(matrix, side, matrix, side, ctypes.c_float(0.0), product, side),
    )
    if list(product) != [float(side)] * (side * side):
        raise SystemExit(f"{library} multiplies wrongly")


if __name__ == "__main__":
    _multiply_once(sys.argv[1])
