"""How optimizer classes are called, tried and taken apart; knows no tier.

Decides what a class needs, from a trial on small tensors; touches no block.
"""
