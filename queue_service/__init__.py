"""The client side of qsvc: contracts, submission, results. Redis and RQ, never MLX."""
