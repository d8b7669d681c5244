"""The log of a parameter server, as one site applies it."""

from collections.abc import Iterable

from dadplug import ParameterServer
from dadplug.parameter_server.sequencer import Decision, Entry


def recorded(server: ParameterServer) -> list[Decision]:
    """Return a list to which the entries of the log are appended as the server applies them."""
    log, apply = [], server._apply

    def record(commit):
        log.append(commit.decision)
        apply(commit)

    server._apply = record
    return log


def entries(log: Iterable[Decision]) -> list[Entry]:
    """Return the committed contributions of a log, in its order."""
    return [entry for decision in log for entry in decision.entries]


def keys(log: Iterable[Decision]) -> list[tuple[int, int]]:
    """Return site and number of the committed contributions."""
    return [(entry.site, entry.number) for entry in entries(log)]
