"""Every option of a DeepSpeed configuration that is known here: its kind, default and effect.

The tables are what a file is read by, what ``explain`` reports from and what the page in ``docs``
is made of. An option whose ``setting`` is empty has no effect; ``effect`` then says why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import kinds as k
from .kinds import Kind

ZERO = "zero_optimization"
PARAM = f"{ZERO}.offload_param"
STATE = f"{ZERO}.offload_optimizer"


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        path: Sections and key, with dots.
        kind: What its value may be.
        default: What holds where it is left out.
        setting: The tiermem setting that it becomes, or "" for none.
        effect: What that does, or why there is none.
        test: The test that shows it, in ``tests/integrations``.
    """

    path: str
    kind: Kind
    default: Any
    setting: str
    effect: str
    test: str = ""


@dataclass(frozen=True)
class Section:
    """A part of a file that is taken as a whole, without effect.

    Attributes:
        key: At the top of the file, or with dots.
        why: Why it has no effect.
        changes: Whether training differs without it, so that it is warned about where it is on.
    """

    key: str
    why: str
    changes: bool = False


_ONE = "one process has nothing to exchange"
_OWN = "tiermem plans copies itself, from what it measures"
_BUDGET = "what may be in HBM is tiermem's budget: `hbm` of the `tiermem` section"

_BATCH = "test_zero_infinity_batches.py"
_MAP = "test_zero_infinity_mapping.py"
_ENGINE = "test_zero_infinity_engine.py"
_HALF = "test_zero_infinity_half.py"
_OPT = "test_zero_infinity_optimizers.py"
_SAVE = "test_zero_infinity_checkpoints.py"
_READ = "test_zero_infinity_reading.py"

_TOP = (
    Option(
        "train_batch_size",
        k.POSITIVE,
        None,
        "accumulation",
        "samples of a step: micro-batch × accumulation × one process",
        _BATCH,
    ),
    Option(
        "train_micro_batch_size_per_gpu",
        k.POSITIVE,
        None,
        "batch size of the loader",
        "samples of a backward; `initialize` makes a loader of `training_data` with it",
        _BATCH,
    ),
    Option(
        "gradient_accumulation_steps",
        k.POSITIVE,
        None,
        "accumulation",
        "`step()` steps after so many; `backward` divides the loss by it",
        _BATCH,
    ),
    Option(
        "managed_gradient_accumulation",
        k.BOOL,
        True,
        "accumulation",
        "false: every `step()` is a step",
        _BATCH,
    ),
    Option(
        "gradient_clipping",
        k.AMOUNT,
        1.0,
        "optimizer.clip_grad_norm_",
        "the norm of all gradients is clipped before each step; 0: not",
        _ENGINE,
    ),
    Option(
        "steps_per_print",
        k.INTERVAL,
        None,
        "logging",
        "a line in the log every so many steps",
        _ENGINE,
    ),
    Option(
        "wall_clock_breakdown",
        k.BOOL,
        False,
        "logging",
        "the time of forward, backward and step in the log; waits for the device",
        _ENGINE,
    ),
    Option(
        "dataloader_drop_last",
        k.BOOL,
        False,
        "drop_last of the loader",
        "an incomplete last batch is left out",
        _ENGINE,
    ),
    Option("dump_state", k.BOOL, False, "logging", "`explain` of the file in the log", _ENGINE),
    Option(
        "optimizer.type",
        k.TEXT,
        None,
        "class of tier.optimizer",
        "Adam and AdamW, SGD, Lamb, Lion, or any class of torch.optim; names in any case",
        _OPT,
    ),
    Option(
        "optimizer.params",
        k.MAPPING,
        None,
        "settings of the class",
        "Adam is AdamW unless `adam_w_mode` is false; weight_decay is 0 by default",
        _OPT,
    ),
    Option("optimizer.legacy_fusion", k.BOOL, False, "", "an optimizer of DeepSpeed's own"),
    Option(
        "scheduler.type",
        k.TEXT,
        None,
        "scheduler",
        "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, or torch's",
        "test_zero_infinity_schedules.py",
    ),
    Option(
        "scheduler.params",
        k.MAPPING,
        None,
        "settings of the scheduler",
        "a warm-up is logarithmic unless `warmup_type` is linear",
        "test_zero_infinity_schedules.py",
    ),
    Option(
        "data_types.grad_accum_dtype",
        k.DTYPE,
        None,
        "grad_dtype of tier.optimizer",
        "gradients are summed up and kept in it; by default in the weights' dtype",
        _HALF,
    ),
    Option(
        "data_types.param_dtype", k.DTYPE, None, "check", "must agree with fp16 and bf16", _HALF
    ),
    Option(
        "data_types.buffer_dtype",
        k.DTYPE,
        None,
        "cast of buffers",
        "floating buffers are cast; else they stay as they are",
        _HALF,
    ),
    Option(
        "torch_autocast.enabled",
        k.BOOL,
        False,
        "torch.autocast",
        "forward runs under autocast",
        _HALF,
    ),
    Option("torch_autocast.dtype", k.TEXT, "bfloat16", "torch.autocast", "its dtype", _HALF),
    Option(
        "torch_autocast.lower_precision_safe_modules",
        k.ANY,
        None,
        "",
        "torch's own list of operations holds",
    ),
    Option(
        "amp.enabled",
        k.BOOL,
        False,
        "refused if true",
        "needs NVIDIA Apex; torch_autocast does the same",
        _HALF,
    ),
)

