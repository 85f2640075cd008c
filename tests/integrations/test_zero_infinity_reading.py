"""DeepSpeed configurations as people write them: notation, spellings, types, unknown keys."""

from __future__ import annotations

import base64
import json
import warnings
from pathlib import Path
from typing import Any

import pytest

import tiermem
import tiermem.integrations.zero_infinity as deepspeed
from tiermem.integrations.zero_infinity import notation, reading
from tiermem.integrations.zero_infinity.schema import OPTIONS

ZERO = "zero_optimization"


def read(raw: Any) -> reading.Config:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return reading.read(raw)


HJSON = """
# a comment
{
  // another
  train_batch_size: 8,
  "optimizer": {
    type: AdamW
    'params': { lr: 3e-4, betas: [0.9, 0.95,], eps: 1e-8 }  /* and a third */
  },
  fp16: { enabled: false, },
  "zero_optimization": {
    stage: 3
    offload_optimizer: { device: cpu  # on the host
    }
    note_: '''two
lines'''
  },
}
"""


def test_hjson_with_comments_commas_and_bare_words() -> None:
    found = notation.parse(HJSON, "a file")
    assert found["train_batch_size"] == 8
    assert found["optimizer"] == {
        "type": "AdamW",
        "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8},
    }
    assert found["fp16"] == {"enabled": False}
    assert found[ZERO]["stage"] == 3
    assert found[ZERO]["offload_optimizer"] == {"device": "cpu  # on the host"}
    assert found[ZERO]["note_"] == "two\nlines"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: 1\nb: up to the end, of the line", {"a": 1, "b": "up to the end, of the line"}),
        ('{"a": "\\u0041\\n\\"", b: null}', {"a": 'A\n"', "b": None}),
        ("{a: true, b: -1.5e3, c: 5e8}", {"a": True, "b": -1500.0, "c": 5e8}),
        ("{}", {}),
        ('{"a": 1,}', {"a": 1}),
    ],
)  # fmt: skip
def test_hjson_values(text: str, value: Any) -> None:
    assert notation.parse(text, "a file") == value


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a": 1', "line 1: a '}' is missing"),
        ('{"a": [1, 2', "a '\\]' is missing"),
        ('{\n"a" 1}', "line 2: a ':' is missing after 'a'"),
        ('{"a": "b', "a text is not closed"),
        ("{/* a: 1}", "a comment is not closed"),
        ("{a: 1} b", "something after the end"),
        ("{a: }", "a value is missing"),
        ("[1, 2]", "a configuration is an object, not a list"),
        ('{"a": 1, "a": 2}', "'a' is given twice, as 1 and as 2"),
        ("{a: 1, a: 2}", "'a' is given twice"),
    ],
)
def test_what_is_no_hjson_is_refused_with_its_line(text: str, says: str) -> None:
    with pytest.raises(tiermem.ConfigError, match=says):
        notation.parse(text, "a file")


def test_the_same_key_twice_alike_is_one(tmp_path: Path) -> None:
    assert notation.parse('{"a": 1, "a": 1}', "a file") == {"a": 1}


def test_a_path_a_dict_and_base64_are_the_same(tmp_path: Path) -> None:
    raw = {"train_batch_size": 4, ZERO: {"stage": 2}}
    path = tmp_path / "ds_config.json"
    path.write_text("\ufeff" + json.dumps(raw), encoding="utf-8")  # some editors write a mark
    coded = base64.urlsafe_b64encode(json.dumps(raw).encode()).decode()
    for source in (raw, path, str(path), coded):
        found = read(source)
        assert (found["train_batch_size"], found[f"{ZERO}.stage"]) == (4, 2)
    assert read(path).name == str(path)


def test_a_file_in_another_encoding_is_refused_by_name(tmp_path: Path) -> None:
    """As some shells write them."""
    path = tmp_path / "ds_config.json"
    path.write_text("{}", encoding="utf-16")
    with pytest.raises(tiermem.ConfigError, match=r"ds_config\.json cannot be read as UTF-8"):
        read(path)


def test_what_is_neither_file_nor_base64_is_refused(tmp_path: Path) -> None:
    for wrong in (str(tmp_path / "none.json"), str(tmp_path), "x" * 5000, "", "dsconfig"):
        with pytest.raises(tiermem.ConfigError, match="no such file, and it is not base64"):
            read(wrong)
    with pytest.raises(tiermem.ConfigError, match="must be a path, a dict or base64 text"):
        read(7)


