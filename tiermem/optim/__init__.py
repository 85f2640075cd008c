"""Optimizer steps with state in the tiers, block by block, with any torch optimizer class."""
