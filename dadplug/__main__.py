"""The program `python -m dadplug COMMAND`."""

from __future__ import annotations

import sys

from .tools.cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
