"""Optimizer steps over tiered state, block by block, with any torch optimizer."""
