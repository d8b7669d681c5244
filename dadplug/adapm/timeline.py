"""Placement of keys over time: `Timeline` records it step by step, and draws it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..exchange.codec import register
from ..support.progress import new_figure
from .manager import ParameterManager, Table
from .store import KeyState

COUNTS = ("pulled", "pulled_remotely", "pushed", "pushed_remotely", "moved", "replicated", "rows", "replicas")


@register
@dataclass
class SiteHistory:
    """Records of one site; each list has one entry per call of `Timeline.note`.

    Attributes:
        clocks: clock of the site.
        seconds: seconds since the timeline was created.
        bytes_sent: payload bytes that the manager has sent since its start.
        counts: values of `ParameterManager.counts` by name.
        states: states of the watched keys as `dadplug.adapm.store.KeyState`, -1 for absent keys; of shape (keys,).
    """

    clocks: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    bytes_sent: list[int] = field(default_factory=list)
    counts: dict[str, list[int]] = field(default_factory=lambda: {name: [] for name in COUNTS})
    states: list[NDArray[np.int8]] = field(default_factory=list)

    def per_step(self, name: str) -> NDArray[np.int64]:
        """Return the increase of a count, or of ``"bytes_sent"``, in each step but the first."""
        return np.diff(self.bytes_sent if name == "bytes_sent" else self.counts[name])

    @property
    def local_share(self) -> NDArray[np.float64]:
        """Share of local keys among the pulled keys in each step but the first; 1 if none was pulled."""
        pulled, away = self.per_step("pulled"), self.per_step("pulled_remotely")
        return 1.0 - away / np.maximum(pulled, 1)

    @property
    def owned(self) -> NDArray[np.int64]:
        """Number of keys owned by the site."""
        return np.subtract(self.counts["rows"], self.counts["replicas"])


class Timeline:
    """Recorder of the placement of keys; a record takes microseconds and sends nothing.

    Args:
        manager: the manager.
        table: table of the keys to watch; None to record counts only.
        keys: the keys to watch, int64, such as frequent ones; equal on all sites.

    Attributes:
        history: records of this site.

    Raises:
        ValueError: if only one of `table` and `keys` is passed.

    Example:
        >>> import torch
        >>> from dadplug.adapm import ParameterManager, Timeline
        >>> with ParameterManager() as manager:
        ...     words = manager.table("words", width=4, rows=100)
        ...     timeline = Timeline(manager, words, keys=torch.arange(10))
        ...     for step in range(3):
        ...         values = words.pull(torch.arange(step + 1))
        ...         clock = manager.advance_clock()
        ...         timeline.note()
        ...     histories = timeline.gather()  # one per site; Timeline.draw(path, histories) draws them
        >>> histories[0].counts["pulled"]
        [1, 3, 6]
    """

    def __init__(self, manager: ParameterManager, table: Table | None = None, keys: Tensor | None = None) -> None:
        if (table is None) != (keys is None):
            raise ValueError("a table and the keys to watch in it belong together: give both, or none")
        self.manager = manager
        self.history = SiteHistory()
        self._table, self._keys = table, keys
        self._start = time.perf_counter()
        self._left_out = dict.fromkeys(("bytes_sent", *COUNTS[:-2]), 0)

    def note(self) -> None:
        """Record the state of this site; usually called once per step."""
        history = self.history
        history.clocks.append(self.manager.current_clock)
        history.seconds.append(time.perf_counter() - self._start)
        now = self._now()
        history.bytes_sent.append(now.pop("bytes_sent") - self._left_out["bytes_sent"])
        for name, value in now.items():
            history.counts[name].append(value - self._left_out.get(name, 0))
        if self._table is not None and self._keys is not None:
            history.states.append(self._table.states(self._keys).numpy())

    def _now(self) -> dict[str, int]:
        counts = self.manager.counts
        return {"bytes_sent": self.manager.traffic.total_bytes_sent} | {name: counts[name] for name in COUNTS}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context whose pulls, pushes, moves and bytes are not counted, such as an evaluation."""
        before = self._now()
        try:
            yield
        finally:
            now = self._now()
            for name in self._left_out:
                self._left_out[name] += now[name] - before[name]

    def gather(self) -> list[SiteHistory]:
        """Return the records of all sites, by site; all sites must call it."""
        return self.manager.gather_objects(self.history, SiteHistory, "history")

    @staticmethod
    def draw(path: str | Path, sites: Sequence[SiteHistory], title: str = "") -> None:
        """Draw watched keys, owned keys, replicas, local share and bytes over time.

        Args:
            path: path of the picture, a PNG file.
            sites: histories as returned by `gather`.
            title: title of the picture.

        Raises:
            ImportError: if matplotlib is not installed.
            ValueError: if a site has fewer than two records.
        """
        if not sites or any(len(site.clocks) < 2 for site in sites):
            raise ValueError("there is nothing to draw: each site must call note() twice at least")
        watched = bool(sites[0].states)
        lower = figure = new_figure(11, 8 if watched else 5)
        if watched:
            upper, lower = figure.subfigures(2, 1, height_ratios=(1.2, 1.6))
            _draw_keys(upper, sites)
        panels = lower.subplots(2, 2, sharex=True)
        for rank, site in enumerate(sites):
            style = {"color": _color(rank), "label": f"site {rank}", "linewidth": 1.4}
            panels[0][0].plot(site.owned, **style)
            panels[0][1].plot(site.counts["replicas"], **style)
            panels[1][0].plot(np.arange(1, len(site.clocks)), 100 * site.local_share, **style)
            panels[1][1].plot(np.arange(1, len(site.clocks)), site.per_step("bytes_sent") / 1e3, **style)
        texts = ("keys owned", "replicas", "% of pulls local", "kB sent in a step")
        for panel, text in zip(panels.flat, texts, strict=True):
            panel.set_ylabel(text)
            panel.grid(alpha=0.3)
        for panel in panels[1]:
            panel.set_xlabel("step")
        panels[0][0].legend(frameon=False)
        panels[1][0].set_ylim(-3, 103)
        figure.suptitle(title)
        figure.savefig(path, dpi=110)


