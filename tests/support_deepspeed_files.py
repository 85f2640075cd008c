"""Checkpoints as DeepSpeed 0.19 writes them, made from a plain loop by the formats' description.

Nothing here is shared with what reads them. Names of DeepSpeed's classes are there while files are
written, because its files name them.
"""

from __future__ import annotations

import enum
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from support_zero_infinity import batch, build, loss_of
from torch import nn


class ZeroStageEnum(int, enum.Enum):
    optimizer_states, gradients, weights = 1, 2, 3


class DynamicLossScaler:
    def __init__(self, scale: float) -> None:
        self.cur_scale, self.cur_iter, self.last_overflow_iter = scale, 5, 1
        self.scale_factor, self.scale_window, self.min_scale = 2.0, 1000, 1.0
        self.delayed_shift = self.cur_hysteresis = 2
        self.consecutive_hysteresis, self.dynamic, self.dtype = False, True, torch.half


class fragment_address:
    def __init__(self, numel: int, start: int) -> None:
        self.numel, self.start = numel, start


_HOMES = {
    "deepspeed.runtime.zero.config": ZeroStageEnum,
    "deepspeed.runtime.fp16.loss_scaler": DynamicLossScaler,
    "deepspeed.utils.tensor_fragment": fragment_address,
}


@contextmanager
def named_as_there() -> Iterator[None]:
    """Gives the classes DeepSpeed's names, inside ``with``."""
    homes = {cls: cls.__module__ for cls in _HOMES.values()}
    parents = {name[:at] for name in _HOMES for at, c in enumerate(name + ".") if c == "."}
    before = {name: sys.modules.get(name) for name in parents}
    sys.modules.update({name: ModuleType(name) for name in parents})
    for name, cls in _HOMES.items():
        setattr(sys.modules[name], cls.__name__, cls)
        cls.__module__ = name
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
        for cls, home in homes.items():
            cls.__module__ = home


class PlainRun:
    """A plain loop: masters in float32, in two groups with and without weight decay.

    Args:
        dtype: Of the weights.
        frozen: Whether the first layer is.
    """

    def __init__(self, dtype: torch.dtype = torch.bfloat16, *, frozen: bool = False) -> None:
        self.dtype = dtype
        self.model = build(dtype)
        self.model.register_buffer("seen", torch.arange(3.0))
        if frozen:
            self.model[0].requires_grad_(False)
        self.names = [n for n, p in self.model.named_parameters() if p.requires_grad]
        self.groups = split(self.names)
        self.params = dict(self.model.named_parameters())
        self.masters = {n: self.params[n].detach().float().requires_grad_() for n in self.names}
        lists = [[self.masters[n] for n in names] for names in self.groups]
        self.optimizer = torch.optim.AdamW(
            [{"params": lists[0], "weight_decay": 0.1, "lr": 1e-2},
             {"params": lists[1], "weight_decay": 0.0, "lr": 3e-3}]
        )  # fmt: skip
        self.done = 0

    def steps(self, count: int) -> list[float]:
        """Makes steps; returns the losses."""
        losses = []
        for number in range(self.done, self.done + count):
            loss = loss_of(self.model, batch(number, self.dtype))
            loss.backward()
            losses.append(loss.item())
            for name, master in self.masters.items():
                master.grad = self.params[name].grad.float()
            ordered = [self.masters[n] for names in self.groups for n in names]
            nn.utils.clip_grad_norm_(ordered, 1.0)
            self.optimizer.step()
            with torch.no_grad():
                for name, master in self.masters.items():
                    self.params[name].copy_(master)
                    self.params[name].grad = None
        self.done += count
        return losses

    def values(self, key: str, name: str) -> torch.Tensor:
        """The master, or a tensor of the state."""
        master = self.masters[name]
        return master.detach() if key == "fp32" else self.optimizer.state[master][key]


