"""Transfers between the tiers, and the deferred work of blocks.

Begins, polls and ends copies, reads and writes, and tells the table; does not decide which.
"""
