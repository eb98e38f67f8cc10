"""The MLX worker: job source, preparation, engine, output."""
