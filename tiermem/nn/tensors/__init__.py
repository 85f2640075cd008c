"""Stand-ins for tensors whose bytes are in the tiers.

They fetch one tensor's bytes when it is used, and make no decisions about blocks.
"""
