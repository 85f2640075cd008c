"""Forward and backward passes: the blocks they hold, and the tensors autograd saves in them.

Begins and ends passes; sends saved tensors below HBM and brings them up.
"""
