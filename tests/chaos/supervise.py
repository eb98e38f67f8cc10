"""A supervisor as a process of its own, so that it can be killed: settings on standard input.

``python -m tests.chaos.supervise CHILD…`` supervises that command.
"""

from __future__ import annotations

import logging
import sys

from workers.child_settings import ChildSettings
from workers.supervisor import Supervisor

if __name__ == "__main__":
    logging.basicConfig(level="INFO", format="%(asctime)s supervisor %(levelname)s %(message)s")
    Supervisor(ChildSettings.from_json(sys.stdin.readline()), command=sys.argv[1:]).run()
