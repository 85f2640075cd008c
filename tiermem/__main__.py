"""``python -m tiermem`` is the ``tiermem`` command."""

from tiermem.cli import command

if __name__ == "__main__":
    raise SystemExit(command())
