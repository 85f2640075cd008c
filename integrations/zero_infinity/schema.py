"""Every known option of a DeepSpeed configuration: its kind, default and effect.

Files are read with these tables; ``explain`` and the page in ``docs`` are made from them. An option
whose ``setting`` is empty has no effect; ``effect`` then says why.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import kinds as k
from .zerooptions import MAP_TEST, ONE, PARAM, STATE, ZERO, ZERO_OPTIONS, Option


@dataclass(frozen=True)
class Section:
    """A part of a file that has no effect, whatever is in it.

    Attributes:
        key: Its key at the top of the file, or its path with dots.
        why: Why it has no effect.
        changes: Whether training differs without it; if it is on, there is a warning.
    """

    key: str
    why: str
    changes: bool = False


_BATCH = "test_zero_infinity_batches.py"
_ENGINE = "test_zero_infinity_engine.py"
_HALF = "test_zero_infinity_half.py"
_OPT = "test_zero_infinity_optimizers.py"
_READ = "test_zero_infinity_reading.py"

_TOP = (
    Option(
        "train_batch_size",
        k.POSITIVE,
        None,
        "accumulation",
        "samples per step: micro-batch × accumulation × one process",
        _BATCH,
    ),
    Option(
        "train_micro_batch_size_per_gpu",
        k.POSITIVE,
        None,
        "batch size of the loader",
        "samples per backward; the loader that `initialize` makes for `training_data` uses it",
        _BATCH,
    ),
    Option(
        "gradient_accumulation_steps",
        k.POSITIVE,
        None,
        "accumulation",
        "the number of backwards per step; `backward` divides the loss by it",
        _BATCH,
    ),
    Option(
        "managed_gradient_accumulation",
        k.BOOL,
        True,
        "accumulation",
        "false: every call of `step()` performs a step",
        _BATCH,
    ),
    Option(
        "gradient_clipping",
        k.AMOUNT,
        1.0,
        "optimizer.clip_grad_norm_",
        "the norm of all gradients is clipped before each step; 0: no clipping",
        _ENGINE,
    ),
    Option(
        "steps_per_print",
        k.INTERVAL,
        None,
        "logging",
        "the number of steps between lines in the log",
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
        "gradients are accumulated and kept in it; by default in the weights' dtype",
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
        "floating-point buffers are cast to it; if unset, they are not cast",
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
    Option("torch_autocast.dtype", k.TEXT, "bfloat16", "torch.autocast", "autocast's dtype", _HALF),
    Option(
        "torch_autocast.lower_precision_safe_modules",
        k.ANY,
        None,
        "",
        "torch's own list of operations is used",
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
        k.POWER,
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
        "steps without an overflow after which the scale is doubled",
        _HALF,
    ),
    Option(
        "fp16.hysteresis",
        k.COUNT,
        2,
        "loss scale",
        "overflows before the scale is halved (ZeRO stages 1 to 3)",
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
        "the lowest scale; a further overflow there ends the run (ZeRO stages 1 to 3)",
        _HALF,
    ),
    Option(
        "fp16.fp16_master_weights_and_grads",
        k.BOOL,
        False,
        "refused if true",
        "float16 masters lose updates; use bf16_master_weights_and_grads",
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
        "skipped steps",
        "a step with an infinite or NaN gradient is skipped and counted",
        _HALF,
    ),
    Option(
        "bf16.bf16_master_weights_and_grads",
        k.BOOL,
        False,
        "no master_dtype",
        "weights have no masters, the optimizer steps them; needs bf16_optimizer_states",
        _HALF,
    ),
    Option(
        "bf16.bf16_optimizer_states",
        k.BOOL,
        False,
        "dtype of the state",
        "state is bfloat16; needs bf16_master_weights_and_grads",
        _HALF,
    ),
    Option(
        "bf16.immediate_grad_update",
        k.BOOL,
        False,
        "",
        "gradients are always accumulated during backward",
    ),
)

_AIO = tuple(
    Option(f"aio.{key}", kind, default, "", "tiermem uses io_uring for files and chooses request "
           "sizes itself; `tiermem doctor` shows how")
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
           "what checkpoints (and autograd) save is in DRAM between forward and backward",
           MAP_TEST),
    *(
        Option(f"activation_checkpointing.{key}", kind, default, "", why)
        for key, kind, default, why in (
            ("partition_activations", k.BOOL, False, ONE),
            ("contiguous_memory_optimization", k.BOOL, False, "memory is kept and reused"),
            ("number_checkpoints", k.COUNT, None, "memory is allocated as it is needed"),
            ("synchronize_checkpoint_boundary", k.BOOL, False, "events order the copies"),
            ("profile", k.BOOL, False, "`tier.stats().activations` has it"),
        )
    ),
)  # fmt: skip

_PLAIN = tuple(
    Option(key, k.ANY, None, "", why)
    for key, why in (
        ("communication_data_type", ONE),
        ("seq_parallel_communication_data_type", ONE),
        ("prescale_gradients", ONE),
        ("gradient_predivide_factor", ONE),
        ("gradient_allreduce_op", ONE),
        ("sparse_gradients", ONE),
        ("disable_allgather", ONE),
        ("allgather_size", ONE),
        ("sequence_parallel_size", ONE),
        ("data_parallel_size", ONE),
        ("use_data_before_expert_parallelism", ONE),
        ("graph_harvesting", "no CUDA graphs are made"),
        ("zero_allow_untested_optimizer", "any optimizer that steps parameters separately works"),
        ("zero_force_ds_cpu_optimizer", "offloading works with any optimizer"),
        ("memory_breakdown", "`tier.stats()` and `tier.residency()` have it"),
        ("vocabulary_size", "DeepSpeed only warns by it"),
        ("log_level", "messages go to the logger of this package"),
    )
)

_TIERS, _STEPS = "TierManager", "tier.optimizer"
_OWN = tuple(
    Option(f"tiermem.{key}", k.ANY, None, f"`{key}` of {taker}", effect, MAP_TEST)
    for taker, key, effect in (
        (_TIERS, "device", "where the model computes: 'cuda' where there is one, else 'cpu'"),
        (_TIERS, "hbm", "budget of device memory; by default what the program leaves free"),
        (_TIERS, "dram", "budget of host memory; by default what the run needs, see the guide"),
        (_TIERS, "nvme_bytes", "most bytes on disk"),
        (_TIERS, "prefetch_depth", "how many blocks ahead of the compute fetches may begin"),
        (_STEPS, "overlap", "when steps run: 'auto' (the default), 'forward', 'backward' or false"),
        (_STEPS, "where", "where steps run: 'auto' (the default), 'device', 'host' or 'both'"),
        (_TIERS, "activation_min", "size from which tensors leave HBM with cpu_checkpointing"),
        (_TIERS, "activation_layers", "layers whose tensors leave HBM with cpu_checkpointing"),
    )
)

OPTIONS: dict[str, Option] = {
    option.path: option
    for option in (
        *_TOP, *_HALVES, *ZERO_OPTIONS, *_AIO, *_ACTIVATIONS, *_PLAIN, *_OWN
    )
}  # fmt: skip
"""All options by their paths."""

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
"""Other spellings; if both are given, they have to agree."""

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
        Section(f"{ZERO}.zenflow", "updates are never postponed to later steps", True),
        Section("autotuning", "nothing is tuned automatically: give the values"),
        Section("checkpoint", "`load_universal` prefers `latest_universal`; both formats are read"),
        Section("nebula", "`save_checkpoint` writes a new folder, then renames it"),
        Section("datastates", "`save_checkpoint` writes a new folder, then renames it"),
        Section("compile", "compile the blocks themselves with torch.compile"),
        Section("tensorboard", "log from the loop"),
        Section("wandb", "log from the loop"),
        Section("csv_monitor", "log from the loop"),
        Section("comet", "log from the loop"),
        Section("monitor_config", "log from the loop"),
        Section("comms_logger", ONE),
        Section("comms_config", ONE),
        Section("flops_profiler", "`tier.stats()` and `tier.timeline` measure"),
        Section("timers", "`tier.stats()` and `tier.timeline` measure"),
        Section("amp", "see amp.enabled"),
    )
}
"""Parts without effect, whatever is in them."""

FULL_SECTIONS = {path.rpartition(".")[0] for path in OPTIONS if "." in path}
"""Sections whose keys are known one by one."""
