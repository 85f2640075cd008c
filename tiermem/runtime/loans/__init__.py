"""Blocks that are used without coming into HBM: by code on the host, or by kernels that read DRAM.

May write a block home and take it out of HBM; gives no slot.
"""
