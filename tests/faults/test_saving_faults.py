"""Whatever happens to a save, one whole checkpoint is there; what happened to one is seen."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support_process import child, nothing_left_open
from torch import nn

import tiermem
from tiermem.saving import folder, load, manifest, save
from tiermem.saving.files import FileOperations
from tiermem.saving.folder import CheckpointFolder

OPERATIONS = (
    "make_folder", "open", "close", "reserve", "write", "sync", "lock", "rename", "exchange",
    "remove_file", "remove_folder", "link", "give_access",
)  # fmt: skip


OWN = ("tokenizer.json", "more/notes.txt")
"""Files of the user's own in a checkpoint."""


class Faulty(FileOperations):
    """Calls ``fault`` with the number and name of each operation, before it is made."""

    def __init__(self, fault) -> None:
        self.names: list[str] = []
        self._lock = threading.Lock()
        for name in OPERATIONS:
            setattr(self, name, self._guarded(name, getattr(self, name), fault))

    def _guarded(self, name, own, fault):
        def call(*args):
            with self._lock:
                number = len(self.names)
                self.names.append(name)
            fault(number, name)
            return own(*args)

        return call


class NoExchange(Faulty):
    """A file system that cannot exchange two names."""

    def __init__(self, fault) -> None:
        super().__init__(fault)
        self.exchange = self._guarded("exchange", lambda *_: False, fault)


def nothing(number: int, name: str) -> None:
    """No fault."""


class Small:
    """A model of a few numbers in the tiers, with an optimizer."""

    def __init__(self) -> None:
        torch.default_generator.manual_seed(0)
        self.tier = tiermem.TierManager(device="cpu", hbm="64KiB", dram="1MiB")
        self.model = self.tier.wrap(nn.Linear(3, 3))
        self.optimizer = self.tier.optimizer(self.model, torch.optim.SGD, lr=0.1, momentum=0.9)

    def __enter__(self) -> Small:
        return self

    def __exit__(self, *error: object) -> None:
        self.tier.close(discard=True)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(2, 3)).square().sum().backward()
        self.optimizer.step()

    def weight(self) -> torch.Tensor:
        return self.model.state_dict()["weight"]


class Prepared:
    """A checkpoint numbered 0, and all that a save of what comes after it would write."""

    def __init__(self, place: Path) -> None:
        self.first = place / "first"
        with Small() as run:
            run.step()
            run.tier.save(self.first, 0)
            self.weights = [run.weight()]
            run.step()
            self.weights.append(run.weight())
            self._plan = save.make_plan(run.tier._runtime, place / "never", 1)
            with run.tier._manager.lock:
                runs = [r for source in self._plan.sources for r in source.runs()]
                self._runs = [(key, begin, t.detach().clone()) for key, begin, t in runs]

    def save(self, path: Path, files: FileOperations) -> None:
        """Saves that; as a child may, which has no tiers."""
        self._plan.folder = CheckpointFolder(str(path), files)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(save, "FILES", files)
            with save.writing(self._plan) as writer:
                for run in self._runs:
                    writer.put(*run)

    def put_first(self, path: Path) -> None:
        """Puts the first checkpoint there."""
        shutil.copytree(self.first, path)
        (path / "more").mkdir()
        for name in OWN:
            (path / name).write_text(name)

    def found(self, run: Small, path: Path) -> int:
        """Loads what is there, which is one of the two as a whole; returns which."""
        number = run.tier.load(path)
        for name in OWN if (path / "more").exists() else ():
            assert (path / name).read_text() == name
        assert torch.equal(run.weight(), self.weights[number])
        return number


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Prepared:
    return Prepared(tmp_path_factory.mktemp("prepared"))


KINDS = pytest.mark.parametrize("kind", [Faulty, NoExchange])


def operations(prepared: Prepared, path: Path, kind) -> list[str]:
    """Returns what a save over the first checkpoint does."""
    prepared.put_first(path)
    files = kind(nothing)
    prepared.save(path, files)
    shutil.rmtree(path)
    return files.names


@KINDS
def test_killed_at_any_operation(prepared, tmp_path, kind) -> None:
    path = tmp_path / "run"
    found = set()
    names = operations(prepared, path, kind)
    with Small() as run:
        for at, name in enumerate(names):
            prepared.put_first(path)

            def kill(number: int, _: str, at: int = at) -> None:
                if number == at:
                    os.kill(os.getpid(), signal.SIGKILL)

            assert child(lambda kill=kill: prepared.save(path, kind(kill))) == -signal.SIGKILL
            number = prepared.found(run, path)
            found.add(number)
            prepared.save(path, kind(nothing))
            assert os.listdir(tmp_path) == ["run"], f"left by {at}: {name}"
            shutil.rmtree(path)
    assert found == {0, 1}


