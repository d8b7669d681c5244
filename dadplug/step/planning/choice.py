"""Choice of the number of components that rankdad sends, from the measured time of a step and of its exchange.

A step with fewer components waits less for a slow link, and more steps are needed. Sites report every few steps how
long a step takes and how long they wait in it. All conclude the same from the reports of the sites that are present.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import GenericAlias
from typing import Any, NamedTuple, Protocol

import torch

from ...exchange import Transport
from ...exchange.fields import check_kinds, checked, invalid
from ...exchange.wire import wire_format
from ...options import AUTO, Options
from ...support.logs import get_logger
from ..methods import Method
from ..methods.base import GradientPath
from ..units.base import Unit
from ..units.factor import FactorUnit
from .merging import gather_seconds

_log = get_logger(__name__)

_RANKS = (2, 4)  # that may be chosen in place of the largest one
_FIRST, _EVERY = 8, 16  # the step of the first report, and the steps between two
_WINDOW, _LEAST = 9, 4  # last steps whose median is reported, and how many there have to be
_WAIT = 0.2  # share of a step that sites wait at least where fewer components can pay
_MOVED = 0.3  # change of the time of a step or of its waiting, as a share of a step, that leads to a new choice
_LOWERS, _RAISES = 0.9, 0.97  # predicted time to the loss, as a share of the present one, from which the rank changes
_FURTHER_STEPS = 0.6  # r components need 1 + this / sqrt(r) times the steps of exact gradients, about
_FASTER = 2.0  # times as fast a link leads to a new choice where fewer components than the largest rank are sent
_LEAST_SECONDS = 1e-10  # a byte; less is not measured
_PROBE = 4_096, 65_536  # elements of the message by which the link is measured: least and most


@dataclass(frozen=True)
class Choice:
    """Choice of the defaults. Prints as a line.

    Attributes:
        rank: components of a layer that a site sends, at most.
        wire: number format of the components.
        merge: who adds them up: "all" or "owner".
        error_feedback: what is kept of what is not sent, as in the option: all for True, nothing for False, and for
            None all or the strongest components, by layer.
        sites: number of sites.
        rate: rate of the slowest link, in bits a second; None while it has not been measured, since no site waits long.
        seconds: duration of a step when the choice was made; None before the first choice.
        waiting: share of it that all sites wait for the exchange.
    """

    rank: int
    wire: str
    merge: str
    error_feedback: bool | None
    sites: int
    rate: float | None = None
    seconds: float | None = None
    waiting: float = 0.0

    @property
    def reason(self) -> str:
        """The measurements by which the choice was made, in words."""
        if self.seconds is None:
            return f"{self.sites} sites, not measured yet"
        link = "" if self.rate is None else f"{_in_words(self.rate)}, "
        return f"{self.sites} sites, {link}{1e3 * self.seconds:.3g} ms a step, of which {self.waiting:.0%} waiting"

    def __str__(self) -> str:
        merged = "" if self.merge == "all" else ", merged by owners"
        return f"rank {self.rank}, {self.wire}{merged}; {self.reason}"


class _Last(NamedTuple):
    """Times by which the last choice was made.

    Attributes:
        step: seconds of a step; 0.0 before the first choice.
        wait: seconds of it that all sites wait.
        begins: whether these are of steps before the last change of the rank.
        by_byte: seconds for each byte sent to every other site.
        looks: whether the next review measures the link.
    """

    step: float = 0.0
    wait: float = 0.0
    begins: float = 1.0
    by_byte: float = math.inf
    looks: float = 0.0


class _Plans(Protocol):
    """Planner, as a choice sees it."""

    units: list[Unit]

    @property
    def has_owners(self) -> bool: ...

    @property
    def busiest_share(self) -> float: ...

    def plan_anew(self) -> None: ...


class RankChoice:
    """Choice of the rank, the same at all sites.

    Args:
        method: the method, whose rank is set.
        options: the options, with ``rank="auto"``.
        transport: the transport.
        planner: the planner, which makes a new plan for another rank.

    Attributes:
        given: whether the program has set a rank at this site; then no site chooses any more.
    """

    def __init__(
        self,
        method: Method,
        options: Options,
        transport: Transport,
        planner: _Plans,
    ) -> None:
        self._method = method
        self._options = options
        self._transport = transport
        self._planner = planner
        self._times: deque[tuple[float, float]] = deque(maxlen=_WINDOW)
        self._ended = 0.0  # when the last step ended
        self._apart = 0.0  # seconds of the present step in which sites compare their reports
        self._last = _Last()
        self.given = False
        self._is_given = False  # at some site
        self._next: int | None = None  # rank of a new plan, which follows this step
        wire = options.wire_of(GradientPath.LOWRANK)
        self._choice = Choice(options.largest_rank, wire, "all", options.error_feedback, transport.world_size)

    @classmethod
    def of(cls, method: Method, options: Options, transport: Transport, planner: _Plans) -> RankChoice | None:
        """Make the choice of a reduction; None where the rank is given, and for one site that stays alone.

        Args:
            method: the method.
            options: the options.
            transport: the transport.
            planner: the planner.
        """
        given = options.rank != AUTO or options.budget is not None
        if options.mode != "rankdad" or given or (transport.world_size == 1 and not transport.rounds.elastic):
            return None
        return cls(method, options, transport, planner)

    @property
    def choice(self) -> Choice:
        """The present choice."""
        merge, sites = "owner" if self._planner.has_owners else "all", self._transport.world_size
        return replace(self._choice, merge=merge, sites=sites)

    def review(self, step: int) -> None:
        """Choose anew in a step where it is time for it; all sites call it in the same steps, before these end.

        Args:
            step: number of the step.
        """
        if (step + 1) % _EVERY == _FIRST and not self._is_given:
            begin = time.perf_counter()
            with self._transport.traffic.apart():
                self._compare()
            self._apart = time.perf_counter() - begin

    def end_step(self) -> None:
        """Record the time of a step, and make a new plan if another rank was chosen in it."""
        if self._ended:
            seconds = time.perf_counter() - self._ended - self._apart
            self._times.append((seconds, self._transport.traffic.wait_seconds))
        if self._next is not None:
            if not (self._is_given or self.given):  # the program of an absent site may have set its rank
                self._method.max_rank = self._method.largest_rank = self._next
            self._planner.plan_anew()  # whose messages have room for so many
        self._next, self._apart, self._ended = None, 0.0, time.perf_counter()

    def _compare(self) -> None:
        """Compare the reports of all sites that are present with those at the last choice."""
        seconds, waits = zip(*self._times, strict=True) if self._times else ((0.0,), (0.0,))
        sent = self._transport.traffic.bytes_sent
        given = float(self.given)
        own = [statistics.median(seconds), statistics.median(waits), sent, given, len(self._times), self._present]
        own.append(self._transport.world_size)  # a site that has just joined may know more sites than the others
        reports = []
        for rank, report in self._gather([*own, *self._last]).items():
            most = math.inf if report[3] else self._options.largest_rank
            if all(each >= 0 for each in report) and 1 <= report[5] <= most and math.isfinite(report[5]):
                reports.append(report)
            else:
                error = invalid("report on its steps", self._transport.sites[rank], f"it holds {report}")
                self._transport.rounds.leave_out(rank, error)
        if reports:
            self._conclude(reports)

    def _conclude(self, reports: Sequence[Sequence[float]]) -> None:
        """Choose by the reports of the sites that are present, in the order of ranks."""
        self._is_given = any(report[3] for report in reports)
        rank, self._last = max(int(report[5]) for report in reports), _Last(*reports[0][7:])
        if self._is_given:
            if self._method.largest_rank < self._options.largest_rank:  # owners have room for what a program sets
                self._next = self._options.largest_rank
        elif {rank} != {self._method.largest_rank, *(report[5] for report in reports)}:
            self._set(rank)  # some site has loaded another state
        elif len(reports) > 1 and min(report[4] for report in reports) >= _LEAST:
            step, wait = max(report[0] for report in reports), min(report[1] for report in reports)
            last, first = self._last, bool(self._last.begins)
            if first or _moved((last.step, last.wait), (step, wait)) or self._is_faster():
                self._last = self._last._replace(step=step, wait=wait, begins=0.0)
                sites = max(2, int(min(report[6] for report in reports)))
                self._choose(step, wait, max(report[2] for report in reports), first, sites)

    @property
    def _present(self) -> int:
        assert self._method.max_rank is not None
        return self._method.max_rank

    def _is_faster(self) -> bool:
        """Return whether the link has become faster, which the steps do not show; looked up in every second review."""
        self._last = self._last._replace(looks=float(not self._last.looks))
        if self._choice.rank == self._options.largest_rank or not self._last.looks:
            return False
        return self._last.by_byte > _FASTER * self._measure(_PROBE[0], rounds=1)

    def _choose(self, step: float, wait: float, nbytes: float, first: bool, sites: int) -> None:
        present, largest = self._present, self._options.largest_rank
        rate, rank = None, present  # a rate measured at an earlier choice may no longer be that of the link
        if present < largest or wait > _WAIT * step:
            nbytes /= sites - 1
            by_byte = self._measure(int(min(max(nbytes / 4, _PROBE[0]), _PROBE[1])))
            self._last = self._last._replace(by_byte=by_byte)
            rate = 8 * (sites - 1) / by_byte
            own = self._bytes(present)
            # The sum of several sites has more directions than the gradient of one.
            ranks = _RANKS[1:] if sites > 2 else _RANKS
            times = {rank: by_byte * (self._bytes(rank) - own) for rank in {*ranks, largest, present}}
            rank = best_rank(present, step, wait, times)
        self._choice = replace(self._choice, rank=rank, rate=rate, seconds=step, waiting=wait / step)
        if first or rank != present:
            _log.info("rankdad has chosen %s", self.choice)
        if rank != present:
            self._set(rank)

    def _set(self, rank: int) -> None:
        self._last = self._last._replace(begins=1.0)  # the next report shows the cost of the new rank
        self._next, self._choice = rank, replace(self._choice, rank=rank)

    def _bytes(self, rank: int) -> float:
        """Return the bytes on the busiest site's link with a rank, for each of the others, beside biases."""
        total = 0.0
        for unit in self._planner.units:
            if isinstance(unit, FactorUnit) and unit.path == GradientPath.LOWRANK:
                wire = wire_format(self._choice.wire, unit.lead.dtype)
                rows = self._method.rank_of(rank, *unit.widths)
                total += rows * sum(map(wire.row_size, unit.widths)) * wire.itemsize
        return total * self._planner.busiest_share

    def _measure(self, size: int, rounds: int = 3) -> float:
        """Measure the link with messages of some size; return seconds for each byte sent to every other site."""
        latency = gather_seconds(self._transport, 16, rounds)
        own = max(0.0, gather_seconds(self._transport, size, rounds) - latency) / (4 * size)
        return max([_LEAST_SECONDS, *(report[0] for report in self._gather([own]).values())])

    def _gather(self, numbers: list[float]) -> dict[int, list[float]]:
        """Gather numbers of the sites that are present, by rank, in ascending order."""
        transport = self._transport
        if not transport.rounds.elastic:  # in one message, where objects take several
            gather = transport.gather([len(numbers)] * transport.world_size, torch.float64, once=True)
            gather.payload.copy_(torch.tensor(numbers, dtype=torch.float64))
            gather.launch()
            return {rank: payload.tolist() for rank, payload in enumerate(gather.wait())}
        kind = GenericAlias(tuple, (float,) * len(numbers))
        found = checked(transport.gather_present((*numbers,)), kind, "report on its steps", transport)
        return {rank: [*map(float, report)] for rank, report in found.items()}  # others may send numpy's numbers

    @property
    def room(self) -> int:
        """Most components for which owners need room: the chosen rank, or the largest one that a program can set."""
        return self._options.largest_rank if self._is_given or self.given else self._present

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed training needs to make the same choices: the times by which the last one was made."""
        return {"times": [*self._last], "given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, after the method's rank, for which the next plan has room."""
        check_kinds(state, {"times": Sequence[float | bool], "given": bool})
        self._last, self.given = _Last(*state.get("times", ())), state.get("given", False)
        self._show()

    def shared_state(self) -> tuple[float, ...]:
        """Return what a site that joins needs, see `adopt`: the rank, whether a program has given it, and the times."""
        return (float(self._present), float(self._is_given), *self._last)

    def adopt(self, state: tuple[float, ...]) -> None:
        """Go on from the choice of the other sites; their next plan has room for it.

        Args:
            state: what `shared_state` has returned at one of them.

        Raises:
            MismatchError: if it is that of no site.
        """
        if len(state) != len(self.shared_state()):
            raise invalid("plan", "another site", f"its choice of the rank has {len(state)} numbers")
        rank, given, *times = state
        self._is_given, self._last = bool(given), _Last(*times)
        if not given:
            if not 1 <= rank <= self._options.largest_rank:
                raise invalid("plan", "another site", f"its rank is {rank}")
            self._method.max_rank = self._method.largest_rank = int(rank)
        self._next = None
        self._times.clear()
        self._show()

    def _show(self) -> None:
        """Let the choice show what has been restored."""
        step, wait, *_ = self._last
        share = wait / step if step else 0.0
        self._choice = replace(self._choice, rank=self._present, rate=None, seconds=step or None, waiting=share)


def best_rank(present: int, step: float, wait: float, further: Mapping[int, float]) -> int:
    """Return the rank with the least predicted time to the loss; the present one unless another gains enough.

    Args:
        present: the present rank.
        step: seconds of a step with the present rank.
        wait: seconds of it that all sites wait for the exchange.
        further: by rank, the seconds that its messages travel longer than those of the present one.
    """

    def to_loss(rank: int) -> float:
        return (1 + _FURTHER_STEPS / math.sqrt(rank)) * (step + max(further[rank], -wait))

    best = min(sorted(further), key=to_loss)
    share = _LOWERS if best < present else _RAISES
    return best if to_loss(best) < share * to_loss(present) else present


def _moved(before: tuple[float, float], now: tuple[float, float]) -> bool:
    return any(abs(new - old) > _MOVED * max(before[0], now[0]) for old, new in zip(before, now, strict=True))


def _in_words(rate: float) -> str:
    """Return a rate in bits a second in words."""
    return f"{rate / 1e6:.3g} Mbit/s" if rate < 1e9 else "1 Gbit/s or more"
