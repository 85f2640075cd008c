"""Which place in HBM a block gets, and who leaves for it.

May evict, move and drain blocks that nobody holds; begins no fetch.
"""
