"""Checkpoints of a training run: a crash while saving leaves one; bits are restored exactly.

``files`` has every operation on the file system, ``folder`` replaces the old folder with a new
one, ``layout``, ``writer`` and ``reader`` handle safetensors files, ``values`` converts to
JSON, ``contents`` maps bytes of the tiers to tensors, ``save`` and ``load`` combine them.
"""