_HALVES = (
    Option(
        "fp16.enabled",
        k.BOOL,
        False,
        "model.half(), master_dtype",
        "float16 weights, float32 masters and state; the loss is scaled",
        _HALF,
    ),
    Option("fp16.auto_cast", k.BOOL, False, "cast of inputs", "inputs are cast to float16", _HALF),
    Option("fp16.loss_scale", k.AMOUNT, 0, "loss scale", "0: dynamic", _HALF),
    Option(
        "fp16.initial_scale_power",
        k.NUMBER,
        16,
        "loss scale",
        "the first scale is 2 to this power",
        _HALF,
    ),
    Option(
        "fp16.loss_scale_window",
        k.AMOUNT,
        1000,
        "loss scale",
        "steps without an overflow after which it is doubled",
        _HALF,
    ),
    Option(
        "fp16.hysteresis",
        k.COUNT,
        2,
        "loss scale",
        "overflows before it is halved (ZeRO stages 1 to 3)",
        _HALF,
    ),
    Option(
        "fp16.consecutive_hysteresis",
        k.BOOL,
        False,
        "loss scale",
        "a step without an overflow restores the hysteresis",
        _HALF,
    ),
    Option(
        "fp16.min_loss_scale",
        k.AMOUNT,
        1,
        "loss scale",
        "never below; at it, an overflow more ends the run (ZeRO stages 1 to 3)",
        _HALF,
    ),
    Option(
        "fp16.fp16_master_weights_and_grads",
        k.BOOL,
        False,
        "refused if true",
        "float16 masters lose updates; bf16_master_weights_and_grads is there",
        _HALF,
    ),
    Option(
        "bf16.enabled",
        k.BOOL,
        False,
        "model.bfloat16(), master_dtype",
        "bfloat16 weights, float32 masters and state",
        _HALF,
    ),
    Option(
        "bf16.check_grad_overflow",
        k.BOOL,
        True,
        "step left out",
        "a step with an infinite or NaN gradient is left out and counted",
        _HALF,
    ),
    Option(
        "bf16.bf16_master_weights_and_grads",
        k.BOOL,
        False,
        "no master_dtype",
        "weights are stepped themselves; with bf16_optimizer_states only",
        _HALF,
    ),
    Option(
        "bf16.bf16_optimizer_states",
        k.BOOL,
        False,
        "dtype of the state",
        "state is bfloat16, with bf16_master_weights_and_grads only",
        _HALF,
    ),
    Option(
        "bf16.immediate_grad_update",
        k.BOOL,
        False,
        "",
        "gradients are always summed up as they come",
    ),
)

