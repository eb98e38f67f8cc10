"""The program of a worker child: ``python -m workers.main``, started by the supervisor."""

from __future__ import annotations

import logging
import os
import sys
from importlib.metadata import version

from queue_service.settings import WorkerSettings
from workers.blas import load_blas
from workers.child import ServedModel, run_child
from workers.generation import EngineParts


def load(settings: WorkerSettings) -> ServedModel:
    """Load the model and make its engine; called on the engine thread."""
    blas = load_blas(settings.blas_threads)
    # MLX links its BLAS when it is imported: it has to come after the line above.
    from workers.mlx_engine import MlxEngine
    from workers.models import load_model
    from workers.self_test import Batching, choose_batching

    loaded = load_model(settings.model or "", dtype=settings.dtype)
    batching = choose_batching(loaded.model)
    engine = MlxEngine(
        loaded.model,
        eos_token_ids=loaded.info.eos_token_ids,
        max_rows=1 if batching is Batching.ALONE else settings.slots,
        prefill_rows=settings.prefill_batch if batching is Batching.FULL else 1,
        prefill_step_tokens=settings.prefill_step,
    )
    versions = f"mlx={version('mlx')} mlx-lm={version('mlx-lm')}"
    line = (
        f"model loaded name={loaded.info.name} device={loaded.info.device} "
        f"dtype={loaded.info.dtype} rows={batching.value!r} {versions}"
    )
    return ServedModel(
        parts=EngineParts(engine, loaded.tokenizer, loaded.info.eos_token_ids),
        encoder=loaded.tokenizer,
        info=loaded.info,
        versions=versions,
        log_lines=tuple(line for line in (blas, line) if line),
    )


if __name__ == "__main__":
    code = run_child(load)
    logging.shutdown()
    sys.stdout.flush()
    # The interpreter's own end would tear the engine thread out of MLX and abort the process.
    os._exit(code)
