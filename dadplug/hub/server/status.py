"""Status of the hub: which sites are here, the step, rates and which site is late, as JSON and as a table.

Metrics for Prometheus, and whether the hub is in health, are served over HTTP: `/metrics` and `/healthz`. There is one
connection for each request, a few at a time, each ended after some seconds: any client of the port can delay other
readers of metrics, but not the hub, which only puts its status there.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TextIO

from ...errors import KitError
from ...support.files import write_file
from ...support.logs import get_logger
from ...support.prometheus import exposition, family
from ..pki.kits import RENEW, SOON_DAYS, days_left
from ..pki.project import HUB
from .hub import Hub
from .journal import Journal, JournalFile
from .membership import Phase
from .relay import Relay

_log = get_logger(__name__)
_MOST_REQUESTS = 8  # at a time
_SECONDS = 5.0  # for a request
_HEALTHY_SECONDS = 10.0  # since the last status

_OF_HUB = {  # by the name in the status: kind, name and help of the metric
    "up_seconds": ("gauge", "hub_up_seconds", "Seconds since the hub has started"),
    "started": ("gauge", "hub_training", "Whether training has started"),
    "step": ("counter", "hub_steps", "Steps that all present sites have ended"),
    "step_seconds": ("gauge", "hub_step_seconds", "Median seconds of the last steps"),
    "refused": ("counter", "hub_refused_connections", "Connections that were refused"),
}
_OF_SITE = {
    "step": ("gauge", "site_step", "Steps that the site has ended"),
    "connected_seconds": ("gauge", "site_connected_seconds", "Seconds since the site has connected"),
    "bytes_from": ("counter", "site_received_bytes", "Bytes that the hub has received from the site"),
    "bytes_to": ("counter", "site_sent_bytes", "Bytes that the hub has sent to the site"),
    "late_seconds": ("gauge", "site_late_seconds", "Seconds for which others have waited for the site"),
    "missed_steps": ("counter", "site_missed_steps", "Steps that were made without the site"),
}
STATES = ("absent", "disconnected", "waiting", "joining", "member")
"""States of a site, see `Phase`; `site_state` is 1 for the present one."""


def metrics(status: dict[str, Any]) -> Iterator[Any]:
    """Yield the metrics of prometheus_client that make up a status.

    Args:
        status: what `snapshot` has returned.
    """
    sites = status["sites"]
    texts = status["project"], status["version"]
    yield family("gauge", "hub_info", "Project and version of the hub", [(texts, 1)], ("project", "version"))
    here = sum(site["state"] not in ("absent", "disconnected") for site in sites)
    late = sum(site["late_seconds"] > 0 for site in sites)
    for kind, name, text, value in (
        *((*metric, status[key]) for key, metric in _OF_HUB.items()),
        ("gauge", "hub_sites_expected", "Sites of the roster", len(sites)),
        ("gauge", "hub_sites_present", "Sites that are connected", here),
        ("gauge", "hub_late_sites", "Sites that others wait for", late),
        ("gauge", "hub_kit_problems", "Parts of the changed kit that are not used", len(status["kit_problems"])),
        ("gauge", "hub_paused", "Whether training waits for sites", bool(status["waiting"])),
    ):
        if value is not None:
            yield family(kind, name, text, [((), value)])
    days = {HUB: status["certificate_days"]} | {site["name"]: site["certificate_days"] for site in sites}
    ends = [((name,), left) for name, left in days.items() if left is not None]
    yield family("gauge", "certificate_days", "Days until the certificate ends", ends, ("name",))
    for key, metric in _OF_SITE.items():
        yield family(*metric, [((site["name"],), site[key]) for site in sites], ("site",))
    spent = [((site["name"], f"{site['delta']:g}"), site["epsilon"]) for site in sites if site["epsilon"]]
    text = "Epsilon that the site has stated last, of a delta"
    yield family("gauge", "site_epsilon", text, spent, ("site", "delta"))
    states = [((site["name"], state), state == site["state"]) for site in sites for state in STATES]
    yield family("gauge", "site_state", "Whether the site is in the state", states, ("site", "state"))


class _Handler(BaseHTTPRequestHandler):
    server: MetricsServer
    timeout = _SECONDS
    server_version, sys_version = "dadplug", ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._answer(200, self.server.text(), "text/plain; version=0.0.4; charset=utf-8")
        elif path == "/healthz":
            silent = time.monotonic() - self.server.given
            healthy = silent < _HEALTHY_SECONDS
            text = "ok\n" if healthy else f"the hub has given no status for {silent:.0f} s\n"
            self._answer(200 if healthy else 503, text.encode())
        else:
            self._answer(404, b"there are /metrics and /healthz\n")

    def _answer(self, status: int, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


class MetricsServer(ThreadingHTTPServer):
    """Server of a hub's metrics, in a thread of its own.

    Args:
        address: host and port to listen at.

    Attributes:
        address: host and port that it listens at.
        given: time of the last status.

    Raises:
        KitError: if prometheus_client is not installed, or the address cannot be listened at.
    """

    daemon_threads = True

    def __init__(self, address: tuple[str, int]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        try:
            import prometheus_client  # noqa: F401

            super().__init__(address, _Handler)
        except ImportError as error:
            raise KitError("--metrics needs prometheus_client: pip install 'dadplug[hub]'") from error
        except OSError as error:
            raise KitError(f"cannot serve metrics at {address[0]}:{address[1]}: {error}") from error
        self._status: dict[str, Any] = {}
        self.given = time.monotonic()
        host, port = self.server_address[:2]
        self.address = str(host), int(port)
        self._free = threading.BoundedSemaphore(_MOST_REQUESTS)
        self._thread = threading.Thread(target=self.serve_forever, name="dadplug-metrics", daemon=True)
        self._thread.start()

    def show(self, status: dict[str, Any]) -> None:
        """Take a status, as `snapshot` returns it."""
        self._status, self.given = status, time.monotonic()

    def text(self) -> bytes:
        """Return the metrics in the format of Prometheus; none before there is a status."""
        return exposition(metrics(self._status) if self._status else ())

    def close(self) -> None:
        """Stop listening."""
        self.shutdown()
        self.server_close()
        self._thread.join()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        timer = threading.Timer(_SECONDS, self.shutdown_request, (request,))  # a slow client sends byte by byte
        timer.daemon = True
        timer.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            timer.cancel()
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            _log.exception("metrics cannot be served")  # otherwise the client has left, or was too slow


_LATE_SECONDS = 1.0  # without a frame
_RATE_SECONDS = 1.0  # at least, over which rates are measured


class Meter:
    """Rates by site, from numbers of bytes.

    Attributes:
        totals: bytes from and to each site in all of its sessions, as of the last measurement.
    """

    def __init__(self) -> None:
        self.totals: list[tuple[int, int]] = []
        self._since = -math.inf  # the last measurement
        self._before: dict[int, tuple[int, int]] = {}  # bytes from and to each session until then, by identity
        self._rates: list[tuple[float, float]] = []
        self._held: dict[object, str] = {}

    def since(self, what: object, holds: object) -> str | None:
        """Return the first time in UTC at which something held, without a break since; None if it does not hold.

        Args:
            what: what it is.
            holds: whether it holds now.
        """
        if not holds:
            self._held.pop(what, None)
            return None
        return self._held.setdefault(what, utc_now())

    def rates(self, relay: Relay, now: float) -> list[tuple[float, float]]:
        """Return bytes per second from and to each site; 0 before there are two measurements.

        Args:
            relay: the hub's sessions.
            now: the time, in seconds.
        """
        if now >= self._since + _RATE_SECONDS:
            sums = [[0, 0] for _ in relay.runs.roster]
            for session in relay.sessions.values():
                received, sent = self._before.get(id(session), (0, 0))
                sums[session.slot][0] += max(0, session.bytes_in - received)
                sums[session.slot][1] += max(0, session.bytes_out - sent)
            took, self._since = now - self._since, now
            self._rates = [(up / took, down / took) for up, down in sums]
            before = self.totals + [(0, 0)] * (len(sums) - len(self.totals))
            self.totals = [(ups + up, downs + down) for (ups, downs), (up, down) in zip(before, sums)]
            self._before = {id(each): (each.bytes_in, each.bytes_out) for each in relay.sessions.values()}
        self.totals += [(0, 0)] * (len(relay.runs.roster) - len(self.totals))  # sites may have been added since
        return self._rates + [(0.0, 0.0)] * (len(relay.runs.roster) - len(self._rates))


def late_sites(relay: Relay, now: float) -> dict[int, float]:
    """Return the sites that others wait for, with the seconds since their last frame.

    Args:
        relay: the hub's sessions.
        now: the time, in seconds.
    """
    sessions = relay.sessions.training
    furthest = max((each.progress for each in sessions), default=(0, 0))
    return {
        each.slot: now - each.progressed
        for each in sessions
        if relay.run.membership.started and each.progress < furthest and now >= each.progressed + _LATE_SECONDS
    }


def snapshot(hub: Hub, meter: Meter) -> dict[str, Any]:
    """Return the status of a hub, to be written as JSON.

    Args:
        hub: the hub.
        meter: measures the rates.
    """
    now = time.monotonic()
    relay, kit = hub.relay, hub.kit
    rates, late = meter.rates(relay, now), late_sites(relay, now)
    sites, waiting = [], relay.outage.state(now) or relay.run.pause
    for slot, name in enumerate(relay.runs.roster):
        session, state = relay.sessions.get(("training", slot)), _state(relay, slot)
        receives = session.receiving if session and state == Phase.JOINING.value else None
        spent = relay.spent.get(slot)
        sites.append(
            {
                "name": name,
                "slot": slot,
                "state": state,
                "step": session.progress[0] if session else 0,
                "absent_since": meter.since(slot, session is None),
                "connected_seconds": round(now - session.created, 1) if session else 0.0,
                "bytes_per_second_from": round(rates[slot][0]),
                "bytes_per_second_to": round(rates[slot][1]),
                "bytes_from": meter.totals[slot][0],
                "bytes_to": meter.totals[slot][1],
                "receives": str(receives or ""),
                "late_seconds": round(late.get(slot, 0.0), 1),
                "certificate_days": days_left(session.expires) if session and session.expires else None,
                "epsilon": f"{spent.epsilon:.4g}" if spent else None,  # as text: JSON has no infinity
                "delta": spent.delta if spent else None,
                "contributed": str(relay.run.contributions.get(slot, "")),
                "outsized": str(relay.run.outsized.get(slot, "")),
                "missed_steps": relay.run.missed.counts[slot] if slot < len(relay.run.names) else 0,
            }
        )
    return {
        "project": kit.roster.project,
        "version": sys.modules[__name__.partition(".")[0]].__version__,
        "up_seconds": round(now - hub.begun, 1),
        "address": f"{hub.address[0]}:{hub.address[1]}",
        "time": utc_now(),
        "started": relay.run.membership.started,
        "step": relay.run.membership.step,
        "step_seconds": relay.run.membership.pace.median,
        "waiting": waiting,
        "waiting_since": meter.since("waiting", waiting),
        "refused": hub.acceptor.refused,
        "certificate_days": days_left(kit.certificate.not_valid_after_utc),
        "kit_problems": hub.kit_problems,
        "sites": sites,
        "journal": list(hub.journal.recent),
    }


def for_sites(status: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a status that sites may read: neither the journal, with addresses of others, nor the kit.

    Args:
        status: what `snapshot` has returned.
    """
    return {name: value for name, value in status.items() if name not in ("journal", "kit_problems", "refused")}


