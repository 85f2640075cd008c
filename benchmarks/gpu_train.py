"""The steps that measure full training on one GPU, and what is required of it."""

from __future__ import annotations

from collections.abc import Callable

from required import Check, Results, Step, cell
from train_peers import PEERS

Read = Callable[[Results], float | None]

_SMALL = (
    "--device cpu --shape tiny --tokens 32 --chunks 2 --repeats 1 --steps 1 --warm 2 "
    "--adam-elements 1024 --raw-repeats 1 --scratch 4MiB"
)
_ACTIVATIONS = f"{_SMALL} --activation-min 4KiB --dram 16MiB"
_FEW = "--repeats 1 --steps 2"
_4K_STEPS = (
    "--tokens 4096 --hbm 2.3GiB --overlap backward --repeats 2 --steps 5 --warm 9 --check-steps 1 "
    "--raw-repeats 1"
)


def step(name: str, line: str, small: str, seconds: int) -> Step:
    """Returns a step of bench_train.py."""
    out = "{out}train_" + name.replace("-", "_") + "_{name}.json"
    return Step(f"train-{name}", f"bench_train.py {line} --out {out}", small, seconds, "train")


_16K_STEPS = (
    "--tokens 16384 --micro 1 4 --where both --overlap backward --warm 10 --check-steps 1 "
    "--raw-repeats 1 --repeats 2 --steps 6"
)


STEPS = (
    step("4k-device", f"{_4K_STEPS} --where device", _SMALL, 80),
    step("4k-both", f"{_4K_STEPS} --where both", _SMALL, 80),
    step(
        "4k-peers",
        f"--what peers --tokens 4096 --hbm 2.3GiB --where both --overlap backward --warm 4 {_FEW}",
        _SMALL,
        110,
    ),
    step(
        "16k",
        f"{_16K_STEPS} --hbm 4GiB",
        f"{_SMALL} --micro 1 4",
        170,
    ),
    step("16k-8gib", f"{_16K_STEPS} --hbm 8GiB", f"{_SMALL} --micro 1 4", 170),
    step("16k-12gib", f"{_16K_STEPS} --hbm 12GiB", f"{_SMALL} --micro 1 4", 170),
    step(
        "capped",
        "--what capped --shape 6.7b --hbm 3GiB --tokens 16384 --micro 4 --where both "
        "--overlap backward --warm 3 --check-steps 1 --repeats 1 --steps 2",
        _SMALL,
        200,
    ),
    step(
        "nvme",
        "--shape 1b --nvme {folder} --tokens 4096 16384 --warm 2 --check-steps 1 --raw-repeats 1 "
        f"--raw-share 0.5 {_FEW}",
        f"{_SMALL} --tokens 16 32",
        220,
    ),
    step(
        "nvme-spare",
        "--shape 1b --nvme {folder} --spare 5GiB --tokens 4096 --warm 2 --check-steps 1 "
        f"--raw-repeats 1 --raw-share 0.5 {_FEW}",
        f"{_SMALL} --spare 1MiB",
        115,
    ),
    step(
        "residual",
        "--what residual --layers 28 14 --tokens 16384 --raw-repeats 1 --warm 2 --repeats 2 "
        "--steps 2",
        f"{_ACTIVATIONS} --layers 4 2",
        90,
    ),
    step(
        "saved",
        f"--what saved --layers 28 --tokens 16384 --dram 72GiB --raw-repeats 2 --warm 3 {_FEW}",
        f"{_ACTIVATIONS} --layers 4",
        100,
    ),
)


def best(column: str, *kinds: str) -> Read:
    """Returns what reads the best value of a column."""

    def read(results: Results) -> float | None:
        return max((v for kind in kinds for v in results.pick(kind, column)), default=None)

    return read


