"""Metrics of the hub for Prometheus, and whether it is in health, over HTTP: `/metrics` and `/healthz`.

One connection for each request, a few at a time, each ended after some seconds: whoever reaches the port can delay
other readers of metrics, but not the hub, which only puts its status here.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ...errors import KitError
from ...logs import get_logger
from ..pki.project import HUB

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


class StatusMetrics:
    """Collector of prometheus_client that makes metrics of the hub's status, as `status.snapshot` returns it.

    Attributes:
        status: the last status; empty before there is one.
    """

    def __init__(self) -> None:
        self.status: dict[str, Any] = {}

    def collect(self) -> Iterator[Any]:
        """Yield the metrics."""
        status = self.status
        if not status:
            return
        sites = status["sites"]
        info = _family("gauge", "hub_info", "Project and version of the hub", ("project", "version"))
        info.add_metric([status["project"], status["version"]], 1)
        yield info
        for key, (kind, name, text) in _OF_HUB.items():
            if status[key] is not None:
                family = _family(kind, name, text)
                family.add_metric([], float(status[key]))
                yield family
        here = sum(site["state"] not in ("absent", "disconnected") for site in sites)
        late = sum(site["late_seconds"] > 0 for site in sites)
        for name, text, value in (
            ("hub_sites_expected", "Sites of the roster", len(sites)),
            ("hub_sites_present", "Sites that are connected", here),
            ("hub_late_sites", "Sites that others wait for", late),
            ("hub_kit_problems", "Parts of the changed kit that are not used", len(status["kit_problems"])),
        ):
            family = _family("gauge", name, text)
            family.add_metric([], float(value))
            yield family
        paused = _family("gauge", "hub_paused", "Whether training waits for sites")
        paused.add_metric([], float(bool(status["waiting"])))
        yield paused
        ends = _family("gauge", "certificate_days", "Days until the certificate ends", ("name",))
        for name, owner in [(HUB, status), *((each["name"], each) for each in sites)]:
            if owner["certificate_days"] is not None:
                ends.add_metric([name], owner["certificate_days"])
        yield ends
        for key, (kind, name, text) in _OF_SITE.items():
            family = _family(kind, name, text, ("site",))
            for site in sites:
                family.add_metric([site["name"]], float(site[key]))
            yield family
        spent = _family("gauge", "site_epsilon", "Epsilon that the site has stated last, of a delta", ("site", "delta"))
        for site in sites:
            if site["epsilon"]:
                spent.add_metric([site["name"], f"{site['delta']:g}"], float(site["epsilon"]))
        yield spent
        states = _family("gauge", "site_state", "Whether the site is in the state", ("site", "state"))
        for site in sites:
            for state in dict.fromkeys((*STATES, site["state"])):
                states.add_metric([site["name"], state], float(state == site["state"]))
        yield states


def _family(kind: str, name: str, text: str, labels: tuple[str, ...] = ()) -> Any:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    kinds = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
    return kinds[kind](f"dadplug_{name}", f"{text}.", labels=labels)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _SECONDS
    server_version, sys_version = "dadplug", ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._answer(200, self.server.text(), "text/plain; version=0.0.4; charset=utf-8")
        elif path == "/healthz":
            silent = self.server.silent_seconds()
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


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        from prometheus_client import CollectorRegistry

        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)
        self.metrics, self.given = StatusMetrics(), time.monotonic()
        self._registry = CollectorRegistry()
        self._registry.register(self.metrics)
        self._free = threading.BoundedSemaphore(_MOST_REQUESTS)

    def text(self) -> bytes:
        from prometheus_client import generate_latest

        found: bytes = generate_latest(self._registry)
        return found

    def silent_seconds(self) -> float:
        return time.monotonic() - self.given

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


class MetricsServer:
    """Server of a hub's metrics, in a thread of its own.

    Args:
        address: host and port to listen at.

    Attributes:
        address: host and port that it listens at.

    Raises:
        KitError: if prometheus_client is not installed, or the address cannot be listened at.
    """

    def __init__(self, address: tuple[str, int]) -> None:
        try:
            self._server = _Server(*address)
        except ImportError as error:
            raise KitError("--metrics needs prometheus_client: pip install 'dadplug[hub]'") from error
        except OSError as error:
            raise KitError(f"cannot serve metrics at {address[0]}:{address[1]}: {error}") from error
        host, port = self._server.server_address[:2]
        self.address = str(host), int(port)
        self._thread = threading.Thread(target=self._server.serve_forever, name="dadplug-metrics", daemon=True)
        self._thread.start()

    def show(self, status: dict[str, Any]) -> None:
        """Take a status, as `status.snapshot` returns it."""
        self._server.metrics.status, self._server.given = status, time.monotonic()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
