"""What the manager offers beside ``acquire``: sweeps, saved tensors, steps on the host, checks.

Works through the manager, as its users do.
"""
