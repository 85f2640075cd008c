"""Bytes in motion: copies between the tiers."""
