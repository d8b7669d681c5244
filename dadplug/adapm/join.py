"""Command that joins a sharded checkpoint to one file with whole tables.

python -m dadplug.adapm.join FOLDER WHOLE.pt
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from torch import Tensor

from .shards import join_shards, write_whole


def main(arguments: list[str] | None = None) -> int:
    """Join a sharded checkpoint to one file with whole states.

    Args:
        arguments: arguments of the command; None for those of the process.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description="Join a sharded checkpoint to one file with whole tables.")
    parser.add_argument("folder", help="folder that holds index.json and all shards")
    parser.add_argument("whole", help="file to write: a dictionary with the states 'model' and 'optimizer'")
    given = parser.parse_args(arguments)
    try:
        state = join_shards(given.folder)
        write_whole(Path(given.whole), state)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    values: list[Tensor] = [value for value in state["model"].values() if isinstance(value, Tensor)]
    print(f"{given.whole}: {len(values)} tensors, {sum(value.numel() for value in values):,} numbers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
