"""Allocation of memory: slots in HBM, homes in DRAM and files. Moves no bytes."""
