"""Start of the process group: every process claims its rank at the rendezvous address, and site 0 lists the members.

A claim holds the address at which its process answers status requests. The claim of a process that has exited is
therefore recognised, and passes to the next process that asks for the rank. Site 0 posts the list of members to the
store once every rank is claimed by a process that answers; the group is made of that list.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlparse

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from ..errors import MismatchError, SiteError
from ..support.logs import Troubles, get_logger
from ..support.refusals import refuse
from ..support.signature import check_seconds
from . import codec
from .handshake import Deadline, choose_interface, explain_unresolved, gloo_interface, within
from .status import Member, ProcessSites, Silence, Status, ask, introduce_default, own_member

_log = get_logger(__name__)
_STATUS_SECONDS = 1.0  # for answers to a status request
_POLL_SECONDS = 0.02  # between two reads of the store
_NOTICE = 5.0  # seconds after which a site logs for which sites it waits
_LINGER = 0.5  # seconds that site 0 keeps the store after a failure, for the others to read it
_MEMBERS = "dadplug/members"
_SLURM_PORTS = range(20_000, 30_000)  # below those of outgoing connections

Result = TypeVar("Result")


@dataclass
class RollCall:
    """Registration of one site.

    Attributes:
        store: the store at the rendezvous address.
        rank: this site.
        num_nodes: number of sites.
        timeout: seconds to wait for all sites.
        deadline: end of that time.
        host: description of the process that hosts the store, for messages.
        own: this process, as the others are to know it.
        noun: name of a process in messages.
    """

    store: dist.Store
    rank: int
    num_nodes: int
    timeout: float
    deadline: Deadline
    host: str
    own: Member
    noun: str = "site"
    _counts: dict[str, int] = field(default_factory=dict)  # numbers of sites as others have them, by claim
    _noticed: bool = False

    def run(self) -> list[Member]:
        """Wait until every site has registered.

        Returns:
            The sites, by rank.

        Raises:
            SiteError: if a site does not register in time, or another process has this rank.
            MismatchError: if another site has been given another number of sites.
        """
        self._call(lambda: self.store.set(_count_of(self.own), str(self.num_nodes)))
        self._claim()
        return self._lead() if self.rank == 0 else self._follow()

    def _claim(self) -> None:
        key, own = _claim_of(self.rank), codec.encode(self.own).hex()
        current = self._call(lambda: self.store.compare_set(key, "", own)).decode()
        while current != own:
            holder = _member(current)
            if isinstance(ask({0: holder}, _STATUS_SECONDS)[0], Status):
                raise SiteError(
                    f"another process already claims rank {self.rank} ({holder.name}): every {self.noun} needs one "
                    "of its own"
                )
            before = current
            current = self._call(lambda: self.store.compare_set(key, before, own)).decode()  # noqa: B023

    def _lead(self) -> list[Member]:
        """Wait for all claims, and post the list of members; run by site 0."""
        while True:
            claims = self._claims()
            if difference := self._other_count(claims):
                self._post((difference,))
                time.sleep(_LINGER)
                raise MismatchError(difference)
            answers = {}
            if len(claims) == self.num_nodes:
                answers = ask({site: member for site, member in claims.items() if site != self.rank}, _STATUS_SECONDS)
                if not any(isinstance(answer, Silence) for answer in answers.values()):
                    members = [claims[site] for site in range(self.num_nodes)]
                    self._post(members)
                    return members
            if self.deadline.over:
                message = self._failure(claims, answers)
                self._post(message)
                time.sleep(_LINGER)
                raise SiteError(message)
            self._notice()
            time.sleep(_POLL_SECONDS)

    def _follow(self) -> list[Member]:
        """Wait for the list of members that site 0 posts.

        torchrun may keep its store when it restarts the processes. So a list without this process, or a failure, counts
        only if the process that has posted it is still there.
        """
        while True:
            leader, posted = self._posted()
            if leader is None:
                self._compare_count()
            if isinstance(posted, list) and len(posted) == self.num_nodes and posted[self.rank] == self.own:
                return posted
            if leader is not None and isinstance(ask({0: leader}, _STATUS_SECONDS)[0], Status):
                if isinstance(posted, str):
                    raise SiteError(posted)
                if isinstance(posted, tuple):
                    raise MismatchError(posted[0])
                self._compare_count()
                raise SiteError(
                    f"{posted[self.rank].name} has taken rank {self.rank}, since this process did not answer"
                )
            if self.deadline.over:
                claims = self._claims()
                others = {site: member for site, member in claims.items() if site != self.rank}
                raise SiteError(self._failure(claims, ask(others, _STATUS_SECONDS)))
            self._notice()
            time.sleep(_POLL_SECONDS)

    def _compare_count(self) -> None:
        """Raise MismatchError if site 0 has been given another number of sites."""
        first = self._look_up(_claim_of(0))
        if first and (difference := self._other_count({0: _member(first)})):
            raise MismatchError(difference)

    def _other_count(self, claims: dict[int, Member]) -> str | None:
        """Return a message if another site has been given another number of sites than this one."""
        for site, member in claims.items():
            key = _count_of(member)
            if key not in self._counts and (found := self._look_up(key)):
                self._counts[key] = int(found)
            if (count := self._counts.get(key, self.num_nodes)) != self.num_nodes:
                return (
                    f"configuration differs between sites: the number of sites is {self.num_nodes} at {self.noun} "
                    f"{self.rank} ({self.own.name}), and {count} at {self.noun} {site} ({member.name})"
                )
        return None

    def _posted(self) -> tuple[Member | None, Any]:
        """Return what site 0 has posted, and its process: a list of members, a message, or None before that."""
        content = self._look_up(_MEMBERS)
        return codec.decode(bytes.fromhex(content)) if content else (None, None)

    def _look_up(self, key: str) -> str:
        """Return a value of the store; an empty text before it is there."""
        return self._call(lambda: self.store.get(key).decode() if self.store.check([key]) else "")

    def _claims(self) -> dict[int, Member]:
        def read() -> dict[int, Member]:
            there = [site for site in range(self.num_nodes) if self.store.check([_claim_of(site)])]
            return {site: _member(self.store.get(_claim_of(site)).decode()) for site in there}

        return self._call(read)

    def _post(self, posted: list[Member] | str | tuple[str]) -> None:
        content = codec.encode((self.own, posted)).hex()
        self._call(lambda: self.store.set(_MEMBERS, content))

    def _failure(self, claims: dict[int, Member], answers: dict[int, Status | Silence]) -> str:
        missing = [site for site in range(self.num_nodes) if site not in claims]
        silent = [site for site, answer in answers.items() if isinstance(answer, Silence)]
        waited = f"waited {self.timeout:g} s for {self.num_nodes} {plural(self.noun)}"
        if silent:
            names = ", ".join(f"{self.noun} {site} ({claims[site].name})" for site in silent)
            return (
                f"{waited}: {names} came, and does not answer any more: it was killed or stopped, or cannot be reached "
                "over IPv4, which sites need that connect without a hub"
            )
        if not missing:
            return f"{waited}: {self.host} has not listed them, though all have come"
        return (
            f"{waited}: {self._names(missing)} did not come. Start every {self.noun} with the same rendezvous address, "
            "or give a larger timeout"
        )

    def _notice(self) -> None:
        """Log once for which sites this one waits, after some seconds."""
        if self._noticed or self.deadline.left >= self.timeout - _NOTICE:
            return
        claims = self._claims()
        missing = [site for site in range(self.num_nodes) if site not in claims]
        self._noticed = bool(missing)
        if missing:
            _log.info("%s %d waits for %s", self.noun, self.rank, self._names(missing))

    def _names(self, numbers: list[int]) -> str:
        noun = plural(self.noun) if len(numbers) > 1 else self.noun
        return f"{noun} {', '.join(map(str, numbers))}"

    def _call(self, call: Callable[[], Result]) -> Result:
        """Call the store, within the time that is left."""
        try:
            return within(max(self.deadline.left, _STATUS_SECONDS), call)
        except TimeoutError as error:
            raise SiteError(
                f"{self.host} has not answered for {self.timeout:g} s: its process is stopped, or its machine or "
                "link is down"
            ) from error
        except RuntimeError as error:
            raise SiteError(f"{self.host} ended before all {plural(self.noun)} had come") from error


def _count_of(member: Member) -> str:
    return f"dadplug/count/{member.token.hex()}"


def _claim_of(site: int) -> str:
    return f"dadplug/claims/{site}"


def _member(content: str) -> Member:
    try:
        member = codec.decode(bytes.fromhex(content))
    except ValueError:
        member = None
    return member if isinstance(member, Member) else Member("an unknown process", "", 0, b"\0" * 16)


def plural(noun: str) -> str:
    """Return the plural of the name of a process in messages."""
    return noun + ("es" if noun.endswith("s") else "s")


DEFAULT_TIMEOUT = 300.0  # seconds
_SLACK = 1.0  # seconds for a call to raise its own error


def connect(
    rank: int | None = None,
    num_nodes: int | None = None,
    dist_url: str | None = None,
    *,
    backend: str | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> None:
    """Join the other sites: start the default process group of torch.distributed.

    Without arguments, the environment that torchrun sets is read (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), or in a
    step of SLURM, started by srun, that of SLURM. Nothing is done if it names no other site, or if a group exists
    already that the arguments do not contradict.

    Args:
        rank: number of this site, from 0; site 0 hosts the rendezvous.
        num_nodes: number of sites.
        dist_url: the rendezvous address, ``tcp://HOST:PORT``, an address of site 0 that all sites reach.
        backend: ``"gloo"`` (CPU, and GPUs across sites), ``"nccl"`` (GPUs in one place); chosen by device if None.
        timeout: seconds to wait for all sites.

    Raises:
        ValueError: if an argument is out of its range or missing, or contradicts the group that exists already.
        SiteError: if a site does not come in time, two claim one rank, or the port is taken.
    """
    if dist.is_initialized():
        _check_same(rank, num_nodes, dist_url)
        return
    environment = launch_environment(os.environ)
    if num_nodes is None and rank is None and dist_url is None and int(environment.get("WORLD_SIZE", "1")) <= 1:
        return
    rank, num_nodes, host, port = _rendezvous_address(rank, num_nodes, dist_url, environment)
    check_seconds("timeout", timeout)
    backend = _backend(backend)
    choose_interface(host, port)
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and dist_url is None
    store, members = meet(rank, num_nodes, (host, port), timeout, own_member(), by_torchrun)
    sites = ProcessSites(rank, members)
    limit = timedelta(seconds=timeout)
    # A store that torchrun keeps over a restart holds the addresses of processes that have ended.
    prefixed = dist.PrefixStore(f"dadplug/group/{members[0].token.hex()}", store)

    def start() -> None:
        with gloo_interface():
            dist.init_process_group(backend, store=prefixed, rank=rank, world_size=num_nodes, timeout=limit)
            if backend == "gloo":
                dist.barrier()  # else site 0 may end, with the store, while others still read from it

    try:
        within(timeout, start)
    except (RuntimeError, TimeoutError) as error:
        raise sites.lost(error, timeout) from None
    introduce_default(sites)
    global _joined
    _joined = dist.group.WORLD, (host, port)
    names = ", ".join(f"site {each}: {member.name}" for each, member in enumerate(members))
    _log.info("connected as site %d of %d (%s); site 0 is at %s:%d", rank, num_nodes, names, host, port)


_joined: tuple[object, tuple[str, int]] | None = None  # the default group, and its rendezvous address


def _check_same(rank: int | None, num_nodes: int | None, dist_url: str | None) -> None:
    """Raise ValueError if arguments contradict the group to which this process belongs already."""
    known: dict[str, Any] = {"rank": (rank, dist.get_rank()), "num_nodes": (num_nodes, dist.get_world_size())}
    if dist_url is not None and _joined is not None and _joined[0] is dist.group.WORLD:
        known["dist_url"] = _resolved(_parse(dist_url)), _resolved(_joined[1])
    for name, (given, present) in known.items():
        if given is not None and given != present:
            raise ValueError(
                f"this process is connected already, with {name}={present}, and connect() is called again with "
                f"{name}={given}: call it once, or torch.distributed.destroy_process_group() before"
            )


def _resolved(place: tuple[str, int]) -> str:
    host, port = place
    with suppress(OSError):
        host = socket.gethostbyname(host)
    return f"tcp://{host}:{port}"


def meet(
    rank: int, count: int, address: tuple[str, int], timeout: float, own: Member, by_torchrun: bool, noun: str = "site"
) -> tuple[dist.Store, list[Member]]:
    """Wait until all processes have come to the rendezvous.

    Args:
        rank: number of this process; number 0 hosts the rendezvous, unless torchrun does.
        count: number of processes.
        address: host and port of the rendezvous address.
        timeout: seconds to wait.
        own: this process, as the others are to know it.
        by_torchrun: whether torchrun hosts the rendezvous.
        noun: name of a process in messages.

    Returns:
        The store at the rendezvous address, and the processes by number.

    Raises:
        SiteError: if a process does not come in time, two claim one number, or the port is taken.
    """
    deadline = Deadline(timeout)
    if by_torchrun:
        host = "the rendezvous of torchrun"
        store = _within(timeout, host, lambda: next(rendezvous("env://", timeout=timedelta(seconds=timeout)))[0])
    else:
        host = f"{noun} 0, which hosts the rendezvous,"
        store = _within(timeout, host, lambda: _open_store(*address, rank, timeout, noun))
    return store, RollCall(store, rank, count, timeout, deadline, host, own, noun).run()


def launch_environment(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return environment variables with those of torchrun, also where srun has started the processes of a SLURM job.

    Site 0 is on the first node of the step, and its port follows from the numbers of job and step. MASTER_ADDR and
    MASTER_PORT replace them. A batch script without srun has one process, in whatever step it counts tasks.

    Args:
        environment: environment variables of this process.
    """
    tasks, step = environment.get("SLURM_STEP_NUM_TASKS", "1"), environment.get("SLURM_STEP_ID", "")
    if "WORLD_SIZE" in environment or not step.isdigit() or not tasks.isdigit() or int(tasks) <= 1:
        return environment
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    job = environment.get("SLURM_JOB_ID", "0")
    port = _SLURM_PORTS.start + (7 * int(job) + int(step)) % len(_SLURM_PORTS)
    place = {"RANK": environment.get("SLURM_PROCID", ""), "WORLD_SIZE": tasks}
    return {"MASTER_ADDR": _first_host(nodes), "MASTER_PORT": str(port), **environment, **place}


