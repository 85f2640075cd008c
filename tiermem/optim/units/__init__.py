"""Units: parameters of one block that are stepped together, with gradients, masters and state.

A unit's blocks are leased for its step, which is completed or undone.
"""
