"""``python -m tiermem`` is the ``tiermem`` command."""

from tiermem.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
