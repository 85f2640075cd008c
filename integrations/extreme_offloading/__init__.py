"""The run of "Extreme offloading": LoRA on a model whose layers stream, under a memory cap.

    from tiermem.integrations import extreme_offloading

    with extreme_offloading.Offloading(model, cap="7GiB") as run:
        optimizer = run.optimizer()

Embedding, last norm, head and adapters stay on the device; every layer is at home in host memory,
comes up in forward and once more in backward, where it is computed again. The model is in host
memory when it is given; reading layers from a checkpoint is to come.
"""

from __future__ import annotations

from .offloading import OPTIONS, Offloading

__all__ = ["OPTIONS", "Offloading"]
