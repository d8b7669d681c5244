"""Processes of one site: how they find each other on their machine, and the connections between them.

The process with local rank 0, the leader, holds the site's only connection to the hub. The others meet it at a port of
the loopback interface, and exchange with it, and with each other, over loopback only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import SiteError
from ..exchange import codec
from ..exchange.deadline import within
from ..exchange.failure_reports import ProcessSites, own_member
from ..exchange.rendezvous import meet
from ..exchange.status import Member, Silence

LOOPBACK = "127.0.0.1"
# Environment variable with the number of processes of a site, of which the leader starts all others.
STARTED_PROCESSES = "DADPLUG_STARTED_PROCESSES"
_POLL_SECONDS = 0.05  # between two looks for a message of the leader
_ALIVE_SECONDS = 2.0  # between two questions whether the others are alive
_ASK_SECONDS = 1.0  # for answers to that
_SLACK_SECONDS = 5.0  # that the leader has to tell why it has waited in vain
_RELAYED = "relayed: "  # before a reason that the leader has from the hub


class LocalPlace(NamedTuple):
    """Place of a process among those of its site.

    Attributes:
        local_rank: local rank; 0 for the leader.
        processes: number of processes.
        port: port of the rendezvous on the loopback interface.
        by_torchrun: whether torchrun hosts the rendezvous.
        late: whether the leader has started this process when it was connected already, as Lightning's launcher does.
    """

    local_rank: int
    processes: int
    port: int
    by_torchrun: bool = False
    late: bool = False

    @classmethod
    def find(cls, environment: Mapping[str, str]) -> LocalPlace | None:
        """Return the place that a launcher has given to this process; None if it is the only one of its site.

        Args:
            environment: environment variables, of torchrun, of `dadplug.processes` or of Lightning's launcher.

        Raises:
            ValueError: if they are not those of several processes on one machine.
        """
        late = STARTED_PROCESSES in environment and environment.get("LOCAL_RANK", "0") != "0"
        here = environment.get(STARTED_PROCESSES if late else "LOCAL_WORLD_SIZE", "1")
        if here == "1":
            return None
        names = (STARTED_PROCESSES if late else "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
        numbers = [environment.get(name, "") for name in names]
        if not here.isdigit() or not all(number.isdigit() for number in numbers):
            raise ValueError(
                f"the environment announces {here} processes here (LOCAL_WORLD_SIZE), and its variables "
                f"{', '.join(names)} should be numbers: start the processes of a site by torchrun --standalone"
            )
        world, index, port = map(int, numbers)
        if world != int(here):
            raise ValueError(
                f"the environment announces {world} processes (WORLD_SIZE), of which {here} are here: with a kit, the "
                "processes of a site run on one machine, and each site starts its own: torchrun --standalone "
                f"--nproc_per_node={here}"
            )
        return cls(index, world, port, "TORCHELASTIC_RUN_ID" in environment, late)


class LocalProcesses(ProcessSites):
    """Processes of this site by their local ranks, with exit reasons.

    Args:
        index: local rank of this process.
        members: the processes, by local rank.
        site: name of the site for messages.

    Attributes:
        found: error by which one of them was found lost; None before.
    """

    def __init__(self, index: int, members: Sequence[Member], site: str) -> None:
        super().__init__(index, members)
        self._site = site
        self.found: SiteError | None = None

    def __getitem__(self, rank: int) -> str:
        return f"process {rank} of {self._site}"

    def relay(self, error: BaseException) -> None:
        """Tell the other processes an error of the connection to the hub; to be called by the leader."""
        self.report(f"{_RELAYED}{error}")

    def found_lost(self) -> SiteError | None:
        self.found = self._relayed() or super().found_lost() or self.found
        return self.found

    def lost(self, error: BaseException, timeout: float, peer: int | None = None) -> SiteError:
        found = super().lost(error, timeout, peer)
        self.found = self._relayed() or found
        return self.found

    def check_alive(self) -> None:
        """Raise SiteError if one of the other processes has ended."""
        if Silence.REFUSED in self._ask().values():
            raise self.lost(ConnectionError("it has ended"), _ASK_SECONDS)

    def _relayed(self) -> SiteError | None:
        """Return the error that the leader has told, if it has."""
        for report in self._reports().values():
            if report.reason and report.reason.startswith(_RELAYED):
                return SiteError(report.reason.removeprefix(_RELAYED))
        return None


class LocalSite:
    """Processes of this site that have met.

    Args:
        place: place of this process.
        site: name of the site for messages.
        timeout: seconds to wait for the others.

    Attributes:
        place: place of this process.
        processes: the processes.
        store: store that they share.

    Raises:
        SiteError: if a process does not come in time.
    """

    _attempts = 0  # of this process

    def __init__(self, place: LocalPlace, site: str, timeout: float) -> None:
        LocalSite._attempts += 1
        self.place = place
        address, own = (LOOPBACK, place.port), own_member([LOOPBACK])
        try:
            store, members = meet(
                place.local_rank, place.processes, address, timeout, own, place.by_torchrun, "process"
            )
        except SiteError as error:
            raise SiteError(f"the processes of {site} have not met: {error}") from error
        self.processes = LocalProcesses(place.local_rank, members, site)
        # The token of the leader tells its runs apart: torchrun keeps its store when it restarts the processes.
        self.store = dist.PrefixStore(f"dadplug/site/{members[0].token.hex()}/{LocalSite._attempts}", store)
        self._groups = self._messages = 0

    @property
    def leads(self) -> bool:
        """Whether this process is the leader."""
        return self.place.local_rank == 0

    def post(self, message: Any) -> None:
        """Send a message to all other processes; to be called by the leader.

        Args:
            message: what `dadplug.exchange.codec.encode` takes.
        """
        self.store.set(self._next_message(), codec.encode(message).hex())

    def _next_message(self) -> str:
        self._messages += 1
        return f"message/{self._messages}"

    def read(self, timeout: float) -> Any:
        """Wait for the next message of the leader.

        Args:
            timeout: seconds that the leader has.

        Raises:
            SiteError: if the leader has ended, or is silent.
        """
        deadline = time.monotonic() + timeout + _SLACK_SECONDS
        asked, key = time.monotonic(), self._next_message()
        while not self._call(timeout, lambda: self.store.check([key])):
            now = time.monotonic()
            if now > deadline:
                raise self.processes.lost(TimeoutError("timed out"), timeout, 0)
            if now > asked + _ALIVE_SECONDS:
                asked = now
                self.processes.check_alive()
            time.sleep(_POLL_SECONDS)
        return codec.decode(bytes.fromhex(self._call(timeout, lambda: self.store.get(key)).decode()))

    def _call(self, timeout: float, call: Any) -> Any:
        try:
            return within(timeout, call)
        except (RuntimeError, TimeoutError) as error:
            raise self.processes.lost(error, timeout, 0) from error

    def open_group(self, timeout: float) -> LocalGroup:
        """Open connections between all processes of the site, which must call it together.

        Args:
            timeout: seconds after which a silent process counts as lost.

        Raises:
            SiteError: if a process has ended or does not answer.
        """
        self.processes.begin_session()
        self._groups += 1
        store = dist.PrefixStore(f"group/{self._groups}", self.store)
        # What the leader sends to the others may have to wait for other sites, for as long.
        limit = timeout if self.leads else 2 * timeout + _SLACK_SECONDS
        try:
            return within(
                timeout + _SLACK_SECONDS, lambda: LocalGroup(store, self.place, limit), self.processes.check_alive
            )
        except (RuntimeError, TimeoutError) as error:
            raise self.processes.lost(error, timeout) from error


class LocalGroup:
    """gloo connections on the loopback interface, between the processes of a site.

    Args:
        store: store that they share.
        place: place of this process.
        timeout: seconds of a wait.
    """

    def __init__(self, store: dist.Store, place: LocalPlace, timeout: float) -> None:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=LOOPBACK)]
        options._timeout = timedelta(seconds=timeout)
        self._process = os.getpid()
        self._place = place
        self._group: Any = gloo(store, place.local_rank, place.processes, options)

    def start(self, tensor: Tensor, index: int, tag: int, sends: bool) -> dist.Work:
        """Start to send a tensor to a process, or to receive it.

        Args:
            tensor: a contiguous tensor on the CPU.
            index: local rank of the process.
            tag: number of the message.
            sends: whether to send.

        Raises:
            RuntimeError: if the connection is closed.
        """
        group = self._open()
        work: dist.Work = (group.send if sends else group.recv)([tensor], index, tag)
        return work

    def broadcast(self, tensor: Tensor) -> dist.Work:
        """Start to replace a tensor's values by those of the leader."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        work: dist.Work = self._open().broadcast([tensor], options)
        return work

    def gather(self, tensor: Tensor) -> tuple[list[Tensor], dist.Work]:
        """Start to gather a tensor of each process; return room for them, by local rank, and the operation."""
        rooms = [torch.empty_like(tensor) for _ in range(self._place.processes)]
        return rooms, self._open().allgather([rooms], [tensor])

    def _open(self) -> Any:
        """Return the connections, or raise RuntimeError once they are closed."""
        if self._group is None:
            raise RuntimeError("the connection is closed")
        return self._group

    def close(self) -> None:
        """Close the connections. May be called twice."""
        if self._process != os.getpid():
            return  # the threads of gloo do not exist in a forked child: to destroy a group would wait for them
        group, self._group = self._group, None
        if group is not None:
            with suppress(RuntimeError, AttributeError):
                group.shutdown()
