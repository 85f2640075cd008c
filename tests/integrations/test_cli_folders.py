"""``tiermem generate`` and ``tiermem train --checkpoint`` beside resident transformers and peft."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiermem
from tiermem import cli
from tiermem.cli import adapting, checkpoints, finetune, folders, generate
from tiermem.cli.bound import bound_of, streamed_nbytes
from tiermem.cli.folders import open_folder
from tiermem.cli.generation import Sampling, write_on
from tiermem.cli.model import ByteGPT, Shape
from tiermem.cli.needs import Sizes, least_budgets, sizes_of
from tiermem.cli.tokens import ByteTokens, TextStream
from tiermem.runtime.metrics import machine_profile

transformers: Any = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

WORDS = "the weights of a model stream from their files while it writes text".split()


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv(machine_profile.VARIABLE, str(Path("no such profile").absolute()))


def llama(folder: Path, vocabulary: int) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.5,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("words")
    vocabulary = {word: number for number, word in enumerate(["?", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    llama(folder, len(vocabulary))
    return folder


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model over bytes, without a tokenizer."""
    folder = tmp_path_factory.mktemp("bare")
    llama(folder, 256)
    return folder


@pytest.fixture(scope="module")
def byte_gpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``tiermem train --save`` leaves, as far as generating looks at it."""
    folder = tmp_path_factory.mktemp("byte")
    shape = Shape(layers=4, width=32, heads=4, context=16)
    torch.manual_seed(0)
    model = ByteGPT(shape)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(10)
    save_file(model.state_dict(), folder / "model.safetensors")
    save_file({"moment": torch.zeros(3)}, folder / "optimizer.safetensors")
    settings = {"shape": {"layers": 4, "width": 32, "heads": 4, "context": 16}}
    manifest = {"format": "tiermem", "extra": {"settings": settings}}
    (folder / "tiermem.json").write_text(json.dumps(manifest))
    return folder


def write(folder: Path, *more: str) -> int:
    line = ["generate", str(folder), "--device", "cpu", "--dram", "8MiB", *more]
    return cli.main(line if "--hbm" in more else [*line, "--hbm", "400KiB"])


def test_text_is_that_of_greedy_generate(words: Path, capfd: Any) -> None:
    prompt = "the model writes"
    assert write(words, "--prompt", prompt, "--max-new-tokens", "20") == 0
    out, err = capfd.readouterr()
    tokenizer = transformers.AutoTokenizer.from_pretrained(words)
    plain = transformers.AutoModelForCausalLM.from_pretrained(words)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    made = plain.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0)
    whole, before = (tokenizer.decode(each) for each in (made[0], ids[0]))
    assert len(set(made[0, 3:].tolist())) > 3  # it is no loop of one word
    assert out == whole.removeprefix(before) + "\n"
    assert err.startswith("looking at")
    assert "layer 4/4" in err and "tokens/s; bound" in err and "of HBM" in err


def test_tokens_are_bytes_where_there_are_256(bare: Path) -> None:
    folder = open_folder(str(bare))
    plain = transformers.AutoModelForCausalLM.from_pretrained(bare)
    ids = folder.tokens.encode("mémoire")
    assert ids == list("mémoire".encode())
    for temperature in (0.0, 1.5):
        expected: list[int] = []
        found: list[int] = []
        sampling = Sampling(16, temperature, seed=4)
        write_on(plain, ids, "cpu", sampling, expected.append)
        folder = open_folder(str(bare))
        with tiermem.TierManager("cpu", hbm="400KiB", dram="8MiB") as tier:
            model = tiermem.load_checkpoint(folder.model, folder.path, tier=tier)
            write_on(model, ids, "cpu", sampling, found.append)
            tier.close(discard=True)
        assert found == expected and len(found) == 16


def test_a_byte_gpt_goes_on_beyond_its_context(byte_gpt: Path, capfd: Any) -> None:
    budgets = ["--hbm", "100KiB", "--max-new-tokens", "24"]
    assert write(byte_gpt, "--prompt", "def f(", *budgets) == 0
    out, err = capfd.readouterr()
    plain = ByteGPT(Shape(4, 32, 4, 16))
    plain.load_state_dict(load_file(byte_gpt / "model.safetensors"))
    tokens = list(b"def f(")
    for _ in range(24):
        with torch.no_grad():
            tokens.append(int(plain(torch.tensor([tokens[-16:]]))[0, -1].argmax()))
    assert len(set(tokens)) > 8
    assert out == bytes(tokens[6:]).decode("utf-8", "replace") + "\n"
    assert "0 B for keys and values" in err
    assert write(byte_gpt, "--prompt", "x" * 17, *budgets) == 2
    assert "17 tokens are more than the model's 16 positions" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--prompt", "the " * 65], "65 tokens and 8 new ones are more than the model's 64"),
        (["--prompt", "the " * 60], "--max-new-tokens 4 at most"),
        (["--prompt", ""], "--prompt is no token"),
        (["--prompt", "the", "--hbm", "8KiB"], "does not hold the blocks of weights"),
        (["--prompt", "the", "--hbm", "900TB"], "is for weights; keys, values and activations"),
        (["--prompt", "the", "--temperature", "-1"], "--temperature must be"),
        (["--prompt", "the", "--max-new-tokens", "0"], "--max-new-tokens must be"),
        (["--prompt", "the " * 65, "--hbm", "12XB"], "--hbm"),  # before what it is for
    ],
)
def test_what_is_refused_before_loading(
    words: Path, more: list[str], said: str, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tiermem.loading.load.load_made", lambda *_, **__: pytest.fail("it was loaded")
    )
    assert write(words, "--max-new-tokens", "8", *more) == 2
    out, err = capfd.readouterr()
    assert said in err and not out


def test_a_device_without_room_for_keys_and_values(words: Path, monkeypatch: Any) -> None:
    folder = open_folder(str(words))
    least = least_budgets(folder.model, device="cpu", hbm=4096, nvme=True).least_hbm
    arguments = generate_options()
    monkeypatch.setattr(generate, "free_nbytes", lambda _: least + 100)
    assert generate.pick_hbm(arguments, folder.model, "cpu", 100) == least
    with pytest.raises(tiermem.CapacityError, match="keys, values and activations take 101 B"):
        generate.pick_hbm(arguments, folder.model, "cpu", 101)


def generate_options() -> Any:
    import argparse

    parser = argparse.ArgumentParser()
    generate.add_arguments(parser)
    return parser.parse_args(["x", "--prompt", "x"])


def test_folders_that_are_none(
    tmp_path: Path, bare: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(said: str) -> None:
        assert write(tmp_path, "--prompt", "x") == 2
        assert said in (err := capfd.readouterr().err)
        assert err.count("\n") == 2  # one of them is that it is looked at

    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    refused("neither config.json")
    (tmp_path / "tiermem.json").write_text("{}")
    refused("not of the model of tiermem train")
    (tmp_path / "tiermem.json").write_text("[" * 100_000)
    refused("tiermem.json: maximum recursion depth")
    (tmp_path / "tiermem.json").write_text("{}")
    save_file(ByteGPT(Shape(1, 8, 2, 4)).state_dict(), tmp_path / "model.safetensors")
    refused("does not say how many heads")
    (tmp_path / "config.json").write_text((bare / "config.json").read_text().replace("256", "200"))
    refused("has no tokenizer, and the model has 200 tokens")
    (tmp_path / "tokenizer.json").write_text("{")
    refused("its tokenizer cannot be used")
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text("{}")
    refused("its tokenizer cannot be used")  # transformers has several lines to say
    monkeypatch.setattr(folders.os, "access", lambda *_: False)
    refused("this user may not read it; change its permissions")
    assert write(tmp_path / ("x" * 300), "--prompt", "x") == 2  # longer than a name may be
    assert "no such folder" in capfd.readouterr().err


def test_what_the_files_have_too_much_is_said(bare: Path, tmp_path: Path, capfd: Any) -> None:
    """As ``from_pretrained`` warns of it."""
    shutil.copytree(bare, tmp_path, dirs_exist_ok=True)
    stored = load_file(tmp_path / "model.safetensors") | {"of_another": torch.zeros(2)}
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    assert write(tmp_path, "--prompt", "x", "--max-new-tokens", "2") == 0
    assert "none of the model's and were left ('of_another')" in capfd.readouterr().err


def test_text_is_not_written_with_weights_that_are_missing(
    bare: Path, tmp_path: Path, capfd: Any
) -> None:
    """They would be drawn at random."""
    shutil.copytree(bare, tmp_path, dirs_exist_ok=True)
    stored = load_file(tmp_path / "model.safetensors")
    name = next(each for each in stored if "layers.1" in each or "h.1." in each)
    del stored[name]
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    assert write(tmp_path, "--prompt", "x", "--max-new-tokens", "2") == 2
    out, err = capfd.readouterr()
    assert f"are missing: '{name}'; load_checkpoint in Python would draw" in err and not out


def test_text_of_a_folder_of_adapters_is_pefts(words: Path, tmp_path: Path, capfd: Any) -> None:
    """Its base is looked for where its configuration says; a base beside them counts first."""
    peft: Any = pytest.importorskip("peft")
    plain = transformers.AutoModelForCausalLM.from_pretrained(words)
    torch.manual_seed(1)
    how = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    plain = peft.get_peft_model(plain, how).eval()
    plain.peft_config["default"].base_model_name_or_path = str(words)
    plain.save_pretrained(tmp_path / "adapters")
    shutil.copytree(tmp_path / "adapters", tmp_path / "both")
    shutil.copytree(words, tmp_path / "both", dirs_exist_ok=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(words)
    ids = tokenizer("the model writes", return_tensors="pt")["input_ids"]
    made = plain.generate(input_ids=ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
    whole, before = (tokenizer.decode(each) for each in (made[0], ids[0]))
    for folder in ("adapters", "both"):
        line = ["--prompt", "the model writes", "--max-new-tokens", "12", "--hbm", "600KiB"]
        assert write(tmp_path / folder, *line) == 0
        assert capfd.readouterr().out == whole.removeprefix(before) + "\n"
    settings = tmp_path / "adapters" / "adapter_config.json"
    said = json.loads(settings.read_text())
    assert cli.main(["train", "--checkpoint", str(settings.parent), "--lora", "r=4"]) == 2
    assert f"give --checkpoint {words}" in capfd.readouterr().err
    settings.write_text(json.dumps({**said, "base_model_name_or_path": "someone/no such"}))
    assert write(tmp_path / "adapters", "--prompt", "x") == 2
    assert "has adapters on 'someone/no such'" in capfd.readouterr().err


def test_what_is_said_without_transformers(bare: Path, capfd: Any, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert write(bare, "--prompt", "x") == 2
    assert "install it with pip install transformers\n" in capfd.readouterr().err


# -- forecasts ---------------------------------------------------------------


def test_keys_and_values_are_what_the_cache_holds(words: Path) -> None:
    plain = transformers.AutoModelForCausalLM.from_pretrained(words)
    with torch.no_grad():
        cache = plain(torch.ones(1, 10, dtype=torch.int64), use_cache=True).past_key_values
    held = [
        tensor.numel() * tensor.element_size()
        for layer in cache.layers
        for tensor in (layer.keys, layer.values)
    ]
    assert sizes_of(plain).cache_nbytes(10) == sum(held) * 5 // 4  # and one of four layers anew


def test_a_window_bounds_the_cache() -> None:
    sizes = Sizes(2, 8, 16, 1, 4, (None, 3), 10, None, 2)
    assert sizes.cache_nbytes(10) == 2 * 4 * 2 * (10 + 3 + 10)


def test_text_comes_when_characters_are_whole() -> None:
    stream = TextStream(ByteTokens(), list(b"ab"))
    parts = [stream.add(byte) for byte in "é→x".encode()]
    assert parts == ["", "é", "", "", "→", "x"]
    assert stream.add(0xE2) == "" and stream.end() == "\ufffd"


def test_the_bound_is_the_slower_of_link_and_disk(words: Path) -> None:
    arguments = generate_options()
    arguments.link_gbps, arguments.read_gbps = "2", "1"
    links = {
        "nvme->hbm": tiermem.LinkStats(moves=1, nbytes=1000),
        "dram->hbm": tiermem.LinkStats(moves=1, nbytes=9000),
    }
    stats = tiermem.Stats(links=links, budget={"hbm": 200, "dram": 300})
    for weights, tokens, expected in (
        (800, 1, 1e9 / 300),  # 600 over the link and 300 from the disk take as long
        (650, 1, 2e9 / 450),  # 150 from the disk
        (1200, 1, 1e9 / 700),
        (99999, 10, 1e9 / 500),  # experts: what did move counts, 1,000 and 100 a token
    ):
        bound = bound_of(arguments, weights, stats, tokens, 1.0)
        assert bound.tokens_per_second == pytest.approx(expected), weights
    assert bound_of(arguments, 200, stats, 1, 1.0).tokens_per_second is None
    folder = open_folder(str(words))
    every = sum(p.numel() * 4 for p in folder.model.parameters())
    embedding = folder.model.get_parameter("model.embed_tokens.weight").numel() * 4
    assert streamed_nbytes(folder.model) == every - embedding


# -- adapters ------------------------------------------------------------------


def adapt(folder: Path, out: Path, *more: str, context: Sequence[str] = ("--context", "12")) -> int:
    text = out.parent / "text"
    text.write_text(" ".join(WORDS * 40))
    line = ["train", "--checkpoint", str(folder), "--device", "cpu", "--data", str(text)]
    line += ["--dram", "8MiB", "--out", str(out), "--batch", "2", "--json"]
    line += ["--steps", "3", "--accumulate", "2", *context]
    return cli.main([*line, *more])


@pytest.mark.parametrize("clip", ["0", "0.5"])
def test_losses_and_adapters_are_those_of_resident_peft(
    words: Path, tmp_path: Path, capfd: Any, clip: str
) -> None:
    peft: Any = pytest.importorskip("peft")
    out = tmp_path / "adapters"
    lora = ["--lora", "r=4,alpha=8,target_modules=q_proj+v_proj", "--hbm", "720KiB", "--lr", "0.01"]
    assert adapt(words, out, *lora, "--clip", clip) == 0
    found = json.loads(capfd.readouterr().out)
    plain = transformers.AutoModelForCausalLM.from_pretrained(words)
    assert found["hbm"] < sum(p.numel() * 4 for p in plain.parameters())  # weights did stream
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    torch.manual_seed(0)
    plain = peft.get_peft_model(plain, config)
    trained = [param for param in plain.parameters() if param.requires_grad]
    folder = open_folder(str(words))
    plan = adapting.Plan(2, 2, 12, 3, 0.01, float(clip), 0, "cpu")
    expected: list[float] = []
    adapting.train(
        plain.train(),
        torch.optim.AdamW(trained, lr=0.01),
        lambda norm: torch.nn.utils.clip_grad_norm_(trained, norm),
        adapting.corpus_of([str(tmp_path / "text")], folder.tokens),
        plan,
        lambda _, loss: expected.append(loss),
    )
    assert found["losses"] == expected and len(set(expected)) == 3
    loaded = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(words), out
    )
    own = dict(loaded.named_parameters())
    for name, param in plain.named_parameters():
        if "lora_" in name:
            assert torch.equal(own[name], param), name


def test_a_run_of_adapters_goes_on(words: Path, tmp_path: Path, capfd: Any) -> None:
    """Stopped after two steps of three; other budgets afterwards, the same losses and files."""
    lora = ["--lora", "r=4,target_modules=q_proj+v_proj", "--lr", "0.01"]
    assert adapt(words, tmp_path / "whole", *lora, "--hbm", "720KiB") == 0
    expected = json.loads(capfd.readouterr().out)["losses"]
    saved = [*lora, "--save", str(tmp_path / "run"), "--save-every", "1"]
    with pytest.MonkeyPatch.context() as patch:
        after = checkpoints.Checkpoints.after

        def stopped(self: Any, step: int, *more: Any) -> None:
            after(self, step, *more)
            if step == 2:
                raise KeyboardInterrupt

        patch.setattr(checkpoints.Checkpoints, "after", stopped)
        adapt(words, tmp_path / "first", *saved, "--hbm", "720KiB")
    capfd.readouterr()
    assert adapt(words, tmp_path / "first", *saved, "--resume", "--hbm", "1MiB") == 0
    assert json.loads(capfd.readouterr().out)["losses"] == expected
    whole, own = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("whole", "first")
    )
    assert whole.keys() == own.keys()
    assert all(torch.equal(own[name], value) for name, value in whole.items())
    assert adapt(words, tmp_path / "first", *saved, "--resume", "--lr", "0.5") == 2
    assert "is of a run with lr 0.01" in capfd.readouterr().err


def text_of(folder: Path, prompt: str, capfd: Any) -> str:
    capfd.readouterr()
    status = write(folder, "--prompt", prompt, "--max-new-tokens", "12")
    out, err = capfd.readouterr()
    assert status == 0, err
    return out


def greedy(model: Any, ids: list[int]) -> list[int]:
    sampling, made = Sampling(12), list[int]()
    write_on(model.eval(), ids, "cpu", sampling, made.append)
    return made


def test_a_saved_run_on_a_byte_gpt_writes_text(byte_gpt: Path, tmp_path: Path, capfd: Any) -> None:
    """From the folder alone, as the base with the adapters does, and as no base without them."""
    base, run, out = (tmp_path / name for name in ("base", "run", "adapters"))
    shutil.copytree(byte_gpt, base)
    lora = ["--lora", "r=4,dropout=0.5,bias=lora_only", "--lr", "0.3", "--hbm", "600KiB"]
    assert adapt(base, out, *lora, "--save", str(run)) == 0
    shutil.rmtree(base)
    plain = ByteGPT(Shape(4, 32, 4, 16))
    plain.load_state_dict(load_file(byte_gpt / "model.safetensors"))
    without = greedy(plain, list(b"def f("))
    tiermem.load_adapters(plain, out)
    expected = greedy(plain, list(b"def f("))
    assert expected != without
    assert text_of(run, "def f(", capfd) == bytes(expected).decode("utf-8", "replace") + "\n"
    assert adapt(run, tmp_path / "more", *lora) == 2
    assert "has an adapter already" in capfd.readouterr().err


@pytest.mark.parametrize("base", ["words", "bare"])
def test_a_saved_run_on_a_folder_of_transformers_writes_text(
    base: str, tmp_path: Path, capfd: Any, request: Any
) -> None:
    """With the tokenizer of its base, or one that was copied beside it."""
    folder, run, out = tmp_path / "base", tmp_path / "run", tmp_path / "adapters"
    shutil.copytree(request.getfixturevalue(base), folder)
    lora = ["--lora", "r=4,alpha=32,rslora=true", "--lr", "0.1", "--hbm", "1MiB"]
    assert adapt(folder, out, *lora, "--save", str(run)) == 0
    opened = open_folder(str(folder))
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = opened.tokens.encode("the model writes")
    without = greedy(plain, ids)
    tiermem.load_adapters(plain, out)
    expected = greedy(plain, ids)
    assert expected != without
    text = TextStream(opened.tokens, ids)
    whole = "".join([text.add(each) for each in expected]) + text.end() + "\n"
    assert text_of(run, "the model writes", capfd) == whole
    shutil.move(folder, tmp_path / "moved")
    if base == "words":
        assert write(run, "--prompt", "the model writes") == 2
        said = capfd.readouterr().err
        assert f"{folder}, whose tokenizer" in said and "copy the tokenizer's files" in said
        for path in (tmp_path / "moved").glob("tokenizer*"):
            shutil.copy(path, run)
    assert text_of(run, "the model writes", capfd) == whole


def test_a_run_whose_base_an_older_release_did_not_save_is_refused(
    byte_gpt: Path, tmp_path: Path, capfd: Any, monkeypatch: Any
) -> None:
    run = tmp_path / "run"
    lora = ["--lora", "r=4", "--hbm", "500KiB", "--save", str(run)]
    with monkeypatch.context() as patch:
        patch.setattr(folders, "about", lambda _: None)
        assert adapt(byte_gpt, tmp_path / "adapters", *lora) == 0
    assert write(run, "--prompt", "x") == 2
    said = capfd.readouterr().err
    assert "holds adapters (r=4) on a byte GPT of 4 layers and width 32" in said
    assert "another --save" in said and "load_adapters" in said
    assert adapt(byte_gpt, tmp_path / "adapters", *lora, "--resume") == 0  # it still goes on


@pytest.mark.parametrize("failing", [2, 3])
def test_adapters_are_kept_where_a_save_fails(
    words: Path, tmp_path: Path, capfd: Any, monkeypatch: Any, failing: int
) -> None:
    """In the midst of the run, or at its end: those of the steps that were made."""
    lora = ["--lora", "r=4,target_modules=q_proj+v_proj", "--lr", "0.01", "--hbm", "720KiB"]
    saved = ["--save", str(tmp_path / "run"), "--save-every", "1"]
    after = checkpoints.Checkpoints.after

    def stopping(error: BaseException) -> Any:
        def stopped(self: Any, step: int, *more: Any) -> None:
            if step == failing:
                raise error
            after(self, step, *more)

        return stopped

    monkeypatch.setattr(checkpoints.Checkpoints, "after", stopping(KeyboardInterrupt()))
    assert adapt(words, tmp_path / "whole", *lora, *saved) == cli.INTERRUPTED
    full = stopping(tiermem.CapacityError("the disk is full"))
    monkeypatch.setattr(checkpoints.Checkpoints, "after", full)
    assert adapt(words, tmp_path / "kept", *lora, *saved) == 2
    assert "error: the disk is full" in capfd.readouterr().err
    whole, kept = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("whole", "kept")
    )
    assert all(torch.equal(kept[name], value) for name, value in whole.items())


def test_adapters_on_a_byte_gpt_in_parts(byte_gpt: Path, tmp_path: Path, capfd: Any) -> None:
    out = tmp_path / "adapters"
    lora = ["--lora", "r=2,target_modules=qkv+out", "--hbm", "500KiB"]
    assert adapt(byte_gpt, out, *lora, "--loss-chunks", "2") == 0
    losses = json.loads(capfd.readouterr().out)["losses"]
    assert len(losses) == 3
    assert len(load_file(out / "adapter_model.safetensors")) == 4 * 4


def test_adapters_on_a_byte_gpt_need_no_more_than_a_rank(
    byte_gpt: Path, tmp_path: Path, capfd: Any
) -> None:
    """They are on its linear layers, and the context is what it has positions for."""
    out = tmp_path / "adapters"
    assert adapt(byte_gpt, out, "--lora", "r=2", "--hbm", "500KiB", context=()) == 0
    found = json.loads(capfd.readouterr().out)
    assert len(load_file(out / "adapter_model.safetensors")) == 4 * 4 * 2
    given = ["--lora", "r=2,target_modules=qkv+out+up+down", "--hbm", "500KiB"]
    assert adapt(byte_gpt, tmp_path / "given", *given, context=["--context", "16"]) == 0
    assert json.loads(capfd.readouterr().out)["losses"] == found["losses"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--lora", "r=4", "--hbm", "200KiB"], "is a cap on the whole process: activations of 2"),
        (["--lora", "r=4", "--context", "65"], "--context 65 is more than the model's 64"),
        (["--lora", "r=4", "--layers", "2"], "--layers is about the model that tiermem train"),
        (["--lora", "r=4", "--context", "1"], "--context must be at least 2"),
        (["--lora", "rank=4"], "'rank=4' is no option=value"),
        (["--lora", "r=many"], "r cannot be 'many'"),
        (["--lora", "r=0"], "r=0 is not a whole number"),
        ([], "--checkpoint needs --lora"),
    ],
)
def test_what_fine_tuning_refuses(
    words: Path, tmp_path: Path, more: list[str], said: str, capfd: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(tiermem, "load_checkpoint", lambda *_: pytest.fail("it was loaded"))
    assert adapt(words, tmp_path / "adapters", *more) == 2
    assert said in capfd.readouterr().err
    assert not (tmp_path / "adapters").exists()


@pytest.mark.parametrize("options", [["--lora", "r=8"], ["--checkpoint", "x", "--lora", "r=0"]])
def test_options_are_checked_before_anything_is_looked_at(options: list[str], capfd: Any) -> None:
    assert cli.main(["train", *options]) == 2
    out, err = capfd.readouterr()
    assert not out and err.count("\n") == 1


@pytest.mark.parametrize("option", ["--out", "--save"])
def test_adapters_that_could_not_be_kept_are_not_trained(
    words: Path, tmp_path: Path, option: str, capfd: Any, monkeypatch: Any
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(adapting, "train", lambda *_: pytest.fail("they were trained"))
    more = ["--lora", "r=4", "--hbm", "1MiB", option, str(tmp_path / "file")]
    assert adapt(words, tmp_path / "adapters", *more) == 2
    assert str(tmp_path / "file") in capfd.readouterr().err


def test_threads_of_fine_tuning(
    words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(adapting, "train", lambda *_: seen.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    lora = ["--lora", "r=4", "--hbm", "1MiB"]
    assert adapt(words, tmp_path / "adapters", *lora, "--threads", str(before + 1)) == 0
    assert adapt(words, tmp_path / "adapters", *lora) == 0
    assert seen == [before + 1, before] and torch.get_num_threads() == before


def test_options_of_adapters() -> None:
    assert finetune._READ.keys() <= {each.name for each in fields(tiermem.Lora)}
    found = finetune.parse_lora(
        "r=2, alpha=3.5,target_modules=all-linear,rslora=true,layers_to_transform=0+2"
    )
    assert found == tiermem.Lora(
        r=2, alpha=3.5, target_modules="all-linear", rslora=True, layers_to_transform=[0, 2]
    )
