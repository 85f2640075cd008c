"""Bytes at rest: the stores of the tiers."""