def _first_host(nodes: str) -> str:
    """Return the first host of a list as SLURM writes it, such as ``gpu[01-04,07],cpu3``."""
    first = re.match(r"(?:[^,\[]|\[[^]]*])*", nodes)
    assert first is not None
    return re.sub(r"\[([^]]*)]", lambda group: re.split("[,-]", group[1])[0], first[0])


def _rendezvous_address(
    rank: int | None, num_nodes: int | None, dist_url: str | None, environment: Mapping[str, str]
) -> tuple[int, int, str, int]:
    """Return rank, number of sites, host and port, from the arguments or from torchrun's environment.

    Raises:
        ValueError: if an argument is out of its range or missing.
    """
    if num_nodes is None and rank is None and dist_url is None:
        rank, num_nodes, port = (_number(environment, name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        host = environment.get("MASTER_ADDR", "127.0.0.1")
    elif rank is None or num_nodes is None or dist_url is None:
        raise ValueError("rank, num_nodes and dist_url go together: give all three, or none to use torchrun's")
    else:
        host, port = _parse(dist_url)
    for name, value in (("rank", rank), ("num_nodes", num_nodes)):
        if not isinstance(value, int):
            raise ValueError(f"{name} must be a whole number, got {value!r}")
    refuse(
        (num_nodes < 1, f"num_nodes must be at least 1, got {num_nodes}"),
        (not 0 <= rank < num_nodes, f"rank must lie in 0 to {num_nodes - 1} for {num_nodes} sites, got {rank}"),
    )
    return rank, num_nodes, host, port


def _within(timeout: float, host: str, call: Callable[[], dist.Store]) -> dist.Store:
    try:
        return within(timeout + _SLACK, call)
    except TimeoutError as error:
        raise SiteError(f"{host} has not answered for {timeout:g} s") from error


def _backend(backend: str | None) -> str:
    if backend is None:
        return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    refuse(
        (
            backend not in ("gloo", "nccl", "mpi", "cpu:gloo,cuda:nccl"),
            f"unknown backend {backend!r}; valid ones are gloo, nccl and mpi",
        ),
        (
            backend == "nccl" and not (dist.is_nccl_available() and torch.cuda.is_available()),
            "backend 'nccl' needs CUDA GPUs and a build of torch with NCCL; use 'gloo' here",
        ),
    )
    return backend


def _number(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name, "")
    if not value.isdigit():
        raise ValueError(f"the environment variable {name} should be a number, it is {value!r}")
    return int(value)


def _parse(url: str) -> tuple[str, int]:
    try:
        parsed = urlparse(url)
        host, port = parsed.hostname, parsed.port
    except ValueError:
        host = port = None
    if not url.startswith("tcp://") or host is None or port is None:
        raise ValueError(f"the rendezvous address should read tcp://HOST:PORT, got {url!r}")
    return host, port


def _open_store(host: str, port: int, rank: int, timeout: float, noun: str) -> dist.Store:
    limit = timedelta(seconds=timeout)
    try:
        if rank != 0:
            _wait_for_host(host, port, timeout)
            return dist.TCPStore(host, port, None, False, limit, wait_for_workers=False)
        # torch's own listens on all interfaces, this one on the address that the rendezvous address names
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address, family=family, backlog=1024)
        store = dist.TCPStore(host, port, None, True, limit, wait_for_workers=False, master_listen_fd=listener.fileno())
        listener.detach()  # it is the store's now
        return store
    except (RuntimeError, ValueError, OSError) as error:  # DistNetworkError and kin derive from RuntimeError
        if rank == 0 and getattr(error, "errno", None) == errno.EADDRINUSE:
            if (other := _occupant(host, port)) and noun == "site":
                raise SiteError(
                    f"another process with rank 0 is at {host}:{port} already ({other}): give each process of a run a "
                    "rank of its own, and each run a port of its own"
                ) from None
            raise SiteError(
                f"port {port} is in use on this machine: another run may still be going on; end it, or choose another "
                f"port for all {plural(noun)}"
            ) from None
        if isinstance(error, socket.gaierror):
            place = "its rendezvous address" if rank == 0 else f"{noun} 0"
            raise SiteError(f"{noun} {rank} cannot find {place}: {explain_unresolved(host, error)}") from error
        if rank == 0:
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise SiteError(
                f"{noun} 0 cannot open its rendezvous address {host}:{port}: it must be one of this machine's own, "
                f"and reachable from the others ({reason})"
            ) from error
        raise SiteError(
            f"{noun} {rank} did not reach {noun} 0 at {host}:{port} within {timeout:g} s: is it running, is the "
            "address right, and does a firewall let the port through?"
        ) from error


def _occupant(host: str, port: int) -> str:
    """Return the name of the process with rank 0 whose rendezvous is at an address; empty if that is not known."""

    def read() -> str:
        store = dist.TCPStore(host, port, None, False, timedelta(seconds=_STATUS_SECONDS), wait_for_workers=False)
        return _member(store.get(_claim_of(0)).decode()).name if store.check([_claim_of(0)]) else ""

    with suppress(RuntimeError, TimeoutError):
        return within(_STATUS_SECONDS, read)
    return ""


def _wait_for_host(host: str, port: int, timeout: float) -> None:
    """Wait until the rendezvous address can be reached.

    Raises:
        OSError: if that takes too long.
    """
    deadline = Deadline(timeout)
    troubles = Troubles(_log)
    while True:
        try:
            socket.create_connection((host, port), max(0.1, deadline.left)).close()
            troubles.end("unresolved", f"{host} resolves now")
            return
        except OSError as error:
            if isinstance(error, socket.gaierror):
                troubles.begin("unresolved", explain_unresolved(host, error))
                troubles.remind()
            if deadline.over:
                raise
        time.sleep(0.05)