@KINDS
def test_the_first_save_of_all_is_killed(prepared, tmp_path, kind) -> None:
    path = tmp_path / "run"
    with Small() as run:
        for at in range(0, 60, 6):

            def kill(number: int, _: str, at: int = at) -> None:
                if number == at:
                    os.kill(os.getpid(), signal.SIGKILL)

            code = child(lambda kill=kill: prepared.save(path, kind(kill)))
            if code == 0:
                break
            try:
                assert prepared.found(run, path) == 1
            except tiermem.CheckpointError as error:
                assert "no such folder" in str(error)
            prepared.save(path, kind(nothing))
            assert os.listdir(tmp_path) == ["run"]
            shutil.rmtree(path)
        assert at > 20


@KINDS
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.one_in(2)
def test_every_operation_fails_once(prepared, tmp_path, kind, number) -> None:
    path = tmp_path / "run"
    names = operations(prepared, path, kind)
    expected = tiermem.CapacityError if number == errno.ENOSPC else tiermem.StorageError
    refused = 0
    with Small() as run, nothing_left_open():
        for at, name in enumerate(names):
            if name in ("close", "lock"):
                continue  # these do not fail for want of a disk
            prepared.put_first(path)

            def fail(count: int, _: str, at: int = at) -> None:
                if count == at:
                    raise OSError(number, os.strerror(number))

            error = None
            try:
                prepared.save(path, kind(fail))
            except tiermem.TierError as raised:
                error = raised
            there = prepared.found(run, path)
            if error is not None:
                assert type(error) is expected, (at, name, error)
                assert str(path) in str(error) and "nvme" not in str(error)
                refused += 1
                left = os.listdir(tmp_path)
                assert there or left == ["run"], (at, name, left)
            else:
                assert there == 1, (at, name)
            prepared.save(path, kind(nothing))
            assert os.listdir(tmp_path) == ["run"]
            shutil.rmtree(path)
    assert refused > len(names) / 3


class Short(FileOperations):
    """Writes, and says that it was less."""

    def write(self, fd, data, offset) -> int:
        return max(1, super().write(fd, data, offset) // 3)


def test_short_writes_are_gone_on_with(prepared, tmp_path) -> None:
    prepared.save(tmp_path / "run", Short())
    with Small() as run:
        assert prepared.found(run, tmp_path / "run") == 1


def test_no_room_is_said_beforehand(tmp_path, monkeypatch) -> None:
    class Full(FileOperations):
        def free_bytes(self, path: str) -> int:
            return 1000

    with Small() as run:
        run.tier.save(tmp_path / "run")
        monkeypatch.setattr(save, "FILES", Full())
        with pytest.raises(tiermem.CapacityError, match=r"takes .* has 1000 B free"):
            run.tier.save(tmp_path / "run")
    assert os.listdir(tmp_path) == ["run"]


def test_folders_of_others_are_left_alone(tmp_path) -> None:
    mine = [tmp_path / name for name in (".run.tiermem-0123abcd", ".run.tiermem-notours", ".other")]
    for path in mine:
        path.mkdir()
        (path / "thesis").write_text("years of work")
    with Small() as run:
        run.tier.save(tmp_path / "run")
        run.tier.save(tmp_path / "run")
    assert all((path / "thesis").exists() for path in mine)


def test_a_save_under_way_is_not_taken_for_left_over(prepared, tmp_path) -> None:
    other = CheckpointFolder(str(tmp_path / "run"), FileOperations())
    with Small() as run:
        run.tier.save(tmp_path / "run")
        with pytest.raises(ZeroDivisionError), other.replacing([]) as temporary:
            run.tier.save(tmp_path / "run")
            assert os.listdir(temporary) == [folder.MANIFEST]
            raise ZeroDivisionError
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.parametrize("kind", [FileOperations, lambda: NoExchange(nothing)])
@pytest.mark.parametrize(
    ("module", "name", "number"),
    [(manifest, "manifest_of", 1), (manifest, "_beginning", 1), (load, "TensorReader", 0)],
)
def test_a_checkpoint_that_is_replaced_while_it_is_loaded(
    prepared, tmp_path, monkeypatch, module, name, number, kind
) -> None:
    prepared.put_first(tmp_path / "run")
    before, own = [lambda: prepared.save(tmp_path / "run", kind())], getattr(module, name)

    def late(*args):
        if before:
            before.pop()()
        return own(*args)

    with Small() as run, nothing_left_open():
        monkeypatch.setattr(module, name, late)
        assert prepared.found(run, tmp_path / "run") == number
        run.step()


# -- paths that are something else -------------------------------------------


def a_file(path: Path) -> None:
    path.write_text("text")


def a_foreign_folder(path: Path) -> None:
    path.mkdir()
    (path / "notes.txt").write_text("text")


def other_weights_in_a_checkpoint(path: Path) -> None:
    with Small() as run:
        run.tier.save(path)
    (path / "model-00001-of-00002.safetensors").write_bytes(b"")


def weights_alone(path: Path) -> None:
    path.mkdir()
    (path / "model.safetensors").write_bytes(b"")


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (a_file, "is a file"),
        (a_foreign_folder, "'notes.txt' in it"),
        (other_weights_in_a_checkpoint, "'model-00001-of-00002.safetensors' in it"),
        (weights_alone, "'model.safetensors' in it"),
    ],
)
def test_nothing_else_is_saved_over(tmp_path, make, match) -> None:
    make(tmp_path / "run")
    before = sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("*"))
    with Small() as run:
        with pytest.raises(tiermem.CheckpointError, match=match):
            run.tier.save(tmp_path / "run")
        with pytest.raises(tiermem.CheckpointError, match="there is no folder"):
            run.tier.save(tmp_path / "none" / "run")
    assert sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("*")) == before


