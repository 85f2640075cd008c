"""Measuring passes: what stamps say, in whatever order they pass, and what it costs when not."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from support_runtime import PAGE, Rig, rig
from torch import nn
from torch.utils.checkpoint import checkpoint

import tiermem
from tiermem.core.block import Block, Extent, Role, Tier
from tiermem.core.pace import Estimates, _Pass
from tiermem.core.residency import Record, State
from tiermem.runtime.manager import BlockManager
from tiermem.runtime.metrics.counters import Counters
from tiermem.runtime.metrics.machine_profile import MachineProfile, save
from tiermem.runtime.metrics.pass_timer import PassTimer, estimates_from

EXTENT = Extent(0, PAGE)


class FakeClock:
    """Stamps of a time that the test sets, and that pass when the test says so."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self.now = 0.0
        self.copies = 0.0
        self.rng = rng
        self.calls = 0
        self.times: dict[int, float] = {}
        self.late: set[int] = set()
        self.able = True
        self.host_now = 0.0
        self.most = 1 << 20

    def _set(self, now: float) -> int | None:
        self.calls += 1
        if len(self.times) >= self.most:
            return None
        number = self.calls
        self.times[number] = now
        self.late.add(number)
        return number

    def prepare(self, stamps: int) -> None:
        pass

    def stamp(self) -> int | None:
        return self._set(self.now)

    def stamp_copies(self, extent: Extent | None, after: object) -> int | None:
        return self._set(self.copies)

    def passed(self, stamp: int) -> bool:
        assert stamp in self.times, "asked about a stamp that was freed"
        if self.rng is None or (stamp in self.late and self.rng.random() < 0.3):
            self.late.discard(stamp)
        return stamp not in self.late

    def seconds(self, begin: int, end: int) -> float:
        assert {begin, end} & self.late == set(), "read before it has passed"
        return self.times[end] - self.times[begin]

    def free(self, stamp: int) -> None:
        del self.times[stamp]
        self.late.discard(stamp)

    def host(self) -> float:
        return self.host_now

    def usable(self) -> bool:
        return self.able


def record(number: int, home: Tier = Tier.DRAM) -> Record:
    block = Block(number, f"block{number}", Role.PARAM, PAGE, ())
    return Record(block, home, None, at_home=State.VALID, defined=True)