_ZERO = (
    Option(
        f"{ZERO}.stage",
        k.STAGE,
        0,
        "rules",
        "which of DeepSpeed's rules hold (hysteresis, `save_16bit_model`); one process has "
        "nothing to shard, and what is offloaded is offloaded at any stage",
        _MAP,
    ),
    Option(
        f"{PARAM}.device",
        k.DEVICE,
        "none",
        "Policy(params)",
        "home of the weights: HBM, DRAM or NVMe",
        _MAP,
    ),
    Option(
        f"{PARAM}.nvme_path",
        k.TEXT,
        None,
        "TierManager(nvme)",
        "folder of the swap file; two different ones are striped over",
        _MAP,
    ),
    Option(
        f"{PARAM}.buffer_count",
        k.COUNT,
        5,
        "TierManager(dram)",
        "with nvme: count × size in bytes of DRAM to read ahead",
        _MAP,
    ),
    Option(
        f"{PARAM}.buffer_size",
        k.ELEMENTS,
        10**8,
        "TierManager(dram)",
        "elements of a buffer, in bytes of the weights' dtype",
        _MAP,
    ),
    Option(
        f"{PARAM}.max_in_cpu",
        k.ELEMENTS,
        10**9,
        "TierManager(dram)",
        "with nvme: elements that DRAM may hold besides, no more than the model has",
        _MAP,
    ),
    Option(f"{PARAM}.pin_memory", k.BOOL, True, "", "host memory is always page-locked"),
    Option(
        f"{STATE}.device",
        k.DEVICE,
        "none",
        "Policy(master, optimizer, grads)",
        "home of masters and state: HBM, DRAM or NVMe; gradients are then in DRAM",
        _MAP,
    ),
    Option(
        f"{STATE}.nvme_path", k.TEXT, None, "TierManager(nvme)", "folder of the swap file", _MAP
    ),
    Option(
        f"{STATE}.buffer_count",
        k.COUNT,
        4,
        "TierManager(dram)",
        "with nvme: so many times sub_group_size float32 of DRAM to read ahead",
        _MAP,
    ),
    Option(
        f"{STATE}.ratio",
        k.SHARE,
        1.0,
        "host_share of tier.optimizer",
        "given: that share is stepped on the host, the rest on the device. Left out: all on "
        "the device, bit for bit as a resident loop",
        _MAP,
    ),
    Option(f"{STATE}.pin_memory", k.BOOL, True, "", "host memory is always page-locked"),
    Option(f"{STATE}.pipeline_read", k.BOOL, False, "", "reads always overlap steps"),
    Option(f"{STATE}.pipeline_write", k.BOOL, False, "", "writes always overlap steps"),
    Option(f"{STATE}.pipeline", k.BOOL, False, "", "reads and writes always overlap steps"),
    Option(f"{STATE}.fast_init", k.BOOL, False, "", "nothing is written before the first step"),
    Option(f"{STATE}.super_offload", k.BOOL, False, "", "for chips without a PCIe bus"),
    Option(
        f"{STATE}.cpuadam_cores_perc",
        k.SHARE,
        0.8,
        "",
        "a quarter of the cores is left alone where steps are made on the host",
    ),
    Option(
        f"{ZERO}.sub_group_size",
        k.ELEMENTS,
        10**9,
        "TierManager(dram)",
        "elements of a buffer of offload_optimizer with nvme",
        _MAP,
    ),
    Option(
        f"{ZERO}.stage3_prefetch_bucket_size",
        k.ELEMENTS,
        5 * 10**7,
        "TierManager(prefetch_depth)",
        "0: nothing is fetched ahead; else tiermem decides",
        _MAP,
    ),
    Option(
        f"{ZERO}.stage3_gather_16bit_weights_on_model_save",
        k.BOOL,
        False,
        "save_16bit_model",
        "at stage 3 `save_16bit_model` saves only with it",
        _SAVE,
    ),
    Option(f"{ZERO}.stage3_param_persistence_threshold", k.ELEMENTS, 10**5, "", _BUDGET),
    Option(f"{ZERO}.stage3_model_persistence_threshold", k.ELEMENTS, None, "", _BUDGET),
    Option(f"{ZERO}.stage3_max_live_parameters", k.ELEMENTS, 10**9, "", _BUDGET),
    Option(
        f"{ZERO}.stage3_max_reuse_distance",
        k.ELEMENTS,
        10**9,
        "",
        "the order of use is known: what is needed last leaves first",
    ),
    Option(
        f"{ZERO}.stage3_module_granularity_threshold",
        k.ELEMENTS,
        0,
        "",
        "small modules always move with their block",
    ),
    Option(f"{ZERO}.stage3_use_all_reduce_for_fetch_params", k.BOOL, False, "", _ONE),
    Option(f"{ZERO}.stage3_allgather_sequential", k.BOOL, False, "", _ONE),
    Option(
        f"{ZERO}.contiguous_gradients",
        k.BOOL,
        True,
        "",
        "gradients of a block always lie side by side",
    ),
    Option(f"{ZERO}.overlap_comm", k.BOOL, None, "", "copies always overlap compute"),
    Option(f"{ZERO}.round_robin_gradients", k.BOOL, False, "", _ONE),
    Option(f"{ZERO}.reduce_scatter", k.BOOL, True, "", _ONE),
    Option(f"{ZERO}.reduce_bucket_size", k.ELEMENTS, 5 * 10**8, "", _ONE),
    Option(f"{ZERO}.use_multi_rank_bucket_allreduce", k.BOOL, True, "", _ONE),
    Option(f"{ZERO}.allgather_partitions", k.BOOL, True, "", _ONE),
    Option(f"{ZERO}.allgather_bucket_size", k.ELEMENTS, 5 * 10**8, "", _ONE),
    Option(f"{ZERO}.load_from_fp32_weights", k.BOOL, True, "", "masters are always loaded"),
    Option(f"{ZERO}.elastic_checkpoint", k.BOOL, False, "", _ONE),
    Option(
        f"{ZERO}.ignore_unused_parameters",
        k.BOOL,
        True,
        "",
        "parameters without a gradient are never an error",
    ),
    Option(f"{ZERO}.legacy_stage1", k.BOOL, False, "", _ONE),
    Option(f"{ZERO}.zero_hpz_partition_size", k.COUNT, 1, "", _ONE),
    Option(f"{ZERO}.zero_quantized_weights", k.BOOL, False, "", "weights travel unchanged"),
    Option(
        f"{ZERO}.zero_quantized_nontrainable_weights", k.BOOL, False, "", "weights travel unchanged"
    ),
    Option(f"{ZERO}.zero_quantized_gradients", k.BOOL, False, "", _ONE),
    Option(f"{ZERO}.zeropp_loco_param", k.ANY, None, "", _ONE),
    Option(f"{ZERO}.mics_shard_size", k.INT, -1, "", _ONE),
    Option(f"{ZERO}.mics_hierarchical_params_gather", k.BOOL, False, "", _ONE),
    Option(f"{ZERO}.memory_efficient_linear", k.BOOL, True, "", "no weight is kept for backward"),
    Option(f"{ZERO}.pipeline_loading_checkpoint", k.BOOL, False, "", _ONE),
    Option(f"{ZERO}.override_module_apply", k.BOOL, True, "", "`apply` works as ever"),
    Option(f"{ZERO}.log_trace_cache_warnings", k.BOOL, False, "", "`tier.stats()` has it"),
    Option(f"{ZERO}.enable_sanity_checks", k.BOOL, False, "", "what is read is always checked"),
    Option(f"{ZERO}.save_muon_momentum_buffer_in_memory", k.BOOL, False, "", "no Muon here"),
    Option(f"{ZERO}.leaf_module", k.ANY, None, "", "experts are blocks of their own"),
    Option(
        f"{ZERO}.cpu_offload_use_pin_memory", k.BOOL, None, "", "host memory is always page-locked"
    ),
)

