"""Loading OpenBLAS: only before MLX, never one that would end the process."""

from __future__ import annotations

import subprocess
import sys

import mlx.core as mx
import pytest

from queue_service.errors import ConfigurationError
from workers.blas import load_blas

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="MLX has a fast BLAS elsewhere")


def test_once_mlx_is_imported_it_is_too_late() -> None:
    assert mx.array(1).item() == 1
    with pytest.raises(ConfigurationError, match="before the first import of mlx"):
        load_blas()


def test_mlx_multiplies_rightly_on_what_was_loaded() -> None:
    program = (
        "from workers.blas import load_blas; print(load_blas(threads=1));"
        "import mlx.core as mx; print((mx.ones((64, 64)) @ mx.ones((64, 64))).sum().item())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    line, total = done.stdout.splitlines()
    assert line.endswith(", 1 threads") or "pip install" in line
    assert float(total) == 64**3


def test_zero_threads_are_refused_before_anything_is_loaded() -> None:
    program = "from workers.blas import load_blas; load_blas(threads=0)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120
    )
    assert "ConfigurationError: BLAS threads must be at least 1, not 0" in done.stderr
