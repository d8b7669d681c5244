"""Start of a parameter server: its options, and the connections between the sites and the sequencer.

The connections are over one socket each: at the start, and of sites that return. The options have here the one
definition of their names, types, defaults and help texts.
"""

from __future__ import annotations

import math
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NoReturn

import torch
from msgspec.msgpack import encode
from torch import nn

from ..errors import SiteError
from ..exchange import Traffic, Transport, codec
from ..exchange.dialers import DIALERS
from ..exchange.fields import checked
from ..exchange.network import connect_pairs
from ..exchange.rounds import Rounds
from ..exchange.status import PeerNames
from ..exchange.transport import Streams, StreamToHub
from ..options import Options
from ..step.methods import check_allowed
from ..step.model_sync.sameness import raise_problems
from ..support.signature import OptionSet, check_choice, option
from .dealing import DEALS
from .sequencer import Rules, make_rules
from .service import (
    KEY_CHARACTERS,
    MOST_NAMES,
    VERDICTS,
    VERSION,
    Greeting,
    SequencerHost,
    Settings,
    Verdict,
    read_message,
    write_message,
)
from .streams import Log

# Options

_REDUCTION = {option.name: option for option in fields(Options)}
MODES = ("dsgd", "dad", "rankdad")
_OWN = ("staleness", "quorum", "gather", "late", "deal")  # not those of a reduction


def _as_in_reductions(name: str) -> Any:
    """Define an option that a gradient reduction has, too."""
    return option(_REDUCTION[name].default, _REDUCTION[name].metadata["help"])


def check_mode(mode: object) -> None:
    """Raise ValueError if a method cannot be used with a parameter server.

    Args:
        mode: value of the option ``mode``.
    """
    if mode in MODES:
        return
    reasons = {
        "edad": "mode 'edad' recomputes deltas from the rows of all sites in one step, which are not there",
        "powersgd": "mode 'powersgd' sums over all sites twice in each step",
        "topk": "mode 'topk' is not built for it",
        "auto": "mode 'auto' chooses paths by the time of synchronous steps",
    }
    reason = reasons.get(str(mode), f"unknown mode {mode!r}")
    raise ValueError(f"{reason}; valid modes of a parameter server are {', '.join(map(repr, MODES))}")


@dataclass(frozen=True)
class ServerOptions(OptionSet):
    """Options of `dadplug.ParameterServer`, its strategy and its runner.

    Raises:
        ValueError: if a value is not valid; the message lists the valid ones.
    """

    mode: str = option("rankdad", "how gradients are encoded: dsgd, dad or rankdad")
    staleness: int = option(8, "largest number of versions by which a gradient may be late; 0: synchronous steps")
    quorum: int = option(1, "number of sites whose gradients make a commit; 1 for asynchronous steps")
    gather: float = option(
        0.75,
        "largest part of a site's step for which its gradient waits for those of other sites that are expected, to be "
        "committed together; 0: not at all",
    )
    late: str = option(
        "scale",
        "treatment of a gradient that is t > 0 versions late: scale (learning rate times 1 / (1 + t)), keep, or drop "
        "(above the staleness; then no site waits)",
    )
    deal: str = option(
        "own",
        "data of loaders that server.loader() returns: own (of each site; a fast site makes further passes), or shared "
        "(one data set, whose batches are handed out on demand)",
    )
    site_timeout: float = option(30.0, "seconds of silence after which a site counts as lost; the others go on")
    rank: int | Literal["auto"] = _as_in_reductions("rank")
    iterations: int = _as_in_reductions("iterations")
    tolerance: float = _as_in_reductions("tolerance")
    warm_start: bool = _as_in_reductions("warm_start")
    error_feedback: bool | None = _as_in_reductions("error_feedback")
    weighting: str = _as_in_reductions("weighting")
    wire: str = _as_in_reductions("wire")
    may_differ: tuple[str, ...] = _as_in_reductions("may_differ")
    dense: str = _as_in_reductions("dense")
    share_inputs: bool = _as_in_reductions("share_inputs")
    sync_batchnorm: bool = option(
        False,
        "normalise by the statistics of all sites' rows: of other sites, those that they have committed last; with a "
        "quorum of all sites where these are not equally fast",
    )
    average_buffers: bool = _as_in_reductions("average_buffers")
    private: str | tuple[str, ...] = _as_in_reductions("private")
    timeout: float = _as_in_reductions("timeout")
    hub_timeout: float | None = _as_in_reductions("hub_timeout")

    def __post_init__(self) -> None:
        check_mode(self.mode)
        make_rules(self.staleness, self.quorum, self.late, self.gather)
        check_choice("deal", self.deal, DEALS)
        object.__setattr__(self, "private", self.of_reduction().private)

    @property
    def rules(self) -> Rules:
        """Rules of the sequencer."""
        return make_rules(self.staleness, self.quorum, self.late, self.gather)

    def unused(self) -> dict[str, str]:
        return {name: needed for name, needed in self.of_reduction().unused().items() if name != "site_timeout"}

    def of_reduction(self) -> Options:
        """Return those options that a gradient reduction has, too."""
        return Options(**{name: value for name, value in vars(self).items() if name not in _OWN})

    @classmethod
    def unknown(cls, name: str) -> ValueError:
        """Return the error for an unknown option, or for one that only a gradient reduction has."""
        if name in _REDUCTION:
            return ValueError(f"a ParameterServer has no option {name!r}; valid options are {', '.join(cls.names())}")
        return super().unknown(name)


