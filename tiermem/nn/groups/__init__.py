"""Groups: which tensors share a block, where its parameters point, and where gradients go.

Leases and releases blocks; does not intercept calls of modules.
"""
