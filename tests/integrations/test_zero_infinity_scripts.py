"""Names that scripts use of DeepSpeed, and their calling forms: they work, or say why not."""

from __future__ import annotations

import logging
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support_deepspeed_files import PlainRun, stage_3, stages_1_and_2
from support_integrations import batches, decoder
from support_zero_infinity import batch, build, config, loss_of, losses_of, plain, started, train

import tiermem
import tiermem.integrations.zero_infinity as deepspeed

WORK = """
import deepspeed.comm as dist
from deepspeed import DeepSpeedEngine, OnDevice, comm, get_accelerator, init_distributed, zero
from deepspeed.accelerator.real_accelerator import get_accelerator
from deepspeed.checkpoint.constants import OPTIMIZER_STATE_DICT, PARAM_SHAPES
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from deepspeed.git_version_info import version
from deepspeed.moe.utils import is_moe_param
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.adam.cpu_adam import DeepSpeedCPUAdam
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.runtime.dataloader import RepeatingLoader
from deepspeed.runtime.engine import DeepSpeedEngine, ADAM_OPTIMIZER, LAMB_OPTIMIZER
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.lr_schedules import WarmupDecayLR, VALID_LR_SCHEDULES
from deepspeed.runtime.utils import move_to_device, see_memory_usage, set_random_seed
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.runtime.zero.partition_parameters import GatheredParameters, Init, ZeroParamStatus
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_live
from deepspeed.utils import OnDevice, RepeatingLoader, log_dist, logger, safe_get_full_fp32_param
from deepspeed.utils import safe_get_full_grad, set_z3_leaf_modules
from deepspeed.utils import groups
from deepspeed.utils.groups import _get_data_parallel_world_size
from deepspeed.utils.logging import log_dist, logger
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from deepspeed.zero import Init
"""
REFUSE = [
    "deepspeed.InferenceEngine(model)",
    "deepspeed.PipelineModule(layers=[])",
    "deepspeed.pipe.LayerSpec(torch.nn.Linear)",
    "deepspeed.runtime.pipe.topology.PipeModelDataParallelTopology(1, 1, 1)",
    "deepspeed.moe.layer.MoE(8)",
    "deepspeed.ops.op_builder.CPUAdamBuilder().load()",
    "deepspeed.ops.sparse_attention.FixedSparsityConfig()",
    "deepspeed.profiling.flops_profiler.get_model_profile(model)",
    "deepspeed.runtime.sequence_parallel.ulysses_sp.UlyssesSPAttentionHF()",
    "deepspeed.compression.compress.init_compression(model)",
]


@pytest.fixture
def installed() -> Iterator[Any]:
    """DeepSpeed's name stands for this package, for a while."""
    before = {k: v for k, v in sys.modules.items() if k.split(".")[0] == "deepspeed"}
    finders = list(sys.meta_path)
    for name in before:
        del sys.modules[name]
    deepspeed.install()
    yield deepspeed
    for name in [k for k in sys.modules if k.split(".")[0] == "deepspeed"]:
        del sys.modules[name]
    sys.modules.update(before)
    sys.meta_path[:] = finders


@pytest.mark.usefixtures("installed")
def test_names_that_scripts_import() -> None:
    for line in WORK.strip().splitlines():
        exec(line, {})


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "line",
    [
        "import deepspeed.engine",
        "from deepspeed.compile.passes import zero3_compile",
        "from deepspeed.runtime.utils import PartitionedTensor",
        "from deepspeed.launcher.runner import main",
    ],
)
def test_what_is_not_there_is_named_at_import(line: str) -> None:
    first = ".".join(line.split()[1].split(".")[:2])  # the outermost that is not there
    with pytest.raises(ImportError, match=rf"{first} is not there|{line.split()[-1]}"):
        exec(line, {})


@pytest.mark.parametrize("call", REFUSE)
def test_what_cannot_work_says_why_when_it_is_used(call: str) -> None:
    scope = {"deepspeed": deepspeed, "model": None, "torch": torch}
    with pytest.raises(tiermem.ConfigError, match=r"is not there in zero_infinity: \w+"):
        eval(call, scope)
    assert not isinstance(build(), deepspeed.pipe.PipelineModule)


def test_unknown_names_of_the_package_are_refused_by_name() -> None:
    for place in (deepspeed, deepspeed.runtime, deepspeed.utils):
        with pytest.raises(AttributeError, match="nonsense"):
            _ = place.nonsense


def test_positional_arguments_and_a_parsers() -> None:
    parser = deepspeed.add_config_arguments(ArgumentParser())
    args = parser.parse_args(["--deepspeed"])
    args.local_rank = -1
    model = build()
    params = filter(lambda p: p.requires_grad, model.parameters())
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        args, model, None, params, None, None, 29500, None, None, None, config()
    )
    try:
        assert train(engine, 2) == plain(2)
        assert (optimizer, loader, scheduler) == (engine.optimizer, None, None)
        assert args.local_rank == engine.local_rank == 0
        assert isinstance(engine, deepspeed.runtime.engine.DeepSpeedEngine)
    finally:
        engine.destroy()


