"""What is stepped together on the device: its weights, gradients, masters and state.

Holds the blocks of one unit for its step, makes it whole or takes it back.
"""
