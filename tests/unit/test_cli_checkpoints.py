"""``tiermem train --save``: a run that is killed goes on with the losses of one that is not."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from support_process import child

from tiermem import cli, errors
from tiermem.cli import checkpoints, training

LINE = (
    "train --device cpu --layers 1 --width 16 --heads 2 --context 8 --batch 2 --accumulate 2 "
    "--steps 6 --threads 1 --hbm 1MiB --dram 8MiB --nvme none --quiet"
).split()


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("data") / "text"
    path.write_bytes(bytes(range(256)) * 8)
    return str(path)


def train(folder: Path, data: str, *more: str) -> int:
    return cli.main([*LINE, "--data", data, "--out", str(folder / "out"), *more])


def losses(folder: Path) -> list[float]:
    return json.loads((folder / "out" / "report.json").read_text())["tiered"]["losses"]


def test_a_killed_run_goes_on(tmp_path, data, monkeypatch) -> None:
    save = ["--save", str(tmp_path / "run"), "--save-every", "2"]
    assert train(tmp_path, data) == 0
    expected = losses(tmp_path)
    for at in (3, 5):
        after = checkpoints.Checkpoints.after

        def killed(self, step, *rest, at=at, after=after) -> None:
            after(self, step, *rest)
            if step == at:
                self._under_way.wait()  # or the former one: which is a matter of luck
                os.kill(os.getpid(), signal.SIGKILL)

        with monkeypatch.context() as patch:
            patch.setattr(checkpoints.Checkpoints, "after", killed)
            code = child(lambda: train(tmp_path, data, *save, "--resume"))
            assert code == -signal.SIGKILL
    # The end is compared with the resident run, bit for bit.
    assert train(tmp_path, data, *save, "--resume") == 0
    assert losses(tmp_path) == expected
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["equal"] is True
    # Nothing is left to do; and it may go on with other budgets.
    assert train(tmp_path, data, *save, "--resume", "--hbm", "2MiB", "--no-compare") == 0
    assert losses(tmp_path) == expected
    assert sorted(os.listdir(tmp_path)) == ["out", "run"]


@pytest.mark.parametrize(
    ("more", "match"),
    [
        (["--resume"], "--resume needs --save"),
        (["--save-every", "2"], "--save-every needs --save"),
        (["--save", "x", "--save-every", "0"], "--save-every must be at least 1"),
    ],
)
def test_options_that_do_not_go_together(tmp_path, data, capsys, more, match) -> None:
    assert train(tmp_path, data, *more) == 2
    assert match in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "where", "match"),
    [
        ("--save", "file/run", "a checkpoint cannot be saved to"),
        ("--save", "/proc/run", "a checkpoint cannot be saved to"),
        ("--save", "/proc/nowhere/run", "a checkpoint cannot be saved to"),
        ("--save", "file", "is a file, not a checkpoint"),
        ("--out", "file", "--out"),
        ("--out", "/proc", "--out /proc: "),
    ],
)
def test_where_nothing_can_be_kept_no_step_is_made(
    tmp_path, data, capsys, monkeypatch, option, where, match
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(training, "run_steps", lambda *_, **__: pytest.fail("it was trained"))
    assert train(tmp_path, data, option, str(tmp_path / where)) == 2
    assert match in capsys.readouterr().err


def test_folders_that_a_run_is_to_be_saved_in_are_made(tmp_path, data, monkeypatch) -> None:
    run = tmp_path / "runs" / "of today" / "a"
    made = training.run_steps

    def trained(*args, **kwargs) -> None:
        assert run.parent.is_dir() and not run.exists()
        made(*args, **kwargs)

    monkeypatch.setattr(training, "run_steps", trained)
    assert train(tmp_path, data, "--save", str(run), "--no-compare", "--steps", "1") == 0
    assert (run / "model.safetensors").is_file()


def test_a_checkpoint_that_a_crash_left_beside_its_name_is_gone_on_with(
    tmp_path, data, capsys
) -> None:
    """File systems that exchange no two names have an instant without the name."""
    save = ["--save", str(tmp_path / "run"), "--no-compare"]
    assert train(tmp_path, data, *save) == 0
    (tmp_path / "run").rename(tmp_path / ".run.tiermem-00000000")
    assert train(tmp_path, data, *save, "--resume", "--lr", "0.5") == 2
    assert "is of a run with lr 0.001" in capsys.readouterr().err  # it was found
    assert os.listdir(tmp_path / "run")


def test_another_run_is_not_gone_on_with(tmp_path, data, capsys) -> None:
    save = ["--save", str(tmp_path / "run"), "--no-compare"]
    assert train(tmp_path, data, *save, "--steps", "1") == 0
    assert train(tmp_path, data, *save, "--resume") == 2
    assert "steps 1, and this one has 6" in capsys.readouterr().err
    with pytest.raises(errors.ConfigError, match="not saved by tiermem train"):
        checkpoints.check_settings("x", None, {})
