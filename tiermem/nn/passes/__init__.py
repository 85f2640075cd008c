"""Forward and backward passes: the blocks they hold, and the tensors autograd saves in them.

Begins and ends passes; copies saved tensors out of HBM and back.
"""