def test_several_engines_of_which_some_only_infer() -> None:
    with started(config()) as engine:
        evaluated, *_ = deepspeed.initialize(
            model=build(),
            config={"train_micro_batch_size_per_gpu": 1, "tiermem": {"device": "cpu"}},
        )
        with torch.no_grad():
            assert torch.equal(evaluated(batch(0)), engine(batch(0)))
        assert evaluated.optimizer is None
        evaluated.destroy()


def test_batches_of_an_iterator() -> None:
    """``train_batch`` is the loop by hand."""
    settings = config(
        train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=2,
        tiermem={"device": "cpu", "hbm": "4MiB", "dram": "8MiB"},
    )  # fmt: skip
    with started(settings, decoder(2)) as engine:
        by_hand = []
        for tokens in batches(4):
            loss = engine(tokens)
            engine.backward(loss)
            engine.step()
            by_hand.append(loss.detach())
    with started(settings, decoder(2)) as engine:
        data = deepspeed.utils.RepeatingLoader(list(batches(4)))
        found = [engine.train_batch(data_iter=data) for _ in range(2)]
        assert found == [torch.stack(by_hand[i : i + 2]).mean() for i in (0, 2)]
        assert engine.global_steps == 2
        before = engine.module_state_dict()
        loss = engine.eval_batch(data)
        assert loss.item() > 0
        assert engine.training
        assert all(torch.equal(v, before[k]) for k, v in engine.module_state_dict().items())
        with pytest.raises(tiermem.StepError, match="there is no training_data"):
            engine.train_batch()


def test_what_loops_ask_an_engine() -> None:
    section = {"stage": 2, "overlap_comm": True, "offload_optimizer": {"device": "cpu"}}
    settings = config(zero_optimization=section, steps_per_print=7, fp16={"enabled": True})
    settings["tiermem"] = {"device": "cpu"}
    with started(settings) as engine:
        assert engine.get_batch_info() == (2, 2, 1)
        engine.set_train_micro_batch_size(4)
        assert engine.get_batch_info() == (4, 4, 1)
        engine.set_train_batch_size(8)
        assert engine.gradient_accumulation_steps() == 2
        assert engine.zero_optimization_stage() == 2
        assert engine.zero_optimization_partition_gradients()
        assert not engine.zero_optimization_partition_weights()
        assert engine.zero_offload_optimizer()
        assert not engine.zero_offload_param()
        assert engine.zero_overlap_comm()
        assert engine.steps_per_print() == 7
        assert engine.wall_clock_breakdown() is False
        assert engine.optimizer_name() == "AdamW"
        assert engine.optimizer_params()["lr"] == 1e-2
        assert engine.fp16_enabled()
        assert engine.dynamic_loss_scale()
        assert engine.optimizer.cur_scale == engine.loss_scale() == 2.0**16
        assert engine.get_type() == [None]
        assert not engine.monitor.enabled
        engine.monitor.write_events([("loss", 1.0, 1)])
        engine.tput_timer.update_epoch_count()
        engine.offload_states()
        engine.reload_states(non_blocking=True)
        engine.allreduce_gradients()
        assert engine._zero3_consolidated_16bit_state_dict().keys() == build().state_dict().keys()
        with pytest.raises(tiermem.StepError, match=r"before initialize\(\)"):
            engine.compile()


def test_whole_weights_of_one_parameter() -> None:
    with started(config(bf16={"enabled": True}, gradient_clipping=0.0)) as engine:
        param = engine.module[0].up.weight
        engine.backward(loss_of(engine, batch(0, torch.bfloat16)))
        gradient = deepspeed.utils.safe_get_full_grad(param)
        engine.step()
        master = deepspeed.utils.safe_get_full_fp32_param(param)
        moment = deepspeed.utils.safe_get_full_optimizer_state(param, "exp_avg")
        assert master.dtype is gradient.dtype is torch.float32
        assert torch.equal(master.bfloat16(), engine.module_state_dict()["0.up.weight"])
        assert not torch.equal(master, master.bfloat16().float())
        assert torch.allclose(moment, gradient * 0.1)
        deepspeed.utils.safe_set_full_fp32_param(param, torch.full_like(master, 3.0))
        assert set(deepspeed.utils.safe_get_full_fp32_param(param).flatten().tolist()) == {3.0}


