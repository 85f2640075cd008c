"""Steps on the host: which units, with how many threads, over which bytes.

May borrow blocks from HBM and DRAM during a step.
"""
