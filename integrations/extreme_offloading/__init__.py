"""The run of "Extreme offloading": LoRA on a model whose layers stream, under a memory cap.

    from tiermem.integrations import extreme_offloading

    with extreme_offloading.Offloading(model, cap="7GiB") as run:
        optimizer = run.optimizer()

Embedding, last norm, head and adapters stay on the device. Every layer has its home in host memory
and is copied to the device in forward, and again in backward, where it is recomputed. The model has
to be in host memory at the start; reading layers from a checkpoint is not supported yet.
"""

from __future__ import annotations

from .offloading import OPTIONS, Offloading

__all__ = ["OPTIONS", "Offloading"]
