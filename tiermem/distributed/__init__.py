"""Sharding over processes; empty so far. Replicas need none: see ``tiermem.nn``."""
