"""Lightning cluster environment of sites that are connected already, by `dadplug.connect` or a process group."""

from __future__ import annotations

import os

import torch.distributed as dist

from ...exchange.handshake import free_port
from ...hub.site.processes import LOOPBACK, STARTED_PROCESSES
from ...hub.site.runtime import current_connection


class SiteEnvironment:
    """Cluster environment, in Lightning's sense, with the processes that are connected.

    Lightning starts none, but for further processes of a site that is connected by a kit: see `start_processes`.
    """

    def __init__(self) -> None:
        self.started = 0  # processes of this site, if Lightning starts all but one of them
        self._port = 0

    def start_processes(self, count: int) -> None:
        """Have Lightning start the other processes of this site when a trainer begins.

        Args:
            count: number of processes of this site.
        """
        self.started = count
        self._port = free_port()

    @property
    def creates_processes_externally(self) -> bool:
        """Whether Lightning has no processes to start, or has started them."""
        connection = current_connection()
        return not self.started or (connection is not None and connection.processes > 1)

    @property
    def main_address(self) -> str:
        """Address of site 0; loopback if it is not known, or if Lightning starts processes of this site."""
        return LOOPBACK if self.started else os.environ.get("MASTER_ADDR", LOOPBACK)

    @property
    def main_port(self) -> int:
        """Port of site 0, or of this one if Lightning starts processes; 0 if it is not known."""
        return self._port or int(os.environ.get("MASTER_PORT", "0"))

    @staticmethod
    def detect() -> bool:
        """Return whether the sites are connected."""
        return dist.is_available() and dist.is_initialized()

    def world_size(self) -> int:
        """Number of sites, or of all their processes."""
        return dist.get_world_size()

    def set_world_size(self, size: int) -> None:
        """Do nothing: the sites are connected."""

    def global_rank(self) -> int:
        """Number of this site, or of this process among those of all sites."""
        return dist.get_rank()

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the sites are connected."""

    def local_rank(self) -> int:
        """Return the number of this process on its node, as torchrun or its connection by a kit sets it."""
        if (connection := current_connection()) is not None:
            return connection.local_rank
        return int(os.environ.get("LOCAL_RANK", "0")) if "TORCHELASTIC_RUN_ID" in os.environ else 0

    def node_rank(self) -> int:
        """Return the number of this site: each site counts as a node."""
        return dist.get_rank()

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Accept any settings: they do not change the number of sites. Tell processes to be started their number."""
        if self.started:
            os.environ[STARTED_PROCESSES] = str(self.started)

    def teardown(self) -> None:
        """Do nothing: the process group belongs to the program that created it."""


class ReturnedEnvironment(SiteEnvironment):
    """Cluster environment of a site that returns into a training, and has no process group with the others.

    Args:
        rank: this site.
        world_size: number of sites.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
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
