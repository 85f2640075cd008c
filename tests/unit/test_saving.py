"""tier.save and tier.load: a run goes on bit for bit, wherever it is loaded."""

from __future__ import annotations

import copy
import errno
import gc
import json
import os
import random
import threading
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from support_nn import assert_same, seed
from support_process import child, open_files
from support_saving import Net, Run, Setup, backward
from torch import nn

import tiermem
from tiermem.core import parts
from tiermem.saving import later, layout, save
from tiermem.saving.files import FileOperations

BF16 = {"dtype": torch.bfloat16, "options": {"master_dtype": torch.float32}}
SGD = {"cls": torch.optim.SGD, "settings": {"lr": 0.05, "momentum": 0.9}}
AMSGRAD = {"settings": {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}}
ADAGRAD = {"cls": torch.optim.Adagrad, "settings": {"lr": 0.05}}

PAIRS = {
    "same": ({}, {}),
    "more memory": ({}, {"hbm": 1 << 20}),
    "other blocks": (BF16, {**BF16, "blocks": ["layers.0.up", "head"]}),
    "to files": (BF16, {**BF16, "nvme": ".", "dram": 600 << 10, "policy": "nvme"}),
    "from files": ({**AMSGRAD, "nvme": ".", "dram": 600 << 10, "policy": "nvme"}, AMSGRAD),
    "in HBM": ({**BF16, "policy": "hbm", "hbm": 1 << 20}, BF16),
    "momentum": (SGD, {**SGD, "blocks": ["layers"]}),
    "state from the beginning": (ADAGRAD, ADAGRAD),
    "to parts": ({"hbm": 1 << 20}, {"hbm": 96 << 10}),
    "from parts": ({"hbm": 96 << 10}, {"hbm": 1 << 20}),
    "to other parts": ({**BF16, "hbm": 96 << 10}, {**BF16, "hbm": 72 << 10}),
    "fused": ({"settings": {"lr": 0.01, "fused": True}},) * 2,
    "tensor rate": ({"settings": {"lr": torch.tensor(0.01)}},) * 2,
}


def folder(options: dict, path) -> dict:
    """Puts swap files into the test's folder."""
    return {**options, "nvme": str(path)} if options.get("nvme") else options


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.one_in(2)
def test_a_run_goes_on_elsewhere(tmp_path, name, monkeypatch) -> None:
    if "parts" in name:
        for setting, value in (("_ALIGNED", 64), ("_LEAST", 0), ("_MOST", 0.125)):
            monkeypatch.setattr(parts, setting, value)
    first, second = (Setup(**folder(options, tmp_path)) for options in PAIRS[name])
    with Run(first) as run:
        for _ in range(2):
            run.step()
        run.save(tmp_path / "run")
        expected = [run.step() for _ in range(3)]
        state = run.state()
        parted = run.in_parts
    with Run(second, number=5) as other:
        assert (parted or other.in_parts) == ("parts" in name)
        other.step()
        other.load(tmp_path / "run")
        assert [other.step() for _ in range(3)] == expected
        assert_same(dict(other.state()), dict(state), name)


GIVEN = {
    "data": lambda buffer, value: setattr(buffer, "data", value),
    "set_": lambda buffer, value: buffer.set_(value),
}


@pytest.mark.parametrize("how", GIVEN)
def test_a_small_buffer_that_was_given_other_memory(tmp_path, how) -> None:
    """It stays in HBM, in a block that does not have its values any more."""
    path = tmp_path / "run"

    def wrapped() -> tuple[tiermem.TierManager, nn.Module]:
        tier = tiermem.TierManager(device="cpu", hbm="1MiB", dram="1MiB")
        return tier, tier.wrap(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))

    tier, model = wrapped()
    with tier:
        model(torch.randn(4, 8))
        GIVEN[how](model[1].running_mean, torch.arange(8.0))
        GIVEN[how](model[1].num_batches_tracked, torch.tensor(7))
        state = model.state_dict()
        tier.save(path)
        model[1].running_mean.zero_()
        tier.load(path)
        assert_same(dict(model.state_dict()), dict(state), "into the same")
    other, model = wrapped()
    with other:
        other.load(path)
        assert_same(dict(model.state_dict()), dict(state), "into another")


OVERLAPS = [{}, {"overlap": "forward"}, {"overlap": "backward"}]


