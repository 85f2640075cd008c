"""Copies of bytes between the tiers."""
