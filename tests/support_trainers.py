"""What tests of trainers of transformers share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class Sentences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Token ids, the same ones each time."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def llama(seed: int = 0, width: int = 64) -> Any:
    """Returns a model of four layers.

    Args:
        seed: Of its weights.
        width: Of its hidden states.
    """
    import transformers

    transformers.set_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return transformers.LlamaForCausalLM(config)


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