class Player:
    """Plays passes into a pacing: waits, computes and copies as long as it is told."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self.clock = FakeClock(rng)
        self.counters = Counters()
        self.estimates = Estimates()
        self.pass_timer = PassTimer(self.clock, self.counters, self.estimates)

    def use(self, number: int, wait: float, compute: float, home: Tier = Tier.DRAM) -> None:
        if self.pass_timer.sampling:
            self.pass_timer.arrived()
        self.clock.now += wait
        if self.pass_timer.sampling:
            self.pass_timer.started(record(number, home), object() if wait else None)  # type: ignore[arg-type]
        self.clock.now += compute

    def copy(self, number: int, seconds: float, nbytes: int = PAGE) -> None:
        self.counters.moved("dram->hbm", PAGE, 1)
        if self.pass_timer.sampling:
            self.pass_timer.rising(EXTENT, None)
        self.clock.copies += seconds
        if self.pass_timer.sampling:
            self.pass_timer.risen(record(number).block, nbytes)

    def sweep(self, key: str = "f", scale: float = 1.0) -> None:
        self.pass_timer.begin(key)
        for number in range(4):
            self.use(number, 0.5 if number == 2 else 0.0, scale * (number + 1))
        if self.pass_timer.sampling:
            self.pass_timer.ended()

    def read_all(self) -> None:
        for _ in range(10_000):
            if not self.pass_timer.pending:
                return
            self.pass_timer.harvest()
        raise AssertionError("stamps have passed, and are not read")


@pytest.mark.parametrize("seed", range(20))
def test_uses_are_told_apart_in_whatever_order_stamps_pass(seed: int) -> None:
    player = Player(random.Random(seed))
    for _ in range(3):
        player.estimates.ask_again()
        player.sweep()
        player.pass_timer.harvest()
    player.read_all()
    for number in range(4):
        assert player.estimates.compute("f", number) == number + 1
    found = player.pass_timer.efficiency()
    assert found is not None
    assert found.measured == pytest.approx(2 * 10.5), "the first pass does not count"
    assert found.bound == 20.0 and found.limit == "compute"
    assert found.losses == {"dram->hbm": 1.0, "host": 0.0}
    assert not player.clock.times, "every stamp is used again"


def test_what_has_not_passed_is_not_waited_for() -> None:
    player = Player(random.Random(1))
    player.clock.rng.random = lambda: 1.0  # type: ignore[union-attr]
    for _ in range(20):
        player.sweep()
        player.pass_timer.harvest()
    assert player.pass_timer.pending and player.pass_timer.efficiency() is None
    assert len(player.clock.times) < 5 * 9, "and no more passes are measured meanwhile"
    player.pass_timer.reset()
    assert not player.clock.times and not player.pass_timer.pending


def test_without_sampling_the_clock_is_not_asked() -> None:
    player = Player()
    for _ in range(3):
        player.sweep()
    player.read_all()
    calls = player.clock.calls
    assert calls == 2 * 9
    for _ in range(14):
        player.sweep()
        player.copy(1, 1.0)
        assert not player.pass_timer.pending
    assert player.clock.calls == calls
    player.sweep()
    assert player.clock.calls == calls + 9


@pytest.mark.parametrize("home", [Tier.DRAM, Tier.NVME])  # the latter was read into DRAM before
def test_copies_are_timed_and_waits_for_them_told_from_others(home: Tier) -> None:
    player = Player()
    player.sweep()
    player.pass_timer.begin("f")
    player.clock.now = player.clock.copies = 100.0
    player.copy(1, 3.0)
    player.use(1, 5.0, 1.0, home)  # 3 for the copy, 2 for the host
    player.copy(2, 1.0)
    player.use(2, 0.5, 1.0)  # the copy was over long before
    player.pass_timer.ended()
    player.read_all()
    assert player.estimates.transfer("dram->hbm", 1, PAGE) == 3.0
    assert player.estimates.best_rate("dram->hbm") == 2 * PAGE / 4.0
    found = player.pass_timer.efficiency()
    assert found is not None and found.measured == 7.5
    assert found.losses == {"dram->hbm": 3.0, "host": 2.5}
    assert found.bound == 4.0 and found.limit == "dram->hbm"
    player.pass_timer.begin("f")
    player.pass_timer.begin("f")
    assert not player.clock.times


def test_host_waits_are_for_files_or_for_room() -> None:
    player = Player()
    player.sweep()
    player.pass_timer.begin("f")
    player.pass_timer.arrived()
    player.clock.now += 4.0
    player.counters.stall_ns += 3 * 10**9
    player.pass_timer.started(record(1, Tier.NVME), None)
    player.pass_timer.arrived()
    player.clock.now += 2.0
    player.counters.stall_ns += 10**9
    player.pass_timer.started(record(2, Tier.HBM), None)
    player.pass_timer.ended()
    player.read_all()
    found = player.pass_timer.efficiency()
    assert found is not None
    assert found.losses == {"nvme->hbm": 3.0, "host wait": 1.0, "host": 2.0}


def test_files_that_are_read_beside_each_other_count_once() -> None:
    player = Player()
    player.pass_timer.begin("f")
    player.pass_timer.landed("nvme->hbm", 300, 0, 10**9)
    player.pass_timer.landed("nvme->hbm", 100, 0, 2 * 10**9)
    player.pass_timer.landed("nvme->hbm", 100, 5 * 10**9, 6 * 10**9)
    player.use(1, 0.0, 1.0)
    player.pass_timer.ended()
    player.read_all()
    assert player.estimates.best_rate("nvme->hbm") == pytest.approx(500 / 3)


def test_a_use_that_fails_leaves_nothing_behind() -> None:
    player = Player()
    player.pass_timer.begin("f")
    player.pass_timer.arrived()
    player.pass_timer.rising(EXTENT, None)
    player.pass_timer.arrived()
    player.pass_timer.rising(EXTENT, None)
    player.use(1, 0.0, 1.0)
    player.pass_timer.begin("g")  # and the pass has no end
    player.read_all()
    player.pass_timer.begin("h")
    assert not player.clock.times
    assert player.estimates.samples("f") == 1 and player.estimates.compute("f", 1) is None


def test_where_stamps_cannot_be_set_there_are_none() -> None:
    player = Player()
    player.clock.able = False
    player.sweep()
    assert not player.pass_timer.sampling and player.clock.calls == 0
    player.clock.able = True
    player.clock.most = 4
    player.sweep()
    player.read_all()
    assert not player.clock.times and player.estimates.samples("f") == 1


@pytest.mark.parametrize("how", ["nothing used", "set back", "exception"])
def test_what_came_to_nothing_is_measured_again(how: str) -> None:
    """A pass is known once two were read; what was dropped unread is none of them."""
    player = Player()
    pass_timer = player.pass_timer
    for _ in range(2):
        if how == "nothing used":
            pass_timer.begin("f")
        else:
            player.sweep()
            (pass_timer.reset if how == "set back" else pass_timer.cut_short)()
    for _ in range(2):
        player.sweep()
        player.read_all()
    assert player.estimates.sure("f")


def test_fetches_of_a_pass_that_is_not_measured_further_are_let_go() -> None:
    player = Player()
    for number in range(40):
        player.pass_timer.begin("f")
        player.use(0, 0.0, 1.0)
        player.copy(number, 1.0)
        player.read_all()
    player.pass_timer.reset()
    for _ in range(2):
        player.pass_timer.begin("never")
        player.pass_timer.reset()
    player.pass_timer.begin("f")
    assert len(player.clock.times) == 0


def test_an_exception_anywhere_leaves_no_stamp_behind() -> None:
    player = Player()
    player.sweep()  # waits to be read
    player.pass_timer.begin("f")
    player.use(0, 0.0, 1.0)
    player.copy(1, 1.0)
    player.pass_timer.arrived()
    player.pass_timer.rising(EXTENT, None)
    assert player.clock.times
    player.pass_timer.cut_short()
    assert not player.clock.times
    player.sweep()
    player.read_all()
    assert not player.clock.times


def test_first_estimates_are_the_machine_profile() -> None:
    assert estimates_from(None).best_rate("dram->hbm") is None
    profile = MachineProfile(
        "x", "d", "t", "t", h2d=9e9, d2h=8e9, nvme_read=2e9, h2d_by_size=((1024, 1e9), (65536, 5e9))
    )
    estimates = estimates_from(profile)
    assert estimates.transfer("dram->hbm", 0, 2000) == 2000 / 1e9
    assert estimates.transfer("nvme->hbm", 0, 2000) == 2000 / 2e9
    assert estimates.best_rate("dram->hbm") == 5e9 and estimates.best_rate("hbm->dram") == 8e9
    assert estimates.best_rate("hbm->nvme") is None


# -- in a manager ----------------------------------------------------------------


def test_a_manager_reads_the_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "profile.json"
    monkeypatch.setenv("TIERMEM_PROFILE", str(path))
    save(MachineProfile("cpu", "d", "t", "t", h2d=3e9), path)
    with rig(4, [(1, "dram")]) as made:
        assert made.manager.parts.pass_timer.estimates.best_rate("dram->hbm") == 3e9


def loop(made: Rig, order: list[int], rounds: int) -> None:
    for _ in range(rounds):
        made.manager.begin_pass("f")
        for number in order:
            made.use(made.blocks[number])
        made.manager.end_pass()


def test_a_loop_is_measured_on_the_host(tmp_path: Path) -> None:
    with rig(4, [(1, "dram"), (1, "nvme"), (2, "dram"), (2, "nvme")], nvme=tmp_path) as made:
        assert made.manager.stats().efficiency is None
        loop(made, [0, 1, 2, 3], 4)
        stats = made.manager.stats()
        assert stats.efficiency is not None and stats.efficiency > 0
        assert stats.efficiency == stats.bound_seconds / stats.measured_seconds
        assert set(stats.losses) <= {"dram->hbm", "nvme->hbm", "host wait", "host"}
        assert sum(stats.losses.values()) <= stats.measured_seconds * (1 + 1e-9)
        rows = {
            row.block: row for row in made.manager.parts.pass_timer.rows(made.manager.parts.table)
        }
        assert set(rows) == {block.name for block in made.blocks}
        assert all(row.compute_seconds > 0 and row.samples >= 2 for row in rows.values())
        assert all(row.transfer_seconds > 0 and row.during == "f" for row in rows.values())
        made.manager.parts.pass_timer.reset()
        stats = made.manager.stats()
        assert stats.efficiency is None and stats.losses == {} and stats.limit is None
        parts = made.manager.parts
        assert len(parts.pass_timer.rows(parts.table)) == 4, "what was learned stays"
        loop(made, [0, 1, 2, 3], 1)
        assert made.manager.stats().efficiency is not None, "the next pass is measured"


def test_a_steady_loop_is_left_alone() -> None:
    """Of forty passes the first ones are measured, until they are read, and each sixteenth."""
    with rig(4, [(1, "dram")] * 8) as made:
        pass_timer = made.manager.parts.pass_timer
        calls: list[str] = []
        estimates = pass_timer.estimates
        observe = estimates.observe

        def alike(key, compute, flows, fills, whole) -> None:  # type: ignore[no-untyped-def]
            observe(key, dict.fromkeys(compute, 1.0), {}, ())

        estimates.observe = alike  # type: ignore[method-assign]
        for name in ("arrived", "started", "rising", "risen", "harvest"):
            method = getattr(pass_timer, name)

            def counting(*args, name=name, method=method):  # type: ignore[no-untyped-def]
                calls.append(name)
                return method(*args)

            setattr(pass_timer, name, counting)
        per_pass = []
        for _ in range(40):
            before = calls.count("arrived")
            loop(made, list(range(8)), 1)
            per_pass.append(calls.count("arrived") - before)
        assert [n for n, count in enumerate(per_pass) if count] == [0, 1, 17, 33]
        assert {count for count in per_pass if count} == {8}
        assert calls.count("started") == 4 * 8
        assert calls.count("rising") == calls.count("risen") <= 4 * 8


@pytest.mark.parametrize("pages", [[1] * 12, [3, 1, 1, 2, 1, 1, 2, 1, 1, 2, 1, 4]])
def test_a_loop_moves_as_few_bytes_as_it_can(pages: list[int]) -> None:
    """What streams has room for the largest three blocks; the rest of HBM is full of residents."""
    hbm = 10 if max(pages) == 1 else 14
    with rig(hbm, [(size, "dram") for size in pages]) as made:
        manager = made.manager
        loop(made, list(range(12)), 6)
        manager.parts.counters.reset()
        loop(made, list(range(12)), 10)
        residents = manager.parts.evictor.residents
        reserve = sum(sorted(pages)[-3:])
        assert sum(manager.parts.table[b].block.nbytes for b in residents) == (hbm - reserve) * PAGE
        moved = manager.stats().links["dram->hbm"].nbytes / PAGE / 10
        assert moved <= sum(pages) - (hbm - reserve)


def test_residents_stay_from_pass_to_pass() -> None:
    """There and back is one loop: what stays does not depend on which way it goes just now."""
    with rig(6, [(1, "dram")] * 12) as made:
        seen = []
        for _ in range(6):
            for key, order in (("f", range(12)), ("b", range(11, -1, -1))):
                made.manager.begin_pass(key)
                for number in order:
                    made.use(made.blocks[number])
                seen.append(made.manager.parts.evictor.residents)
        assert len(seen[-1]) == 3 and set(seen[4:]) == {seen[-1]}


def fill_ahead(manager: BlockManager) -> int:
    return manager.stats().prefetches


def test_the_depth_follows_the_estimates(tmp_path: Path) -> None:
    """Fast disk, slow compute: two blocks ahead. Slow disk: as many as there is room for."""
    with rig(20, [(1, "nvme")] * 40, nvme=tmp_path) as made:
        manager = made.manager
        # gradients are in the loop, so that nothing stays for good
        made.add(1, "dram", Role.GRAD)
        estimates = manager.parts.pass_timer.estimates
        observe, speed = estimates.observe, [1e12]

        def fixed(key, compute, flows, fills, whole) -> None:  # type: ignore[no-untyped-def]
            flows = {"nvme->hbm": (int(speed[0]), 1.0)}
            observe(key, dict.fromkeys(compute, 0.01), flows, ())

        estimates.observe = fixed  # type: ignore[method-assign]

        def ahead() -> int:
            loop(made, list(range(41)), 6)
            manager.flush()
            manager.begin_pass("f")
            made.use(made.blocks[0])
            return len(manager.prefetcher._walk()._ahead.uses)

        assert ahead() == 2
        speed[0] = PAGE / 0.045  # 45 ms and a quarter, at 10 ms of compute each
        loop(made, list(range(41)), 20)
        assert ahead() >= 8


@pytest.mark.parametrize("leaves", [True, False])
def test_a_fetch_is_wasted_if_the_block_leaves_or_the_pass_ends(
    tmp_path: Path, leaves: bool
) -> None:
    with rig(4, [(1, "nvme")] * 2, nvme=tmp_path, depth=2) as made:
        manager = made.manager
        loop(made, [0, 1], 3)
        for block in made.blocks:
            manager.parts.evictor.evict(manager.parts.table[block.id])
        manager.begin_pass("f")
        manager.flush()
        made.use(made.blocks[0])
        assert manager.stats().prefetch_wasted == 0
        if leaves:
            manager.parts.evictor.evict(manager.parts.table[made.blocks[1].id])
        else:
            manager.begin_pass("g")
        assert manager.stats().prefetch_wasted == 1


class Mixture(nn.Module):
    """Two experts of six, and then a layer that is always used."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.last = nn.Linear(64, 64)
        self.chosen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.experts[self.chosen], self.experts[(self.chosen + 3) % 6]
        result: torch.Tensor = self.last(second(first(x)))
        return result