def test_whole_gradients_are_not_rounded_to_the_dtype_of_the_weights() -> None:
    wide = config(
        bf16={"enabled": True},
        data_types={"grad_accum_dtype": "fp32"},
        gradient_accumulation_steps=2,
    )
    with started(wide) as engine:
        losses_of(engine, range(1), torch.bfloat16)
        engine.backward(loss_of(engine, batch(1, torch.bfloat16)))
        for param in engine.module.parameters():
            gradient = deepspeed.utils.safe_get_full_grad(param)
            assert torch.equal(gradient, param.grad)
        assert not torch.equal(gradient, gradient.bfloat16().float())
        frozen = torch.nn.Parameter(torch.zeros(1))
        assert deepspeed.utils.safe_get_full_grad(frozen) is None  # of no engine
        frozen.grad = torch.ones(1)
        assert deepspeed.utils.safe_get_full_grad(frozen) is not frozen.grad


@pytest.mark.parametrize("how", ["stage 2", "stage 3", "own"])
def test_float32_weights_out_of_a_checkpoint(how: str, tmp_path: Path) -> None:
    helper = deepspeed.utils.zero_to_fp32
    if how == "own":
        with started(config(bf16={"enabled": True})) as engine:
            train(engine, 2, torch.bfloat16)
            engine.save_checkpoint(tmp_path)
            names = [name for name, _ in engine.module.named_parameters()]
            masters = engine.optimizer.state_dict()["master"]
            expected = {names[n]: value for n, value in masters.items()}
    else:
        run = PlainRun(frozen=how == "stage 3")
        run.steps(2)
        write = stage_3 if how == "stage 3" else stages_1_and_2
        write(run, tmp_path / "tag", 2)
        (tmp_path / "latest").write_text("tag")
        expected = {n: m.detach() for n, m in run.masters.items()}
        frozen = {n: p.float() for n, p in run.params.items() if not p.requires_grad}
        alone = helper.get_fp32_state_dict_from_zero_checkpoint(tmp_path, None, True)
        assert not frozen.keys() & alone.keys()
        expected |= frozen
    found = helper.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert {value.dtype for value in found.values()} == {torch.float32}
    model = helper.load_state_dict_from_zero_checkpoint(build(), tmp_path)
    assert all(torch.equal(p, expected[name]) for name, p in model.named_parameters())
    helper.convert_zero_checkpoint_to_fp32_state_dict(
        tmp_path, tmp_path / "out", max_shard_size="20KB", safe_serialization=True
    )
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()
    helper.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "one", None)
    build().load_state_dict(torch.load(tmp_path / "one" / "pytorch_model.bin"), strict=False)
    with pytest.raises(tiermem.CheckpointError, match="give tag="):
        helper.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "out")


def test_helpers_around_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    utils = deepspeed.runtime.utils
    with caplog.at_level(logging.INFO, "tiermem.integrations.zero_infinity"):
        utils.see_memory_usage("not forced")
        utils.see_memory_usage("after the step", force=True)
        deepspeed.log_dist("said", ranks=[0])
        deepspeed.log_dist("not said", ranks=[1])
    text = caplog.text
    assert "after the step | host memory" in text
    assert "said" in text
    assert "not said" not in text
    assert "not forced" not in text
    utils.set_random_seed(3)
    first = torch.rand(2)
    utils.set_random_seed(3)
    assert torch.equal(first, torch.rand(2))
    moved = utils.move_to_device({"a": [torch.ones(1)], "b": 2}, "cpu")
    assert moved["b"] == 2
    with deepspeed.OnDevice(torch.float16, "meta"):
        made = torch.nn.Linear(2, 2)
    assert made.weight.is_meta
    assert made.weight.dtype is torch.float16
    accelerator = deepspeed.get_accelerator()
    assert accelerator.total_memory() > accelerator.available_memory() > 0
    assert accelerator.memory_allocated() >= 0
    assert torch.bfloat16 in accelerator.supported_dtypes()
    tracker = deepspeed.checkpointing.get_cuda_rng_tracker()
    with tracker.fork():
        assert tracker.get_states() == {}
    assert deepspeed.comm.get_rank() == deepspeed.comm.get_local_rank() == 0
    assert deepspeed.comm.get_world_size() == 1
    deepspeed.comm.barrier()
    assert deepspeed.utils.groups._get_data_parallel_world_size() == 1
    value = torch.arange(4)[:2]
    (copied,) = deepspeed.checkpoint.utils.clone_tensors_for_torch_save({"a": value}).values()
    assert copied.untyped_storage().nbytes() == 16


def test_a_configurations_values_by_name() -> None:
    found = deepspeed.runtime.config.DeepSpeedConfig(config(gradient_accumulation_steps=3))
    assert found.train_batch_size == 6
    assert found.zero_stage == 3
    assert found.fp16_enabled is False
    with pytest.raises(AttributeError, match="nonsense"):
        _ = found.nonsense


def test_arguments_that_name_a_path(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 2, "tiermem": {"device": "cpu"}}')
    engine = deepspeed.initialize(args=Namespace(deepspeed_config=path), model=build())[0]
    assert engine.train_batch_size() == 2
    engine.destroy()
