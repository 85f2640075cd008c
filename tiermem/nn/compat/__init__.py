"""Access to torch's internals: versions, the compiler, hooks, modes, memory that refuses reads.

Depends on torch only; does not know blocks.
"""
