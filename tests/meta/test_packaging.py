"""The wheel and the editable install, built and installed for real.

No network: dependencies come from the environment that runs the tests.
"""

from __future__ import annotations

import os
import re
import site
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 brings it")

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow

_CHECK = """
import importlib.util, sys
from pathlib import Path
import tiermem.integrations, tiermem.cli
assert importlib.util.find_spec("integrations") is None, "a top-level `integrations`"
assert Path(tiermem.cli.__file__).parent.parent.joinpath("py.typed").exists()
print(Path(tiermem.integrations.__file__).parent)
print(Path(tiermem.cli.__file__).parent.parent)
"""


def _run(*command: str | Path, cwd: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _environment(folder: Path) -> Path:
    """Makes an environment that sees the packages of the present one; returns its python."""
    venv.create(folder, with_pip=False)
    library = next((folder / "lib").glob("python3*")) / "site-packages"
    # The present environment may be one itself: its packages are added by hand,
    # as plain path entries, so that its .pth files (an editable tiermem) stay out.
    (library / "outside.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return folder / "bin" / "python"


def _install(python: Path, *what: str | Path, cwd: Path) -> None:
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--force-reinstall", "--no-index"]
    _run(python, "-m", "pip", "install", *options, *what, cwd=cwd)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is packaged, so that building leaves the checkout alone."""
    copy = tmp_path_factory.mktemp("source")
    listed = _run("git", "ls-files", "-co", "--exclude-standard", cwd=ROOT).splitlines()
    for name in listed:
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    _run(sys.executable, "-m", "pip", "wheel", *options, "-w", folder, source, cwd=folder)
    (built,) = folder.glob("tiermem-*.whl")
    return built


def test_wheel_holds_every_module_and_nothing_else(source: Path, wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = {str(path.relative_to(source)) for path in (source / "tiermem").rglob("*.py")}
    expected |= {
        f"tiermem/integrations/{path.relative_to(source / 'integrations')}"
        for path in (source / "integrations").rglob("*.py")
    }
    assert names == expected | {"tiermem/py.typed", "tiermem/optim/host/exact.c"}


def test_wheel_installs(wheel: Path, tmp_path: Path) -> None:
    python = _environment(tmp_path / "env")
    _install(python, wheel, cwd=tmp_path)
    where = _run(python, "-c", _CHECK, cwd=tmp_path).split()
    assert all(path.startswith(str(tmp_path / "env")) for path in where), where
    assert not list((tmp_path / "env" / "lib").rglob("site-packages/integrations*"))
    assert _run(tmp_path / "env" / "bin" / "tiermem", "--version", cwd=tmp_path).startswith(
        "tiermem "
    )


def test_editable_install(source: Path, tmp_path: Path) -> None:
    python = _environment(tmp_path / "env")
    _install(python, "--editable", source, cwd=tmp_path)
    where = _run(python, "-c", _CHECK, cwd=tmp_path).split()
    assert where == [str(source / "integrations"), str(source / "tiermem")]
    assert _run(tmp_path / "env" / "bin" / "tiermem", "--help", cwd=tmp_path)


def test_every_package_is_listed() -> None:
    with open(ROOT / "pyproject.toml", "rb") as file:
        listed = set(tomllib.load(file)["tool"]["setuptools"]["packages"])
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in (ROOT / "tiermem").rglob("__init__.py")
    }
    found |= {
        ".".join(("tiermem", *path.parent.relative_to(ROOT).parts))
        for path in (ROOT / "integrations").rglob("__init__.py")
    }
    assert listed == found


def test_constraints_agree_with_the_dependencies() -> None:
    """Every direct dependency is pinned, and torch exactly as the Makefile installs it."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        project = tomllib.load(file)["project"]
    direct = project["dependencies"] + project["optional-dependencies"]["test"]
    names = {re.split("[;<>=]", requirement)[0].lower() for requirement in direct}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {line.split("==")[0].lower() for line in lines if "==" in line}
    assert names <= pins
    (torch,) = [line for line in lines if line.startswith("torch==")]
    assert torch in (ROOT / "Makefile").read_text()
