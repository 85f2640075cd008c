"""Processes with a GPU each train replicas, and exchange gradients through NCCL."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import support_replicas as replicas
import support_two_trainers as two_trainers
import torch
import torch.distributed as dist

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.skipif(
        not (dist.is_available() and dist.is_nccl_available()), reason="torch has no NCCL here"
    ),
]


def run_two(command: list[str], folder: Path) -> list[str]:
    """Returns what two processes print that know of each other by a file."""
    printed = []
    running = [
        subprocess.Popen(
            [*command, str(rank), "2", str(folder / "store"), "cuda"],
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
            assert process.returncode == 0, error
            printed.append(out)
    finally:
        for process in running:
            process.kill()
            process.wait()
    return printed


def test_two_processes_train_as_those_with_resident_models(tmp_path: Path) -> None:
    for out in run_two([sys.executable, replicas.__file__], tmp_path):
        assert f"equal {len(replicas.CASES)}" in out


@pytest.mark.parametrize("library", ["transformers", "lightning"])
def test_trainers_of_others_in_two_processes(library: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip(library)
    command = [sys.executable, two_trainers.__file__, library]
    cases = two_trainers.HUGGING_FACE if library == "transformers" else two_trainers.LIGHTNING
    for out in run_two(command, tmp_path):
        assert out.splitlines().count("equal") == len(cases)