def split(names: list[str]) -> list[list[str]]:
    """Weights, and biases and norms."""
    plain = [n for n in names if n.endswith("bias") or "norm" in n]
    return [[n for n in names if n not in plain], plain]


def _groups(run: PlainRun, params: list[list[int]]) -> list[dict[str, Any]]:
    return [
        {"lr": g["lr"], "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": g["weight_decay"],
         "bias_correction": True, "params": p}
        for g, p in zip(run.optimizer.param_groups, params, strict=True)
    ]  # fmt: skip


def _model_state(run: PlainRun, shapes: Any, module: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "module": module, "buffer_names": ["seen"], "optimizer": None, "param_shapes": shapes,
        "frozen_param_shapes": None, "shared_params": {}, "frozen_param_fragments": None,
        "lr_scheduler": {"last_batch_iteration": run.done - 1}, "data_sampler": None,
        "random_ltd": None, "sparse_tensor_module_names": set(), "skipped_steps": 1,
        "global_steps": run.done, "global_samples": 2 * run.done, "dp_world_size": 1,
        "mp_world_size": 1, "ds_config": {"train_batch_size": 2}, "ds_version": "0.19.6",
        "epoch": 4, **more,
    }  # fmt: skip


def _save(value: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with named_as_there():
        torch.save(value, path)


def stages_1_and_2(run: PlainRun, folder: Path, world: int, *, elastic: bool = False) -> None:
    """Every rank has its share of each group's weights, one after another; the end is padded."""
    step = torch.tensor(float(run.done))
    states: list[dict[int, Any]] = [{} for _ in range(world)]
    leans: list[list[torch.Tensor]] = [[] for _ in range(world)]
    paddings: list[list[int]] = [[] for _ in range(world)]
    for number, names in enumerate(run.groups):
        flats = {}
        for key in ("fp32", "exp_avg", "exp_avg_sq"):
            flat = torch.cat([run.values(key, n).flatten() for n in names])
            padding = -flat.numel() % (2 * world)
            flats[key] = torch.cat([flat, flat.new_full((padding,), 7.0)]).chunk(world)
        for rank in range(world):
            length = flats["fp32"][rank].numel()
            left = max(0, padding - (world - 1 - rank) * length)
            paddings[rank].append(min(left, length))
            leans[rank].append(flats["fp32"][rank][: length - paddings[rank][-1]].clone())
            states[rank][number] = {"step": step} | {k: flats[k][rank].clone() for k in
                                                     ("exp_avg", "exp_avg_sq")}  # fmt: skip
    for rank in range(world):
        base: Any = {"state": states[rank], "param_groups": _groups(run, [[0], [1]])}
        if elastic:
            base = [
                {k: v[: v.numel() - pad] if v.dim() else v for k, v in state.items()}
                for state, pad in zip(states[rank].values(), paddings[rank], strict=True)
            ]
        inside = {
            "loss_scaler": DynamicLossScaler(64.0), "dynamic_loss_scale": True, "overflow": False,
            "clip_grad": 1.0, "base_optimizer_state": base,
            "single_partition_of_fp32_groups": leans[rank],
            "zero_stage": ZeroStageEnum.gradients, "group_paddings": paddings[rank],
            "partition_count": [world, world], "ds_version": "0.19.6",
            "param_slice_mappings": [OrderedDict(x=fragment_address(1, 0))] * 2,
        }  # fmt: skip
        file = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        _save({"optimizer_state_dict": inside, "ds_config": {}, "ds_version": "0"}, folder / file)
    shapes = [OrderedDict((n, run.params[n].shape) for n in names) for names in run.groups]
    state = _model_state(run, shapes, run.model.state_dict())
    _save(state, folder / "mp_rank_00_model_states.pt")


def stage_3(run: PlainRun, folder: Path, world: int) -> None:
    """Every rank has its share of each weight, padded; a sub-group ends after two weights."""
    subs = [names[i : i + 2] for names in run.groups for i in range(0, len(names), 2)]
    count = -(-len(run.groups[0]) // 2)
    numbers = [list(range(count)), list(range(count, len(subs)))]

    def share(value: torch.Tensor, rank: int) -> torch.Tensor:
        flat = value.detach().flatten()
        length = -(-flat.numel() // world)
        padded = torch.cat([flat, flat.new_full((length * world - flat.numel(),), 7.0)])
        return padded[rank * length : (rank + 1) * length].clone()

    frozen = {n: p for n, p in run.params.items() if not p.requires_grad}
    module = {n: torch.empty(0, dtype=run.dtype) for n in run.params}
    for rank in range(world):
        flats = {
            key: [torch.cat([share(run.values(key, n), rank) for n in sub]) for sub in subs]
            for key in ("fp32", "exp_avg", "exp_avg_sq")
        }
        state = {
            i: {"step": run.done, "exp_avg": flats["exp_avg"][i],
                "exp_avg_sq": flats["exp_avg_sq"][i]} for i in range(len(subs))
        }  # fmt: skip
        inside = {
            "zero_stage": ZeroStageEnum.weights, "loss_scaler": DynamicLossScaler(64.0),
            "dynamic_loss_scale": True, "overflow": False, "partition_count": world,
            "optimizer_state_dict": {"state": state, "param_groups": _groups(run, numbers)},
            "fp32_flat_groups": flats["fp32"],
        }  # fmt: skip
        optim = {"optimizer_state_dict": inside, "ds_config": {}, "ds_version": "0.19.6"}
        _save(optim, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        model = _model_state(
            run,
            [OrderedDict((n, run.params[n].shape) for n in sub) for sub in subs],
            {**module, "seen": run.model.get_buffer("seen")},
            frozen_param_shapes={n: p.shape for n, p in frozen.items()} or None,
            frozen_param_fragments={n: share(p, rank) for n, p in frozen.items()} or None,
        )
        _save(model, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")


def universal(run: PlainRun, folder: Path, *, flat: bool) -> None:
    """A folder for each weight; from stage 3 its tensors are flat and bare."""
    for name in run.names:
        for key in ("fp32", "exp_avg", "exp_avg_sq"):
            value = run.values(key, name).clone()
            content: Any = value.flatten() if flat else {"cat_dim": 0, "param": value}
            _save(content, folder / "zero" / name / f"{key}.pt")
        if not flat:
            _save(torch.tensor(float(run.done)), folder / "zero" / name / "step.pt")
    groups = _groups(run, [[0], [1]])
    rest = {"param_groups": groups, "loss_scaler": DynamicLossScaler(64.0)}
    if flat:
        for group in groups:
            group["step"] = run.done
    _save(rest, folder / "zero" / "optimizer_state.pt")
    shapes = [OrderedDict((n, run.params[n].shape) for n in names) for names in run.groups]
    state = _model_state(run, shapes, run.model.state_dict())
    _save(state, folder / "mp_rank_00_model_states.pt")


def stage_0(run: PlainRun, folder: Path) -> None:
    """float16 without ZeRO: flat masters by group inside the model's file."""
    state = {
        i: {"step": run.done}
        | {k: torch.cat([run.values(k, n).flatten() for n in names])
           for k in ("exp_avg", "exp_avg_sq")}
        for i, names in enumerate(run.groups)
    }  # fmt: skip
    masters = [torch.cat([run.values("fp32", n).flatten() for n in g]) for g in run.groups]
    base = {"state": state, "param_groups": _groups(run, [[0], [1]])}
    inside = {
        "dynamic_loss_scale": True, "cur_scale": 64.0, "cur_iter": 5, "last_overflow_iter": 1,
        "scale_factor": 2.0, "scale_window": 1000, "optimizer_state_dict": base,
        "fp32_groups_flat": masters, "clip_grad": 1.0,
    }  # fmt: skip
    model = _model_state(run, None, run.model.state_dict(), optimizer=inside)
    _save(model, folder / "mp_rank_00_model_states.pt")
