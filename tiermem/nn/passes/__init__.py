"""Forward and backward: what a pass holds, and what autograd saves in it.

Begins and ends passes; may send saved tensors below HBM and bring them up.
"""