_AIO = tuple(
    Option(f"aio.{key}", kind, default, "", "tiermem drives files by io_uring and sizes requests "
           "itself; `tiermem doctor` shows how")
    for key, kind, default in (
        ("block_size", k.COUNT, 1 << 20),
        ("queue_depth", k.COUNT, 8),
        ("intra_op_parallelism", k.COUNT, 1),
        ("thread_count", k.COUNT, 1),
        ("num_threads", k.COUNT, 1),
        ("single_submit", k.BOOL, False),
        ("overlap_events", k.BOOL, True),
        ("use_gds", k.BOOL, False),
    )
)  # fmt: skip

_ACTIVATIONS = (
    Option("activation_checkpointing.cpu_checkpointing", k.BOOL, False, "Policy(activations)",
           "what checkpoints (and autograd) save is in DRAM between forward and backward", _MAP),
    *(
        Option(f"activation_checkpointing.{key}", kind, default, "", why)
        for key, kind, default, why in (
            ("partition_activations", k.BOOL, False, _ONE),
            ("contiguous_memory_optimization", k.BOOL, False, "places are kept and used again"),
            ("number_checkpoints", k.COUNT, None, "places are made as they are needed"),
            ("synchronize_checkpoint_boundary", k.BOOL, False, "events order the copies"),
            ("profile", k.BOOL, False, "`tier.stats().activations` has it"),
        )
    ),
)  # fmt: skip

