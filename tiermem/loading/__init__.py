"""Models from safetensors checkpoints: which bytes of the files belong to each tensor.

Handles modules, names and files; the tiers use :class:`tiermem.nn.wrap.origins.Origins`.
"""
