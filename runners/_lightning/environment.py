"""Lightning cluster environment of sites that are connected already, by `dadplug.connect` or a process group."""

from __future__ import annotations

import os

import torch.distributed as dist


class SiteEnvironment:
    """Cluster environment, in Lightning's sense, with one process per site, which Lightning does not start."""

    creates_processes_externally = True

    @property
    def main_address(self) -> str:
        """Address of site 0; loopback if it is not known."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """Port of site 0; 0 if it is not known."""
        return int(os.environ.get("MASTER_PORT", "0"))

    @staticmethod
    def detect() -> bool:
        """Return whether the sites are connected."""
        return dist.is_available() and dist.is_initialized()

    def world_size(self) -> int:
        """Number of sites."""
        return dist.get_world_size()

    def set_world_size(self, size: int) -> None:
        """Do nothing: the sites are connected."""

    def global_rank(self) -> int:
        """Number of this site."""
        return dist.get_rank()

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the sites are connected."""

    def local_rank(self) -> int:
        """Return the number of this process on its node, as torchrun sets it."""
        return int(os.environ.get("LOCAL_RANK", "0")) if "TORCHELASTIC_RUN_ID" in os.environ else 0

    def node_rank(self) -> int:
        """Return the number of this site: each site counts as a node."""
        return dist.get_rank()

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Accept any settings: the number of sites does not depend on them."""

    def teardown(self) -> None:
        """Do nothing: the process group belongs to the program that created it."""


class ReturnedEnvironment(SiteEnvironment):
    """Cluster environment of a site that returns into a training, and has no process group with the others.

    Args:
        rank: this site.
        world_size: number of sites.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size

    def begin(self) -> None:
        """Start a process group of this process alone, without which metrics would not ask for the other sites'."""
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def world_size(self) -> int:
        return self._world_size

    def global_rank(self) -> int:
        return self._rank

    def node_rank(self) -> int:
        return self._rank
