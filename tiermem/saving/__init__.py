"""Checkpoints of a whole training run: written so that a crash leaves one, read bit for bit.

``files`` is every operation on the file system, ``folder`` puts a new folder in the place of the
old one, ``layout``, ``writer`` and ``reader`` are safetensors files, ``values`` is what goes into
JSON, ``contents`` says which bytes of the tiers are which tensor, ``save`` and ``load`` join them.
"""