def _state(relay: Relay, slot: int) -> str:
    session = relay.sessions.get(("training", slot))
    if session is None:
        return "absent"
    if session.stream is None:
        return "disconnected"
    return Phase.WAITING.value if session.waits else relay.run.membership.sites[slot].phase.value


def table(status: dict[str, Any]) -> list[str]:
    """Return a status as the lines of a table.

    Args:
        status: what `snapshot` has returned.
    """
    sites = status["sites"]
    here = sum(site["state"] not in ("absent", "disconnected") for site in sites)
    width = max(4, *(len(site["name"]) for site in sites))
    lines = [
        f"{status['project']} at {status['address']}: step {status['step']}, {here} of {len(sites)} sites",
        f"{'site':{width}}  {'state':12}  {'step':>8}  {'from MB/s':>9}  {'to MB/s':>9}  late",
    ]
    for site in sites:
        up, down = (site[f"bytes_per_second_{way}"] / 1e6 for way in ("from", "to"))
        since, missed, epsilon = site.get("absent_since"), site["missed_steps"], site.get("epsilon")
        notes = (
            f"{site['late_seconds']:.0f} s" if site["late_seconds"] else "",
            f"since {_clock(since)}{'' if site['bytes_from'] else ', has never connected'}" if since else "",
            site.get("receives"),
            f"{missed} steps missed" if missed else "",
            f"epsilon {epsilon}, delta {site['delta']:g}" if epsilon else "",
            site.get("contributed"),
            site.get("outsized"),
        )
        late = ", ".join(filter(None, notes))
        lines.append(
            f"{site['name']:{width}}  {site['state']:12}  {site['step']:8}  {up:9.2f}  {down:9.2f}  {late}".rstrip()
        )
    ends = {HUB: status.get("certificate_days")} | {site["name"]: site.get("certificate_days") for site in sites}
    for name, days in ends.items():
        if days is not None and days < SOON_DAYS:
            lines.append(f"THE CERTIFICATE OF {name} ENDS IN {days} DAYS: run `{RENEW} {name}`")
    lines += [f"the kit has changed, and a part of it is not used: {each}" for each in status.get("kit_problems", ())]
    if status["waiting"]:
        since = status.get("waiting_since")
        lines.append(status["waiting"] + (f" (since {_clock(since)})" if since else ""))
    return lines