_LEAST_LIMIT = 1 << 26  # bytes of a message that are possible in any case
_ANSWER_SECONDS = 30.0
_AT_HUB = "hub:"  # before the folder of the kit, in addresses of sequencers at a hub
_ALONE = "this site has returned into a training: only step() and finish() of the ParameterServer involve other sites"


# Start


def gather_workers(transport: Transport, role: str, quorum: int, problem: str) -> list[int]:
    """Return the ranks of the sites that contribute; all sites must call it together.

    Args:
        transport: the transport.
        role: role of this site.
        quorum: number of sites whose gradients make a commit.
        problem: what is wrong with this site's arguments; empty if nothing is.

    Raises:
        ValueError: on all sites, if something is wrong at one.
    """
    roles = checked(transport.gather_present(role), str, "role", transport).values()
    workers = [rank for rank, each in enumerate(roles) if each == "worker"]
    if not problem and not workers:
        problem = "no process has role='worker'"
    if not problem and quorum > len(workers):
        problem = f"quorum={quorum} needs as many sites, and there are {len(workers)}"
    raise_problems(problem, transport)
    return workers


def largest_message(model: nn.Module) -> int:
    """Return the number of bytes that a contribution, or the state of a site, may have at most.

    Args:
        model: the shared part of the model.
    """
    return _LEAST_LIMIT + 16 * sum(each.numel() * each.element_size() for each in model.parameters())


def open_log(
    transport: Transport, options: ServerOptions, workers: Sequence[int], limit: int, traffic: Traffic, in_trainer: bool
) -> tuple[Log, SequencerHost | None, str]:
    """Start the sequencer, and connect this site to it; all sites must call it together.

    The hub has it where there is one that may read what sites send; else site 0.

    Args:
        transport: the transport.
        options: the options.
        workers: ranks of the sites that contribute.
        limit: bytes of the largest message.
        traffic: meter of sent bytes.
        in_trainer: whether sites return in the midst of a phase only.

    Returns:
        The log; at the site that has the sequencer, its service, else None; and the address for sites that return,
        without the rank, empty where none can.

    Raises:
        SiteError: if a site does not connect.
        ValueError: at all sites, if the sequencer does not start.
    """
    sites, silence, timeout = transport.sites, options.site_timeout, options.timeout
    settings = Settings(tuple(workers), options.rules, options.deal, in_trainer, limit, silence, timeout)
    stream = transport.open_hub_stream(timeout) if isinstance(transport, Streams) else None
    if stream is not None:
        key = start_sequencer(transport, stream.connected, stream.hub, settings)
        log = Log(stream.connected, sites, limit, silence, timeout, traffic, hub=stream)
        return log, None, f"{_AT_HUB}{stream.folder}/{key}"
    own, served = _connect_star(transport, timeout)
    host = None
    if served:
        names = [sites.name(rank) for rank in range(transport.world_size)]
        host = SequencerHost(names, math.inf, transport.rank, traffic)
        for rank, connected in served.items():
            host.accept(rank, connected)
    key = start_sequencer(transport, own, sites[0], settings)
    can_return = transport.world_size > 1 and not isinstance(transport, Streams)
    places = transport.gather_present(host.listen() if host and can_return else "")
    place = checked(places, str, "address", transport)[0]
    delayed = host.service(key).blocks_others if host else bool
    log = Log(own, sites, limit, silence, timeout, traffic, delayed=delayed)
    return log, host, f"{place}/{key}" if place else ""


