"""Rounds of training steps, at whose ends sites agree on who takes part; what a run requires, and what sites show."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ..support.logs import span
from ..support.structs import Count, Milliseconds, Slot


class Requirements(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Requirements, the same at all sites, which a hub gets as a control message.

    Attributes:
        min_sites: number of sites below which training pauses.
        timeout_ms: milliseconds of silence after which a site counts as lost.
        skips: whether a late site misses a step, and is not waited for.
        patience_percent: time after which a site is late, in hundredths of the median step; 0: so many milliseconds as
            `timeout_ms` after the first site.
        provisional: whether they hold only until a site states others, in a run that may start without all sites.
    """

    min_sites: Count
    timeout_ms: Milliseconds
    skips: bool = False
    patience_percent: Count = 300
    provisional: bool = False

    @classmethod
    def of(
        cls, min_sites: int | None, site_timeout: float, late: str = "wait", patience: float = 3.0
    ) -> Requirements | None:
        """Return the requirements that options state.

        Args:
            min_sites: number of sites below which training pauses; None where all must stay.
            site_timeout: seconds of silence after which a site counts as lost.
            late: "wait" for late sites, or "skip" them.
            patience: time after which a site is late, in median steps; 0: `site_timeout` after the first site.
        """
        if min_sites is None:
            return None
        return cls(min_sites, round(1e3 * site_timeout), late == "skip", round(100 * patience))


class Shown(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Statement of a site for the status of a hub, which gets it as a control message."""


class Spent(Shown, frozen=True):
    """Cost of a site's training so far for its records.

    Attributes:
        epsilon: the epsilon of differential privacy; infinity for steps without noise.
        delta: the delta.
    """

    epsilon: Annotated[float, Meta(ge=0)]
    delta: Annotated[float, Meta(ge=0)]


class Contribution(Shown, frozen=True):
    """Part of a site in the training so far, as its process states it.

    Attributes:
        samples: number of samples; 0 where they are not counted.
        steps: number of steps.
        waited_ms: milliseconds in which it has waited for others in them.
        loss: loss of its own validation; None without one.
    """

    samples: Count
    steps: Count
    waited_ms: Milliseconds
    loss: float | None = None

    def __str__(self) -> str:
        samples = f"{self.samples:,} samples in " if self.samples else ""
        loss = "" if self.loss is None else f", loss {self.loss:.4g}"
        return f"{samples}{self.steps:,} steps, {span(self.waited_ms / 1e3)} of waiting{loss}"


class Outsized(Shown, frozen=True):
    """Finding of a site: the gradient of another one, or its delta in local steps, is out of all proportion.

    Attributes:
        slot: the other site.
        training_step: number of the training step.
        times: norm of the gradient over the median of the sites' norms.
    """

    slot: Slot
    training_step: Count
    times: Annotated[float, Meta(gt=0)]

    def __str__(self) -> str:
        return f"in step {self.training_step} the norm of its gradient or delta is {self.times:.3g} times the median"


class Rounds:
    """Part of the sites in training steps, where all of them stay: there are no rounds, and every site takes part.

    Networks whose sites may leave have subclasses.

    Args:
        size: number of sites.

    Attributes:
        size: number of sites.
        elastic: whether training goes on without a site that leaves.
        absent: ranks of the sites that are not part of the last round, the same at all sites; what they have sent does
            not count, and gathers return zeros for them. Always empty unless `elastic`.
        joins: whether this site joins others in mid-training, and `receive_state` returns a state.
        listens: whether this site has begun this step with the state of another one, since it joins.
        in_step: whether a round of a training step has been closed, and others may follow.
        donate: returns what a site that joins in mid-training needs; called while this site waits for the end of a
            round that admits sites.
    """

    elastic = joins = listens = in_step = False
    absent: frozenset[int] = frozenset()
    donate: Callable[[], Any] | None = None

    def __init__(self, size: int) -> None:
        self.size = size

    @property
    def alone(self) -> bool:
        """Whether this site exchanges nothing so far, since it joins: collectives return what it gives."""
        return False

    @property
    def grows(self) -> bool:
        """Whether there are further sites, for which `grow` is due."""
        return False

    def grow(self) -> None:
        """Take further sites, if there are any; all sites do so at the end of the same step."""

    @property
    def behind(self) -> bool:
        """Whether the others have ended the open step already, without this site."""
        return False

    @property
    def hub_is_away(self) -> bool:
        """Whether nothing can be exchanged, since the hub is away, and perhaps for long."""
        return False

    @property
    def gone(self) -> Mapping[int, str]:
        """Reasons of the sites that have left and are not back, by rank."""
        return {}

    @property
    def position(self) -> int:
        """Number of the open round, where sites may leave."""
        return 0

    @property
    def present(self) -> list[int]:
        """Ranks of the sites that took part in the last round; all of them unless `elastic`."""
        return [rank for rank in range(self.size) if rank not in self.absent]

    @property
    def lowest(self) -> int:
        """Rank of the first site that is present, the same at all sites."""
        return self.present[0]

    @property
    def place(self) -> int:
        """Number of their transport among those of the process, where sites may return.

        It is the same at all sites at the same place of a program.
        """
        return 0

    def leave_out(self, rank: int, error: Exception) -> None:
        """Go on without a site that has sent what is invalid, where sites may be absent; all sites must find the same.

        Args:
            rank: the site, which is absent until the end of the step.
            error: the error that names it.

        Raises:
            Exception: the error, where all sites have to stay.
            MismatchError: if too few sites are left.
        """
        raise error

    def end_step(self) -> None:
        """End a training step, whose exchanges are over at this site."""

    def show(self, shown: Shown) -> None:
        """Show something in the status of a hub, if there is one."""

    def wait_for_hub(self, seconds: float) -> None:
        """Wait for a hub that is away, from now on.

        Args:
            seconds: time after which it is given up.
        """

    def begin_plan(self) -> None:
        """Begin a plan, whose gathers follow; all sites call it together, with no exchange in progress."""

    def receive_state(self, most: int) -> Any:
        """Return what `donate` has returned at another site, where this site joins in mid-training; else None.

        Until it is called, the others do not wait for this site.

        Args:
            most: largest size of a state in bytes; one that is announced as larger is refused.

        Raises:
            SiteError: if it does not arrive.
        """
        return None

    def rejoin(self) -> None:
        """Prepare this site, which has been dropped, for `receive_state` and `take_part`; its open step is lost.

        Raises:
            SiteError: if the others do not let it join.
        """

    def take_part(self) -> bool:
        """Confirm that the state has been restored: from the next round on this site takes part.

        In the first round it only listens: nothing that it sends counts.

        Returns:
            Whether it takes part; otherwise the state has become outdated, and `receive_state` returns another one.
        """
        return True

    def close(self, admits: bool = False, idle: bool = False) -> None:
        """End a round of gathers: wait until all sites have ended it or left, and update `absent`.

        What arrived before is provisional, where sites may leave. All sites must call it together.

        Args:
            admits: whether the state of this site is that of the beginning of a step, so that others may join.
            idle: whether this site contributes nothing to the step.

        Raises:
            SiteError: if training cannot go on.
        """
