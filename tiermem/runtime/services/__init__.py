"""Services on top of the manager: sweeps, saved tensors, steps on the host, experts, checks.

They work through the manager, as its users do.
"""
