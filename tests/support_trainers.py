"""What tests of trainers of transformers share."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def arguments(folder: Path, **settings: Any) -> Any:
    """Returns the arguments of four steps on the CPU, each of them logged.

    Args:
        folder: Of the trainer.
        settings: Others, or in place of these.
    """
    from transformers import TrainingArguments

    return TrainingArguments(
        str(folder),
        **{
            "max_steps": 4,
            "per_device_train_batch_size": 2,
            "logging_steps": 1,
            "learning_rate": 1e-3,
            "weight_decay": 0.1,
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            "save_strategy": "no",
            **settings,
        },
    )