@torch.no_grad()
def test_experts_that_change_are_no_longer_fetched_ahead(tmp_path: Path) -> None:
    """Each pass uses other experts: fetching those of the one before is for nothing."""
    torch.manual_seed(0)
    model, x = Mixture(), torch.randn(4, 64)
    names = [f"experts.{n}" for n in range(6)] + ["last"]
    expected = []
    for n in range(6):
        model.chosen = n
        expected.append(model(x))
    with tiermem.TierManager(
        "cpu", hbm="44KiB", dram="16MiB", nvme=tmp_path, policy="nvme"
    ) as tier:
        tier.wrap(model, blocks=names)

        def play(order: list[int]) -> tuple[int, int]:
            before = tier.stats()
            for n in order:
                model.chosen = n
                assert torch.equal(model(x), expected[n])
            after = tier.stats()
            return (
                after.prefetches - before.prefetches,
                after.prefetch_wasted - before.prefetch_wasted,
            )

        changing = list(range(6)) * 4
        first = play(changing)
        assert first[1] >= 6, "what the last pass used was fetched for the next"
        play(changing)
        late = play(changing)
        assert late[1] <= 2
        play([3] * 8)
        replay = play([3] * 8)
        assert replay[1] == 0 and replay[0] >= 8, "what is used again is fetched again"


