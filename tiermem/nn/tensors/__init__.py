"""Tensors whose bytes are elsewhere, and what stands for them meanwhile.

May ask for one tensor's bytes; decides nothing about blocks.
"""
