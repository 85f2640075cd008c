"""torch.distributed with one process, for peers that cannot do without it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


@contextmanager
def one_rank() -> Iterator[None]:
    """Sets what a launcher would: the only rank, and a free port; puts back what there was.

    A process group that is made inside is ended.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    settings = {**_RANK, "MASTER_PORT": port}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        try:
            if dist.is_initialized():
                dist.destroy_process_group()
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Makes torch's own group of one process, for a device and for the host."""
    with one_rank():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        yield
