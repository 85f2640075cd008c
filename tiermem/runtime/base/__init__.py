"""Foundations of the runtime: forks, ``torch.func``, signals.

Decides nothing; touches no block.
"""
