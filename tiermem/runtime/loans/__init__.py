"""Blocks that are used without a copy in HBM: by code on the host, or by kernels that read DRAM.

May write a block home and evict it; returns no slots.
"""
