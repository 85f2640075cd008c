"""How optimizer classes are called, tried and split by parameter; knows no tier.

Decides what a class needs, from a trial on small tensors; touches no block.
"""
