"""The program of a worker child: ``python -m workers.main``, started by the supervisor."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING

from workers.answer_forms import AnswerForms, Compiler
from workers.blas import load_blas
from workers.child import ServedModel, run_child
from workers.child_settings import ChildSettings
from workers.generation import EngineParts
from workers.reasoning import find_format
from workers.tool_calls import find_tool_format

if TYPE_CHECKING:
    from workers.tokenizer import Tokenizer


def load(child: ChildSettings) -> ServedModel:
    """Load the model and make its engine; called on the engine thread."""
    settings = child.worker
    blas = load_blas(settings.blas_threads)
    # MLX links its BLAS when it is imported: it has to come after the line above.
    from workers.batch_engine import BatchEngine
    from workers.checkpoint_setup import open_checkpoints
    from workers.memory import MemoryGuard, apply_limits, plan_memory
    from workers.models import find_model, load_model
    from workers.pace import PrefillPace
    from workers.scheduler import Policy
    from workers.self_test import choose_runner
    from workers.structured import ConstraintCompiler

    loaded = load_model(settings.model or "", dtype=settings.dtype)
    memory = plan_memory(model_bytes=loaded.num_bytes, kv_bytes=settings.kv_memory)
    apply_limits(memory)
    batching, runner = choose_runner(loaded.model, kv_bytes=memory.kv_bytes)
    engines: list[BatchEngine] = []
    checkpoints = open_checkpoints(
        child.checkpoints,
        path=find_model(settings.model or ""),
        info=loaded.info,
        tokenizer=loaded.tokenizer,
        runner=runner,
        is_busy=lambda: any(engine.num_rows for engine in engines),
    )
    engine = BatchEngine(
        runner,
        vocab_size=loaded.info.vocab_size,
        eos_token_ids=loaded.info.eos_token_ids,
        policy=Policy(kv_budget_bytes=memory.kv_bytes, max_rows=settings.slots),
        pace=PrefillPace(
            pause_seconds=settings.prefill_pause_seconds, most_tokens=settings.prefill_step
        ),
        memory=MemoryGuard(memory.limit_bytes),
        prefix_bytes=memory.prefix_bytes,
        tier=checkpoints.tier if checkpoints is not None else None,
    )
    engines.append(engine)

    def figures() -> dict[str, str]:
        shared = {name: str(count) for name, count in asdict(engine.prefix_figures).items()}
        kept = checkpoints.figures() if checkpoints is not None else {}
        return {
            "kv_budget_bytes": str(memory.kv_bytes),
            **{f"prefix_{name}": count for name, count in shared.items()},
            **kept,
        }

    versions = f"mlx={version('mlx')} mlx-lm={version('mlx-lm')}"
    line = (
        f"model loaded name={loaded.info.name} device={loaded.info.device} "
        f"dtype={loaded.info.dtype} rows={batching.value!r} "
        f"model_mb={loaded.num_bytes / 1e6:.0f} kv_mb={memory.kv_bytes / 1e6:.0f} {versions}"
    )
    return ServedModel(
        parts=EngineParts(engine, loaded.tokenizer),
        encoder=loaded.tokenizer,
        info=loaded.info,
        versions=versions,
        forms=answer_forms(
            loaded.tokenizer,
            ConstraintCompiler(
                loaded.tokenizer,
                vocab_size=loaded.info.vocab_size,
                eos_token_ids=loaded.info.eos_token_ids,
            ),
        ),
        sampling_defaults=loaded.sampling_defaults,
        log_lines=tuple(line for line in (blas, line) if line),
        history=checkpoints.history if checkpoints is not None else None,
        figures=figures,
        close=checkpoints.tier.close if checkpoints is not None else lambda: None,
    )


def answer_forms(tokenizer: Tokenizer, compiler: Compiler) -> AnswerForms:
    """Return what a model's tokenizer and template tell of its answers."""
    template, vocabulary = tokenizer.chat_template, tokenizer.vocabulary
    reasoning = find_format(template, vocabulary)
    closing = "" if reasoning is None else reasoning.closing_text
    return AnswerForms(
        reasoning=reasoning,
        tool_format=find_tool_format(template, vocabulary),
        compiler=compiler,
        closing_ids=tuple(tokenizer.encode(closing, add_special_tokens=False)),
        added_tokens=tokenizer.added_vocabulary,
    )


if __name__ == "__main__":
    code = run_child(load)
    logging.shutdown()
    sys.stdout.flush()
    # The interpreter's own end would tear the engine thread out of MLX and abort the process.
    os._exit(code)
