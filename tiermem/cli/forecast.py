"""The arithmetic behind ``tiermem plan``: bytes, homes, traffic, and a bound on time.

The formulas, with ``P`` parameters of ``b`` bytes in ``L`` equal blocks:

* Weights and gradients are ``P·b`` each; optimizer state is ``k·P·b``, as torch
  keeps it in the dtype of the weights (``k`` = 2 for AdamW).
* HBM holds the blocks in work: two of each role, so that one is used while the
  next arrives. Room beyond that keeps weights for good.
* Every block has a home below HBM, also one that stays. DRAM takes the homes of weights,
  then of gradients, then of optimizer state; what is left goes to NVMe.
* Weights that do not stay come up three times a step (forward, backward, step) and
  go down once; gradients go down once and come up once; state comes up and goes down.
* Compute is ``6·P`` operations per token, ``8·P`` with recomputation, ``2·P`` forward only.

The bound on the step is the longest of compute, the host link in each direction and
the disks (whose reads and writes share them). It is a bound, not a promise: latency,
activations and the optimizer's arithmetic are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from tiermem.config import exact_size, format_size
from tiermem.errors import CapacityError

STATES = {"adamw": 2, "adam": 2, "momentum": 1, "lion": 1, "sgd": 0}
"""State tensors per parameter, by optimizer."""

_ROLES = ("params", "grads", "optimizer")
_BLOCKS_IN_WORK = 2


@dataclass(frozen=True)
class Workload:
    """What is to be trained or run.

    Attributes:
        parameters: Number of parameters.
        layers: Equal blocks they fall into.
        itemsize: Bytes of one.
        states: State tensors per parameter.
        tokens: Tokens in a step.
        recompute: Whether activations are recomputed in backward.
        inference: Forward only.
    """

    parameters: float
    layers: int
    itemsize: int
    states: int
    tokens: float
    recompute: bool = False
    inference: bool = False

    def role_bytes(self) -> dict[str, float]:
        """Returns the bytes of each role."""
        weights = self.parameters * self.itemsize
        if self.inference:
            return {"params": weights, "grads": 0.0, "optimizer": 0.0}
        return {"params": weights, "grads": weights, "optimizer": self.states * weights}

    def operations(self) -> float:
        """Returns the floating-point operations of one step."""
        per_parameter = 2 if self.inference else 8 if self.recompute else 6
        return per_parameter * self.parameters * self.tokens


@dataclass(frozen=True)
class Machine:
    """Budgets in bytes and speeds in bytes (or operations) per second.

    Attributes:
        hbm: Device budget.
        dram: Host budget.
        nvme: Swap-file budget; 0 for none.
        link: Host link, each way.
        read: Disks, reading.
        write: Disks, writing.
        flops: Device.
    """

    hbm: float
    dram: float
    nvme: float
    link: float
    read: float
    write: float
    flops: float


@dataclass(frozen=True)
class Forecast:
    """What to expect.

    Attributes:
        homes: Bytes by role, then by home tier.
        in_work: Bytes of HBM for the blocks in work.
        stays: Bytes of weights that stay in HBM from step to step.
        traffic: Bytes per step by link.
        seconds: Bounds per step by what sets them.
        bound: Which of them is the longest.
        hiding_tokens: Tokens per step from which compute hides every transfer.
    """

    homes: dict[str, dict[str, float]]
    in_work: float
    stays: float
    traffic: dict[str, float]
    seconds: dict[str, float]
    bound: str
    hiding_tokens: float

    @property
    def step_seconds(self) -> float:
        """The bound on the time of a step."""
        return self.seconds[self.bound]


def forecast(work: Workload, machine: Machine) -> Forecast:
    """Forecasts placement, traffic and time.

    Raises:
        CapacityError: If the budgets cannot hold it, naming the least that would.
    """
    sizes = work.role_bytes()
    in_work = _blocks_in_work(work, machine)
    stays = min(sizes["params"], machine.hbm - in_work)
    homes = _homes(sizes, machine)
    traffic = _traffic(homes, 1 - stays / sizes["params"], work.inference)
    up = traffic["dram->hbm"] + traffic["nvme->hbm"]
    down = traffic["hbm->dram"] + traffic["hbm->nvme"]
    seconds = {
        "compute": work.operations() / machine.flops,
        "host link, up": up / machine.link,
        "host link, down": down / machine.link,
        "disks": traffic["nvme->hbm"] / machine.read + traffic["hbm->nvme"] / machine.write,
    }
    longest = max(value for name, value in seconds.items() if name != "compute")
    return Forecast(
        homes=homes,
        in_work=in_work,
        stays=stays,
        traffic=traffic,
        seconds=seconds,
        bound=max(seconds, key=lambda name: seconds[name]),
        hiding_tokens=longest * machine.flops * work.tokens / work.operations(),
    )


def _blocks_in_work(work: Workload, machine: Machine) -> float:
    least = sum(work.role_bytes().values()) / work.layers
    if machine.hbm < least:
        raise CapacityError(
            f"one of {work.layers} equal blocks needs {format_size(least)} of HBM (all roles "
            f"at once), but --hbm is {format_size(machine.hbm)}",
            f"give at least {exact_size(ceil(least))} or more layers",
        )
    return min(_BLOCKS_IN_WORK * least, machine.hbm)


def _homes(sizes: dict[str, float], machine: Machine) -> dict[str, dict[str, float]]:
    room = {"dram": machine.dram, "nvme": machine.nvme}
    homes: dict[str, dict[str, float]] = {}
    for role in _ROLES:
        left = sizes[role]
        homes[role] = {}
        for tier in room:
            homes[role][tier] = min(left, room[tier])
            room[tier] -= homes[role][tier]
            left -= homes[role][tier]
        if left > 0:
            needed = sum(sizes.values())
            raise CapacityError(
                f"{role} do not fit: {format_size(needed)} are needed below HBM, "
                f"but --dram and --nvme-bytes give {format_size(machine.dram + machine.nvme)}",
                f"give {exact_size(ceil(needed))} or more in both together",
            )
    return homes


def _traffic(
    homes: dict[str, dict[str, float]], moving: float, inference: bool
) -> dict[str, float]:
    ups = {"params": (1 if inference else 3) * moving, "grads": 1, "optimizer": 1}
    downs = {"params": 0 if inference else moving, "grads": 1, "optimizer": 1}
    traffic: dict[str, float] = {}
    for tier in ("dram", "nvme"):
        traffic[f"{tier}->hbm"] = sum(ups[role] * homes[role][tier] for role in _ROLES)
        traffic[f"hbm->{tier}"] = sum(downs[role] * homes[role][tier] for role in _ROLES)
    return traffic
