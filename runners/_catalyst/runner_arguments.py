"""Arguments that every Catalyst runner has beside model, criterion, optimizer and its own options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from .loaders import SPLIT_DATA

_AS_IN_SUPERVISED = {"help": "as in `SupervisedRunner`"}
_SPLIT = {
    "help": "True: all sites' loaders hold the same data set, which is split over the sites; False: each site has data "
    'of its own; ``"auto"``: split those loaders that hold the same data set on all sites'
}
_GROUP = {"help": "process group of the sites; the default group if None"}


@dataclass(frozen=True)
class RunnerArguments:
    """Arguments that every runner has beside model, criterion, optimizer and its own options.

    Raises:
        ValueError: if `split_data` is neither True, False nor ``"auto"``.
    """

    input_key: Any = field(default="features", metadata=_AS_IN_SUPERVISED)
    output_key: Any = field(default="logits", metadata=_AS_IN_SUPERVISED)
    target_key: str = field(default="targets", metadata=_AS_IN_SUPERVISED)
    loss_key: str = field(default="loss", metadata=_AS_IN_SUPERVISED)
    split_data: bool | str = field(default="auto", metadata=_SPLIT)
    process_group: dist.ProcessGroup | None = field(default=None, metadata=_GROUP)

    def __post_init__(self) -> None:
        if self.split_data not in SPLIT_DATA:
            valid = ", ".join(map(repr, SPLIT_DATA))
            raise ValueError(f"unknown split_data {self.split_data!r}; valid ones are {valid}")