_PLAIN = tuple(
    Option(key, k.ANY, None, "", why)
    for key, why in (
        ("communication_data_type", _ONE),
        ("seq_parallel_communication_data_type", _ONE),
        ("prescale_gradients", _ONE),
        ("gradient_predivide_factor", _ONE),
        ("gradient_allreduce_op", _ONE),
        ("sparse_gradients", _ONE),
        ("disable_allgather", _ONE),
        ("allgather_size", _ONE),
        ("sequence_parallel_size", _ONE),
        ("data_parallel_size", _ONE),
        ("use_data_before_expert_parallelism", _ONE),
        ("graph_harvesting", "no CUDA graphs are made"),
        ("zero_allow_untested_optimizer", "any optimizer that steps each parameter by itself"),
        ("zero_force_ds_cpu_optimizer", "any optimizer is taken with offloading"),
        ("memory_breakdown", "`tier.stats()` and `tier.residency()` have it"),
        ("vocabulary_size", "DeepSpeed only warns by it"),
        ("log_level", "messages go to the logger of this package"),
    )
)

_MANAGER = tuple(
    Option(f"tiermem.{key}", k.ANY, None, f"`{key}` of TierManager or tier.optimizer", effect, _MAP)
    for key, effect in (
        ("device", "where the model computes: 'cuda' where there is one, else 'cpu'"),
        ("hbm", "budget of device memory; by default 80% of what is free"),
        ("dram", "budget of host memory; by default what the file asks for"),
        ("nvme_bytes", "most bytes on disk"),
        ("prefetch_depth", "blocks looked ahead"),
        ("overlap", "when steps are made: 'forward' (the default), 'backward' or false"),
        ("where", "where steps are made: 'device' (the default), 'host' or 'both'"),
        ("activation_min", "least size of what leaves HBM with cpu_checkpointing"),
        ("activation_layers", "layers whose tensors leave HBM with it"),
    )
)

OPTIONS: dict[str, Option] = {
    option.path: option
    for option in (
        *_TOP, *_HALVES, *_ZERO, *_AIO, *_ACTIVATIONS, *_PLAIN, *_MANAGER
    )
}  # fmt: skip
"""By path."""

ALIASES = {
    **{
        f"{ZERO}.{name.removeprefix('stage3_')}": f"{ZERO}.{name}"
        for name in (path.removeprefix(f"{ZERO}.") for path in OPTIONS)
        if name.startswith("stage3_")
    },
    f"{ZERO}.stage3_gather_fp16_weights_on_model_save": (
        f"{ZERO}.stage3_gather_16bit_weights_on_model_save"
    ),
}
"""Other spellings: one of them may be given, or both alike."""

SECTION_ALIASES = {"bfloat16": "bf16"}

OFFLOAD_FLAGS = {
    f"{ZERO}.cpu_offload": STATE,
    f"{ZERO}.cpu_offload_param": PARAM,
    f"{ZERO}.cpu_offload_params": PARAM,
}
"""Deprecated switches, and the section whose ``device`` they set to ``cpu``."""

SECTIONS = {
    section.key: section
    for section in (
        Section("progressive_layer_drop", "no layers are dropped", True),
        Section("curriculum_learning", "batches come as the loader gives them", True),
        Section("data_efficiency", "batches come as the loader gives them", True),
        Section("compression_training", "weights are neither quantized nor pruned", True),
        Section("quantize_training", "DeepSpeed does not read it either"),
        Section("sparse_attention", "for modules of DeepSpeed's own"),
        Section("eigenvalue", "DeepSpeed does not read it at the top either"),
        Section("elasticity", "there is one process", True),
        Section("tensor_parallel", "there is one process", True),
        Section("expert_parallel", "there is one process", True),
        Section("pipeline", "there is one process"),
        Section("hybrid_engine", "inference runs in the same wrapped model"),
        Section("weight_quantization", "weights are not quantized", True),
        Section(f"{ZERO}.zenflow", "steps are never left for later ones", True),
        Section("autotuning", "nothing is tuned: give the values"),
        Section("checkpoint", "`save_checkpoint` writes beside, then renames"),
        Section("nebula", "`save_checkpoint` writes beside, then renames"),
        Section("datastates", "`save_checkpoint` writes beside, then renames"),
        Section("compile", "compile the blocks themselves with torch.compile"),
        Section("tensorboard", "log from the loop"),
        Section("wandb", "log from the loop"),
        Section("csv_monitor", "log from the loop"),
        Section("comet", "log from the loop"),
        Section("monitor_config", "log from the loop"),
        Section("comms_logger", _ONE),
        Section("comms_config", _ONE),
        Section("flops_profiler", "`tier.stats()` and `tier.timeline` measure"),
        Section("timers", "`tier.stats()` and `tier.timeline` measure"),
        Section("amp", "see amp.enabled"),
    )
}
"""Parts that are taken as a whole."""

FULL_SECTIONS = {path.rpartition(".")[0] for path in OPTIONS if "." in path}
"""Sections whose keys are known one by one."""