def owners(sites: Sequence[SiteHistory]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the owners of watched keys over time.

    Args:
        sites: histories as returned by `Timeline.gather`.

    Returns:
        Arrays of shape (records, keys): the owner of a key, -1 if it was in transit or had not been used; and whether a
        site had a replica. The n-th records of all sites are combined.
    """
    moments = min(len(site.states) for site in sites)
    states = np.stack([np.stack(site.states[:moments]) for site in sites])
    owned = states == KeyState.OWNED
    return np.where(owned.any(0), owned.argmax(0), -1), (states == KeyState.REPLICA).any(0)


def _draw_keys(figure: Any, sites: Sequence[SiteHistory]) -> None:
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Patch

    owner, replicated = owners(sites)
    image = np.full((*owner.shape, 3), 0.85)
    patches = [Patch(color=(0.85,) * 3, label="in transit, or not used yet")]
    for rank in range(len(sites)):
        full = np.array(to_rgb(_color(rank)))
        light = 0.45 * full + 0.55
        image[(owner == rank) & ~replicated] = full
        image[(owner == rank) & replicated] = light
        patches.append(Patch(color=tuple(full), label=f"site {rank} alone"))
        patches.append(Patch(color=tuple(light), label=f"site {rank}, replicas elsewhere"))
    panel = figure.subplots()
    panel.imshow(image.transpose(1, 0, 2), aspect="auto", interpolation="nearest")
    panel.set(ylabel="watched keys, frequent to rare", xlabel="step")
    panel.legend(handles=patches, loc="upper center", bbox_to_anchor=(0.5, 1.2), ncols=5, frameon=False, fontsize=8)


def _color(rank: int) -> str:
    return f"C{rank % 10}"


def frequent_keys(ids: Tensor, count: int) -> Tensor:
    """Select keys to watch, evenly on a logarithmic scale of their frequency rank.

    Args:
        ids: ids that will be looked up, of any shape.
        count: maximum number of keys.

    Returns:
        Keys in descending order of frequency.
    """
    keys, times = torch.unique(ids, return_counts=True)
    order: Tensor = keys[times.argsort(descending=True, stable=True)]
    ranks = torch.logspace(0, float(np.log10(len(order))), count, dtype=torch.float64).round().long() - 1
    return order[ranks.unique()]
