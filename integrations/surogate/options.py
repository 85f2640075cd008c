"""Surogate's options: names, types and defaults, and the rules between them.

Names, defaults and rules are those of Surogate's pages "Offloading", "Multi-GPU training" and
"Configuration reference", and of its ``SFTConfig``.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from tiermem import ConfigError

from ..options import Option, checked, merged, nearest

_TABLES = "test_surogate_tables.py"
_RULES = "test_surogate.py"
_STREAMED = "streamed through HBM in blocks, two or more in flight"


def _flag(name: str, setting: str, effect: str, test: str) -> Option:
    return Option(name, "bool", False, setting, effect, test)


OPTIONS: tuple[Option, ...] = (
    _flag(
        "offload_residual",
        '`Policy(activations="dram")`',
        "one page-locked copy per layer, written in forward and prefetched in backward",
        f"{_TABLES}::test_residuals",
    ),
    _flag(
        "offload_optimizer",
        '`Policy(optimizer="dram")`',
        f"state is {_STREAMED}; in Surogate it stays on the device unless `use_zero_copy` is set",
        f"{_TABLES}::test_optimizer_state",
    ),
    _flag(
        "offload_master",
        '`Policy(master="dram")`',
        f"masters are {_STREAMED}",
        f"{_TABLES}::test_masters",
    ),
    _flag(
        "offload_grads",
        '`Policy(grads="dram")`',
        "gradients leave HBM during backward; needs shard_gradients, zero_level 2 or cpu_training",
        f"{_TABLES}::test_gradients",
    ),
    _flag(
        "persistent_quants",
        "refused",
        "needs quantized copies of sharded weights (several GPUs), which tiermem does not make yet",
        f"{_RULES}::test_quantized_copies_are_refused",
    ),
    _flag(
        "offload_quants",
        "refused",
        "as persistent_quants, which it needs",
        f"{_RULES}::test_quantized_copies_are_refused",
    ),
    _flag(
        "use_zero_copy",
        "no effect",
        "offloaded state is copied to HBM, overlapping with other work, in any case",
        f"{_RULES}::test_without_effect",
    ),
    _flag(
        "use_write_combined",
        "no effect",
        "host memory is page-locked in place, which has no write-combined form",
        f"{_RULES}::test_without_effect",
    ),
    _flag(
        "offload_saved_tensors",
        '`Policy(activations="dram")`',
        "the same as offload_residual, which in tiermem copies all large saved tensors out of HBM",
        f"{_TABLES}::test_saved_tensors",
    ),
    _flag(
        "cpu_training",
        '`Policy(params="dram", grads="dram", master="dram", optimizer="dram")`, `where="host"`',
        "weights stream; without LoRA, gradients leave HBM and the host performs the steps, with "
        "fp32 AdamW; with LoRA, adapters, their gradients and state stay in HBM",
        f"{_TABLES}::test_cpu_training",
    ),
    Option(
        "recompute",
        "bool",
        True,
        "`torch.utils.checkpoint` around each layer",
        "only the layers' inputs are saved in forward",
        f"{_TABLES}::test_residuals",
    ),
    Option(
        "lmhead_chunks",
        "int",
        1,
        "`tiermem.chunked_cross_entropy(chunks=...)` in `Offloading.loss`",
        "only the logits of one part of the tokens exist at a time",
        f"{_RULES}::test_loss_in_chunks",
        least=1,
    ),
    Option(
        "attn_bwd_chunks",
        "int",
        1,
        "no effect",
        "attention is computed by the model itself",
        f"{_RULES}::test_without_effect",
        least=1,
    ),
    Option(
        "master_dtype",
        "dtype",
        None,
        "`tier.optimizer(master_dtype=...)`",
        "weights of another dtype get masters of this dtype, which are stepped",
        f"{_TABLES}::test_masters",
    ),
    Option(
        "gradient_dtype",
        "dtype",
        None,
        "`tier.optimizer(grad_dtype=...)`",
        "gradients are accumulated and kept in this dtype",
        f"{_RULES}::test_gradient_dtype",
    ),
    Option(
        "optimizer",
        "choice",
        "adamw_8bit",
        "`adamw`: `torch.optim.AdamW`; `adamw_8bit`: `torchao.optim.AdamW8bit`; `normuon`: "
        "`NorMuon`",
        "the optimizer class",
        f"{_RULES}::test_optimizers",
        ("adamw", "adamw_8bit", "normuon"),
    ),
    Option(
        "gpus",
        "int",
        1,
        "one device",
        "more than one is refused; 0 means all that are visible, which must be one",
        f"{_RULES}::test_several_gpus_are_refused",
    ),
    Option(
        "zero_level",
        "int",
        1,
        "no effect on one GPU",
        "2 sets shard_gradients, 3 also shard_weights",
        f"{_RULES}::test_zero_levels",
    ),
    *(
        _flag(name, "no effect on one GPU", what, f"{_RULES}::{test}")
        for name, what, test in (
            ("shard_weights", "there is no other process", "test_zero_levels"),
            ("shard_gradients", "but offload_grads needs it", "test_zero_levels"),
            ("use_all_to_all_reduce", "nothing is reduced", "test_without_effect"),
            ("memcpy_all_gather", "nothing is gathered", "test_without_effect"),
            ("memcpy_send_recv", "nothing is sent", "test_without_effect"),
        )
    ),
    *(
        Option(
            name,
            kind,
            default,
            setting,
            effect,
            f"{_RULES}::test_optimizer_settings",
            least=None if kind == "bool" else 0,
            below=1 if "beta" in name or "momentum" in name else None,
        )
        for name, kind, default, setting, effect in (
            ("learning_rate", "float", 2e-4, "`lr`", "a setting of the optimizer"),
            ("weight_decay", "float", 0.0, "`weight_decay`", "for matrices; norms, biases: 0"),
            ("adamw_beta1", "float", 0.9, "`betas`", "a setting of AdamW"),
            ("adamw_beta2", "float", 0.999, "`betas`", "a setting of AdamW"),
            ("adamw_epsilon", "float", 1e-8, "`eps`", "a setting of AdamW"),
            ("normuon_momentum", "float", 0.95, "`momentum`", "a setting of NorMuon"),
            ("normuon_beta2", "float", 0.95, "`beta2`", "a setting of NorMuon"),
            ("normuon_cautious_wd", "bool", True, "`cautious`", "a setting of NorMuon"),
            ("max_grad_norm", "float", 1.0, "`Offloading.step()` clips", "0 means no clipping"),
        )
    ),
    Option(
        "gradient_accumulation_steps",
        "int",
        4,
        "`Offloading.step()` is called after this many backwards",
        "the script has to divide losses by it",
        f"{_RULES}::test_optimizer_settings",
        least=1,
    ),
    Option(
        "lora",
        "bool",
        None,
        "with `cpu_training`: which of the two kinds of training",
        "the script adds the adapters; if unset, a model with frozen weights counts as LoRA",
        f"{_TABLES}::test_cpu_training_with_adapters",
    ),
    *(
        _flag(name, "no effect", "the model's weights are used as they are", f"{_RULES}::{test}")
        for name, test in (
            ("qlora_fp8", "test_qlora_warns"),
            ("qlora_fp4", "test_qlora_warns"),
            ("qlora_bnb", "test_qlora_warns"),
        )
    ),
)

NAMES = {option.name: option for option in OPTIONS}

# Options that are not about memory (data, logging, adapters, kernels): the script's own.
_SCRIPTS_OWN = """
    run_name apply_recommended_values num_epochs output_dir checkpoint_dir
    resume_from_checkpoint save_steps save_total_limit from_scratch init_projections_to_zero
    model model_type sequence_len max_model_len rope_scaling torch_dtype sequence_chunks
    parallelism dispatch_pp auto_lmhead_chunks lmhead_drop_ignored_rows recipe use_fused_rope
    fp8_amax_history fp4_four_over_six fp4_backend skip_quant_first_layers
    skip_quant_last_layers long_context use_cuda_graphs lr_scheduler_type cooldown_steps
    wsd_decay_steps_fraction final_lr_fraction max_steps eval_steps logging_steps
    per_device_train_batch_size report_to warmup_ratio warmup_steps log_file lora_rank
    lora_alpha lora_dropout lora_dtype lora_target_modules train_router router_aux_loss_coef
    router_z_loss_coef qlora_block_size qlora_bnb_block_size qlora_bnb_double_quant
    qlora_four_over_six qlora_selective_expert_dequant qlora_offload_experts ep_size
    ep_load_balance_threshold ep_plan_refresh_interval adapter_path adapter_init_mode
    merge_adapter debug_time_breakdown debug_memory_breakdown train_vision log_gpu_util
    auto_lr_reduction early_stop epoch_adjustment wandb_project wandb_name aim_experiment
    aim_repo aim_name surogate_metrics_path distributed distillation datasets
    validation_datasets validation_split_ratio train_seed eval_seed dataloader_num_workers
    sample_packing truncation_strategy use_chat_template loss_scale
