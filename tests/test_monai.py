"""MONAI's engines with `dadplug.monai`: held against stock DDP and one process; engines of ignite by themselves."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support
import torch
import torch.distributed as dist
from comparison import off_by
from support import refuses
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

pytest.importorskip("ignite", reason="needs pytorch-ignite: pip install 'dadplug[monai]'")
pytest.importorskip("monai", reason="needs monai: pip install 'dadplug[monai]'")

import ignite.distributed as idist
from ignite.engine import Engine, Events, create_supervised_trainer
from monai.data import CacheDataset, SmartCacheDataset, ThreadDataLoader, create_test_image_3d
from monai.engines import SupervisedEvaluator, SupervisedTrainer
from monai.handlers import CheckpointSaver, MeanDice, ValidationHandler, from_engine
from monai.inferers import SlidingWindowInferer
from monai.losses import DiceLoss
from monai.metrics import DiceMetric
from monai.networks.nets import UNet
from monai.transforms import Activationsd, AsDiscreted, Compose, EnsureTyped

import dadplug
from dadplug.errors import MismatchError
from dadplug.monai import SiteHandler, _EnginePlace, mean_over_sites, save_at_each_site

SIZE, COUNT = 24, 4
LAST = Compose([Activationsd("pred", sigmoid=True), AsDiscreted("pred", threshold=0.5)])


def build(normalised: bool = False) -> nn.Module:
    torch.manual_seed(0)
    norm = "batch" if normalised else "instance"
    return UNet(3, 1, 1, channels=(4, 8, 8), strides=(2, 2), num_res_units=1, norm=norm).double()


def volumes(site: int, count: int = COUNT) -> list[dict[str, Tensor]]:
    made = []
    for number in range(count):
        image, label = create_test_image_3d(
            SIZE, SIZE, SIZE, num_objs=3, rad_max=6, rad_min=3, noise_max=0.1 + 0.1 * site, num_seg_classes=1,
            channel_dim=0, random_state=np.random.RandomState(100 * site + number),
        )  # fmt: skip
        made.append({"image": torch.tensor(image).double(), "label": torch.tensor(label).double()})
    return made


def trainer_of(network: nn.Module, batches: Any, handlers: Any = (), **keywords: Any) -> SupervisedTrainer:
    settings = {"max_epochs": 2, "epoch_length": COUNT} | keywords
    return SupervisedTrainer(
        device=torch.device("cpu"), train_data_loader=batches, network=network,
        optimizer=torch.optim.SGD(network.parameters(), 0.5, momentum=0.9),
        loss_function=DiceLoss(sigmoid=True), train_handlers=list(handlers), **settings,
    )  # fmt: skip


def evaluator_of(network: nn.Module, data: Any, handlers: Any = ()) -> SupervisedEvaluator:
    return SupervisedEvaluator(
        device=torch.device("cpu"), val_data_loader=DataLoader(data), network=network,
        inferer=SlidingWindowInferer((16, 16, 16), sw_batch_size=2, overlap=0.25), postprocessing=LAST,
        key_val_metric={"dice": MeanDice(include_background=True, output_transform=from_engine(["pred", "label"]))},
        val_handlers=list(handlers),
    )  # fmt: skip


def both(number: int) -> Any:
    """Batches of both sites in one process, in the order of the sites."""
    parts = [volumes(0), volumes(1)]
    return DataLoader([each for pair in zip(*parts, strict=True) for each in pair], batch_size=number)


def same(model: nn.Module, other: nn.Module, limit: float = 1e-9) -> None:
    start = build()
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert off_by(p.detach(), q.detach()) < limit, (name, off_by(p.detach(), q.detach()))
    assert off_by(next(other.parameters()).detach(), next(start.parameters()).detach()) > 1e-4


def dice_of(network: nn.Module, data: Any) -> list[float]:
    """Dice of each volume, computed here."""
    found = []
    for item in data:
        with torch.no_grad():
            logits = SlidingWindowInferer((16, 16, 16), overlap=0.25)(item["image"][None], network.eval())
        one, two = logits.sigmoid()[0] >= 0.5, item["label"] > 0
        found.append(2 * (one & two).sum().item() / (one.sum() + two.sum()).item())
    return found


@pytest.mark.parametrize("mode", ["dsgd", "rankdad"])
@support.at_sites(2)
def test_a_trainer_with_the_handler_is_that_of_ddp_and_of_one_process(mode: str, tmp_path: Path) -> None:
    """Its evaluator slides windows and pools the Dice of all sites; each site writes its checkpoints."""
    rank = dist.get_rank()
    model, stock, alone = build(), DistributedDataParallel(build()), build()
    handler = SiteHandler(mode, **({"rank": 400, "wire": "fp32", "merge": "all"} if mode == "rankdad" else {}))
    saver = save_at_each_site(CheckpointSaver(str(tmp_path / f"site{rank}"), {"network": model}, save_final=True))
    own = volumes(rank + 5, 1 + rank)
    evaluator = evaluator_of(model, own)
    trainer_of(model, DataLoader(volumes(rank)), [handler, ValidationHandler(1, evaluator), saver]).run()
    trainer_of(stock, DataLoader(volumes(rank))).run()
    trainer_of(alone, both(2)).run()
    same(stock.module, alone)
    same(model, alone, 1e-9 if mode == "dsgd" else 1e-6)
    assert handler.reduction.step == 2 * COUNT
    assert handler.reduction.first_difference() is None
    scores = dice_of(alone, volumes(5, 1) + volumes(6, 2))
    assert evaluator.state.metrics["dice"] == pytest.approx(np.mean(scores), abs=1e-4)
    mean = mean_over_sites(handler.reduction, np.mean(dice_of(alone, own)), len(own))
    assert mean == pytest.approx(np.mean(scores))
    assert mean_over_sites(handler.reduction, float("nan"), 0) != mean  # without images anywhere: NaN
    (written,) = (tmp_path / f"site{rank}").glob("*.pt")
    kept = torch.load(written)
    assert torch.equal(kept["model.0.conv.unit0.conv.weight"], model.state_dict()["model.0.conv.unit0.conv.weight"])
    handler.detach()


@support.at_sites(2)
def test_values_that_a_metric_returns_are_those_of_the_site_also_where_it_has_no_images() -> None:
    network, dice, own = build(), DiceMetric(), []
    reduction = dadplug.GradientReduction(network, "dsgd")
    data = volumes(0, 3 - 3 * dist.get_rank())
    for item in data:
        with torch.no_grad():
            predicted = network(item["image"][None]).sigmoid() > 0.5
        own += dice(predicted.double(), item["label"][None]).flatten().tolist()
    mean = mean_over_sites(reduction, sum(own) / max(1, len(own)), len(own))
    every = reduction.gather_objects(own)
    assert [len(each) for each in every] == [3, 0]
    assert mean == pytest.approx(np.mean(every[0]))
    assert min(every[0]) > 0
    reduction.detach()


@support.at_sites(2)
def test_iterations_that_accumulate_are_exchanged_once() -> None:
    rank, model, alone = dist.get_rank(), build(), build()
    handler = SiteHandler("dsgd")
    keywords = {"accumulation_steps": 2, "epoch_length": 3}
    trainer_of(model, DataLoader(volumes(rank)), [handler], **keywords).run()
    trainer_of(alone, both(2), **keywords).run()
    same(model, alone)
    assert handler.reduction.step == 4  # of two epochs: after the second and the third iteration
    handler.detach()


@support.at_sites(2)
def test_windows_in_training_and_loaders_with_threads() -> None:
    """A forward pass of several windows in each step, and caches that are filled by threads meanwhile."""
    rank, model, alone = dist.get_rank(), build(), build()
    transform, inferer = EnsureTyped(["image", "label"]), SlidingWindowInferer((16, 16, 16), sw_batch_size=3)
    cached = CacheDataset(volumes(rank), transform, num_workers=2, progress=False)
    handler = SiteHandler("dsgd")
    trainer_of(model, ThreadDataLoader(cached, num_workers=0), [handler], inferer=inferer).run()
    trainer_of(alone, both(2), inferer=inferer).run()
    same(model, alone, 1e-6)  # windows of one value, which normalisation divides by little
    smart = SmartCacheDataset(volumes(rank), transform, 0.5, cache_num=2, num_replace_workers=2, progress=False)
    with_threads = trainer_of(model, DataLoader(smart), [handler], epoch_length=2)
    with_threads.add_event_handler(Events.STARTED, lambda: smart.start())
    with_threads.add_event_handler(Events.EPOCH_COMPLETED, lambda: smart.update_cache())
    with_threads.add_event_handler(Events.COMPLETED, lambda: smart.shutdown())
    with_threads.run()
    assert handler.reduction.step == 2 * COUNT + 4
    assert handler.reduction.first_difference() is None
    handler.detach()


@support.at_sites(2)
def test_running_statistics_are_averaged_before_handlers_of_an_epochs_end() -> None:
    rank, model, seen = dist.get_rank(), build(normalised=True), []
    handler, trainer = SiteHandler("dsgd"), None
    trainer = trainer_of(model, DataLoader(volumes(rank)), [handler])
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: seen.append(next(iter(model.buffers())).clone()))
    trainer.run()
    every = handler.reduction.gather_objects(torch.stack(seen))
    assert torch.equal(every[0], every[1])
    assert float(every[0].abs().sum()) > 0
    handler.detach()


@support.at_sites(2)
def test_engines_that_make_other_numbers_of_steps_are_refused() -> None:
    rank, handler = dist.get_rank(), SiteHandler("dsgd")
    trainer = trainer_of(build(), DataLoader(volumes(rank)), [handler], epoch_length=3 + rank)
    with pytest.raises(MismatchError, match=r"epoch_length=\[3, 4\]"):
        trainer.run()
    handler.detach()


@support.at_sites(2)
def test_engines_of_ignite_alone() -> None:
    rank, criterion = dist.get_rank(), nn.MSELoss()
    rows = [torch.randn(4, 6, generator=torch.Generator().manual_seed(n)).double() for n in range(8)]
    models = []
    for sites in ([rank], [0, 1]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)).double()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        trainer = create_supervised_trainer(model, optimizer, criterion)
        handler = SiteHandler("dsgd", network=model, optimizer=optimizer)
        if len(sites) == 1:
            handler.attach(trainer)
        data = [torch.cat([rows[2 * step + site] for site in sites]) for step in range(4)]
        trainer.run([(x, x.roll(1, 1)) for x in data], max_epochs=2)
        models.append(model)
        handler.detach()
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert off_by(p.detach(), q.detach()) < 1e-12
    assert idist.get_world_size() == 2


def test_an_engine_that_has_ended_can_run_again() -> None:
    trainer = trainer_of(build(), DataLoader(volumes(0)), [SiteHandler("dsgd")], max_epochs=1)
    for _ in range(2):  # the second run counts its iterations from zero
        trainer.run()
    assert trainer.state.iteration == COUNT


def test_what_does_not_fit_is_refused_before_training():
    with pytest.raises(ValueError, match="unknown option 'rnk'"):
        SiteHandler(rnk=3)
    engine = Engine(lambda engine, batch: None)
    SiteHandler("dsgd").attach(engine)
    refuses(
        (lambda: engine.run([0]), r"SiteHandler\(network=model, optimizer=optimizer\)"),
        (lambda: SiteHandler("none"), "unknown mode 'none'"),
        (trainer_of(build(), DataLoader([]), [SiteHandler("dsgd")]).run, "no batch in this epoch: check the data"),
    )


@pytest.mark.parametrize("iteration", ["4", -4, 4.0, True, 10**30, 12, None], ids=str)
def test_a_place_that_is_none_of_the_run_is_not_taken(iteration: Any) -> None:
    engine = Engine(lambda engine, batch: None)
    place = _EnginePlace(engine)
    engine.state.epoch_length, engine.state.max_epochs = 4, 3
    place.load_state_dict({"iteration": 11})
    with pytest.raises(ValueError, match="the number of the iteration is"):
        place.load_state_dict({"iteration": iteration})
    assert (place.iteration, engine.state.iteration, engine.state.epoch) == (11, 11, 2)
