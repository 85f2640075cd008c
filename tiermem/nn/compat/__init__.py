"""What torch does underneath: versions, the compiler, hooks, modes, memory that refuses reads.

Knows torch; knows no block.
"""
