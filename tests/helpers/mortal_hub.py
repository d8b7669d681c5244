"""Hub that kills its own process at a point of a training, as ``kill -9`` would.

Run as ``mortal_hub.py KIT JOURNAL POINT COUNT``, where the point is "frame", after so many frames of the training;
"close", after so many closed steps, in the announcement of the next one, which has gone to one site only; "joining",
after so many frames of the channel since a site was let join; or "never".
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from dadplug.hub.pki.kits import Kit
from dadplug.hub.server.hub import Hub
from dadplug.hub.server.journal import Journal
from dadplug.hub.server.membership import Phase
from dadplug.hub.server.relay import Relay
from dadplug.hub.server.session import Sessions
from dadplug.hub.wire.messages import Close, pack_control
from dadplug.parameter_server.service import SequencerHost


def die_at(point: str, count: int) -> None:
    """Let this process kill itself."""
    left, begun = [count], [False]
    take, take_any, announce = Relay._take_training, Relay.take, Sessions.announce

    def step() -> bool:
        left[0] -= 1
        return left[0] < 0

    def die(relay: Relay) -> None:
        for each in relay.sessions.values():
            if each.stream is not None and count % 2:
                each.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    def taking(relay: Relay, session: Any, *arguments: Any) -> None:
        take(relay, session, *arguments)
        if step():
            die(relay)

    def taking_any(relay: Relay, session: Any, *arguments: Any) -> None:
        take_any(relay, session, *arguments)
        membership = relay.run.membership
        begun[0] |= any(membership.sites[slot].phase is Phase.JOINING for slot in membership.participants)
        if begun[0] and step():
            die(relay)

    def announcing(sessions: Sessions, message: Any, soon: bool = False) -> None:
        if isinstance(message, Close) and step():
            first = sessions.training[count % len(sessions.training)]
            first.send(pack_control(message, 0))
            while first.waiting:
                first.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        announce(sessions, message, soon)

    if point == "frame":
        Relay._take_training = taking  # type: ignore[method-assign]
    elif point == "joining":
        Relay.take = taking_any  # type: ignore[method-assign]
    elif point == "close":
        Sessions.announce = announcing  # type: ignore[method-assign]


def main(kit: str, journal: str, point: str, count: str) -> None:
    die_at(point, int(count))
    with Path(journal).open("a", buffering=1) as file:
        loaded = Kit.load(Path(kit))
        service = SequencerHost(list(loaded.roster.sites))
        hub = Hub(loaded, journal=Journal(lambda line: print(line, file=file)), service=service)
        signal.signal(signal.SIGTERM, lambda *_: hub.stop("the test is over"))
        hub.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
