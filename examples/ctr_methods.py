"""Methods that train Wide & Deep on clicks in examples/ctr.py: one process, DDP, a parameter server, AdaPM."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from runs import RunProgress
from torch import Tensor, nn

from dadplug.adapm import AdaDataLoader, AdaModel, Constant, Normal, ParameterManager, Timeline
from dadplug.adapm.timeline import SiteHistory, frequent_keys
from dadplug.data import Clicks, DataPair, renumbered
from dadplug.exchange import gather_objects
from dadplug.models import WideDeep

Batch = tuple[Tensor, Tensor, Tensor]
_TEST_ROWS = 512  # in a batch of the evaluation
_WATCHED = 200  # keys in the picture


@dataclass
class Run:
    """One training.

    Attributes:
        data: the clicks, with ids as they are.
        rank: this site.
        sites: number of sites.
        epochs: number of epochs.
        batch_size: rows in a batch of one site.
        lr: learning rate of Adagrad.
        seed: seed of the first values.
        lookahead: batches that intents are ahead.
        interval: least seconds between two rounds of the manager.
        renumber: whether tables have a row for each id that occurs, in place of one for each key.
        options: options of the gradient reduction for all parameters that are not in tables.
        progress: shows the progress of the run; None to show nothing.
    """

    data: DataPair
    rank: int
    sites: int
    epochs: int = 2
    batch_size: int = 128
    lr: float = 0.003
    seed: int = 0
    lookahead: int = 32
    interval: float = 0.05
    renumber: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    progress: RunProgress | None = None

    def step(self, loss: Tensor) -> None:
        """Show a step."""
        if self.progress is not None:
            self.progress.step(loss=f"{float(loss.detach()):.4f}")

    def end_epoch(self, outcome: Outcome) -> None:
        """Show an epoch that has been evaluated."""
        if self.progress is not None:
            sent = outcome.bytes_sent[-1]
            values = {} if sent is None else {"MB/epoch": f"{sent / 1e6:.2f}"}
            self.progress.end_epoch(
                test_loss=f"{outcome.log_losses[-1]:.4f}", **values, **{"s/epoch": f"{outcome.seconds[-1]:.2f}"}
            )


@dataclass
class Outcome:
    """Results of a run, at this site.

    Attributes:
        log_losses: on the test rows of all sites, after each epoch.
        seconds: of each epoch's training.
        bytes_sent: in each epoch's training; by the network interface where GLOO_SOCKET_IFNAME names one, else payload
            bytes, and None where they are not known.
        local_share: share of the looked-up keys that were here, of each epoch; None without a manager.
        table_bytes: memory of the tables at this site.
        histories: of the sites' placement; empty without a manager.
    """

    log_losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    bytes_sent: list[int | None] = field(default_factory=list)
    local_share: list[float | None] = field(default_factory=list)
    table_bytes: int = 0
    histories: list[SiteHistory] = field(default_factory=list)


class Batches:
    """This site's part of each global batch, in the order of the rows: sites together go through what one would.

    Args:
        clicks: the rows.
        size: rows of one site in a batch.
        rank: this site.
        sites: number of sites.
        epochs: how often it goes through them.
    """

    def __init__(self, clicks: Clicks, size: int, rank: int = 0, sites: int = 1, epochs: int = 1) -> None:
        self.clicks, self.size, self.rank, self.sites, self.epochs = clicks, size, rank, sites, epochs

    def __len__(self) -> int:
        return self.epochs * self.in_epoch

    @property
    def in_epoch(self) -> int:
        """Number of batches in an epoch."""
        whole, rest = divmod(len(self.clicks), self.size * self.sites)
        return whole + (rest >= self.sites)

    def __iter__(self) -> Iterator[Batch]:
        for number in [*range(self.in_epoch)] * self.epochs:
            start = number * self.size * self.sites
            count = min(self.size * self.sites, len(self.clicks) - start)
            first, last = count * self.rank // self.sites, count * (self.rank + 1) // self.sites
            yield self.clicks.batch(start + first, start + last)


def build(run: Run, rows: int, **options: Any) -> WideDeep:
    """Build the model; the dense layers start with the same values for tables of any size."""
    torch.manual_seed(run.seed)
    small = WideDeep(1)
    model = WideDeep(rows, **options)
    model.linear.load_state_dict(small.linear.state_dict())
    model.network.load_state_dict(small.network.state_dict())
    return model


def build_renumbered(run: Run, **options: Any) -> tuple[WideDeep, DataPair]:
    """Build the model on renumbered ids, with the first values of the original ids."""
    data, ids = renumbered(run.data)
    model = build(run, len(ids), **options)
    values = torch.empty(len(ids), model.deep.embedding_dim)
    first_values(run)["deep.weight"](ids.numpy(), values.numpy())
    model.deep.weight.data.copy_(values)
    return model, data


def first_values(run: Run) -> dict[str, Any]:
    """Return the initialisers of the tables, by weight."""
    return {"wide.weight": Constant(), "deep.weight": Normal(std=0.01, seed=run.seed)}


def loss_of(model: nn.Module, batch: Batch, reduction: str = "mean") -> Tensor:
    """Compute the log loss of a batch."""
    dense, ids, labels = batch
    return nn.functional.binary_cross_entropy_with_logits(model(dense, ids), labels.float(), reduction=reduction)


def forward(model: nn.Module, batch: Batch) -> Tensor:
    """Call the model, for automatic intent."""
    return model(batch[0], batch[1])


def manual_intent(batch: Batch) -> dict[str, Tensor]:
    """Return the ids that a batch looks up, by weight."""
    ids = batch[1].unique()
    return {"wide.weight": ids, "deep.weight": ids}


@torch.no_grad()
def test_loss(model: nn.Module, clicks: Any, rank: int, sites: int, gather: Callable[[Any], list[Any]]) -> float:
    """Compute the log loss over all test rows, of which each site evaluates its part."""
    model.eval()
    total = sum(float(loss_of(model, batch, "sum")) for batch in Batches(clicks, _TEST_ROWS, rank, sites))
    rows = len(clicks) if len(clicks) % (_TEST_ROWS * sites) >= sites else len(clicks) - len(clicks) % sites
    model.train()
    return sum(gather(total)) / rows


def sent_by_interface() -> int | None:
    """Return the bytes that the interface of GLOO_SOCKET_IFNAME has sent."""
    file = Path(f"/sys/class/net/{os.environ.get('GLOO_SOCKET_IFNAME', '')}/statistics/tx_bytes")
    return int(file.read_text()) if file.is_file() else None


@contextlib.contextmanager
def epoch(outcome: Outcome, sent: Callable[[], int | None]) -> Iterator[None]:
    """Measure the training of an epoch."""
    before, start = sent(), time.perf_counter()
    yield
    outcome.seconds.append(time.perf_counter() - start)
    after = sent()
    outcome.bytes_sent.append(None if after is None or before is None else after - before)


def by_one_process(run: Run) -> Outcome:
    """Train alone on the global batches; each site does so by itself."""
    model, data = build_renumbered(run, sparse=True)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=run.lr)
    outcome = Outcome(table_bytes=2 * 4 * (model.wide.weight.numel() + model.deep.weight.numel()))
    for _ in range(run.epochs):
        with epoch(outcome, lambda: 0):
            for batch in Batches(data.train, run.batch_size * run.sites):
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                loss.backward()
                optimizer.step()
                run.step(loss)
        outcome.log_losses.append(test_loss(model, data.test, 0, 1, lambda total: [total]))
        outcome.local_share.append(None)
        run.end_epoch(outcome)
    return outcome


def by_ddp(run: Run) -> Outcome:
    """Train by DistributedDataParallel with sparse gradients of the tables, which gloo gathers from all sites."""
    plain, data = build_renumbered(run, sparse=True)
    model = nn.parallel.DistributedDataParallel(plain)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=run.lr)
    outcome = Outcome(table_bytes=2 * 4 * (plain.wide.weight.numel() + plain.deep.weight.numel()))

    for _ in range(run.epochs):
        dist.barrier()
        with epoch(outcome, sent_by_interface):
            for batch in Batches(data.train, run.batch_size, run.rank, run.sites):
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                loss.backward()
                optimizer.step()
                run.step(loss)
            dist.barrier()
        outcome.log_losses.append(test_loss(plain, data.test, run.rank, run.sites, gather_objects))
        outcome.local_share.append(None)
        run.end_epoch(outcome)
    return outcome


def by_manager(run: Run, technique: str = "all", intent: Any = "auto") -> Outcome:
    """Train by AdaPM.

    Args:
        run: the training.
        technique: of the manager.
        intent: as for `AdaDataLoader`, or None for no intents.
    """
    if run.renumber:
        plain, data = build_renumbered(run)
        first = None
    else:
        assert isinstance(run.data.train, Clicks)
        plain, data = build(run, run.data.train.rows, device="meta"), run.data
        first = first_values(run)
    optimizer = torch.optim.Adagrad(plain.parameters(), lr=run.lr)
    outcome = Outcome()
    with ParameterManager(technique=technique, interval=run.interval) as manager:
        model = AdaModel(plain, optimizer, manager, initialisers=first, **run.options)
        # All epochs in one: intents go on over the end of an epoch, and what the next one needs stays where it is.
        batches = Batches(data.train, run.batch_size, run.rank, run.sites, run.epochs)
        loader: Any = batches
        if intent is not None:
            loader = AdaDataLoader(batches, model, intent=intent, forward=forward, lookahead=run.lookahead)
        ahead = iter(loader)
        timeline = Timeline(manager, model.managed["deep.weight"].table, frequent_keys(data.train.ids, _WATCHED))

        def sent() -> int:
            assert model.reduction is not None
            by_interface = sent_by_interface()
            payload = manager.traffic.total_bytes_sent + model.reduction.traffic.total_bytes_sent
            return payload if by_interface is None else by_interface

        for _ in range(run.epochs):
            manager.barrier()
            before = manager.counts
            with epoch(outcome, sent):
                for batch in itertools.islice(ahead, batches.in_epoch):
                    optimizer.zero_grad()
                    loss = loss_of(model, batch)
                    loss.backward()
                    model.synchronize()
                    optimizer.step()
                    timeline.note()
                    run.step(loss)
                manager.wait_sync(everywhere=True)
            pulled, away = (manager.counts[name] - before[name] for name in ("pulled", "pulled_remotely"))
            outcome.local_share.append(1 - away / pulled)
            with timeline.paused():
                held_out = test_loss(model, data.test, run.rank, run.sites, manager.gather_objects)
            outcome.log_losses.append(held_out)
            run.end_epoch(outcome)
        outcome.table_bytes = sum(weight.table.nbytes for weight in model.managed.values())
        outcome.histories = timeline.gather()
        next(ahead, None)  # there is none; the loader's thread ends
        model.close()
    return outcome


METHODS: dict[str, Callable[[Run], Outcome]] = {
    "alone": by_one_process,
    "ddp": by_ddp,
    "no-intent": lambda run: by_manager(run, "static", None),
    "adapm": by_manager,
    "adapm-manual": lambda run: by_manager(run, intent=manual_intent),
    "relocation-only": lambda run: by_manager(run, "relocation_only"),
    "replication-only": lambda run: by_manager(run, "replication_only"),
}