@pytest.mark.parametrize(
    ("path", "written", "value"),
    [
        (f"{ZERO}.reduce_bucket_size", 5e8, 500_000_000),
        (f"{ZERO}.reduce_bucket_size", "5e8", 500_000_000),
        (f"{ZERO}.stage3_max_live_parameters", 1e12, 10**12),
        (f"{ZERO}.stage", "3", 3),
        (f"{ZERO}.overlap_comm", "True", True),
        (f"{ZERO}.overlap_comm", 0, False),
        ("train_batch_size", 16.0, 16),
        ("gradient_clipping", "0.5", 0.5),
        ("steps_per_print", "inf", None),
        ("steps_per_print", 1e5, 100_000),
        ("fp16.min_loss_scale", 0.5, 0.5),
        ("fp16.min_loss_scale", 1e-10, 1e-10),
        ("fp16.loss_scale", "128", 128.0),
        ("fp16.initial_scale_power", 8.5, 8.5),
    ],
)
def test_numbers_and_truths_as_people_write_them(path: str, written: Any, value: Any) -> None:
    section, _, key = path.rpartition(".")
    raw = {section: {key: written}} if section else {key: written}
    assert read(raw).settings[path].value == value


@pytest.mark.parametrize(
    ("path", "written", "says"),
    [
        (f"{ZERO}.stage", 4, "must be 0, 1, 2 or 3, and this is a int"),
        (f"{ZERO}.stage", "three", "must be 0, 1, 2 or 3, and this is text"),
        (f"{ZERO}.reduce_bucket_size", -1, "a number of elements, 0 or more"),
        (f"{ZERO}.reduce_bucket_size", 1.5, "a number of elements, 0 or more"),
        (f"{ZERO}.overlap_comm", "maybe", "must be true or false, and this is text"),
        (f"{ZERO}.offload_param", "cpu", "it is an object, and this is text"),
        ("train_batch_size", 0, "a whole number, 1 or more"),
        ("train_batch_size", True, "and this is a truth value"),
        ("gradient_clipping", [1], "a finite number, 0 or more, and this is a list"),
        ("gradient_clipping", "inf", "a finite number"),
        ("gradient_accumulation_steps", 10**400, "must be a whole number, 1 or more"),
        ("gradient_accumulation_steps", 1e300, "must be a whole number, 1 or more"),
        ("gradient_accumulation_steps", float("nan"), "must be a whole number, 1 or more"),
        ("gradient_accumulation_steps", float("inf"), "must be a whole number, 1 or more"),
        ("train_micro_batch_size_per_gpu", -(10**400), "must be a whole number, 1 or more"),
        (f"{ZERO}.mics_shard_size", 10**400, "must be a whole number, and this is a int"),
        ("gradient_clipping", float("nan"), "a finite number"),
        ("steps_per_print", 10**400, "a whole number of steps, or 'inf' for never"),
        ("fp16.initial_scale_power", 1024, "a number from -1022 to 1023"),
        ("fp16.initial_scale_power", float("-inf"), "a number from -1022 to 1023"),
        ("steps_per_print", "often", "a whole number of steps, or 'inf' for never"),
        ("fp16.loss_scale", -1, "a finite number, 0 or more"),
        ("fp16.hysteresis", 1.5, "a whole number, 0 or more"),
        ("optimizer", ["AdamW"], "it is an object, and this is a list"),
        ("optimizer.params", 1e-3, "must be an object"),
    ],
)
def test_a_wrong_type_says_file_key_value_and_type(
    tmp_path: Path, path: str, written: Any, says: str
) -> None:
    file = tmp_path / "ds.json"
    section, _, key = path.rpartition(".")
    raw = {section: {key: written}} if section else {key: written}
    file.write_text(json.dumps(raw))
    with pytest.raises(tiermem.ConfigError) as caught:
        read(file)
    assert says in str(caught.value)
    assert str(file) in str(caught.value)
    assert f"{path}={written!r}"[:200] in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("written", [10**5000, "1" * 5000], ids=["number", "text"])
