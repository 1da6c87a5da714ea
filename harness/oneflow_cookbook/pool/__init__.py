"""Ranks that stay alive and run many calls."""

from oneflow_cookbook.pool.pool import CallCancelled, Pool, PoolError, pool_cache

__all__ = ["Pool", "PoolError", "CallCancelled", "pool_cache"]
