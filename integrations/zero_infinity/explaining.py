"""Explains what each setting of a configuration became: for users, and for the page in ``docs``."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from . import autofill, mapping, notation, optimizers, reading, schema, sizing
from .mapping import Plan
from .optimizers import COMPRESSED
from .schema import OPTIONS, SECTIONS
from .zerooptions import PARAM, STATE, ZERO


@dataclass(frozen=True)
class Row:
    """One setting.

    Attributes:
        option: Its path.
        value: As it was read.
        source: ``"file"``, ``"auto"``, ``"inferred"``, or the deprecated key it is from.
        setting: The tiermem setting it became, or "" where it has no effect.
        effect: What that does, or why there is none.
    """

    option: str
    value: Any
    source: str
    setting: str
    effect: str


@dataclass(frozen=True)
class Explanation:
    """What a configuration became.

    Attributes:
        name: The file.
        rows: One per setting of the file, and per batch number.
        manager: Settings of ``tiermem.TierManager``; with budgets that depend on the model only if
            a model was given.
        optimizer: Settings of ``tier.optimizer``.
        unknown: Unknown keys, and the nearest known one or "".
        refused: Why ``initialize`` would refuse it on this machine (a missing folder, batch numbers
            for several processes), or "".
    """

    name: str
    rows: tuple[Row, ...]
    manager: dict[str, Any]
    optimizer: dict[str, Any]
    unknown: dict[str, str]
    refused: str

    @property
    def without_effect(self) -> list[str]:
        """Options that have no effect."""
        return [row.option for row in self.rows if not row.setting]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __getitem__(self, option: str) -> Row:
        return next(row for row in self.rows if row.option == option)

    def __str__(self) -> str:
        lines = [f"{self.name}:"]
        for row in self.rows:
            became = row.setting or "no effect"
            source = "" if row.source == "file" else f" ({row.source})"
            lines.append(f"  {row.option} = {row.value!r}{source}: {became}: {row.effect}")
        for key, near in self.unknown.items():
            lines.append(f"  {key}: not known" + (f"; did you mean {near!r}?" if near else ""))
        if self.refused:
            lines.append(f"  refused: {self.refused}")
        return "\n".join(lines)


def explain(
    config: notation.Source, args: Any = None, model: nn.Module | None = None
) -> Explanation:
    """Says what each setting of a configuration became; nothing is moved and nothing opened.

    Args:
        config: A path, a dict, or text in base64.
        args: The caller's values for "auto": a namespace or a dict.
        model: If given, budgets are those for training it (with AdamW by default).

    Raises:
        ConfigError: If it is wrong on any machine; ``refused`` says what is missing on this one.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read = reading.read(config)
    autofill.fill(read, autofill.Caller(args, model))
    plan = mapping.plan(read)
    if model is not None:
        kind, params = read["optimizer.type"] or "AdamW", read["optimizer.params"] or {}
        params = {key: value for key, value in params.items() if key != "max_grad_norm"}
        made = optimizers.from_config(read.name, kind, params, plan.device)
        sizing.size(plan, model, made, [p for p in model.parameters() if p.requires_grad])
    return explained(plan)


def explained(plan: Plan) -> Explanation:
    """Returns the explanation of a plan."""
    config = plan.config
    rows = [_row(plan, path) for path in config.settings]
    for key, value in config.sections.items():
        rows.append(Row(key, value, "file", "", SECTIONS[key].why))
    return Explanation(
        config.name,
        tuple(rows),
        dict(plan.manager),
        dict(plan.optimizer),
        dict(config.unknown),
        plan.refused,
    )


def _row(plan: Plan, path: str) -> Row:
    setting, option = plan.config.settings[path], OPTIONS[path]
    became, effect = option.setting, option.effect
    told = _told(plan, path)
    if told is not None:
        became, effect = told if isinstance(told, tuple) else (told, effect)
    return Row(path, plan.config[path], setting.source, became, effect)