@torch.no_grad()
def test_a_pass_of_a_model_ends_with_its_last_module() -> None:
    """So that the last block's compute is known, and the time until the next pass is no part."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    with tiermem.TierManager("cpu", hbm="64KiB", dram="16MiB") as tier:
        tier.wrap(model, blocks=[str(n) for n in range(4)])
        for _ in range(3):
            model(torch.zeros(2, 64))
            assert not tier._manager.parts.pass_timer.sampling
        assert len(tier.pace()) == 4
        assert tier.stats().efficiency > 0.0
        tier.reset_stats()
        assert tier.stats().efficiency is None and len(tier.pace()) == 4


def test_a_backward_that_recomputes_is_measured_to_its_end() -> None:
    """Each layer that is computed again is called as if it were a pass of its own."""
    layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
    with tiermem.TierManager("cpu", hbm="96KiB", dram="16MiB") as tier:
        tier.wrap(layers, blocks=[str(n) for n in range(4)])
        for _ in range(4):
            x = torch.zeros(2, 64, requires_grad=True)
            for layer in layers:
                x = checkpoint(layer, x, use_reentrant=False)
            x.sum().backward()
        seen = {row.block for row in tier.pace() if "backward" in row.during}
        assert {f"ModuleList.{n}" for n in range(4)} <= seen


def test_what_is_held_all_the_while_stays() -> None:
    """A block of an outer module takes room beside all inner ones: it might as well stay."""
    with rig(7, [(3, "dram")] + [(1, "dram")] * 9) as made:
        outer = made.blocks[0]
        for _ in range(8):
            made.manager.begin_pass("f")
            made.manager.acquire(outer)
            for block in made.blocks[1:]:
                made.use(block)
            made.manager.release(outer)
            made.manager.end_pass()
        assert outer.id in made.manager.parts.evictor.residents
        made.manager.parts.counters.reset()
        made.manager.begin_pass("f")
        made.use(outer)
        assert made.manager.stats().hits == 1


def sampled(lengths: list[tuple[float, float]]) -> list[bool]:
    """Plays passes of one name; returns which of them were measured.

    Args:
        lengths: Seconds on the host's clock, and how many more where a pass is measured.
    """
    clock = FakeClock()
    pass_timer = PassTimer(clock, Counters(), Estimates())
    measured = []
    for seconds, longer in lengths:
        pass_timer.begin("loop")
        measured.append(pass_timer.sampling)
        if pass_timer.sampling:
            pass_timer.arrived()
            pass_timer.started(record(1), None)
            seconds += longer
        pass_timer.ended()
        clock.late.clear()
        pass_timer.harvest()
        clock.host_now += seconds
    return measured


def test_a_change_of_length_is_measured_soon() -> None:
    """Between two passes that are measured, by the host's clock; the second like it says so."""
    found = sampled([(1.0, 0.0)] * 9 + [(5.0, 0.0)] * 7)
    assert found[0] and not any(found[5:11]) and all(found[11:15]) and not found[15]


