"""Ranks that stay alive and run many calls."""

from harness.pool.pool import Pool, PoolError

__all__ = ["Pool", "PoolError"]