def _told(plan: Plan, path: str) -> str | tuple[str, str] | None:
    """Returns what an option became in this plan, if the table does not say it, or None."""
    policy = plan.manager["policy"]
    if path == f"{PARAM}.device":
        return f"Policy(params={policy['params']!r})"
    if path == f"{STATE}.device":
        homes = ", ".join(f"{k}={policy[k]!r}" for k in ("master", "optimizer", "grads"))
        return f"Policy({homes}), where={plan.optimizer['where']!r}"
    section = path.rpartition(".")[0]
    if section in (PARAM, STATE) and path.endswith(("buffer_count", "buffer_size", "max_in_cpu",
                                                    "nvme_path")):  # fmt: skip
        return _for_files(plan, path, section)
    if path == f"{ZERO}.sub_group_size":
        return _for_files(plan, path, STATE)
    if path == f"{ZERO}.stage3_prefetch_bucket_size" and plan.manager.get("prefetch_depth") != 0:
        return "", "tiermem decides how far ahead it fetches"
    if path == f"{STATE}.ratio" and plan.config[f"{STATE}.device"] == "none":
        return "", f"{STATE}.device is 'none'"
    if path == "optimizer.type" and str(plan.config[path]).lower() in COMPRESSED:
        return "class of tier.optimizer", "without compression: one process exchanges nothing"
    if path.startswith("fp16.") and path != "fp16.enabled" and not plan.config["fp16.enabled"]:
        return "", "fp16.enabled is false"
    if path.startswith("bf16.") and path != "bf16.enabled" and not plan.config["bf16.enabled"]:
        return "", "bf16.enabled is false"
    return None


def _for_files(plan: Plan, path: str, section: str) -> str | tuple[str, str] | None:
    if plan.config[f"{section}.device"] != "nvme":
        return "", f"{section}.device is not 'nvme'"
    if not path.endswith(("buffer_size", "max_in_cpu", "sub_group_size")):
        return None
    weight = 4 if section == STATE or plan.dtype is None else plan.dtype.itemsize
    return f"TierManager(dram): {plan.config[path] * weight:,} bytes"


def page() -> str:
    """Returns the page in ``docs``, made of the tables that files are read by."""
    head = (
        "# ZeRO-Infinity and ZeRO-Offload: every option\n\nMade by "
        "`python -m tiermem.integrations.zero_infinity` from the tables that files are read by. "
        "Tests are in `tests/integrations`.\nBefore and after: "
        "[From DeepSpeed](../guides/from-deepspeed.md). `explain(config)` says the same of one "
        "file.\n\n"
    )
    return head + table()


def table() -> str:
    """Returns the tables of the page in ``docs``: option, tiermem setting, effect, test."""
    head = "| option | default | tiermem setting | effect | test |\n|---|---|---|---|---|"
    lines = ["## Options with an effect", "", head]
    for option in OPTIONS.values():
        if option.setting:
            lines.append(
                f"| `{option.path}` | {_shown(option.default)} | {option.setting} | "
                f"{option.effect} | `{option.test}` |"
            )
    lines += ["", "## Options without an effect", "", "| option | why |", "|---|---|"]
    lines += [f"| `{o.path}` | {o.effect} |" for o in OPTIONS.values() if not o.setting]
    lines += [
        f"| `{s.key}` | {s.why}{'; warned about where it is on' if s.changes else ''} |"
        for s in SECTIONS.values()
    ]
    lines += ["", "## Other spellings", "", "| written | read as |", "|---|---|"]
    pairs = {**schema.ALIASES, **schema.SECTION_ALIASES}
    pairs |= {flag: f"{section}.device: cpu" for flag, section in schema.OFFLOAD_FLAGS.items()}
    pairs[f"{ZERO}: true"] = f"{ZERO}.stage: 1"
    pairs[f"{ZERO}: 3"] = f"{ZERO}.stage: 3"
    lines += [f"| `{old}` | `{new}` |" for old, new in pairs.items()]
    return "\n".join(lines) + "\n"


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:,}" if isinstance(value, int) else str(value)
