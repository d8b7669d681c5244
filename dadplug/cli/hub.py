"""`python -m dadplug hub`: the process that all sites dial."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from typing import Any

from ..errors import KitError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("kit", type=Path, help="folder of the hub's kit, such as kits/hub")
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        help="address of this machine to listen at, such as 0.0.0.0:8470 (default: the address that sites dial)",
    )
    parser.add_argument("--status", type=Path, metavar="FILE", help="file for the status, as JSON, twice a second")
    parser.add_argument("--journal", type=Path, metavar="FILE", help="file to append to: who joins, leaves, is refused")
    parser.add_argument(
        "--site-timeout",
        type=float,
        default=10.0,
        metavar="S",
        help="seconds of silence after which a site is given up (default: 10)",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=5.0,
        metavar="S",
        help="seconds for which a site may dial again after its connection was lost (default: 5)",
    )
    parser.add_argument(
        "--encrypt-local",
        action="store_true",
        help="encrypt messages to sites in the hub's machine, too, which do not leave its kernel",
    )
    parser.add_argument(
        "--memory",
        type=int,
        default=1024,
        metavar="MIB",
        help="memory for the messages of one parameter server, of which there may be 8 (default: 1024)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the hub until SIGTERM or SIGINT."""
    from ..hub.actions import Rules
    from ..hub.journal import Journal
    from ..hub.kits import Kit
    from ..hub.project import split_address
    from ..hub.server import Hub
    from ..hub.status import Meter, StatusFile, Terminal, snapshot
    from ..parameter_server.hub_host import SequencerHost

    terminal = Terminal()
    file = open(arguments.journal, "a", buffering=1) if arguments.journal else None  # noqa: SIM115
    kit = Kit.load(arguments.kit)
    count = len(kit.roster.sites)

    def write_line(line: str) -> None:
        terminal.write_line(line)
        if file is not None:
            file.write(line + "\n")

    def report(hub: Hub) -> None:
        status = snapshot(hub, meter)
        terminal.show(status)
        if status_file is not None:
            status_file.write(status)

    meter, journal = Meter(count), Journal(write_line)
    status_file = StatusFile(arguments.status, journal.write) if arguments.status else None
    try:
        if arguments.grace <= 0:
            raise ValueError(f"grace={arguments.grace}: it has to be positive")
        if arguments.memory < 1:
            raise ValueError(f"memory={arguments.memory}: it has to be positive")
        rules = Rules(min_sites=count, site_timeout=arguments.site_timeout)
        listen = split_address(arguments.listen) if arguments.listen else None
        service = SequencerHost(list(kit.roster.sites), arguments.memory << 20)
        grace, local = arguments.grace, arguments.encrypt_local
        hub = Hub(
            kit, rules, listen=listen, journal=journal, grace=grace, encrypt_local=local, report=report, service=service
        )
    except KitError:
        raise
    except ValueError as error:
        raise KitError(str(error)) from error

    def stop(number: int, frame: Any) -> None:
        hub.stop(f"it has received {signal.Signals(number).name}")

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        hub.run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if file is not None:
            file.close()
    return 0
