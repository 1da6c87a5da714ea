"""Ranks that stay alive and run many calls."""

from harness.pool.pool import Pool, PoolError, pool_cache

__all__ = ["Pool", "PoolError", "pool_cache"]
