"""Transfers between the tiers, and the deferred work of blocks.

Begins, polls and ends copies, reads and writes, and updates the table; does not decide which.
"""
