"""Tells Lightning of sites that have met already, by `dadplug.connect` or a process group of the user's own."""

from __future__ import annotations

import os

import torch.distributed as dist


class SiteEnvironment:
    """A cluster environment, in Lightning's sense: one process a site, started by somebody else."""

    creates_processes_externally = True

    @property
    def main_address(self) -> str:
        """Address of site 0, where it is known."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """Port of site 0, where it is known."""
        return int(os.environ.get("MASTER_PORT", "0"))

    @staticmethod
    def detect() -> bool:
        """Says whether the sites have met."""
        return dist.is_available() and dist.is_initialized()

    def world_size(self) -> int:
        """Number of sites."""
        return dist.get_world_size()

    def set_world_size(self, size: int) -> None:
        """Does nothing: the sites have met."""

    def global_rank(self) -> int:
        """Number of this site."""
        return dist.get_rank()

    def set_global_rank(self, rank: int) -> None:
        """Does nothing: the sites have met."""

    def local_rank(self) -> int:
        """Number of this process on its machine, as torchrun gives it."""
        return int(os.environ.get("LOCAL_RANK", "0")) if "TORCHELASTIC_RUN_ID" in os.environ else 0

    def node_rank(self) -> int:
        """Number of this site: each counts as a machine."""
        return dist.get_rank()

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Accepts any settings: how many sites there are does not depend on them."""

    def teardown(self) -> None:
        """Leaves the process group to who made it."""