def start_sequencer(transport: Transport, connected: socket.socket, place: str, settings: Settings) -> str:
    """Start the sequencer; all sites must call it together.

    Args:
        transport: the transport.
        connected: this site's stream to the service that is to run it.
        place: name of the place that has the service.
        settings: the settings.

    Returns:
        The key of the training.

    Raises:
        ValueError: at all sites, if it does not start.
        SiteError: if the hub or a site is lost.
    """
    keys = transport.gather_present(secrets.token_hex(KEY_CHARACTERS // 2))
    key: str = checked(keys, str, "key", transport)[0]
    try:
        connected.settimeout(settings.timeout)
        write_message(connected, Greeting(VERSION, key, encode(settings)))
        transport.gather_objects(None)  # a site that is lost here is named at once
        problem = read_message(connected, VERDICTS, MOST_NAMES).problem
    except OSError as error:
        problem = f"{place} has no sequencer for parameter servers, or is lost: {error}"
    raise_problems(problem, transport)
    return key


def _connect_star(transport: Transport, timeout: float) -> tuple[socket.socket, dict[int, socket.socket]]:
    """Connect each site with site 0; all sites must call it together.

    Args:
        transport: the transport, over which sites learn each other's addresses.
        timeout: seconds that it may take.

    Returns:
        The socket to the sequencer; and at site 0 the sequencer's sockets by rank of the other end, else none.

    Raises:
        SiteError: if a site does not connect.
    """
    sockets: dict[int, socket.socket] = {}
    if transport.world_size > 1:
        sockets = dict(connect_pairs(transport, timeout))
        transport.gather_objects(None)  # before it, nothing may be sent on a stream
    if transport.rank == 0:
        inner, outer = socket.socketpair()
        return outer, {0: inner} | sockets
    own = sockets.pop(0)
    for each in sockets.values():
        each.close()
    return own, {}


# Return


class ReturnedSites(PeerNames):
    """PeerNames by name, for one that has returned: it has no further facts about them."""

    def lost(self, error: BaseException, timeout: float, peer: int | None = None) -> SiteError:
        return SiteError(f"{self[peer or 0]} is gone: {error}")


class ReturnedRounds(Rounds):
    """Steps of a site that has returned: it gets the state of another one.

    Args:
        size: number of sites.
        log: the log; None for a trainer's transport, which gets no state.
    """

    joins = True

    def __init__(self, size: int, log: Log | None = None) -> None:
        super().__init__(size)
        self._log = log

    def receive_state(self, most: int) -> Any:
        log = self._log
        assert log is not None
        log.wait(lambda: log.snapshot is not None, entries=False)
        return codec.decode(log.snapshot or b"")


class ReturnedTransport(Transport):
    """Transport of a site that has returned, which has no connections but the log's."""

    def close(self) -> None:
        """Do nothing: the parameter server closes the log."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(_ALONE)

    gather = all_reduce = broadcast = broadcast_bytes = gather_objects = gather_present = _refuse

    def prefers_gather(self, nbytes: int) -> bool:
        return True


def return_to_log(
    address: str, model: nn.Module, limit: int, options: ServerOptions, traffic: Traffic
) -> tuple[Log, ReturnedTransport]:
    """Connect to a training, in place of a lost process of this site.

    Args:
        address: `ParameterServer.return_address` of the process that this one replaces.
        model: the model.
        limit: bytes of the largest message.
        options: the options.
        traffic: the meter.

    Raises:
        ValueError: if the address is none.
        KitError: if the kit that it names is incomplete or damaged, or not valid at present.
        RefusedError: if the hub refuses this site.
        SiteError: if the training cannot be reached.
    """
    timeout = options.timeout
    connected, sites, hub = _dial(address, timeout)
    check_allowed(options.of_reduction())  # a kit restricts it
    log = Log(connected, sites, limit, options.site_timeout, timeout, traffic, hub=hub, returns=True)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    rounds = ReturnedRounds(len(sites), log)
    return log, ReturnedTransport(sites, traffic, sites.rank, device, timeout, rounds)


def _dial(address: str, timeout: float) -> tuple[socket.socket, ReturnedSites, StreamToHub | None]:
    """Connect to the site or the hub that has the sequencer.

    Returns:
        The socket, the sites by name, and the stream where the hub has the sequencer.
    """
    try:
        place, key, last = address.rsplit("/", 2)
        rank = int(last)
        host, port = ("", "0") if place.startswith(_AT_HUB) else place.rsplit(":", 1)
        number = int(port)
    except ValueError as error:
        raise ValueError(f"rejoin should be the return_address of a ParameterServer, got {address!r}") from error
    stream = None
    try:
        if host:
            connected = socket.create_connection((host, number), timeout)
        else:
            folder = place.removeprefix(_AT_HUB)
            own, stream = DIALERS["kit"](folder, timeout)
            if own != rank:
                raise ValueError(
                    f"rejoin is the return_address of site {rank}, and the kit {folder} that of site {own}"
                )
            connected, place = stream.connected, stream.hub
        connected.settimeout(min(timeout, _ANSWER_SECONDS))
        write_message(connected, Greeting(VERSION, key, rank=rank))
        verdict: Verdict = read_message(connected, VERDICTS, MOST_NAMES)
    except OSError as error:
        raise SiteError(f"the training at {place} cannot be reached, it may have ended: {error}") from error
    if verdict.problem:
        raise SiteError(f"the training at {place} cannot be reached: {verdict.problem}")
    return connected, ReturnedSites(rank, verdict.names), stream