def utc_now() -> str:
    """Return the time in UTC, as ISO 8601."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _clock(moment: str) -> str:
    """Return the time of day of a moment in UTC."""
    return f"{moment[11:19]} UTC"


class Terminal:
    """Lines of the journal, and the table below them if they go to a terminal.

    Args:
        stream: the output; None for the standard output stream.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._redraws = self._stream.isatty()
        self._table: list[str] = []

    def write_line(self, line: str) -> None:
        """Write a line of the journal."""
        self._draw([line], self._table)

    def show(self, status: dict[str, Any]) -> None:
        """Show a status in place of the last one; only on a terminal.

        Args:
            status: what `snapshot` has returned.
        """
        if self._redraws:
            columns = shutil.get_terminal_size().columns
            lines = [line[: columns - 1] for line in table(status)]
            if lines != self._table:
                self._draw([], lines)

    def _draw(self, above: list[str], below: list[str]) -> None:
        erase = f"\x1b[{len(self._table)}F\x1b[J" if self._table else ""
        with contextlib.suppress(OSError, ValueError):  # the hub goes on when its terminal is closed
            self._stream.write(erase + "".join(f"{line}\n" for line in [*above, *below]))
            self._stream.flush()
        self._table = below


class StatusFile:
    """File with the status as JSON, complete at any time.

    Args:
        path: its path.
        complain: takes the reason if it cannot be written; called once.
    """

    def __init__(self, path: Path, complain: Callable[[str], None]) -> None:
        self._path, self._complain = path, complain
        self._failed = False

    def write(self, status: dict[str, Any]) -> None:
        """Write a status.

        Args:
            status: what `snapshot` has returned.
        """
        try:
            write_file(self._path, (json.dumps(status, indent=2) + "\n").encode(), durable=False)
            self._failed = False
        except OSError as error:
            if not self._failed:
                self._complain(f"the status cannot be written to {self._path}: {error}")
            self._failed = True


