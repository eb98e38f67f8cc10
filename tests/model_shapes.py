"""The shape of a model that nobody loads."""

from __future__ import annotations

from typing import Any

from workers.fit import ModelShape

GB = 10**9


def model_shape(**fields: Any) -> ModelShape:
    """Return a shape that is llama's, of two gigabytes, but for what is named."""
    made: dict[str, Any] = {
        "name": "m",
        "family": "llama",
        "num_parameters": GB,
        "weight_bytes": 2 * GB,
        "file_bytes": None,
        "dtype": "bfloat16",
        "device": "gpu",
        "context_length": 8192,
        "kv_bytes_per_token": 100_000,
        "fixed_bytes_per_row": 0,
    }
    return ModelShape(**{**made, **fields})
