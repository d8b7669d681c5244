"""The end of a run of Lightning: all sites end at the same batch, also where one of them alone asks for it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_SIGTERM = "_broadcast_sigterm_tensor"  # of Lightning's loop over batches, since 2.6


class SiteFlags:
    """Flags that all sites exchange, once a batch.

    The exchange goes on beside training, and is waited for at the next batch: so no step becomes longer.

    Args:
        strategy: the strategy of this site.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._sent: list[tuple[Tensor, Any]] = []

    def exchange(self, *flags: bool, waits: bool) -> list[Tensor]:
        """Send this site's flags of a batch, and receive those of all sites.

        Args:
            flags: the flags, as many at all sites.
            waits: whether to wait for those of this batch; else they are received at the next one.

        Returns:
            The flags of each batch that have been received, of shape (flags, sites), the latest last.
        """
        strategy = self._strategy
        sent = torch.zeros(len(flags), strategy.world_size, device=strategy.root_device)
        sent[:, strategy.global_rank] = torch.tensor(flags, dtype=sent.dtype)
        with strategy._naming_sites():
            self._sent.append((sent, dist.all_reduce(sent, group=strategy._own_group(None), async_op=True)))
        return self.receive(0 if waits else 1)

    def receive(self, but: int = 0) -> list[Tensor]:
        """Receive the flags of all batches but some of the last ones."""
        received = []
        while len(self._sent) > but:
            flags, exchange = self._sent.pop(0)
            with self._strategy._naming_sites():
                exchange.wait()
            received.append(flags > 0)
        return received

    def abandon(self) -> None:
        """Forget exchanges that have not ended after an error: they would keep the process group open."""
        self._sent.clear()


class CommonEnd:
    """End of a run at the same batch of all sites.

    Lightning ends a run in a process whose ``trainer.should_stop`` is set, or that has got SIGTERM. Where this holds at
    all sites at the same batch, as after `EarlyStopping`, each ends the run at once. Where it holds at some of them,
    all end it one batch later.

    Args:
        strategy: the strategy of this site.
        trainer: Lightning's trainer.

    Attributes:
        flags: whether each site asks for an end, and whether it has got SIGTERM.
    """

    def __init__(self, strategy: Any, trainer: Any) -> None:
        self._strategy, self._trainer = strategy, trainer
        self.flags = SiteFlags(strategy)
        self._early: list[Tensor] = []  # flags that the other sites receive at the next batch
        self._has_sigterm = False

    def begin(self, run: ExitStack, in_step: bool) -> None:
        """Agree at the ends of the trainer's batches and epochs.

        Args:
            run: ends with the run.
            in_step: whether all sites are at the same batch; if not, they agree between epochs, and a site that gets
                SIGTERM ends alone.
        """
        fit, signals = self._trainer.fit_loop, self._trainer._signal_connector
        replaced: list[tuple[Any, str, Callable[..., None]]] = [
            (fit, "on_advance_end", partial(self._end_epoch, fit.on_advance_end)),
            # Lightning asks in the group of all processes, which no site can leave, and in the handler of the signal.
            (signals, "_sigterm_notifier_fn", partial(self._receive_sigterm, in_step)),
        ]
        if in_step:
            replaced.append((fit.epoch_loop, "on_advance_end", partial(self._end_batch, fit.epoch_loop.on_advance_end)))
        if hasattr(fit.epoch_loop, _SIGTERM):
            replaced.append((fit.epoch_loop, _SIGTERM, lambda: None))
        for owner, name, function in replaced:
            setattr(owner, name, function)
            run.callback(delattr, owner, name)

    def _receive_sigterm(self, in_step: bool, signum: int, frame: Any) -> None:
        """Pass the signal on to the processes that this one has started; end the run at the end of a batch."""
        launcher = self._strategy.launcher
        if launcher is not None and not self._has_sigterm:
            launcher.kill(signum)
        self._has_sigterm = True
        if not in_step:
            self._trainer._signal_connector.received_sigterm = True

    def _end_batch(self, original: Callable[[Any], None], data_fetcher: Any) -> None:
        """Agree whether the run ends, before Lightning validates or ends by that."""
        trainer = self._trainer
        is_last = trainer.fit_loop.epoch_loop._is_training_done
        stops = bool(trainer.should_stop and trainer.fit_loop._can_stop_early)
        terminates = self._has_sigterm  # read once: the signal may arrive at any time
        waits = is_last or stops or terminates
        received = self._early + self.flags.exchange(stops, terminates, waits=waits)
        self._early = [received.pop()] if waits and not is_last else []
        agreed = [
            any(bool(flags[index].any()) for flags in received)
            or any(bool(flags[index].all()) for flags in self._early)
            for index in range(2)
        ]
        if stops or agreed[0]:
            trainer.should_stop = agreed[0]
        trainer._signal_connector.received_sigterm = agreed[1]
        original(data_fetcher)

    def _end_epoch(self, original: Callable[[], None]) -> None:
        """Agree whether the run ends, also by callbacks that have run since the last batch."""
        received, self._early = self._early + self.flags.receive(), []
        if any(bool(flags[0].any()) for flags in received):
            self._trainer.should_stop = True
        original()
        self.agree_on_end()

    def agree_on_end(self) -> None:
        """End the run at all sites if one of them asks for it; to be called by all at the same time."""
        self._trainer.should_stop = self._strategy.reduce_boolean_decision(bool(self._trainer.should_stop), all=False)
