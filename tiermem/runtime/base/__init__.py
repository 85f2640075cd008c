"""Foundations of the runtime: forks, ``torch.func``, signals.

Makes no decisions and uses no blocks.
"""