def test_one_pass_of_another_length_is_chance() -> None:
    usual, other = (1.0, 0.0), (5.0, 0.0)
    assert not any(sampled([usual] * 6 + [other] + [usual] * 4 + [other, usual])[3:])


def test_what_measuring_takes_the_host_is_no_change() -> None:
    """A forward that the host limits took half as long again where it was measured."""
    found = sampled([(0.12, 0.08)] * 160)
    assert sum(found) <= 3 + 160 // 16


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("passed", [True, False])
def test_what_a_program_does_between_passes_is_no_part_of_them(left: bool, passed: bool) -> None:
    """Where the device has come to the end by then; else the host's clock says it."""
    player = Player(None if passed else random.Random(1))
    if player.clock.rng is not None:
        player.clock.rng.random = lambda: 1.0  # type: ignore[method-assign]
    player.estimates.wants = lambda _key: False  # type: ignore[method-assign]
    player.estimates._passes["f"] = _Pass()
    for _ in range(3):
        player.clock.host_now += 1.0
        player.pass_timer.begin("f")
        player.clock.now += 2.0
        player.clock.host_now += 2.0
        if left:
            player.pass_timer.left()
            player.pass_timer.left()  # once more does no harm
        player.clock.now += 5.0
        player.clock.host_now += 5.0
    assert player.estimates.longest("f") == (2.0 if left and passed else 8.0)
    assert len(player.clock.times) <= 2
    player.pass_timer.cut_short()
    assert not player.clock.times


def test_the_speed_of_a_link_is_that_of_the_bytes_on_it() -> None:
    """Of a block that comes up packed, these are fewer; how long it takes is its own."""
    player = Player()
    player.pass_timer.begin("f")
    player.copy(1, 3.0, nbytes=3 * PAGE // 4)
    player.use(1, 3.0, 1.0)
    player.pass_timer.ended()
    player.read_all()
    assert player.estimates.rate("dram->hbm") == PAGE / 4
    assert player.estimates.transfer("dram->hbm", 1, PAGE) == 3.0
