"""How a worker's processes log: one line a state change, on standard error."""

from __future__ import annotations

import logging
import sys

FORMAT = "%(asctime)s %(levelname)s %(message)s"
TIME_FORMAT = "%H:%M:%S"


def configure_logging(level: str) -> None:
    """Log to standard error; RQ's own lines only when they are errors.

    They may hold call strings, and so prompts; ours say what matters.
    """
    logging.basicConfig(level=level, stream=sys.stderr, format=FORMAT, datefmt=TIME_FORMAT)
    for name in ("rq.worker", "rq.job", "rq.queue", "rq.registry"):
        logging.getLogger(name).setLevel(logging.ERROR)
