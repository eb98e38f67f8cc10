"""The MLX worker: job source, preparation, engine, output."""

import os

# mlx-lm imports transformers for its tokenizers, which would tell everybody to install PyTorch.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
