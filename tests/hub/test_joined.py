"""Sites that are connected by their kits: torch.distributed, the trainers and the commands over a hub."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

import pytest
import support
import torch
import torch.distributed as dist
from running_hub import running_hub
from torch import nn

import dadplug
from dadplug import GradientReduction
from dadplug.hub.frames import PIECE_BYTES

NAMES = ("bavaria", "saxony")


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    with running_hub(tmp_path_factory.mktemp("hub") / "kits", sites=NAMES) as hub:
        yield hub


@pytest.fixture(scope="module")
def group(hub):
    with support.Sites(2, kits=[hub.kits / name for name in NAMES]) as group:
        yield group


def listeners() -> list[str]:
    """Addresses at which this process or a thread of it listens for TCP connections."""
    links = [
        os.readlink(f"/proc/self/fd/{name}")
        for name in os.listdir("/proc/self/fd")
        if name.isdigit() and os.path.lexists(f"/proc/self/fd/{name}")
    ]
    own = {link[8:-1] for link in links if link.startswith("socket:[")}
    rows = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()]
    return [row[1] for row in rows if row[3] == "0A" and row[9] in own]


def speaks_by_collectives() -> list:
    rank = dist.get_rank()
    assert (dist.get_backend(), dist.get_world_size()) == ("dadplug", 2)
    objects: list = [None, None]
    dist.all_gather_object(objects, {"rank": rank, "list": list(range(rank * 1000))})
    assert [len(each["list"]) for each in objects] == [0, 1000]
    several = ["first", rank] if rank else ["second", {"x": 1}]
    dist.broadcast_object_list(several, src=1)
    assert several == ["first", 1]
    gathered = [None, None] if rank == 1 else None
    dist.gather_object(("from", rank), gathered, dst=1)
    assert gathered in (None, [("from", 0), ("from", 1)])
    scattered: list = [None]
    dist.scatter_object_list(scattered, ["a", "b"] if rank == 0 else None, src=0)
    assert scattered == ["ab"[rank]]
    dist.barrier()
    total = torch.arange(40_000.0) * (rank + 1)
    work = dist.all_reduce(total, async_op=True)
    assert work.get_future().wait()[0] is not None
    assert torch.equal(total, torch.arange(40_000.0) * 3)
    flat = torch.zeros(4)
    dist.all_gather_into_tensor(flat, torch.full((2,), float(rank)))
    part = torch.zeros(2)
    dist.reduce_scatter_tensor(part, torch.arange(4.0))
    swapped = torch.zeros(2)
    dist.all_to_all_single(swapped, torch.tensor([10.0, 11.0]) + 10 * rank)
    return [flat.tolist(), part.tolist(), swapped.tolist()]


def test_torch_distributed_works_over_the_hub(group):
    flat = [0.0, 0.0, 1.0, 1.0]
    assert group.run(speaks_by_collectives) == [
        [flat, [0.0, 2.0], [10.0, 20.0]],
        [flat, [4.0, 6.0], [11.0, 21.0]],
    ]


def makes_groups() -> list[float]:
    rank, found = dist.get_rank(), []
    both = dist.new_group([0, 1])
    alone = [dist.new_group([other]) for other in range(2)][rank]
    local = dist.new_group([1, 0], use_local_synchronization=True)
    for each in (local, alone, both):
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total, group=each)
        found.append(float(total))
        dist.destroy_process_group(each)
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"  # by way of the store
    dist.destroy_process_group(dist.new_group())
    del os.environ["TORCH_DIST_INIT_BARRIER"]
    with pytest.raises(RuntimeError, match="has collectives only"):
        dist.send(torch.ones(1), 1 - rank)
    return found


def test_groups_of_all_sites_and_of_one_can_be_made(group):
    assert group.run(makes_groups) == [[3.0, 1.0, 3.0], [3.0, 2.0, 3.0]]


def uses_the_store() -> None:
    from datetime import timedelta

    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    assert store.add("sum", 5) in (5, 10)
    store.set(f"key {rank}", f"value {rank}")
    store.wait(["key 0", "key 1"], timedelta(seconds=20))
    assert [store.get(f"key {other}") for other in range(2)] == [b"value 0", b"value 1"]
    wrapped = dist.PrefixStore("prefix", store)  # C++ calls Python's methods
    assert wrapped.compare_set(f"own {rank}", "", "new") == b"new"
    wrapped.append(f"own {rank}", "er")
    assert wrapped.multi_get([f"own {rank}"]) == [b"newer"]
    wrapped.multi_set([f"a{rank}", f"b{rank}"], ["1", "2"])
    assert wrapped.check([f"a{rank}", f"b{rank}"])
    assert not wrapped.check(["nothing"])
    assert wrapped.delete_key(f"a{rank}")
    assert not wrapped.check([f"a{rank}"])
    assert wrapped.num_keys() >= 4
    with pytest.raises(
        dist.DistStoreError, match=r"wait of .*prefix/nothing at the store of the hub at .* has timed out"
    ):
        wrapped.wait(["nothing"], timedelta(seconds=0.05))
    with pytest.raises(dist.DistStoreError, match=f"takes {PIECE_BYTES // 2} at most"):
        store.set("large", "x" * (PIECE_BYTES // 2 + 1))
    dist.barrier()


def test_the_store_is_that_of_torch(group):
    group.run(uses_the_store)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.mlp = nn.Sequential(nn.Linear(4 * 36, 64), nn.ReLU(), nn.Linear(64, 5))

    def forward(self, inputs):
        return self.mlp(self.norm(self.conv(inputs)).flatten(1))


def trains(mode: str, options: dict) -> tuple[list[torch.Tensor], int]:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = Mixed()
    reduction = GradientReduction(model, mode=mode, **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(6):
        generator = torch.Generator().manual_seed(100 * step + rank)
        inputs = torch.randn(6 + rank, 1, 8, 8, generator=generator)
        targets = torch.randint(0, 5, (6 + rank,), generator=generator)
        optimizer.zero_grad()
        if step == 4 and rank == 1 and not options.get("sync_batchnorm"):
            reduction.idle()
        else:
            nn.functional.cross_entropy(model(inputs), targets).backward()
            reduction.synchronize()
        optimizer.step()
    assert reduction.first_difference() is None
    sent = reduction.traffic.bytes_sent
    reduction.detach()
    return [parameter.detach() for parameter in model.parameters()], sent


MODES = {
    "dsgd": {},
    "dad": {"sync_batchnorm": True},
    "rankdad": {"wire": "bf16"},
    "edad": {},
    "powersgd": {},
    "topk": {},
}


def test_every_mode_trains_to_the_bits_of_plain_connections(group, sites):
    for mode, options in MODES.items():
        (over_hub, sent), (other, _) = group.run(trains, mode, options)
        (plain, plain_sent), _ = sites(2).run(trains, mode, options)
        assert all(map(torch.equal, over_hub, other)), mode
        assert all(map(torch.equal, over_hub, plain)), mode
        assert 0 < sent <= plain_sent + 64, mode


def test_auto_trains_over_the_hub(group):
    (first, _), (second, _) = group.run(trains, "auto", {})
    assert all(map(torch.equal, first, second))


def connects_again(kit: str) -> None:
    dadplug.connect(kit=kit)
    other = Path(kit).parent / NAMES[1 - dist.get_rank()]
    with pytest.raises(ValueError, match="is connected by the kit"):
        dadplug.connect(kit=other)


def test_the_same_kit_can_be_given_twice_and_no_other(group, hub):
    for rank, name in enumerate(NAMES):
        group._pipes[rank].send((__file__, "connects_again", (str(hub.kits / name),)))
    assert [outcome.kind for outcome in group.outcomes()] == ["ok", "ok"]


def fits_by_catalyst() -> dict:
    pytest.importorskip("catalyst")
    from catalyst_training import metrics_callbacks, train

    runner = train("rankdad", callbacks=metrics_callbacks(), lr=0.5, epochs=8)
    assert runner.reduction.first_difference() is None
    return {name: dict(values) for name, values in runner.epoch_metrics.items()}


def test_catalysts_runner_trains(group):
    first, second = group.run(fits_by_catalyst)
    assert first == second
    assert first["valid"]["accuracy01"] > 0.6


def fits_by_lightning(stock: bool) -> tuple:
    import warnings

    import pytorch_lightning as pl
    from dadplug.runners._lightning.environment import SiteEnvironment
    from dadplug.runners.pytorch_lightning import DADStrategy
    from pytorch_lightning.strategies import DDPStrategy
    from torch.utils.data import DataLoader, TensorDataset
    from torchmetrics.classification import MulticlassAccuracy

    warnings.filterwarnings("ignore")

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 4))
            self.accuracy = MulticlassAccuracy(4, average="micro")
            self.seen: list[int] = []

        def training_step(self, batch, batch_idx):
            self.seen += batch[2].tolist()
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
            return loss

        def validation_step(self, batch, batch_idx):
            self.accuracy.update(self.net(batch[0]), batch[1])
            self.log("accuracy", self.accuracy)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.5)

    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(70, 8, generator=generator)
    data = TensorDataset(inputs, (inputs[:, :4] + 0.3 * inputs[:, 4:]).argmax(1), torch.arange(70))
    strategy = DADStrategy("dsgd", weighting="uniform")
    if stock:
        strategy = DDPStrategy(process_group_backend="dadplug", cluster_environment=SiteEnvironment())
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        num_nodes=2 if stock else 1,
        max_epochs=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    loaders = [DataLoader(data, batch_size=5, shuffle=shuffle) for shuffle in (True, False)]
    trainer.fit(module, *loaders)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return [parameter.detach().clone() for parameter in module.parameters()], metrics, module.seen


@pytest.fixture(scope="module")
def fitted(group):
    pytest.importorskip("pytorch_lightning")
    return {stock: group.run(fits_by_lightning, stock) for stock in (False, True)}


@pytest.mark.parametrize("stock", [False, True])
def test_lightning_trains_with_samplers_and_metrics_of_all_sites(fitted, stock):
    (first, metrics, seen), (second, others, seen_there) = fitted[stock]
    assert all(map(torch.equal, first, second))
    assert metrics == others
    assert metrics["accuracy"] > 0.6
    for epoch in range(4):
        own, other = ({*each[35 * epoch : 35 * epoch + 35]} for each in (seen, seen_there))
        assert not own & other, "the sampler has given a sample to both sites"
        assert len(own | other) == 70


def trainers_of_two_devices() -> list[str]:
    """Return the errors of trainers with two devices whose processes cannot be started."""
    import pytorch_lightning as pl
    from dadplug.runners.pytorch_lightning import DADStrategy

    found = []
    for options in ({"min_sites": 1}, {"start_method": "spawn"}):
        with pytest.raises(ValueError, match="2 devices at a site that is connected by a kit") as error:
            pl.Trainer(strategy=DADStrategy("dsgd", **options), accelerator="cpu", devices=2, logger=False)
        found.append(str(error.value))
    return found


def test_lightning_refuses_processes_that_it_cannot_start(group):
    pytest.importorskip("pytorch_lightning")
    for elastic, spawned in group.run(trainers_of_two_devices):
        assert "min_sites goes with one process at each site: pass devices=1" in elastic
        assert "torchrun --standalone --nproc_per_node=2" in spawned


def test_dad_strategy_equals_stock_ddp(fitted):
    for ours, theirs in zip(fitted[False][0][0], fitted[True][0][0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def shared(name: str) -> ModuleType:
    """Import another test module, whose functions the sites run."""
    return support.load(str(Path(__file__).parents[1] / "runners" / name))


def test_embeddings_are_managed_in_catalyst(group):
    pytest.importorskip("catalyst")
    group.run(shared("test_adapm_runner.py").trains, "sgd", "auto")


def test_embeddings_are_managed_in_lightning(group):
    pytest.importorskip("pytorch_lightning")
    group.run(shared("test_adapm_strategy.py").trains, "adagrad", "function")


def test_no_site_listens(group):
    """After the trainers, so that whatever they open is seen."""
    assert group.run(listeners) == [[], []]
