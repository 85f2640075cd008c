"""Every tensor that tiermem makes is told where: else it would lie on a user's default device."""

from __future__ import annotations

import ast
from pathlib import Path

from torch.utils._device import _device_constructors

PACKAGE = Path(__file__).parents[2] / "tiermem"
OWN_PROCESS = ("cli", "testing")
"""Rooms that no program of a user's calls."""
AS_OTHERS = {
    ("optim/clip.py", "torch.tensor(0.0)"): "torch's own norm of nothing",
    ("lora/adapters.py", "torch.randn((r, module.num_embeddings))"): "peft draws them there",
    ("lora/adapters.py", "torch.randn((module.embedding_dim, r))"): "peft draws them there",
    (
        "transfer/streams.py",
        "torch.as_tensor(DeviceBytes(source, source.data_ptr(), source.numel()))",
    ): "where the address is; a default device is switched off around it",
}
"""Calls that follow the default device, and why."""


def test_tensors_are_made_on_a_device_that_is_named() -> None:
    names = {constructor.__name__ for constructor in _device_constructors()}
    found = set()
    for path in PACKAGE.rglob("*.py"):
        file = path.relative_to(PACKAGE)
        if file.parts[0] in OWN_PROCESS:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            module, name = ast.unparse(node.func.value), node.func.attr
            named = any(keyword.arg in ("device", None) for keyword in node.keywords)
            if module == "torch" and name in names and not named:
                found.add((str(file), ast.unparse(node)))
    assert found == AS_OTHERS.keys()
