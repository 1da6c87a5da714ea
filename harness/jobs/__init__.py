"""Whole jobs, started from outside as a user does, and hosts of their own for them."""
