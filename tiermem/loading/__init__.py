"""Models straight from safetensors checkpoints: which bytes of the files each tensor is.

Knows modules, names and files; the tiers take over from :class:`tiermem.nn.wrap.origins.Origins`.
"""