def test_a_value_that_would_fill_screens_is_shortened(written: Any) -> None:
    says = (
        r"gradient_accumulation_steps=(a number of 16610 bits|'?1[01]+\.\.\. \(\d+ characters\)):"
    )
    with pytest.raises(tiermem.ConfigError, match=says):
        read({"gradient_accumulation_steps": written})


def test_a_file_with_a_number_of_thousands_of_digits_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"gradient_accumulation_steps": ' + "1" * 5000 + "}")
    with pytest.raises(tiermem.ConfigError, match=r"ds\.json, line 1: a number has 5000 digits"):
        read(file)


def test_a_file_with_too_many_objects_inside_one_another_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"a": ' + "[" * 200_000 + "]" * 200_000 + "}")
    with pytest.raises(tiermem.ConfigError, match=r"ds\.json: it has too many objects or lists"):
        read(file)


@pytest.mark.parametrize("written", ["auto", None])
def test_an_optimizer_without_a_name_is_explained(written: Any) -> None:
    found = deepspeed.explain({"optimizer": {"type": written, "params": {}}})
    assert found["optimizer.type"].setting == "class of tier.optimizer"


@pytest.mark.parametrize(
    ("key", "read_as"),
    [
        ("max_live_parameters", "stage3_max_live_parameters"),
        ("prefetch_bucket_size", "stage3_prefetch_bucket_size"),
        ("param_persistence_threshold", "stage3_param_persistence_threshold"),
    ],
)
def test_both_spellings(key: str, read_as: str) -> None:
    assert read({ZERO: {key: 7}})[f"{ZERO}.{read_as}"] == 7
    assert read({ZERO: {read_as: 7}})[f"{ZERO}.{read_as}"] == 7
    assert read({ZERO: {key: 7, read_as: 7}})[f"{ZERO}.{read_as}"] == 7
    with pytest.raises(tiermem.ConfigError, match="they are one option; keep one"):
        read({ZERO: {key: 7, read_as: 8}})


def test_the_old_names_of_gathering_and_of_bfloat16() -> None:
    for name in ("stage3_gather_fp16_weights_on_model_save", "gather_16bit_weights_on_model_save"):
        found = read({ZERO: {name: True}})
        assert found[f"{ZERO}.stage3_gather_16bit_weights_on_model_save"] is True
    assert read({"bfloat16": {"enabled": True}})["bf16.enabled"] is True
    with pytest.raises(tiermem.ConfigError, match="keep one"):
        read({"bfloat16": {"enabled": True}, "bf16": {"enabled": False}})


@pytest.mark.parametrize("flag", ["cpu_offload", "cpu_offload_param", "cpu_offload_params"])
def test_deprecated_switches_set_a_device(flag: str) -> None:
    section = "offload_optimizer" if flag == "cpu_offload" else "offload_param"
    path = f"{ZERO}.{section}.device"
    assert read({ZERO: {flag: True}})[path] == "cpu"
    assert read({ZERO: {flag: False}})[path] == "none"
    assert read({ZERO: {flag: True, section: {"device": "cpu"}}})[path] == "cpu"
    with pytest.raises(tiermem.ConfigError, match=f"{flag}=True is an old name"):
        read({ZERO: {flag: True, section: {"device": "nvme", "nvme_path": "/x"}}})


def test_a_truth_value_for_zero_is_a_stage() -> None:
    assert read({ZERO: True})[f"{ZERO}.stage"] == 1
    assert read({ZERO: False})[f"{ZERO}.stage"] == 0
    assert read({ZERO: 3})[f"{ZERO}.stage"] == 3  # a number is the stage, and no truth value
    with pytest.raises(tiermem.ConfigError, match="zero_optimization=4: it must be 0, 1, 2 or 3"):
        read({ZERO: 4})
    assert read({"fp16": True})["fp16.enabled"] is True


def test_nothing_is_the_default() -> None:
    found = read({ZERO: {"offload_param": None, "stage": None}, "optimizer": None, "fp16": None})
    for path, option in OPTIONS.items():
        assert found[path] == option.default