@pytest.mark.parametrize(("first", "second"), list(pairwise([*OVERLAPS, OVERLAPS[0]])))
def test_steps_that_are_put_off_are_made_first(tmp_path, first, second) -> None:
    with Run(Setup(options=first)) as run:
        for _ in range(4):
            run.step()
        run.save(tmp_path / "run")
        expected = [run.step() for _ in range(3)]
    with Run(Setup(options=second), number=5) as other:
        other.load(tmp_path / "run")
        assert [other.step() for _ in range(3)] == expected


@pytest.mark.parametrize("options", [{}, {"overlap": "backward"}])
@pytest.mark.parametrize("clipped", [False, True])
def test_gradients_that_no_step_has_used(tmp_path, options, clipped) -> None:
    if options and clipped:
        pytest.skip("clipping is refused there")

    def rest(run: Run) -> list[float]:
        return [run.end(backward(run.model)), run.step()]

    with Run(Setup(options=options, dtype=torch.bfloat16)) as run:
        if options:
            run.optimizer.accumulate(2)
            for _ in range(3):
                run.optimizer.zero_grad()
                backward(run.model)
                run.end(backward(run.model))
        run.optimizer.zero_grad()
        backward(run.model)
        if clipped:
            run.optimizer.clip_grad_norm_(0.1)
        run.save(tmp_path / "run")
        expected = [run.end(backward(run.model))]
        state = run.state()
    with Run(Setup(options=options, dtype=torch.bfloat16), number=5) as other:
        if options:
            other.optimizer.accumulate(2)
        backward(other.model)
        other.load(tmp_path / "run")
        assert [other.end(backward(other.model))] == expected
        if not options:  # else a step inside backward may have used up what another one has not
            assert_same(dict(other.state()), dict(state), "state")


def test_weights_written_by_others_are_followed(tmp_path) -> None:
    with Run(Setup(**BF16)) as run:
        run.step()
        with run.tier.materialize(run.model.extra), torch.no_grad():
            run.model.extra.weight[0] = 0.5
        run.save(tmp_path / "run")
        expected = [run.step() for _ in range(2)]
    with Run(Setup(**BF16), number=2) as other:
        other.load(tmp_path / "run")
        assert [other.step() for _ in range(2)] == expected


def test_saving_changes_nothing(tmp_path) -> None:
    found = []
    for saves in (False, True):
        with Run(Setup(**BF16)) as run:
            losses = []
            for number in range(4):
                losses.append(run.step())
                if saves:
                    run.save(tmp_path / f"{number % 2}")
            found.append((losses, dict(run.state())))
    assert_same(*found, "with saves")


def test_others_read_the_weights(tmp_path) -> None:
    with Run(Setup()) as run:
        run.step()
        run.save(tmp_path / "run")
        expected = {k: v for k, v in run.model.state_dict().items() if k != "head.weight"}
    found = load_file(tmp_path / "run" / "model.safetensors")
    assert_same(dict(sorted(found.items())), dict(sorted(expected.items())), "load_file")
    plain = Net()
    load_model(plain, str(tmp_path / "run" / "model.safetensors"))
    assert_same(plain.state_dict()["head.weight"], expected["embed.weight"], "load_model")
    with safe_open(tmp_path / "run" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}


def test_torchs_reader_reads_the_weights(tmp_path) -> None:
    hf = pytest.importorskip("torch.distributed.checkpoint.hf_storage")
    reader = getattr(hf, "HuggingFaceStorageReader", None)
    if reader is None:
        pytest.skip("this torch has none")
    from torch.distributed import checkpoint

    with Run(Setup()) as run:
        run.save(tmp_path / "run")
        expected = {k: v for k, v in run.model.state_dict().items() if k != "head.weight"}
    found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    with pytest.warns(UserWarning, match="single process"):
        checkpoint.load(found, storage_reader=reader(str(tmp_path / "run")), no_dist=True)
    assert_same(found, expected, "reader")


def test_transformers_reads_a_model_of_its_own(tmp_path, monkeypatch) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    seed(0)
    model = transformers.LlamaForCausalLM(config)
    ids = torch.arange(6)[None]
    expected = model(ids).logits
    monkeypatch.setattr(layout, "SHARD_NBYTES", 20_000)
    with tiermem.TierManager(device="cpu", hbm="1MiB", dram="4MiB") as tier:
        tier.wrap(model)
        tier.save(tmp_path / "run")
    names = os.listdir(tmp_path / "run")
    assert {"config.json", "generation_config.json", "model.safetensors.index.json"} <= set(names)
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    assert type(found) is type(model)
    assert_same(found(ids).logits, expected, "logits")


