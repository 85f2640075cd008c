"""What the rest of the runtime stands on, whatever it does: forks, torch.func, signals.

Decides nothing; touches no block.
"""