@pytest.mark.parametrize(
    ("raw", "key", "near"),
    [
        ({"gradient_acumulation_steps": 2}, "gradient_acumulation_steps",
         "gradient_accumulation_steps"),
        ({ZERO: {"ofload_param": {}}}, f"{ZERO}.ofload_param", f"{ZERO}.offload_param"),
        ({ZERO: {"offload_param": {"devise": "cpu"}}}, f"{ZERO}.offload_param.devise",
         f"{ZERO}.offload_param.device"),
        ({"fp16": {"opt_level": "O2"}}, "fp16.opt_level", ""),
        ({"aio": {"blok_size": 1}}, "aio.blok_size", "aio.block_size"),
        ({"xyzzy": 1}, "xyzzy", ""),
        ({"BF16": {"enabled": True}}, "BF16", "bf16"),
        ({ZERO: {"Offload_Param": {}}}, f"{ZERO}.Offload_Param", f"{ZERO}.offload_param"),
    ],
)  # fmt: skip
def test_unknown_keys_are_warned_about_with_the_nearest(raw: Any, key: str, near: str) -> None:
    says = f"'{key}' is not a known key"
    with pytest.warns(UserWarning, match=says) as caught:
        found = reading.read(raw)
    assert found.unknown == {key: near}
    assert (f"did you mean {near!r}?" in str(caught[0].message)) == bool(near)
    assert deepspeed.explain(raw).unknown == {key: near}


@pytest.mark.parametrize("key", ["HBM", "nvme", "budget"])
def test_unknown_keys_of_the_own_section_are_refused(key: str) -> None:
    """DeepSpeed does not read it, so that such a key can only be a mistake about a budget."""
    with pytest.raises(
        tiermem.ConfigError, match=rf"'tiermem.{key}' is not a known key; it has .*hbm"
    ):
        read({"tiermem": {key: "6GiB"}})


def test_remarks_are_not_warned_about() -> None:
    assert read({"tiermem": {"_comment": "mine"}}).unknown == {}
    assert read({"_comment": "mine", "//": "also"}).unknown == {}


def test_sections_without_effect_are_listed_and_warned_about_where_they_would_train_otherwise() -> (
    None
):
    quiet = {"tensorboard": {"enabled": True}, "compile": {"backend": "inductor"},
             "curriculum_learning": {"enabled": False}}  # fmt: skip
    assert read(quiet).sections.keys() == quiet.keys()
    assert set(deepspeed.explain(quiet).without_effect) >= quiet.keys()
    with pytest.warns(UserWarning, match="'curriculum_learning' has no effect: batches come"):
        reading.read({"curriculum_learning": {"enabled": True}})


def test_auto_stays_until_it_is_filled() -> None:
    raw = {"train_batch_size": "auto", ZERO: {"stage": 3, "reduce_bucket_size": "auto"},
           "bf16": {"enabled": "auto"}}  # fmt: skip
    found = read(raw)
    assert set(found.autos) == {
        "train_batch_size", f"{ZERO}.reduce_bucket_size", "bf16.enabled",
    }  # fmt: skip


def test_a_file_of_the_hugging_face_kind_is_taken_whole() -> None:
    """The shape that most public files have."""
    raw = {
        "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000,
                 "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto",
                                                  "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto",
                                                     "warmup_max_lr": "auto",
                                                     "warmup_num_steps": "auto"}},
        ZERO: {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True},
               "offload_param": {"device": "cpu", "pin_memory": True}, "overlap_comm": True,
               "contiguous_gradients": True, "sub_group_size": 1e9, "reduce_bucket_size": "auto",
               "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
               "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
               "stage3_gather_16bit_weights_on_model_save": True},
        "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
        "steps_per_print": 2000, "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": False,
    }  # fmt: skip
    args = {"learning_rate": 3e-4, "bf16": True, "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 8, "max_grad_norm": 0.3, "warmup_steps": 7}  # fmt: skip
    found = deepspeed.explain(raw, args=args)
    assert not found.unknown
    assert found["train_batch_size"].value == 32
    assert found["gradient_clipping"].value == 0.3
    assert found["bf16.enabled"].value is True
    assert found["fp16.enabled"].value is False
    assert found["optimizer.params"].value == {"lr": 3e-4}
    assert found["scheduler.params"].value == {"warmup_max_lr": 3e-4, "warmup_num_steps": 7}
    assert found.manager["policy"]["params"] == "dram"


def test_every_option_is_explained_and_says_what_it_became() -> None:
    for path, option in OPTIONS.items():
        assert option.effect, path
        assert bool(option.setting) == bool(option.test), path
