"""The demonstration model."""

from __future__ import annotations

import pytest
import torch

from tiermem.cli.model import ByteGPT, Shape, loss_of
from tiermem.errors import ConfigError

SMALL = Shape(layers=2, width=16, heads=2, context=8)


@pytest.mark.parametrize("shape", [SMALL, Shape(3, 24, 3, 5)])
def test_parameters_are_counted_right(shape) -> None:
    model = ByteGPT(shape)
    assert sum(p.numel() for p in model.parameters()) == shape.parameters
    assert sum(p.numel() for p in model.layers[0].parameters()) == shape.layer_parameters


def test_it_looks_back_only() -> None:
    torch.manual_seed(0)
    model = ByteGPT(SMALL)
    tokens = torch.randint(256, (2, 8))
    changed = tokens.clone()
    changed[:, 5:] = 0
    with torch.no_grad():
        one, other = model(tokens), model(changed)
    assert torch.allclose(one[:, :5], other[:, :5])
    assert not torch.allclose(one[:, 5:], other[:, 5:])


def test_checkpointing_changes_nothing() -> None:
    tokens = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(0))
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = ByteGPT(SMALL, checkpointing=checkpointing)
        loss_of(model, tokens).backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_a_fresh_model_knows_nothing() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(256, (4, 9))
    assert abs(loss_of(ByteGPT(SMALL), tokens).item() - torch.tensor(256.0).log().item()) < 0.1


@pytest.mark.parametrize("sizes", [(0, 16, 2, 8), (2, 0, 1, 8), (2, 16, 3, 8), (2, 16, 2, 0)])
def test_bad_shapes(sizes) -> None:
    with pytest.raises(ConfigError):
        Shape(*sizes)
