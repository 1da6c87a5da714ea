"""Ranks that stay alive and run many calls."""

from harness.pool.pool import Pool, PoolError, TimeOver, pool_cache

__all__ = ["Pool", "PoolError", "TimeOver", "pool_cache"]