def fastest(column: str) -> Read:
    """Returns what reads a column of whichever 4,096-token row has the fastest step."""

    def read(results: Results) -> float | None:
        rows = [row for kind in _4K for row in results.rows(kind) if "tiermem s" in row]
        chosen = min(rows, key=lambda row: row["tiermem s"], default={})
        return chosen.get(column)

    return read


def beyond(column: str, kind: str) -> Read:
    """Returns what reads how many times a column's largest value is its least."""

    def read(results: Results) -> float | None:
        found = results.pick(kind, column)
        return max(found) / min(found) if len(found) > 1 else None

    return read


def equal(results: Results) -> float | None:
    """Returns the share of rows with steps on the device whose bits are the resident run's."""
    rows = [row for kind in _KINDS for row in results.rows(kind)]
    found = [
        r["equal"] for r in rows if "equal" in r and r.get("where", "device") in ("auto", "device")
    ]
    return sum(map(bool, found)) / len(found) if found else None


_4K = ("train_4k_device", "train_4k_both")
_KINDS = (
    *_4K,
    "train_16k",
    "train_16k_8gib",
    "train_16k_12gib",
    "train_capped",
    "train_nvme",
    "train_nvme_spare",
    "train_residual",
    "train_saved",
)


def check(work: str, found: Read, least: float | None = None, most: float | None = None) -> Check:
    """Returns a line of the group."""
    return Check(work, found, least, most, "train")


CHECKS = (
    *(
        check(
            f"3.02 B, 16384 tokens, {hbm} of HBM, {micro} micro-batches",
            cell(kind, "of resident", micro=micro),
            least,
        )
        for hbm, kind in (
            ("4 GiB", "train_16k"),
            ("8 GiB", "train_16k_8gib"),
            ("12 GiB", "train_16k_12gib"),
        )
        for micro, least in ((1, 0.95), (4, 0.98))
    ),
    check("the same, 4096 tokens, of the bound", fastest("of bound"), 0.9),
    check("the same, steps on the device", best("of bound", "train_4k_device"), 0.9),
    check("the same, steps on both", best("of bound", "train_4k_both"), 0.9),
    *(
        check(
            f"the same, times as fast as {peer}",
            cell("train_4k_peers", "tiermem is so many times as fast", what=peer),
            1,
        )
        for peer in PEERS
    ),
    check("peak HBM at 4096 tokens, GB", fastest("peak HBM GB"), most=4),
    check(
        "host bytes per parameter less 2 GiB",
        fastest("host bytes per parameter less 2 GiB"),
        most=17,
    ),
    check(
        "6.74 B, capped at 8 GiB, of the resident step", cell("train_capped", "of resident"), 0.9
    ),
    *(
        check(
            f"1.0 B from NVMe, {tokens} tokens, of the bound",
            cell("train_nvme", "of bound", tokens=tokens),
            0.9,
        )
        for tokens in (4096, 16384)
    ),
    *(
        check(
            f"the same, times as fast as ZeRO-Infinity, {tokens} tokens",
            cell("train_nvme", "times as fast as ZeRO-Infinity", tokens=tokens),
            1.5,
        )
        for tokens in (4096, 16384)
    ),
    check(
        "the same with 5 GiB of DRAM to spare, of the bound",
        cell("train_nvme_spare", "of bound"),
        0.9,
    ),
    check(
        "with these, times as fast as ZeRO-Infinity",
        cell("train_nvme_spare", "times as fast as ZeRO-Infinity"),
        1.5,
    ),
    check(
        "residual stream to DRAM, of the speed without",
        cell("train_residual", "of resident", layers=28),
        0.99,
    ),
    check(
        "HBM for it, 28 layers beside 14",
        beyond("tiermem activations GB", "train_residual"),
        most=1.05,
    ),
    check("every saved tensor to DRAM, of the bound", cell("train_saved", "of bound"), 0.95),
    check("HBM for it, of its budget", cell("train_saved", "of the activation budget"), most=1),
    check("bits as resident, share of rows", equal, 1),
)
