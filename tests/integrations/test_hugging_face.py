"""Trainer, accelerate and peft over tiers: the resident run's bits, from unchanged scripts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import support_two_trainers as two_trainers
import torch
from support_scripts import run_at_once
from support_trainers import Sentences, arguments, llama
from torch import Tensor

import tiermem
from tiermem.integrations.hugging_face import TrainerTiers

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

pytestmark = pytest.mark.filterwarnings("ignore")  # those libraries' own

BUDGETS: dict[str, Any] = {"device": "cpu", "hbm": "400KiB", "dram": "16MiB"}
STEPS = 4


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")


def trainer_of(model: Any, args: Any, **more: Any) -> Any:
    data = Sentences()
    return transformers.Trainer(model, args, train_dataset=data, eval_dataset=data, **more)


def seen(trainer: Any) -> list[tuple[Any, ...]]:
    """Returns what the trainer logged, but for times."""
    keys = ("loss", "grad_norm", "learning_rate", "eval_loss")
    return [tuple(row.get(key) for key in keys) for row in trainer.state.log_history][:-1]


def resident(folder: Path, **settings: Any) -> tuple[list[Any], dict[str, Tensor]]:
    trainer = trainer_of(llama(), arguments(folder, **settings))
    trainer.train()
    return seen(trainer), trainer.model.state_dict()


def same(weights: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return weights.keys() == others.keys() and all(
        torch.equal(weights[name], others[name].cpu()) for name in weights
    )


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5},
        {"bf16": True, "gradient_checkpointing": True},
        {"eval_strategy": "steps", "eval_steps": 2, "lr_scheduler_type": "cosine"},
        {"optim": "sgd", "warmup_steps": 2},
        {"optim": "adafactor", "label_smoothing_factor": 0.1, "max_grad_norm": 0.0},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {
            "eval_strategy": "steps",
            "eval_steps": 1,
            "save_strategy": "steps",
            "save_steps": 1,
            "load_best_model_at_end": True,
        },
    ],
    ids=lambda settings: "-".join(settings) or "plain",
)
@pytest.mark.one_in(2)
def test_a_trainer_gives_the_resident_runs_bits(tmp_path: Path, settings: dict[str, Any]) -> None:
    expected = resident(tmp_path, **settings)
    args, model = arguments(tmp_path, **settings), llama()
    with TrainerTiers(**BUDGETS) as tier:
        trainer = trainer_of(model, args, optimizers=tier.optimizers(model, args))
        trainer.train()
        assert seen(trainer) == expected[0]
        assert same(expected[1], model.state_dict())
        assert tier.stats().links["dram->hbm"].nbytes > 0


def test_saving_and_resuming(tmp_path: Path) -> None:
    expected = resident(tmp_path / "resident")
    settings = {"save_strategy": "steps", "save_steps": 2}
    for last in (2, STEPS):
        args, model = arguments(tmp_path / "tiered", max_steps=STEPS, **settings), llama()
        with TrainerTiers(**BUDGETS) as tier:
            trainer = trainer_of(model, args, optimizers=tier.optimizers(model, args))
            if last == 2:
                trainer.add_callback(_StopAt(2))
            trainer.train(resume_from_checkpoint=last != 2)
            losses, weights = seen(trainer), model.state_dict()
    assert losses == expected[0]
    assert same(expected[1], weights)


def test_resuming_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """Four steps an epoch; the first run ends after the sixth, the second goes on from there."""
    settings = {"max_steps": 10, "per_device_train_batch_size": 8, "optim": "adamw_torch_fused"}
    expected = resident(tmp_path / "resident", **settings)
    args = arguments(tmp_path, **settings, save_strategy="steps", save_steps=3)
    model = llama()
    with TrainerTiers(**BUDGETS) as tier:
        trainer = trainer_of(model, args, optimizers=tier.optimizers(model, args))
        trainer.add_callback(_StopAt(6))
        trainer.train()
        trainer.remove_callback(_StopAt)
        trainer.train(resume_from_checkpoint=True)
        assert [row["loss"] for row in trainer.state.log_history if "loss" in row] == [
            row[0] for row in expected[0]
        ]
        assert same(expected[1], model.state_dict())


def generated(folder: Path, tier: TrainerTiers | None) -> tuple[list[Any], Any]:
    """Trains an encoder and decoder, and predicts by generating."""
    transformers.set_seed(0)
    config = transformers.T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=3,
        num_heads=4,
        decoder_start_token_id=0,
    )
    model = transformers.T5ForConditionalGeneration(config)
    args = transformers.Seq2SeqTrainingArguments(
        str(folder),
        max_steps=3,
        per_device_train_batch_size=2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        predict_with_generate=True,
        generation_max_length=6,
        save_strategy="no",
    )
    data = Sentences()
    more = {} if tier is None else {"optimizers": tier.optimizers(model, args)}
    trainer = transformers.Seq2SeqTrainer(model, args, train_dataset=data, **more)
    trainer.train()
    return seen(trainer), trainer.predict(data).predictions.tolist()


def test_predicting_by_generating(tmp_path: Path) -> None:
    expected = generated(tmp_path, None)
    with TrainerTiers(**{**BUDGETS, "hbm": "300KiB"}) as tier:
        assert generated(tmp_path, tier) == expected


class _StopAt(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


def test_what_is_saved_is_an_ordinary_model(tmp_path: Path) -> None:
    args, model = arguments(tmp_path), llama()
    with TrainerTiers(**BUDGETS) as tier:
        trainer = trainer_of(model, args, optimizers=tier.optimizers(model, args))
        trainer.train()
        trainer.save_model(str(tmp_path / "model"))
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model")
    assert same(weights, found.state_dict())


def test_masters_are_not_brought_up_all_at_once(tmp_path: Path) -> None:
    args, model = arguments(tmp_path), llama().bfloat16()
    with TrainerTiers(**BUDGETS) as tier:
        optimizers = tier.optimizers(model, args, master_dtype=torch.float32)
        taken: list[Any] = []
        optimizers[0].register_state_dict_pre_hook(taken.append)
        trainer_of(model, args, optimizers=optimizers).train()
        assert not taken


def test_a_step_moves_what_the_bare_loops_does(tmp_path: Path) -> None:
    """With the same clipping: no pass over the gradients is added, and none of them comes back."""
    steps = 8
    args, model = arguments(tmp_path, max_steps=steps), llama()
    moved: dict[str, list[int]] = {"trainer": [], "bare": []}

    class Count(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            moved["trainer"].append(nbytes_moved(tier))

    with TrainerTiers(**BUDGETS) as tier:
        optimizers = tier.optimizers(model, args)
        trainer_of(model, args, optimizers=optimizers, callbacks=[Count()]).train()
    model, data = llama(), Sentences()
    with TrainerTiers(**BUDGETS) as tier:
        optimizer, _ = tier.optimizers(model, args)
        for step in range(steps):
            rows = data[2 * step], data[2 * step + 1]
            model(
                **{key: torch.stack([row[key] for row in rows]) for key in rows[0]}
            ).loss.backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            moved["bare"].append(nbytes_moved(tier))
    # what is learned in the first steps differs, so the schedules do by some blocks
    trainer, bare = (counts[-1] - counts[2] for counts in moved.values())
    assert trainer == pytest.approx(bare, rel=0.1)


def nbytes_moved(tier: tiermem.TierManager) -> int:
    return sum(link.nbytes for link in tier.stats().links.values())


def test_another_class_and_other_settings(tmp_path: Path) -> None:
    args, model = arguments(tmp_path), llama()
    with TrainerTiers(**BUDGETS) as tier:
        optimizer, scheduler = tier.optimizers(model, args, torch.optim.SGD, lr=0.1)
        assert scheduler is None
        assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1]
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


@pytest.mark.parametrize(
    "name, value, says",
    [
        ("deepspeed", "zero3.json", "hands the model to another system"),
        ("fsdp", "full_shard", "hands the model to another system"),
        ("n_gpu", 4, "replicate the model over 4 GPUs"),
        ("device", torch.device("cuda:1"), "trains on cuda:1 in this process"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_moves(name: str, value: Any, says: str) -> None:
    class Arguments:
        optim = "adamw_torch"

    args, model = Arguments(), llama()
    setattr(args, name, value)
    with TrainerTiers(**BUDGETS) as tier:
        with pytest.raises(tiermem.ConfigError, match=says):
            tier.optimizers(model, args)
        assert tier.residency() == []


def test_several_processes_train_as_those_with_resident_models(tmp_path: Path) -> None:
    lines = [["transformers", str(rank), "2", str(tmp_path / "store")] for rank in range(2)]
    for out in run_at_once(Path(two_trainers.__file__), lines, tmp_path, seconds=200):
        assert out.splitlines().count("equal") == len(two_trainers.HUGGING_FACE)


def test_an_optimizer_of_another_model_is_refused(tmp_path: Path) -> None:
    """A copy, say: it would learn nothing."""
    args, model = arguments(tmp_path), llama()
    with TrainerTiers(**BUDGETS) as tier:
        trainer = trainer_of(llama(), args, optimizers=tier.optimizers(model, args))
        with pytest.raises(tiermem.ConfigError, match="is not the one that its tiered optimizer"):
            trainer.train()


# -- accelerate alone ------------------------------------------------------


def accelerated(model: Any, optimizer: Any, steps: int = STEPS) -> list[float]:
    """A loop as accelerate's documentation has it."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = torch.utils.data.DataLoader(Sentences(), batch_size=2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = []
    for _, batch in zip(range(2 * steps), loader, strict=False):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_accelerate_alone() -> None:
    model = llama()
    expected = accelerated(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    model = llama()
    with tiermem.TierManager(**BUDGETS) as tier:
        tier.wrap(model)
        assert accelerated(model, tier.optimizer(model, torch.optim.AdamW, lr=1e-3)) == expected


# -- peft ------------------------------------------------------------------


def with_adapters(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config)


def fine_tuned(model: Any, optimizer: Any) -> list[float]:
    losses = []
    for index in range(3):
        batch = {key: value[None] for key, value in Sentences()[index].items()}
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_adapters_after_wrap(tmp_path: Path) -> None:
    settings = {"learning_rate": 1e-2}
    args, model = arguments(tmp_path, **settings), with_adapters(llama())
    plain = trainer_of(model, args)
    plain.train()
    base = llama()
    with TrainerTiers(**BUDGETS) as tier:
        tier.wrap(base)
        model = with_adapters(base)
        trainer = trainer_of(model, args, optimizers=tier.optimizers(model, args))
        trainer.train()
        assert seen(trainer) == seen(plain)
        assert same(plain.model.state_dict(), model.state_dict())


def test_adapters_inside_a_wrapped_model(tmp_path: Path) -> None:
    """As the model's own ``add_adapter`` puts them in: it stays the same module."""
    peft = pytest.importorskip("peft")

    def adapted(model: Any) -> Any:
        torch.manual_seed(1)
        model.add_adapter(
            peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        )
        return model

    args = arguments(tmp_path, learning_rate=1e-2)
    plain = trainer_of(adapted(llama()), args)
    plain.train()
    model = llama()
    with TrainerTiers(**{**BUDGETS, "hbm": "1MiB"}) as tier:
        tier.wrap(model, blocks=[f"model.layers.{number}" for number in range(4)])
        adapted(model)
        trainer = trainer_of(model, args, optimizers=tier.optimizers(model, args))
        names = [row.block for row in tier.residency()]  # in blocks as before
        assert any(name.endswith("layers.0") for name in names)
        assert not any(name.endswith("lm_head") for name in names)
        trainer.train()
        assert seen(trainer) == seen(plain)
        assert same(plain.model.state_dict(), model.state_dict())


@pytest.mark.parametrize("kind", ["inside", "outside"])
def test_adapters_that_come_after_the_optimizer_are_refused(kind: str, tmp_path: Path) -> None:
    """As trainers with ``peft_config=`` add them: none would be stepped."""
    peft = pytest.importorskip("peft")
    args, model = arguments(tmp_path), llama()
    with TrainerTiers(**BUDGETS) as tier:
        optimizers = tier.optimizers(model, args)
        if kind == "inside":
            adapted, names = with_adapters(model), "lora_A.default.weight' is trained, but not by"
        else:
            prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
            adapted, names = peft.get_peft_model(model, prompts), "nothing is trained by"
        with pytest.raises(tiermem.ConfigError, match=names):
            trainer_of(adapted, args, optimizers=optimizers).train()
        optimizers[0].close()
        trainer = trainer_of(adapted, args)
        trainer.optimizer, _ = tier.optimizers(trainer.model, args)
        trainer.train()
        tiered = seen(trainer), adapted.state_dict()
    plain = trainer_of(
        with_adapters(llama()) if kind == "inside" else peft.get_peft_model(llama(), prompts), args
    )
    plain.train()
    assert seen(plain) == tiered[0]
    assert same(plain.model.state_dict(), tiered[1])


@pytest.mark.parametrize("tiered", [(False, True), (True, False)])
def test_runs_with_adapters_go_on_with_tiers_and_without(
    tiered: tuple[bool, bool], tmp_path: Path
) -> None:
    """All adapters decay: the trainer has a second group without parameters, and so has ours."""
    for steps, tiers in zip((2, 4), tiered, strict=True):
        args = arguments(tmp_path, max_steps=steps, save_steps=2, save_strategy="steps")
        model = with_adapters(llama())
        resume = steps == 4
        if not tiers:
            trainer = trainer_of(model, args)
            trainer.train(resume_from_checkpoint=resume)
        else:
            with TrainerTiers(**BUDGETS) as tier:
                trainer = trainer_of(model, args, optimizers=tier.optimizers(model, args))
                trainer.train(resume_from_checkpoint=resume)
                sizes = [len(group["params"]) for group in trainer.optimizer.param_groups]
                assert len(sizes) == 2 and not sizes[1]


def test_adapters_before_wrap_merge_and_save(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    plain = with_adapters(llama())
    trained = [p for p in plain.parameters() if p.requires_grad]
    expected = fine_tuned(plain, torch.optim.AdamW(trained, lr=1e-2))
    model = with_adapters(llama())
    with tiermem.TierManager(**BUDGETS) as tier:
        tier.wrap(model)
        optimizer = tier.optimizer(
            [p for p in model.parameters() if p.requires_grad], torch.optim.AdamW, lr=1e-2
        )
        assert fine_tuned(model, optimizer) == expected
        model.save_pretrained(tmp_path)
        optimizer.close()
        tier.unwrap(model)
    again = peft.PeftModel.from_pretrained(llama(), tmp_path)
    assert same(plain.state_dict(), again.state_dict())
    merged, other = model.merge_and_unload(), plain.merge_and_unload()
    assert same(other.state_dict(), merged.state_dict())


def test_a_vocabulary_that_is_resized_inside_materialize_can_be_resized_after_unwrap() -> None:
    with tiermem.TierManager(**BUDGETS) as tier:
        model = tier.wrap(llama())
        with pytest.raises(tiermem.ParameterError, match=r"a config.*tier\.unwrap.*wrap it anew"):
            with tier.materialize(model):
                model.resize_token_embeddings(80)
        tier.unwrap(model)
        model.resize_token_embeddings(80)
        tier.wrap(model)
        tokens = torch.full((1, 4), 79)
        assert model(input_ids=tokens, labels=tokens).logits.shape == (1, 4, 80)
