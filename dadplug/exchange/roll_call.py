"""Registration of the sites at the meeting point: each process claims its rank, and site 0 posts the list of members.

A claim holds the address at which its process answers status requests. The claim of a process that has exited is
therefore recognised, and passes to the next process that asks for the rank. Site 0 posts the list of members to the
store once every rank is claimed by a process that answers; the group is made of that list.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ..errors import MismatchError, SiteError
from . import codec
from .deadline import within
from .status import Member, Silence, Status, ask

_STATUS_SECONDS = 1.0  # for answers to a status request
_POLL_SECONDS = 0.02  # between two reads of the store
_NOTICE = 5.0  # seconds after which a site prints for which sites it waits
_LINGER = 0.5  # seconds that site 0 keeps the store after a failure, for the others to read it
_MEMBERS = "dadplug/members"

Result = TypeVar("Result")


class RollCall:
    """Registration of one site.

    Args:
        store: the store at the meeting point.
        rank: this site.
        num_nodes: number of sites.
        timeout: seconds to wait for all sites.
        deadline: end of that time, by `time.monotonic`.
        host: description of the process that hosts the store, for messages.
        own: this process, as the others are to know it.
        noun: name of a process in messages.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        num_nodes: int,
        timeout: float,
        deadline: float,
        host: str,
        own: Member,
        noun: str = "site",
    ) -> None:
        self._store = store
        self._rank = rank
        self._num_nodes = num_nodes
        self._timeout = timeout
        self._deadline = deadline
        self._host = host
        self._own = own
        self._noun = noun
        self._counts: dict[str, int] = {}  # numbers of sites as others have them, by claim

    def run(self) -> list[Member]:
        """Wait until every site has registered.

        Returns:
            The sites, by rank.

        Raises:
            SiteError: if a site does not register in time, or another process has this rank.
            MismatchError: if another site has been given another number of sites.
        """
        self._call(lambda: self._store.set(_count_of(self._own), str(self._num_nodes)))
        self._claim()
        return self._lead() if self._rank == 0 else self._follow()

    def _claim(self) -> None:
        key, own = _claim_of(self._rank), codec.encode(self._own).hex()
        current = self._call(lambda: self._store.compare_set(key, "", own)).decode()
        while current != own:
            holder = _member(current)
            if isinstance(ask({0: holder}, _STATUS_SECONDS)[0], Status):
                raise SiteError(
                    f"another process already claims rank {self._rank} ({holder.name}): every {self._noun} needs one "
                    "of its own"
                )
            before = current
            current = self._call(lambda: self._store.compare_set(key, before, own)).decode()  # noqa: B023

    def _lead(self) -> list[Member]:
        """Wait for all claims, and post the list of members; run by site 0."""
        notice = time.monotonic() + _NOTICE
        while True:
            claims = self._claims()
            if difference := self._other_count(claims):
                self._post((difference,))
                time.sleep(_LINGER)
                raise MismatchError(difference)
            answers = {}
            if len(claims) == self._num_nodes:
                answers = ask({site: member for site, member in claims.items() if site != self._rank}, _STATUS_SECONDS)
                if not any(isinstance(answer, Silence) for answer in answers.values()):
                    members = [claims[site] for site in range(self._num_nodes)]
                    self._post(members)
                    return members
            if time.monotonic() > self._deadline:
                message = self._failure(claims, answers)
                self._post(message)
                time.sleep(_LINGER)
                raise SiteError(message)
            notice = self._notice(notice, claims)
            time.sleep(_POLL_SECONDS)

    def _follow(self) -> list[Member]:
        """Wait for the list of members that site 0 posts.

        torchrun may keep its store when it restarts the processes. So a list without this process, or a failure, counts
        only if the process that has posted it is still there.
        """
        notice = time.monotonic() + _NOTICE
        while True:
            leader, posted = self._posted()
            if leader is None:
                self._compare_count()
            if isinstance(posted, list) and len(posted) == self._num_nodes and posted[self._rank] == self._own:
                return posted
            if leader is not None and isinstance(ask({0: leader}, _STATUS_SECONDS)[0], Status):
                if isinstance(posted, str):
                    raise SiteError(posted)
                if isinstance(posted, tuple):
                    raise MismatchError(posted[0])
                self._compare_count()
                raise SiteError(
                    f"{posted[self._rank].name} has taken rank {self._rank}, since this process did not answer"
                )
            if time.monotonic() > self._deadline:
                claims = self._claims()
                others = {site: member for site, member in claims.items() if site != self._rank}
                raise SiteError(self._failure(claims, ask(others, _STATUS_SECONDS)))
            if time.monotonic() > notice:
                notice = self._notice(notice, self._claims())
            time.sleep(_POLL_SECONDS)

    def _compare_count(self) -> None:
        """Raise MismatchError if site 0 has been given another number of sites."""
        first = self._call(lambda: self._store.get(_claim_of(0)).decode() if self._store.check([_claim_of(0)]) else "")
        if first and (difference := self._other_count({0: _member(first)})):
            raise MismatchError(difference)

    def _other_count(self, claims: dict[int, Member]) -> str | None:
        """Return a message if another site has been given another number of sites than this one."""
        for site, member in claims.items():
            key = _count_of(member)
            if key not in self._counts and self._call(lambda: self._store.check([key])):  # noqa: B023
                self._counts[key] = int(self._call(lambda: self._store.get(key)))  # noqa: B023
            if (count := self._counts.get(key, self._num_nodes)) != self._num_nodes:
                return (
                    f"configuration differs between sites: the number of sites is {self._num_nodes} at {self._noun} "
                    f"{self._rank} ({self._own.name}), and {count} at {self._noun} {site} ({member.name})"
                )
        return None

    def _posted(self) -> tuple[Member | None, Any]:
        """Return what site 0 has posted, and its process: a list of members, a message, or None before that."""
        if not self._call(lambda: self._store.check([_MEMBERS])):
            return None, None
        leader, posted = codec.decode(bytes.fromhex(self._call(lambda: self._store.get(_MEMBERS)).decode()))
        return leader, posted

    def _claims(self) -> dict[int, Member]:
        def read() -> dict[int, Member]:
            there = [site for site in range(self._num_nodes) if self._store.check([_claim_of(site)])]
            return {site: _member(self._store.get(_claim_of(site)).decode()) for site in there}

        return self._call(read)

    def _post(self, posted: list[Member] | str | tuple[str]) -> None:
        content = codec.encode((self._own, posted)).hex()
        self._call(lambda: self._store.set(_MEMBERS, content))

    def _failure(self, claims: dict[int, Member], answers: dict[int, Status | Silence]) -> str:
        missing = [site for site in range(self._num_nodes) if site not in claims]
        silent = [site for site, answer in answers.items() if isinstance(answer, Silence)]
        waited = f"waited {self._timeout:g} s for {self._num_nodes} {plural(self._noun)}"
        if silent:
            names = ", ".join(f"{self._noun} {site} ({claims[site].name})" for site in silent)
            return f"{waited}: {names} came, and does not answer any more: it was killed or stopped"
        if not missing:
            return f"{waited}: {self._host} has not listed them, though all have come"
        return (
            f"{waited}: {self._names(missing)} did not come. Start every {self._noun} with the same meeting point, or "
            "give a larger timeout"
        )

    def _notice(self, when: float, claims: dict[int, Member]) -> float:
        missing = [site for site in range(self._num_nodes) if site not in claims]
        if time.monotonic() < when or not missing:
            return when
        print(f"{self._noun} {self._rank} waits for {self._names(missing)} …", file=sys.stderr)
        return float("inf")

    def _names(self, numbers: list[int]) -> str:
        noun = plural(self._noun) if len(numbers) > 1 else self._noun
        return f"{noun} {', '.join(map(str, numbers))}"

    def _call(self, call: Callable[[], Result]) -> Result:
        """Call the store, within the time that is left."""
        try:
            return within(max(self._deadline - time.monotonic(), _STATUS_SECONDS), call)
        except TimeoutError as error:
            raise SiteError(
                f"{self._host} has not answered for {self._timeout:g} s: its process is stopped, or its machine or "
                "link is down"
            ) from error
        except RuntimeError as error:
            raise SiteError(f"{self._host} ended before all {plural(self._noun)} had come") from error


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
