"""Meter of the bytes that a site sends and the time that it waits."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from .calls import own_place


@dataclass
class LayerTraffic:
    """Traffic of one unit in a step: a weight with its bias, or a parameter.

    Attributes:
        bytes: payload bytes handed to the transport, in its first round.
        encode_seconds: time spent on what is sent.
        decode_seconds: time spent on the agreed gradient.
        wait_seconds: its share of the time spent waiting for its bucket.
    """

    bytes: int = 0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0
    wait_seconds: float = 0.0


class Traffic:
    """Meter of one site's traffic. Prints as a table of the last step with a line for each unit.

    Attributes:
        bytes_sent: payload bytes that this site handed to the transport in the last step, to all other sites together;
            under hierarchical groups to those on other nodes.
        bytes_inside: the same for sites on its own node, under hierarchical groups.
        total_bytes_sent: the same since the start, set-up included.
        dense_bytes: what one step would have sent had every gradient been all-reduced, in bytes.
        wait_seconds: time in the last step that this site spent waiting for others, in seconds.
        steps: number of steps counted.
        bytes_in_steps: the sum of `bytes_sent` over all steps.
        wait_in_steps: the sum of `wait_seconds` over all steps.
        present: by the name of a unit's weight or parameter, its part in the present step, to be added to.
        shared: further parts, of several units at once: an attribute of `LayerTraffic`, numbers by name, and what they
            are multiplied by. They are added when `layers` is read, which takes a call a unit.
    """

    def __init__(self) -> None:
        self.bytes_sent = 0
        self.bytes_inside = 0
        self.total_bytes_sent = 0
        self.dense_bytes = 0
        self.wait_seconds = 0.0
        self.steps = 0
        self.bytes_in_steps = 0
        self.wait_in_steps = 0.0
        self._lock = threading.Lock()
        self._bytes = self._inside = 0
        self._wait = 0.0
        self.present: defaultdict[str, LayerTraffic] = defaultdict(LayerTraffic)
        self.shared: list[tuple[str, Mapping[str, float], float]] = []
        self._last: defaultdict[str, LayerTraffic] = defaultdict(LayerTraffic)
        self._last_shared: list[tuple[str, Mapping[str, float], float]] = []

    @property
    def layers(self) -> dict[str, LayerTraffic]:
        """By the name of a unit's weight or parameter, its part in the last step."""
        for attribute, numbers, times in self._last_shared:
            for name, number in numbers.items():
                layer = self._last[name]
                setattr(layer, attribute, getattr(layer, attribute) + number * times)
        self._last_shared = []
        return dict(self._last)

    @property
    def ratio(self) -> float:
        """Bytes of an all-reduce of every gradient, divided by those sent in the last step; 1.0 before the first."""
        return self.dense_bytes / self.bytes_sent if self.bytes_sent else 1.0

    @property
    def compute_seconds(self) -> float:
        """Time in the last step spent on encoding and decoding, in seconds."""
        return sum(layer.encode_seconds + layer.decode_seconds for layer in self.layers.values())

    def __str__(self) -> str:
        lines = [f"{'':40} {'bytes':>12} {'encode ms':>10} {'decode ms':>10} {'wait ms':>10}"]
        for name, layer in self.layers.items():
            times = (layer.encode_seconds, layer.decode_seconds, layer.wait_seconds)
            lines.append(f"{name:40} {layer.bytes:12,} " + " ".join(f"{1e3 * seconds:10.3f}" for seconds in times))
        whole = f"{1e3 * self.compute_seconds:.3f} ms of it computing, {1e3 * self.wait_seconds:.3f} ms waiting"
        return "\n".join([*lines, f"step {self.steps}: {self.bytes_sent:,} bytes in all{self._apart}, {whole}"])

    @property
    def _apart(self) -> str:
        return f" and {self.bytes_inside:,} inside the node" if self.bytes_inside else ""

    def add(self, nbytes: int, inside: bool = False) -> None:
        """Add bytes handed to the transport.

        Args:
            nbytes: number of bytes.
            inside: whether they stay inside the node, where several sites are on one.
        """
        with self._lock:  # worker threads send, too
            if inside:
                self._inside += nbytes
            else:
                self._bytes += nbytes
                self.total_bytes_sent += nbytes

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Add the time inside to the time spent waiting for other sites; a context manager.

        Status requests find meanwhile that this process waits in an exchange.
        """
        start, thread = time.perf_counter(), threading.get_ident()
        own_place.waiting.add(thread)
        try:
            yield
        finally:
            own_place.waiting.discard(thread)
            self._wait += time.perf_counter() - start

    def end_step(self) -> None:
        """End a step: what was counted since the last end is that of the last step."""
        self.bytes_sent, self._bytes = self._bytes, 0
        self.bytes_inside, self._inside = self._inside, 0
        self.wait_seconds, self._wait = self._wait, 0.0
        self._last, self.present = self.present, defaultdict(LayerTraffic)
        self._last_shared, self.shared = self.shared, []
        self.steps += 1
        self.bytes_in_steps += self.bytes_sent
        self.wait_in_steps += self.wait_seconds

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Leave what is counted inside out of the steps; a context manager."""
        before = self._bytes, self._inside, self._wait
        try:
            yield
        finally:
            self._bytes, self._inside, self._wait = before

    def start(self) -> None:
        """Begin the first step: leave out what the set-up has sent."""
        self._bytes, self._inside, self._wait = 0, 0, 0.0

    def __repr__(self) -> str:
        fewer = f"{self.ratio:.1f} times fewer than dense"
        whole = f"{self.total_bytes_sent:,} bytes in all"
        return f"Traffic({self.bytes_sent:,} bytes{self._apart} in the last step, {fewer}; {whole})"
