"""How optimizer classes are called, tried and split by parameter; independent of the tiers.

Decides what a class needs, from a trial on small tensors; does not use blocks.
"""
