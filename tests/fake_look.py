"""What a benchmark sees of a machine with the fake engine: ``python -m tests.fake_look``."""

from __future__ import annotations

import json
import os
import sys
import time

from workers.bench_look import Look, Machine, Model

ROW_BYTES = ((128, 1_000_000), (256, 2_000_000))


def fake_look(*, kv_bytes: int = 10_000_000, load: float = 0.1) -> Look:
    machine = Machine(
        device="the CPU (a fake)",
        kind="cpu",
        system="Linux x86_64, Python 3.11.7",
        cores=2,
        memory_bytes=8_000_000_000,
        usable_bytes=4_000_000_000,
        blas="BLAS: libfake.so, 1 threads",
        versions={"qsvc": "0.1.0"},
        load=load,
    )
    model = Model(
        name="fake",
        family="echo",
        dtype="float32",
        weight_bytes=123_000_000,
        context_length=256,
        kv_bytes=kv_bytes,
        row_bytes=ROW_BYTES,
    )
    return Look(machine, model)


if __name__ == "__main__":
    asked = json.loads(sys.stdin.read())
    time.sleep(float(os.environ.get("FAKE_LOOK_SECONDS", "0")))
    if asked["model"] == "missing":
        print(json.dumps({"kind": "ModelUnavailable", "message": "there is no model missing"}))
    elif asked["model"] == "crash":
        os.abort()
    else:
        kv_bytes = asked["kv_memory"] or 10_000_000
        print(json.dumps({"seen": fake_look(kv_bytes=kv_bytes).to_object()}))