class Outputs:
    """Outputs of a hub: the terminal, files, metrics for Prometheus, and the status that sites may ask for.

    Args:
        journal: file that lines of the journal are appended to, too.
        status: file for the status as JSON.
        metrics: host and port to serve metrics at.
        log_format: "text" or "json", for the lines.
        log_level: least level of the lines.

    Attributes:
        journal: the journal.

    Raises:
        KitError: if metrics cannot be served.
        OSError: if the file of the journal cannot be opened.
    """

    def __init__(
        self,
        journal: Path | None,
        status: Path | None,
        metrics: tuple[str, int] | None,
        log_format: str,
        log_level: str,
    ) -> None:
        self._terminal, self._meter = Terminal(), Meter()
        self._file = None if journal is None else JournalFile(journal, self._terminal.write_line)
        self.journal = Journal(self._write_line, log_format == "json", log_level)
        self._status = None if status is None else StatusFile(status, self.journal.write)
        self._metrics = None if metrics is None else MetricsServer(metrics)
        if self._metrics is not None:
            self.journal.write("metrics at http://{}:{}/metrics".format(*self._metrics.address))

    def _write_line(self, line: str) -> None:
        self._terminal.write_line(line)
        if self._file is not None:
            self._file.write_line(line)

    def report(self, hub: Hub) -> None:
        """Show the status of a hub."""
        status = snapshot(hub, self._meter)
        hub.relay.status = for_sites(status)
        self._terminal.show(status)
        if self._status is not None:
            self._status.write(status)
        if self._metrics is not None:
            self._metrics.show(status)

    def close(self) -> None:
        """Close the file, and stop serving metrics."""
        if self._metrics is not None:
            self._metrics.close()
        if self._file is not None:
            self._file.close()
