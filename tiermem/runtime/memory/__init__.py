"""Where bytes may lie: slots in HBM, homes in DRAM and files.

Hands places out and takes them back; moves nothing.
"""
