"""Bytes on their way between the tiers, and work that is owed to blocks before anybody looks.

Begins, polls and ends copies, reads and writes, and tells the table; does not decide which.
"""
