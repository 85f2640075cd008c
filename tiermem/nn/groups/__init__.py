"""Which tensors share a block, where its parameters point, and where gradients go.

Holds and lets go of blocks; knows no module's call.
"""