def test_a_path_inside_a_folder_that_is_gone(tmp_path, monkeypatch) -> None:
    (tmp_path / "gone").mkdir()
    with Small() as run:
        monkeypatch.chdir(tmp_path / "gone")
        (tmp_path / "gone").rmdir()
        for call in (run.tier.save, run.tier.load):
            with pytest.raises(tiermem.CheckpointError, match="has been removed; give the whole"):
                call("run")
        run.tier.save(tmp_path / "run")


class NoLinks(FileOperations):
    """A file system where a file has one name."""

    def link(self, source: str, target: str) -> None:
        raise OSError(errno.EPERM, "no links")


@pytest.mark.parametrize("exchanges", [True, False])
def test_what_is_private_stays_private(tmp_path, monkeypatch, exchanges) -> None:
    monkeypatch.setattr(save, "FILES", FileOperations() if exchanges else NoExchange(nothing))
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    with Small() as run:
        for mode in (0o700, 0o750, 0o500):
            path.chmod(mode)
            run.tier.save(path)
            assert path.stat().st_mode & 0o777 == mode | 0o700


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_program_may_work_inside_its_checkpoint(tmp_path, monkeypatch, exchanges) -> None:
    """The folder of that name is another one after each save; what was empty in it is there."""
    monkeypatch.setattr(save, "FILES", FileOperations() if exchanges else NoExchange(nothing))
    path = tmp_path / "run"
    (path / "logs" / "deep").mkdir(parents=True)
    with Small() as run:
        for where in (path, path / "logs" / "deep", tmp_path):
            monkeypatch.chdir(where)
            for _ in range(2):
                run.tier.save(path)
                assert os.getcwd() == str(where)
                assert (path / "logs" / "deep").is_dir()
        monkeypatch.chdir(path)
        run.tier.save(".")
        Path("notes").write_text("of mine")
        run.tier.load(".")
    assert (path / "notes").exists()


@pytest.mark.parametrize("files", [FileOperations, NoLinks])
def test_files_of_the_users_own_stay(tmp_path, files, monkeypatch) -> None:
    """Put there before the first save, or after one; a configuration of theirs is theirs."""
    monkeypatch.setattr(save, "FILES", files())
    path = tmp_path / "run"
    path.mkdir()
    mine = {"config.json": "{}", "tokenizer.json": "words"}
    for name, text in mine.items():
        (path / name).write_text(text)
    with Small() as run:
        run.model.config = SimpleNamespace(to_json_string=lambda: '{"of": "the model"}')
        run.tier.save(path)
        (path / "logs" / "deep").mkdir(parents=True)
        mine["logs/deep/loss.txt"] = "1.5"
        (path / "logs/deep/loss.txt").write_text("1.5")
        (path / "latest").symlink_to("tokenizer.json")
        for _ in range(2):
            run.step()
            run.tier.save(path)
            assert {name: (path / name).read_text() for name in mine} == mine
            assert os.readlink(path / "latest") == "tokenizer.json"
            assert os.listdir(tmp_path) == ["run"]
        expected = run.weight()
        run.step()
        run.tier.load(path)
        assert torch.equal(run.weight(), expected)
        (path / "config.json").unlink()
        run.tier.save(path)
        assert (path / "config.json").read_text() == '{"of": "the model"}'


