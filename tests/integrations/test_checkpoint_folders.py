"""Folders that transformers writes and reads: the same tensors are found in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support_checkpoint import same_bits

from tiermem.storage.checkpoint.folder import CheckpointFiles

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # that library's own


def test_an_index_that_names_fewer_tensors_than_its_files(tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    for parameter in model.parameters():  # biases begin as zeros, read or not
        torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    named = dict(index["weight_map"])
    gone = [name for name in named if name.endswith(".bias")]
    for name in gone:
        del index["weight_map"][name]
    path.write_text(json.dumps(index))

    files = CheckpointFiles.open(tmp_path)
    assert len(files.paths) == len(set(named.values())) > 1 and gone
    assert set(files.tensors) == set(named)
    state = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).state_dict()
    for name in named:
        assert same_bits(files.read_tensor(name), state[name])
        assert same_bits(state[name], model.state_dict()[name])
