"""Access to torch's internals: versions, the compiler, hooks, modes, memory that refuses reads.

Knows torch; knows no block.
"""
