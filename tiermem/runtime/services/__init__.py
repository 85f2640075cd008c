"""Services on top of the manager: sweeps, saved tensors, steps on the host, experts, checks.

They use the manager in the same way as its other users.
"""
