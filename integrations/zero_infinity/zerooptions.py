"""Options of ``zero_optimization``: what is offloaded, and what DeepSpeed tunes by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import kinds as k
from .kinds import Kind

ZERO = "zero_optimization"
PARAM = f"{ZERO}.offload_param"
STATE = f"{ZERO}.offload_optimizer"
MAP_TEST = "test_zero_infinity_mapping.py"
SAVE_TEST = "test_zero_infinity_checkpoints.py"

ONE = "one process has nothing to exchange"
"""Why options of collectives have no effect."""
_BUDGET = "tiermem's budget limits what is in HBM: `hbm` of the `tiermem` section"


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        path: Sections and key, with dots.
        kind: The kind of its value.
        default: Its value if it is left out.
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


ZERO_OPTIONS = (
    Option(
        f"{ZERO}.stage",
        k.STAGE,
        0,
        "rules",
        "which of DeepSpeed's rules apply (hysteresis, `save_16bit_model`); one process has "
        "nothing to shard, and offloading works at any stage",
        MAP_TEST,
    ),
    Option(
        f"{PARAM}.device",
        k.DEVICE,
        "none",
        "Policy(params)",
        "home of the weights: HBM, DRAM or NVMe",
        MAP_TEST,
    ),
    Option(
        f"{PARAM}.nvme_path",
        k.TEXT,
        None,
        "TierManager(nvme)",
        "folder of the swap file; if params and optimizer name two, files are striped over both",
        MAP_TEST,
    ),
    Option(
        f"{PARAM}.buffer_count",
        k.COUNT,
        5,
        "TierManager(dram)",
        "with nvme: buffer_count × buffer_size of DRAM to read ahead",
        MAP_TEST,
    ),
    Option(
        f"{PARAM}.buffer_size",
        k.ELEMENTS,
        10**8,
        "TierManager(dram)",
        "size of a buffer in elements of the weights' dtype",
        MAP_TEST,
    ),
    Option(
        f"{PARAM}.max_in_cpu",
        k.ELEMENTS,
        10**9,
        "TierManager(dram)",
        "with nvme: weights, in elements, that DRAM may hold in addition to the buffers",
        MAP_TEST,
    ),
    Option(f"{PARAM}.pin_memory", k.BOOL, True, "", "host memory is always page-locked"),
    Option(
        f"{STATE}.device",
        k.DEVICE,
        "none",
        "Policy(master, optimizer, grads)",
        "home of masters and state: HBM, DRAM or NVMe; the home of gradients is then DRAM, or HBM "
        "if its budget is not set and everything fits there",
        MAP_TEST,
    ),
    Option(
        f"{STATE}.nvme_path", k.TEXT, None, "TierManager(nvme)", "folder of the swap file", MAP_TEST
    ),
    Option(
        f"{STATE}.buffer_count",
        k.COUNT,
        4,
        "TierManager(dram)",
        "with nvme: buffer_count × sub_group_size float32 numbers of DRAM to read ahead",
        MAP_TEST,
    ),
    Option(
        f"{STATE}.ratio",
        k.SHARE,
        None,
        "where and host_share of tier.optimizer",
        "this share is stepped on the host, the rest on the device. If unset, all is stepped on "
        "the device, bitwise identical to a resident loop (DeepSpeed's default is 1.0)",
        MAP_TEST,
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
        "a quarter of the cores is left free if steps are performed on the host",
    ),
    Option(
        f"{ZERO}.sub_group_size",
        k.ELEMENTS,
        10**9,
        "TierManager(dram)",
        "elements of a buffer of offload_optimizer, with nvme",
        MAP_TEST,
    ),
    Option(
        f"{ZERO}.stage3_prefetch_bucket_size",
        k.ELEMENTS,
        5 * 10**7,
        "TierManager(prefetch_depth)",
        "0: nothing is prefetched; otherwise tiermem decides",
        MAP_TEST,
    ),
    Option(
        f"{ZERO}.stage3_gather_16bit_weights_on_model_save",
        k.BOOL,
        False,
        "save_16bit_model",
        "at stage 3 `save_16bit_model` saves only if it is true",
        SAVE_TEST,
    ),
    Option(f"{ZERO}.stage3_param_persistence_threshold", k.ELEMENTS, 10**5, "", _BUDGET),
    Option(f"{ZERO}.stage3_model_persistence_threshold", k.ELEMENTS, None, "", _BUDGET),
    Option(f"{ZERO}.stage3_max_live_parameters", k.ELEMENTS, 10**9, "", _BUDGET),
    Option(
        f"{ZERO}.stage3_max_reuse_distance",
        k.ELEMENTS,
        10**9,
        "",
        "the order of use is known: the block whose next use is furthest away leaves first",
    ),
    Option(
        f"{ZERO}.stage3_module_granularity_threshold",
        k.ELEMENTS,
        0,
        "",
        "small modules always move with their block",
    ),
    Option(f"{ZERO}.stage3_use_all_reduce_for_fetch_params", k.BOOL, False, "", ONE),
    Option(f"{ZERO}.stage3_allgather_sequential", k.BOOL, False, "", ONE),
    Option(
        f"{ZERO}.contiguous_gradients",
        k.BOOL,
        True,
        "",
        "gradients of a block are always contiguous",
    ),
    Option(f"{ZERO}.overlap_comm", k.BOOL, None, "", "copies always overlap compute"),
    Option(f"{ZERO}.round_robin_gradients", k.BOOL, False, "", ONE),
    Option(f"{ZERO}.reduce_scatter", k.BOOL, True, "", ONE),
    Option(f"{ZERO}.reduce_bucket_size", k.ELEMENTS, 5 * 10**8, "", ONE),
    Option(f"{ZERO}.use_multi_rank_bucket_allreduce", k.BOOL, True, "", ONE),
    Option(f"{ZERO}.allgather_partitions", k.BOOL, True, "", ONE),
    Option(f"{ZERO}.allgather_bucket_size", k.ELEMENTS, 5 * 10**8, "", ONE),
    Option(f"{ZERO}.load_from_fp32_weights", k.BOOL, True, "", "masters are always loaded"),
    Option(f"{ZERO}.elastic_checkpoint", k.BOOL, False, "", ONE),
    Option(
        f"{ZERO}.ignore_unused_parameters",
        k.BOOL,
        True,
        "",
        "parameters without a gradient are never an error",
    ),
    Option(f"{ZERO}.legacy_stage1", k.BOOL, False, "", ONE),
    Option(f"{ZERO}.zero_hpz_partition_size", k.COUNT, 1, "", ONE),
    Option(f"{ZERO}.zero_quantized_weights", k.BOOL, False, "", "weights travel unchanged"),
    Option(
        f"{ZERO}.zero_quantized_nontrainable_weights", k.BOOL, False, "", "weights travel unchanged"
    ),
    Option(f"{ZERO}.zero_quantized_gradients", k.BOOL, False, "", ONE),
    Option(f"{ZERO}.zeropp_loco_param", k.ANY, None, "", ONE),
    Option(f"{ZERO}.mics_shard_size", k.INT, -1, "", ONE),
    Option(f"{ZERO}.mics_hierarchical_params_gather", k.BOOL, False, "", ONE),
    Option(f"{ZERO}.memory_efficient_linear", k.BOOL, True, "", "no weight is kept for backward"),
    Option(f"{ZERO}.pipeline_loading_checkpoint", k.BOOL, False, "", ONE),
    Option(f"{ZERO}.override_module_apply", k.BOOL, True, "", "`apply` works as usual"),
    Option(f"{ZERO}.log_trace_cache_warnings", k.BOOL, False, "", "`tier.stats()` has it"),
    Option(f"{ZERO}.enable_sanity_checks", k.BOOL, False, "", "every read is always checked"),
    Option(f"{ZERO}.save_muon_momentum_buffer_in_memory", k.BOOL, False, "", "no Muon here"),
    Option(f"{ZERO}.leaf_module", k.ANY, None, "", "experts are blocks of their own"),
    Option(
        f"{ZERO}.cpu_offload_use_pin_memory", k.BOOL, None, "", "host memory is always page-locked"
    ),
)
