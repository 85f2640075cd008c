"""Names of DeepSpeed's that scripts import but that cannot work here: they raise when used."""

from __future__ import annotations

from typing import Any, NoReturn

from tiermem import ConfigError

_PIPE = "pipelines need several GPUs; give initialize() the plain module"
_MOE = "a mixture's experts are blocks of their own here: use the model's own module for it"
_INFER = "inference runs in the wrapped model: initialize() without an optimizer, or tier.wrap"
_SEQUENCE = "sequence parallelism needs several GPUs"
_OWN = "it is a kernel or module of DeepSpeed's own; use torch's"
_MEASURE = "engine.tier.stats() and engine.tier.timeline measure"
_OPS = "no ops are built here; leave it out"
_DATA = "batches come as the loader gives them"
_STATE = "it belongs to DeepSpeed's own optimizer; use engine.optimizer"

REFUSED: dict[str, tuple[str, str]] = {
    "": ("PipelineModule PipelineEngine", _PIPE),
    " ": ("InferenceEngine DeepSpeedInferenceConfig DeepSpeedHybridEngine", _INFER),
    "  ": ("DeepSpeedTransformerLayer DeepSpeedTransformerConfig replace_transformer_layer "
           "revert_transformer_layer add_tuning_arguments", _OWN),
    "autotuning": ("", _MEASURE),
    "checkpoint": ("DeepSpeedCheckpoint", "load_checkpoint reads DeepSpeed's files"),
    "compression": ("init_compression redundancy_clean", "weights are not compressed"),
    "compression.compress": ("init_compression redundancy_clean", "weights are not compressed"),
    "compression.helper": ("recursive_getattr recursive_setattr convert_conv1d_to_linear", _OWN),
    "elasticity": ("compute_elastic_config", "there is one process"),
    "inference": ("RaggedInferenceEngineConfig DeepSpeedTPConfig build_hf_engine", _INFER),
    "inference.config": ("DeepSpeedInferenceConfig DtypeEnum", _INFER),
    "inference.engine": ("InferenceEngine", _INFER),
    "linear": ("OptimizedLinear LoRAConfig QuantizationConfig", _OWN),
    "module_inject": ("replace_transformer_layer revert_transformer_layer", _INFER),
    "moe": ("", _MOE),
    "moe.layer": ("MoE", _MOE),
    "moe.utils": ("split_params_into_different_moe_groups_for_optimizer "
                  "split_params_grads_into_shared_and_expert_params", _MOE),
    "monitor.monitor": ("MonitorMaster", "log from the loop"),
    "ops.op_builder": ("CPUAdamBuilder FusedAdamBuilder AsyncIOBuilder GDSBuilder "
                       "UtilsBuilder CPULionBuilder FusedLambBuilder ALL_OPS", _OPS),
    "ops.aio": ("AsyncIOBuilder", _OPS),
    "ops.sparse_attention": ("SparseSelfAttention SparseAttentionUtils BertSparseSelfAttention "
                             "FixedSparsityConfig VariableSparsityConfig BigBirdSparsityConfig "
                             "BSLongformerSparsityConfig DenseSparsityConfig SparsityConfig", _OWN),
    "ops.transformer": ("DeepSpeedTransformerLayer DeepSpeedTransformerConfig", _OWN),
    "pipe": ("PipelineModule LayerSpec TiedLayerSpec", _PIPE),
    "profiling.flops_profiler": ("FlopsProfiler get_model_profile", _MEASURE),
    "profiling.flops_profiler.profiler": ("FlopsProfiler get_model_profile", _MEASURE),
    "runtime.bf16_optimizer": ("BF16_Optimizer", _STATE),
    "runtime.data_pipeline.curriculum_scheduler": ("CurriculumScheduler", _DATA),
    "runtime.data_pipeline.data_sampling.data_analyzer": ("DataAnalyzer", _DATA),
    "runtime.data_pipeline.data_routing.helper": (
        "convert_to_random_ltd save_without_random_ltd remove_random_ltd_state_dict", _DATA),
    "runtime.fp16.fused_optimizer": ("FP16_Optimizer", _STATE),
    "runtime.fp16.unfused_optimizer": ("FP16_UnfusedOptimizer", _STATE),
    "runtime.hybrid_engine": ("DeepSpeedHybridEngine", _INFER),
    "runtime.checkpoint_engine": ("torch_checkpoint_engine", _STATE),
    "runtime.pipe": ("schedule PipelineModule LayerSpec TiedLayerSpec", _PIPE),
    "runtime.pipe.engine": ("PipelineEngine", _PIPE),
    "runtime.pipe.module": ("PipelineModule LayerSpec TiedLayerSpec", _PIPE),
    "runtime.pipe.topology": ("PipeModelDataParallelTopology PipeDataParallelTopology "
                              "PipelineParallelGrid ProcessTopology", _PIPE),
    "runtime.sequence_parallel.ulysses_sp": (
        "UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter TiledMLP SequenceTiledCompute", _SEQUENCE),
    "runtime.zero.stage3": ("DeepSpeedZeroOptimizer_Stage3", _STATE),
    "runtime.zero.stage_1_and_2": ("DeepSpeedZeroOptimizer", _STATE),
    "runtime.zero.tiling": ("TiledLinear TiledLinearReturnBias", _OWN),
    "sequence.layer": ("DistributedAttention", _SEQUENCE),
    "utils.timer": ("SynchronizedWallClockTimer ThroughputTimer", _MEASURE),
}  # fmt: skip
"""Names and the reason, by the module below ``deepspeed`` (blank for the package itself)."""


class _Refusing(type):
    """The class of names that refuse to be called, while ``isinstance`` with them says False."""

    why: str

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigError(f"deepspeed.{cls.__name__} is not there in zero_infinity: {cls.why}")


def stand_ins(module: str) -> dict[str, Any]:
    """Returns the names of one module that refuse, by name."""
    found: dict[str, Any] = {}
    for key, (names, why) in REFUSED.items():
        if key.strip() == module:
            found |= {name: _Refusing(name, (), {"why": why}) for name in names.split()}
    return found