def test_a_file_put_there_while_a_save_ends_stays(prepared, tmp_path) -> None:
    path = tmp_path / "run"
    prepared.put_first(path)

    class Late(FileOperations):
        def exchange(self, first: str, second: str) -> bool:
            (path / "late.txt").write_text("late")
            return super().exchange(first, second)

    prepared.save(path, Late())
    assert (path / "late.txt").read_text() == "late"
    assert os.listdir(tmp_path) == ["run"]


def test_links_and_empty_folders_are_saved_to(tmp_path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with Small() as run:
        run.tier.save(tmp_path / "link")
        run.tier.save(tmp_path / "link")
        assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / folder.MANIFEST).exists()
        run.tier.load(tmp_path / "link")


# -- checkpoints that are not what was written -------------------------------


def test_a_flipped_bit_is_noticed(prepared, tmp_path) -> None:
    prepared.save(tmp_path / "good", FileOperations())
    for name in ("model.safetensors", "optimizer.safetensors", folder.MANIFEST):
        size = (tmp_path / "good" / name).stat().st_size
        for at in {0, 9, 60, size // 2, size - 60, size - 1}:
            bad = tmp_path / "bad"
            shutil.copytree(tmp_path / "good", bad)
            text = bytearray((bad / name).read_bytes())
            text[at] ^= 1 << at % 8
            (bad / name).write_bytes(text)
            with Small() as run:
                before = run.weight()
                with pytest.raises((tiermem.IntegrityError, tiermem.CheckpointError)) as caught:
                    run.tier.load(bad)
                assert str(bad) in str(caught.value) and "nvme" not in str(caught.value)
                if run.tier._runtime.models.half_loaded:
                    for use in (run.step, lambda run=run: run.tier.save(tmp_path / "x")):
                        with pytest.raises(tiermem.CheckpointError, match="loaded in part"):
                            use()
                    assert prepared.found(run, tmp_path / "good") == 1
                else:
                    assert torch.equal(run.weight(), before)
                run.step()
            shutil.rmtree(bad)


def truncated(path: Path) -> None:
    os.truncate(path / "optimizer.safetensors", 5000)


def without_weights(path: Path) -> None:
    (path / "model.safetensors").unlink()


def without_manifest(path: Path) -> None:
    (path / folder.MANIFEST).unlink()


def newer(path: Path) -> None:
    text = (path / folder.MANIFEST).read_text().replace('"version":1', '"version":9')
    (path / folder.MANIFEST).write_text(text)


def unfinished(path: Path) -> None:
    (path / folder.MANIFEST).write_bytes(folder._UNFINISHED)


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (truncated, "optimizer.safetensors has 5000 bytes"),
        (without_weights, "model.safetensors is missing"),
        (without_manifest, "has no tiermem.json.*load_checkpoint"),
        (unfinished, "has no tiermem.json"),
        (newer, "version 9"),
        (shutil.rmtree, "no such folder"),
    ],
)
def test_a_spoiled_checkpoint_is_refused(prepared, tmp_path, spoil, match) -> None:
    prepared.put_first(tmp_path / "run")
    spoil(tmp_path / "run")
    with Small() as run:
        before = run.weight()
        with pytest.raises(tiermem.CheckpointError, match=match):
            run.tier.load(tmp_path / "run")
        assert torch.equal(run.weight(), before)
        run.step()


def test_a_block_that_cannot_be_read_leaves_the_former_one(prepared, tmp_path, monkeypatch) -> None:
    prepared.put_first(tmp_path / "run")
    with Small() as run:
        lost = tiermem.StorageError("lost", block="x")

        def fail(*_: object) -> None:
            raise lost

        monkeypatch.setattr(run.tier._manager.block_io, "views", fail)
        with pytest.raises(tiermem.StorageError, match="lost"):
            run.tier.save(tmp_path / "run")
        monkeypatch.undo()
        assert os.listdir(tmp_path) == ["run"] and prepared.found(run, tmp_path / "run") == 0