def test_many_files(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(layout, "SHARD_NBYTES", 4000)
    with Run(Setup()) as run:
        run.step()
        run.save(tmp_path / "run")
        expected = run.step()
        names = {k for k in run.model.state_dict() if k != "head.weight"}
    index = json.loads((tmp_path / "run" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == names
    files = [n for n in os.listdir(tmp_path / "run") if n.startswith("model-")]
    assert set(index["weight_map"].values()) == set(files) and len(files) > 2
    with Run(Setup(), number=3) as other:
        other.load(tmp_path / "run")
        assert other.step() == expected


def test_several_models_and_optimizers(tmp_path) -> None:
    def run(number: int):
        seed(number)
        tier = tiermem.TierManager(device="cpu", hbm="1MiB", dram="8MiB")
        models = [tier.wrap(nn.Linear(4, 4)), tier.wrap(nn.Linear(4, 2))]
        outside = nn.Parameter(torch.randn(2))
        params = [*models[0].parameters(), outside]
        first = tier.optimizer(params, torch.optim.AdamW, lr=0.1)
        second = tier.optimizer(models[1], torch.optim.SGD, lr=0.1, momentum=0.5)
        return tier, models, outside, (first, second)

    def step(models, outside, optimizers) -> float:
        loss = (models[1](models[0](torch.randn(3, 4))) * outside).square().mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss.item()

    tier, *rest = run(0)
    with tier:
        step(*rest)
        tier.save(tmp_path / "run")
        expected = [step(*rest) for _ in range(2)]
    assert {"model-0", "model-1"} < set(os.listdir(tmp_path / "run"))
    tier, *rest = run(1)
    with tier:
        tier.load(tmp_path / "run")
        assert [step(*rest) for _ in range(2)] == expected
        tier.save(tmp_path / "run")
    assert os.listdir(tmp_path) == ["run"]


class Counting(nn.Module):
    """Keeps something of its own in a state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.count = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_a_name_that_safetensors_keep_for_themselves(tmp_path) -> None:
    """It was saved, and could not be loaded."""
    model = nn.Module()
    model.register_parameter("__metadata__", nn.Parameter(torch.ones(3)))
    with tiermem.TierManager(device="cpu", hbm="1MiB", dram="1MiB") as tier:
        tier.wrap(model)
        with pytest.raises(tiermem.CheckpointError, match="'__metadata__' is the name of a tensor"):
            tier.save(tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_what_modules_keep_themselves(tmp_path) -> None:
    model = Counting()
    with tiermem.TierManager(device="cpu", hbm="1MiB", dram="1MiB") as tier:
        tier.wrap(model)
        model.count = 7
        tier.save(tmp_path / "run")
        model.count = 0
        tier.load(tmp_path / "run")
    assert model.count == 7


def test_gradients_of_a_module_that_was_taken_out_are_left(tmp_path) -> None:
    """Like its weights, which no name of the model leads to any longer."""
    seed(3)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)])
    with tiermem.TierManager(device="cpu", hbm="1MiB", dram="1MiB") as tier:
        tier.wrap(model)
        model(torch.randn(2, 16)).sum().backward()
        removed, expected = model[2], [p.grad.clone() for p in model[:2].parameters()]
        del model[2]
        tier.save(tmp_path / "run")
        model.zero_grad()
        tier.load(tmp_path / "run")
        assert all(map(torch.equal, [p.grad for p in model.parameters()], expected))
    assert removed.weight.shape == (16, 16)


def test_extra_comes_back_as_it_was(tmp_path) -> None:
    extra = {
        "plain": [1, -0.0, 2.5, True, None, "text", {}, [], 10**30],
        "floats": (float("inf"), float("-inf"), 0.1),
        "$dollar": {"$tensor": "x"},
        "numbers": {1: "a", None: "b", (2, "x"): torch.zeros(0)},
        "tensors": [torch.arange(4).view(2, 2).t(), torch.tensor(1 + 2j), torch.tensor(True)],
        "rng": torch.get_rng_state(),
        "python": random.getstate(),
    }
    model = nn.Linear(2, 2)
    with tiermem.TierManager(device="cpu", hbm="1MiB", dram="1MiB") as tier:
        tier.wrap(model)
        tier.save(tmp_path / "run", extra)
        found = tier.load(tmp_path / "run")
        tier.save(tmp_path / "run", {"nan": float("nan")})
        assert str(tier.load(tmp_path / "run")["nan"]) == "nan"
    assert_same(found, extra, "extra")
    assert str(found["plain"][1]) == "-0.0" and found["numbers"].keys() == extra["numbers"].keys()


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [1, {1, 2}]}, r"extra\['a'\]\[1\]"),
        ({"a": np.float64(1)}, r"extra\['a'\] is of the class numpy.float64"),
        ([torch.zeros(2).to_sparse()], r"extra\[0\]"),
        ([torch.zeros(2, device="meta")], "meta"),
        (print, "extra is of the class"),
        ({torch.zeros(1): 1}, "a key of extra is a tensor"),
        ({"a": [-(2**20_000)]}, r"extra\['a'\]\[0\] is a number of 20001 bits"),
        ({(2**20_000, 1): 1}, r"a key of extra\[0\] is a number of 20001 bits"),
    ],
)
def test_what_cannot_be_kept_is_named(tmp_path, value, path) -> None:
    with tiermem.TierManager(device="cpu", hbm="1MiB", dram="1MiB") as tier:
        tier.wrap(nn.Linear(2, 2))
        with pytest.raises(tiermem.CheckpointError, match=path):
            tier.save(tmp_path / "run", value)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b", b"a"])
def test_paths_that_no_file_can_have_are_named(tmp_path, name) -> None:
    path = os.path.join(os.fsencode(tmp_path) if isinstance(name, bytes) else tmp_path, name)
    model = nn.Sequential(nn.Linear(2, 2))
    tiermem.add_adapters(model, tiermem.Lora(r=1, target_modules=["0"]))
    with tiermem.TierManager(device="cpu", hbm="1MiB", dram="1MiB") as tier:
        tier.wrap(model)
        for call in (
            tier.save,
            tier.load,
            lambda path: tier.save(path, wait=False),
            lambda path: tiermem.save_adapters(model, path),
            lambda path: tiermem.load_adapters(model, path),
        ):
            with pytest.raises(tiermem.CheckpointError, match=r"path=.*a"):
                call(path)
        tier.save(tmp_path / "run", {"most": 10**4299, "least": -(10**4299)})
        assert tier.load(tmp_path / "run") == {"most": 10**4299, "least": -(10**4299)}
    assert os.listdir(tmp_path) == ["run"]


def test_states_of_generators_of_other_kinds(tmp_path) -> None:
    before = np.random.get_bit_generator()
    with tiermem.TierManager(device="cpu", hbm="1MiB", dram="1MiB") as tier:
        tier.wrap(nn.Linear(2, 2))
        try:
            np.random.set_bit_generator(np.random.PCG64(5))
            tier.save(tmp_path / "run")
            expected = np.random.random(3).tolist()
            tier.load(tmp_path / "run")
            assert np.random.random(3).tolist() == expected
        finally:
            np.random.set_bit_generator(before)


# -- what is refused ---------------------------------------------------------


def test_inside_a_forward_or_backward(tmp_path) -> None:
    model = nn.Linear(2, 2)
    with tiermem.TierManager(device="cpu", hbm="1MiB", dram="1MiB") as tier:
        tier.wrap(model)
        for register in (model.register_forward_hook, model.weight.register_hook):
            hook = register(lambda *_: tier.save(tmp_path / "run"))
            with pytest.raises(tiermem.CheckpointError, match="inside a forward or backward"):
                model(torch.ones(2)).sum().backward()
            hook.remove()
        tier.save(tmp_path / "run")


def test_without_a_model(tmp_path) -> None:
    with tiermem.TierManager(device="cpu", hbm="1MiB", dram="1MiB") as tier:
        with pytest.raises(tiermem.CheckpointError, match="no model is wrapped"):
            tier.save(tmp_path / "run")


def test_a_step_that_backward_has_begun_is_refused(tmp_path) -> None:
    with Run(Setup(options={"overlap": "backward"})) as run:
        for _ in range(3):
            run.step()
        run.optimizer.zero_grad()
        backward(run.model)
        assert run.optimizer.stepped_in_backward
        with pytest.raises(tiermem.StepError, match=r"tier.save\(\)"):
            run.save(tmp_path / "run")
        run.optimizer.step()


@pytest.mark.parametrize(
    ("setup", "match"),
    [
        (Setup(cls=torch.optim.Adam), "class=torch.optim.adamw.AdamW"),
        (Setup(options={"master_dtype": torch.float64}, hbm=1 << 20), "master_dtype=None"),
        (Setup(options={"grad_dtype": torch.float64}, hbm=1 << 20), "grad_dtype=None"),
        (
            Setup(dtype=torch.float64, hbm=1 << 20),
            r"'embed.weight' as \(150, 24\) float32.*float64",
        ),
    ],
)
def test_another_run_is_refused(tmp_path, setup, match) -> None:
    with Run(Setup()) as run:
        run.step()
        run.save(tmp_path / "run")
    with Run(setup, number=4) as other:
        other.step()
        before = dict(other.state())
        with pytest.raises(tiermem.CheckpointError, match=match):
            other.load(tmp_path / "run")
        assert_same(dict(other.state()), before, "nothing was loaded")


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: nn.Sequential(nn.Linear(3, 3)), "lacks '0.bias' and 0 more"),
        (lambda: nn.Sequential(nn.Linear(3, 3, bias=False), nn.ReLU()), None),
        (lambda: nn.Sequential(nn.ReLU()), "has '0.weight' and 0 more that"),
        (lambda: nn.Sequential(nn.Linear(3, 4, bias=False)), r"as \(3, 3\) float32.*\(4, 3\)"),
    ],
)
def test_another_model_is_refused(tmp_path, build, match) -> None:
    with tiermem.TierManager(device="cpu", hbm="1MiB", dram="1MiB") as tier:
        tier.wrap(nn.Sequential(nn.Linear(3, 3, bias=False)))
        tier.save(tmp_path / "run")
    with tiermem.TierManager(device="cpu", hbm="1MiB", dram="1MiB") as tier:
        tier.wrap(build())
        if match is None:
            tier.load(tmp_path / "run")
            return
        with pytest.raises(tiermem.CheckpointError, match=match):
            tier.load(tmp_path / "run")


def test_optimizers_must_be_made_first(tmp_path) -> None:
    with Run(Setup()) as run:
        run.save(tmp_path / "run")
    with tiermem.TierManager(device="cpu", hbm="1MiB", dram="1MiB") as tier:
        tier.wrap(Net())
        with pytest.raises(tiermem.CheckpointError, match="has 1 optimizers, and 0 are open"):
            tier.load(tmp_path / "run")


def test_an_optimizer_whose_model_was_unwrapped_is_not_in_it(tmp_path) -> None:
    """It was not closed, and could not be made again when the checkpoint is loaded."""
    with tiermem.TierManager(device="cpu", hbm="1MiB", dram="1MiB") as tier:
        first = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        optimizers = []
        for model in (first, first, nn.Linear(8, 8)):
            tier.wrap(model)
            optimizer = tier.optimizer(model, torch.optim.AdamW, lr=0.1)
            model(torch.ones(2, 8)).square().sum().backward()
            optimizer.step()
            optimizers.append(optimizer)
            if len(optimizers) == 1:
                tier.unwrap(model)
        tier.save(tmp_path / "run")
        before = copy.deepcopy([optimizer.state_dict() for optimizer in optimizers[1:]])
        tier.load(tmp_path / "run")
        assert_same([o.state_dict() for o in optimizers[1:]], before, "after a load")
    with tiermem.TierManager(device="cpu", hbm="1MiB", dram="1MiB") as tier:
        models = [nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 8)]
        made = [tier.optimizer(tier.wrap(m), torch.optim.AdamW, lr=0.1) for m in models]
        tier.load(tmp_path / "run")
        assert_same([o.state_dict() for o in made], before, "in another manager")


# -- while training goes on --------------------------------------------------


LATER = {
    "room for all": {},
    "half precision": BF16,
    "no room": {"dram": 176 << 10, "hbm": 72 << 10},
    "some room": {"dram": 196 << 10, "hbm": 72 << 10},
    "in HBM": {"policy": "hbm", "hbm": 1 << 20},
    "kept in HBM": {"hbm": 1 << 20},
    "files": {"nvme": ".", "dram": 700 << 10, "policy": "nvme"},
    "both": {**BF16, "nvme": ".", "dram": 600 << 10},
    "put off": {"options": {"overlap": "forward"}},
    "in backward": {"options": {"overlap": "backward"}},
    "on the host": {"options": {"where": "host"}},
    "on both": {"options": {"where": "both", "host_share": 0.5, "overlap": "forward"}},
}


SHORT = ("no room", "some room", "files", "both")
"""Where free DRAM may be too little; how much of it reads ahead take is a matter of time."""


AHEAD = ("some room", "files", "on the host", "put off")
"""Where blocks are copied ahead of the steps, as ever; else who overwrites them copies them."""


@pytest.mark.parametrize(
    ("name", "ahead"), [*((name, False) for name in LATER), *((name, True) for name in AHEAD)]
)
@pytest.mark.one_in(2)
def test_the_state_of_the_call_is_saved(tmp_path, name, ahead, monkeypatch) -> None:
    """The thread is let go block by block, by a random schedule, while steps are made."""
    setup = Setup(**folder(LATER[name], tmp_path))
    draws, pause = random.Random(name), threading.Semaphore(0)
    save_one = later.SaveHandle._save

    def paused(self, entry) -> None:
        pause.acquire()
        save_one(self, entry)

    copies: list[bool] = []
    copy = later.SaveHandle._copy

    def noted(self, entry, whole) -> bool:
        copies.append(copy(self, entry, whole))
        return copies[-1]

    monkeypatch.setattr(later.SaveHandle, "_save", paused)
    monkeypatch.setattr(later.SaveHandle, "_copy", noted)
    if not ahead:
        monkeypatch.setattr(later.SaveHandle, "_make_room", lambda self: None)
        monkeypatch.setattr(later.SaveHandle, "_copy_ahead", lambda self: None)
    with Run(setup) as run:
        for _ in range(3):
            run.step()
        run.optimizer.zero_grad()
        state = run.state()
        handle = run.save(tmp_path / "later", wait=False)
        assert isinstance(handle, tiermem.SaveHandle) and not handle.done()
        losses = []
        for _ in range(3):
            losses.append(run.step())
            pause.release(draws.randrange(1, 4))
        pause.release(10_000)
        handle.result()
        assert handle.done()
        assert run.tier._manager.parts.homes.keeper is None
        assert all(copies) or name in SHORT, f"{copies.count(False)} were not copied"
        assert ahead or (copies and (not all(copies) or name != "no room"))
        after = dict(run.state())
    with Run(setup, number=5) as other:
        other.load(tmp_path / "later")
        assert_same(dict(other.state()), dict(state), "the state of the call")
        if setup.options.get("where") is None:
            assert [other.step() for _ in range(3)] == losses
            assert_same(dict(other.state()), after, "what comes after it")


def held_back() -> tuple[threading.Event, Any]:
    """Returns what lets a save go on, and the step of it that waits for that."""
    begins, save_one = threading.Event(), later.SaveHandle._save

    def slow(self, entry) -> None:
        begins.wait()
        save_one(self, entry)

    return begins, slow


def test_steps_wait_for_no_copy_where_there_is_room(tmp_path, monkeypatch) -> None:
    """What is in DRAM has been copied before it is stepped; nothing has been written yet."""
    begins, slow = held_back()

    def refused(self, entry, whole) -> bool:
        raise AssertionError(f"a step copies block {entry.block.name!r}")

    setup = Setup(dram=64 << 20, options={"overlap": False})  # steps ahead keep DRAM for themselves
    with Run(setup) as run:
        run.step()
        run.optimizer.zero_grad()
        state = dict(run.state())
        monkeypatch.setattr(later.SaveHandle, "_save", slow)
        handle = run.save(tmp_path / "run", wait=False)
        try:
            entries = [entry for entry in handle._entries.values() if entry.home is not None]
            assert len(entries) > 1
            copied = later._State.COPIED
            with handle._changed:
                assert handle._changed.wait_for(lambda: all(e.state is copied for e in entries), 60)
            monkeypatch.setattr(later.SaveHandle, "_copy", refused)
            run.step()
        finally:
            begins.set()
        monkeypatch.undo()
        handle.result()
        used = run.tier.stats().used["dram"]
    with Run(setup, number=5) as other:
        other.load(tmp_path / "run")
        assert_same(dict(other.state()), state, "the state of the call")
        other.step()
        assert other.tier.stats().used["dram"] == used  # the copies are given back


class Failing(FileOperations):
    """Syncs nothing that a thread writes."""

    def sync(self, fd: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise OSError(errno.EIO, "broken")
        super().sync(fd)


def test_a_save_that_fails_is_told_of_once(tmp_path, monkeypatch) -> None:
    with Run(Setup()) as run:
        monkeypatch.setattr(save, "FILES", Failing())
        handle = run.save(tmp_path / "run", wait=False)
        monkeypatch.undo()
        run.step()
        with pytest.raises(tiermem.StorageError, match="could not be written"):
            handle.result()
        run.save(tmp_path / "run")
        monkeypatch.setattr(save, "FILES", Failing())
        run.save(tmp_path / "run", wait=False)
        monkeypatch.undo()
        with pytest.raises(tiermem.StorageError, match="could not be written"):
            run.save(tmp_path / "run")
        run.save(tmp_path / "run")
        run.load(tmp_path / "run")
        run.step()
    assert os.listdir(tmp_path) == ["run"]


def test_closing_tells_of_a_save_that_failed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(save, "FILES", Failing())
    run = Run(Setup())
    with pytest.raises(tiermem.StorageError, match="could not be written"), run.tier:
        run.save(tmp_path / "run", wait=False)
    assert run.tier.closed
    assert type(run.model.embed.weight) is torch.nn.Parameter
    run.tier.close()  # it is told once
    run = Run(Setup())
    with pytest.raises(ZeroDivisionError) as raised, run.tier:
        run.save(tmp_path / "run", wait=False)
        raise ZeroDivisionError
    assert "could not be written" in "".join(raised.value.__notes__)


def test_a_save_that_failed_is_told_of_when_its_manager_goes(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(save, "FILES", Failing())
    run = Run(Setup())
    run.save(tmp_path / "run", wait=False).wait()
    with pytest.warns(RuntimeWarning, match="was not saved: .*could not be written"):
        del run
        gc.collect()
    assert os.listdir(tmp_path) == []


def test_the_end_of_the_interpreter_waits_for_a_save(tmp_path, monkeypatch) -> None:
    """Soon after, thread pools take no work any more."""
    waited, save_one, begin = threading.Event(), later.SaveHandle._save, later.SaveHandle.begin

    class Awaited(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waited.set()
            return super().wait(timeout)

    def slow(self, entry) -> None:
        waited.wait(1.0)
        save_one(self, entry)

    def watched(self, plan) -> None:
        self._ended = Awaited()
        begin(self, plan)

    def end_without_closing() -> None:
        handle = Run(Setup()).save(tmp_path / "run", wait=False)
        threading._shutdown()  # as at the end of a program
        handle.result()

    monkeypatch.setattr(later.SaveHandle, "_save", slow)
    monkeypatch.setattr(later.SaveHandle, "begin", watched)
    assert child(end_without_closing) == 0
    with Run(Setup(), number=2) as other:
        other.load(tmp_path / "run")


def test_closing_waits_for_a_save(tmp_path) -> None:
    with Run(Setup()) as run:
        handle = run.save(tmp_path / "run", wait=False)
        expected = dict(run.state())
    assert handle.done()
    handle.result()
    with Run(Setup(), number=2) as other:
        other.load(tmp_path / "run")
        assert_same(dict(other.state()), expected, "state")


def test_a_forked_child_does_not_wait_for_its_parents_save(tmp_path, monkeypatch) -> None:
    begins, slow = held_back()

    def refused() -> None:
        assert not [target for _, target in open_files() if str(tmp_path) in target]
        with pytest.raises(tiermem.ClosedError, match="parent process's"):
            handle.wait()
        with pytest.raises(tiermem.ClosedError, match="parent process's"):
            handle.result()

    with Run(Setup()) as run:
        run.step()
        run.optimizer.zero_grad()
        monkeypatch.setattr(later.SaveHandle, "_save", slow)
        handle = run.save(tmp_path / "run", wait=False)
        try:
            assert not handle.done()
            assert child(refused) == 0
        finally:
            begins.set()
        handle.result()
