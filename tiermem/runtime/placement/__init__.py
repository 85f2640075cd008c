"""Placement in HBM: which place a block gets, and which blocks are evicted for it.

Evicts, moves and drains blocks that have no lease; does not begin fetches.
"""
