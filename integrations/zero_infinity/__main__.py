"""``python -m tiermem.integrations.zero_infinity``: the page, or what a file becomes."""

from __future__ import annotations

import sys

from .explaining import explain, page

if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(explain(name))
    if not sys.argv[1:]:
        sys.stdout.write(page())
