"""Processes with a GPU each train replicas, and exchange gradients through NCCL."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import support_replicas as replicas
import torch
import torch.distributed as dist

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.skipif(
        not (dist.is_available() and dist.is_nccl_available()), reason="torch has no NCCL here"
    ),
]


def test_two_processes_train_as_those_with_resident_models(tmp_path: Path) -> None:
    command = [sys.executable, replicas.__file__]
    running = [
        subprocess.Popen(
            [*command, str(rank), "2", str(tmp_path / "store"), "cuda"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        )
        for rank in range(2)
    ]
    try:
        for process in running:
            out, error = process.communicate(timeout=240)
            assert f"equal {len(replicas.CASES)}" in out, error
    finally:
        for process in running:
            process.kill()
            process.wait()