"""
SCRIPTS_OWN = frozenset(_SCRIPTS_OWN.split())

_QUANTS = ("persistent_quants", "offload_quants")
_QLORA = ("qlora_fp8", "qlora_fp4", "qlora_bnb")


class Options:
    """Surogate's options that concern memory and steps, checked.

    Attributes:
        values: The values by name, with defaults filled in; they obey the rules between options.
        given: Names of the options that the configuration or the call has.
        scripts_own: Options of Surogate's that the script handles: data, logging, kernels.
        unknown: Names that Surogate does not have.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        **given: Any,
    ) -> None:
        """Reads and checks the options.

        Args:
            config: A mapping, or the path of a Surogate YAML file.
            **given: Options by name; they override those of ``config``.

        Raises:
            ConfigError: If a value is of a wrong type or a rule is broken; names file, option,
                value and what is missing.
        """
        raw, where = merged(config, given)
        self.given = frozenset(raw)
        self.values = {
            option.name: checked(option, raw.get(option.name), where) for option in OPTIONS
        }
        self.scripts_own = {name: raw[name] for name in raw if name in SCRIPTS_OWN}
        self.unknown = tuple(n for n in raw if n not in NAMES and n not in SCRIPTS_OWN)
        for name in self.unknown:
            _warn(f"{where}: Surogate has no option {name!r}{nearest(name, NAMES)}; ignored")
        self._check(where)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["values"][name]
        except KeyError:
            raise AttributeError(f"Surogate has no option {name!r}") from None

    def without_effect(self, name: str, *, lora: bool | None = None) -> str:
        """Returns why an option has no effect, given the other options; empty if it has one.

        Args:
            name: The option's name.
            lora: Whether adapters are trained; by default as the options say.
        """
        values = self.values
        lora = bool(values["lora"]) if lora is None else lora
        host = values["cpu_training"] and not lora
        if name == "optimizer" and host and values[name] != "adamw":
            return "with cpu_training the host steps fp32 AdamW"
        if name.startswith("normuon_") and (values["optimizer"] != "normuon" or host):
            return "optimizer is not normuon"
        if name in ("offload_master", *_QUANTS) and self.qlora is not None:
            return f"under QLoRA ({self.qlora}) as in Surogate"
        return ""

    @property
    def qlora(self) -> str | None:
        """The option that asks for quantized base weights, or None."""
        return next((name for name in _QLORA if self.values[name]), None)

    def _check(self, where: str) -> None:
        """Applies the rules of Surogate's pages."""
        values = self.values
        if values["zero_level"] not in (1, 2, 3):
            raise ConfigError(f"{where}: zero_level is 1, 2 or 3, not {values['zero_level']}")
        self._check_gpus(where)
        if values["cpu_training"]:
            self._check_cpu_training(where)
        values["shard_gradients"] |= values["zero_level"] >= 2
        values["shard_weights"] |= values["zero_level"] >= 3
        self._check_quants(where)
        if values["offload_grads"] and not (values["shard_gradients"] or values["cpu_training"]):
            raise ConfigError(
                f"{where}: offload_grads needs shard_gradients: true (or zero_level: 2), or "
                "cpu_training: true"
            )

    def _check_gpus(self, where: str) -> None:
        gpus = self.values["gpus"]
        if gpus == 0:
            gpus = max(1, torch.cuda.device_count())
        if gpus != 1:
            raise ConfigError(
                f"{where}: gpus: {self.values['gpus']} asks for {gpus} GPUs; tiermem trains on one "
                "GPU a process so far, sharding over several is to come. Set gpus: 1"
            )

    def _check_cpu_training(self, where: str) -> None:
        if self.values["zero_level"] > 1:
            raise ConfigError(
                f"{where}: cpu_training and zero_level: {self.values['zero_level']} exclude each "
                "other; leave zero_level out"
            )
        if self.qlora is not None:
            raise ConfigError(
                f"{where}: cpu_training and {self.qlora} exclude each other, as in Surogate"
            )

    def _check_quants(self, where: str) -> None:
        values = self.values
        several = [name for name in _QLORA if values[name]]
        if len(several) > 1:
            raise ConfigError(f"{where}: {' and '.join(several)} exclude each other; keep one")
        if self.qlora is not None:
            for name in ("offload_master", *_QUANTS):
                if values[name]:
                    _warn(f"{where}: {name} has no effect under QLoRA ({self.qlora})")
                    values[name] = False
        if values["offload_quants"] and not values["persistent_quants"]:
            raise ConfigError(f"{where}: offload_quants needs persistent_quants: true")
        if values["persistent_quants"] and not values["shard_weights"]:
            raise ConfigError(
                f"{where}: persistent_quants needs shard_weights: true (or zero_level: 3)"
            )
        if values["persistent_quants"]:
            raise ConfigError(
                f"{where}: persistent_quants: true asks for quantized copies of weights that are "
                "sharded over several GPUs; tiermem makes none so far. Leave it out: weights then "
                "stream in their own dtype"
            )


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=5)
