"""Sites with several processes over a hub: gradients, collectives and trainers."""

import copy
import itertools
import json
import os
import signal
from pathlib import Path

import hub_kits
import pytest
import support
import torch
import torch.distributed as dist
from fleet import ENDED, Fleet, MortalHub, is_exact, presence, same_bits
from running_hub import running_hub
from sealed_sites import sealed_hub
from torch import nn

from dadplug import DifferentialPrivacy, GradientReduction, LocalSGD, NonFiniteError
from dadplug.adapm import ParameterManager

JOINED = Path(__file__).with_name("test_joined.py")
NAMES = ("bavaria", "saxony")
ROWS = (3, 6, 4, 2)  # of each process in a step


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    with running_hub(tmp_path_factory.mktemp("hub") / "kits", NAMES, policy={"allow_pickle": True}) as hub:
        yield hub


@pytest.fixture(scope="module")
def four(hub):
    """Two sites of two processes each."""
    with support.Sites(4, kits=[hub.kits / NAMES[rank // 2] for rank in range(4)]) as group:
        yield group


def build(mode: str, options: dict) -> nn.Module:
    """Build a model with parameters on all paths that the mode can have."""
    norm = nn.BatchNorm1d(10) if options.get("sync_batchnorm") else nn.LayerNorm(10)
    middle = [nn.Tanh()] if mode == "edad" else [norm, nn.Tanh()]
    return nn.Sequential(nn.Linear(12, 10), *middle, nn.Linear(10, 5)).double()


def off_by(own: torch.Tensor, other: torch.Tensor) -> float:
    return float((own - other).norm() / other.norm().clamp(min=1e-3))  # biases before a norm have none


def trains(mode: str, options: dict, steps: int = 4) -> tuple[float, int, int]:
    """Train beside one process with the rows of all; return the largest error and the bytes sent and inside."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = build(mode, options)
    reduction = GradientReduction(model, mode=mode, **{"weighting": "samples"} | options)
    reference = copy.deepcopy(model)
    worst = 0.0
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        batches = [
            (
                torch.randn(rows, 12, dtype=torch.float64, generator=generator),
                torch.randint(0, 5, (rows,), generator=generator),
            )
            for rows in ROWS[:world_size]
        ]
        idle = step == 2 and not options.get("sync_batchnorm")
        present = [batch for other, batch in enumerate(batches) if not (idle and other == 1)]
        model.zero_grad()
        reference.zero_grad()
        if idle and rank == 1:
            reduction.idle()
        else:
            nn.functional.cross_entropy(model(batches[rank][0]), batches[rank][1]).backward()
            reduction.synchronize()
        inputs, targets = (torch.cat(parts) for parts in zip(*present, strict=True))
        nn.functional.cross_entropy(reference(inputs), targets).backward()
        for own, other in zip(model.parameters(), reference.parameters(), strict=True):
            worst = max(worst, off_by(own.grad, other.grad))
            with torch.no_grad():
                own.sub_(own.grad, alpha=0.3)
                other.sub_(other.grad, alpha=0.3)
    assert reduction.first_difference() is None
    sent, inside = reduction.traffic.bytes_sent, reduction.traffic.bytes_inside
    return worst, sent, inside


EXACT = {
    "dsgd": {},
    "dad": {"sync_batchnorm": True},
    "auto": {},
    "edad": {},
    "rankdad": {"rank": 10, "tolerance": 0.0},
    "powersgd": {"rank": 10},
    "topk": {"density": 1.0},
}


def test_gradients_are_those_of_one_process(four):
    for mode, options in EXACT.items():
        results = four.run(trains, mode, options)
        assert max(worst for worst, _, _ in results) < 1e-9, (mode, results)
        sent = [sent for _, sent, _ in results]
        assert sent[0] > 0 < sent[2], mode
        assert sent[1] == sent[3] == 0, mode
        assert all(inside > 0 for _, _, inside in results), mode


def speaks_by_collectives() -> list:
    rank, count = dist.get_rank(), dist.get_world_size()
    assert dist.get_backend() == "dadplug"
    objects: list = [None] * count
    dist.all_gather_object(objects, {"rank": rank, "list": list(range(rank * 100))})
    assert [len(each["list"]) for each in objects] == [100 * other for other in range(count)]
    for source in range(count):
        several = [f"from {rank}"]
        dist.broadcast_object_list(several, src=source)
        assert several == [f"from {source}"]
    dist.barrier()
    total = torch.arange(40_000.0) * (rank + 1)
    small = torch.tensor([rank], dtype=torch.int64)
    works = [dist.all_reduce(total, async_op=True), dist.all_reduce(small, dist.ReduceOp.MAX, async_op=True)]
    for work in works:
        work.wait()
    assert torch.equal(total, torch.arange(40_000.0) * (count * (count + 1) // 2))
    assert int(small) == count - 1
    swapped = torch.zeros(count)
    dist.all_to_all_single(swapped, torch.arange(float(count)) + 10 * rank)
    everyone = dist.new_group(range(count))
    alone = dist.new_group([rank], use_local_synchronization=True)
    for each, expected in ((everyone, float(count)), (alone, 1.0)):
        ones = torch.ones(1)
        dist.all_reduce(ones, group=each)
        assert float(ones) == expected
        dist.destroy_process_group(each)
    if rank < 2:
        with pytest.raises(ValueError, match="holds all sites, or one"):
            dist.new_group([0, 1])
    else:
        dist.new_group([0, 1])
    return swapped.tolist()


def exchanges_by_the_reduction() -> list:
    rank = dist.get_rank()
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"goes without collectives of torch\.distributed, and some"):
        GradientReduction(model, weighting="samples", min_sites=1)
    reduction = GradientReduction(model, mode="dad", weighting="samples")
    weights = reduction.gather_objects(model.weight.detach())
    assert all(torch.equal(weights[0], each) for each in weights)
    with pytest.raises(TypeError, match=r"process 1 of site 0 .* has an object that cannot be gathered"):
        reduction.gather_objects(object() if rank == 1 else rank)
    assert "NaN or Inf at process 1 of site 0 (bavaria)" in nan_at(1, model, reduction)
    found = reduction.gather_objects({"rank": rank, "bytes": b"x" * rank})
    reduction.detach()
    with pytest.raises(ValueError, match="AdaPM's tables and parameter servers"):
        ParameterManager()
    return found


def nan_at(culprit: int, model: nn.Module, reduction: GradientReduction) -> str:
    loss = model(torch.randn(2, 3)).square().mean()
    (loss * (torch.nan if dist.get_rank() == culprit else 1)).backward()
    with pytest.raises(NonFiniteError) as found:
        reduction.synchronize()
    return str(found.value)


def listens() -> list[str]:
    """Return the addresses at which this process listens, as hexadecimal numbers."""
    return [address.partition(":")[0] for address in support.load(str(JOINED)).listeners()]


def test_collectives_and_objects_reach_all_processes(four):
    swapped = four.run(speaks_by_collectives)
    assert swapped == [[float(rank + 10 * other) for other in range(4)] for rank in range(4)]
    objects = [{"rank": rank, "bytes": b"x" * rank} for rank in range(4)]
    assert four.run(exchanges_by_the_reduction) == [objects] * 4
    assert {address for found in four.run(listens) for address in found} <= {"0100007F"}  # 127.0.0.1


def fits_by_catalyst() -> dict:
    from catalyst_training import metrics_callbacks, train

    runner = train("rankdad", callbacks=metrics_callbacks(), lr=0.5, epochs=12)
    assert runner.reduction.first_difference() is None
    assert runner.engine.num_processes == 4
    return {name: dict(values) for name, values in runner.epoch_metrics.items()}


def test_catalysts_runner_trains_with_all_processes(four):
    support.need("catalyst")
    first, *others = four.run(fits_by_catalyst)
    assert all(each == first for each in others)
    assert first["valid"]["accuracy01"] > 0.5


def takes_local_steps() -> torch.Tensor:
    model = nn.Linear(6, 3)
    torch.manual_seed(dist.get_rank())
    local = LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), every=2, wire="fp32", weighting="samples")
    for _ in range(4):
        model(torch.randn(4, 6)).square().mean().backward()
        local.step()
    local.finish()
    return model.weight.detach()


def test_local_steps_end_with_equal_models(four):
    first, *others = four.run(takes_local_steps)
    assert all(torch.equal(first, each) for each in others)


def test_sites_may_have_different_numbers_of_processes_and_seal_their_messages(tmp_path):
    address = f"127.0.0.1:{support.free_port()}"
    kits = hub_kits.make(
        tmp_path / "kits",
        hub=address,
        hub_names=[],
        sites=list(NAMES),
        hub_at=NAMES[0],
        sealed=True,
        policy={name: {"allow_pickle": True} for name in NAMES},
    )
    own = [kits / NAMES[0], kits / NAMES[0], kits / NAMES[1]]
    with running_hub(kits, sites=NAMES), support.Sites(3, kits=own) as three:
        for mode, options in EXACT.items():
            results = three.run(trains, mode, options)
            assert max(worst for worst, _, _ in results) < 1e-9, (mode, results)
        three.run(speaks_by_collectives)
        assert three.run(exchanges_by_the_reduction)[2] == [{"rank": rank, "bytes": b"x" * rank} for rank in range(3)]
        assert three.run(listens)[2] == []  # a site with one process needs no port
        three.start(is_lost)
        first, _, third = three.outcomes()
        lost = "process 1 of site 0 (bavaria) is gone: its process has ended without a reason"
        assert (first.kind, third.kind) == ("failed", "failed")
        assert f"SiteError: {lost}" in first.value
        assert f"SiteError: site 0 (bavaria) is gone: {lost}" in third.value


def is_lost() -> None:
    """Exchange until process 1 kills itself."""
    reduction = GradientReduction(nn.Linear(3, 2), mode="dsgd", timeout=60, weighting="samples")
    for number in itertools.count():
        if number == 3 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        reduction.gather_objects(None)


# Programs of sites with several processes, as launchers start them, and how they end when a process is lost


LIGHTNING = """
import sys, torch, dadplug
import pytorch_lightning as pl
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(12, 3)
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen += batch[2].tolist()
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if __name__ == "__main__":
    torch.set_num_threads(1)
    dadplug.connect(kit=sys.argv[1], timeout=200)
    data = TensorDataset(torch.randn(48, 12), torch.randint(0, 3, (48,)), torch.arange(48))
    for repeat in range(2):
        trainer = pl.Trainer(strategy=dadplug.DADStrategy("rankdad", timeout=200), accelerator="cpu", devices=2,
                             max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                             enable_model_summary=False)
        module = Module()
        trainer.fit(module, DataLoader(data, batch_size=4))
        assert trainer.strategy.reduction.first_difference() is None
    place = [trainer.global_rank, trainer.world_size, trainer.local_rank, trainer.global_step]
    sys.stdout.write(f"done {[place, module.seen]}\\n")
"""


def local_processes(program: str, kit: str, *arguments: str) -> list[list[str]]:
    """Return commands of two processes of a site, in an environment as torchrun sets it."""
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": str(support.free_port())}
    commands = []
    for index in "01":
        code = "import os, runpy, sys; sys.argv.pop(0); "
        code += f"os.environ.update({json.dumps(place | {'LOCAL_RANK': index, 'RANK': index})}); "
        code += "runpy.run_path(sys.argv[0], run_name='__main__')"
        commands.append(["-c", code, program, kit, *arguments])
    return commands


@pytest.mark.slow
def test_lightning_starts_the_processes_of_a_site(tmp_path):
    """The first site has a second process once the trainer begins, and the other one has had two from the start."""
    support.need("pytorch_lightning")
    program = tmp_path / "train.py"
    program.write_text(LIGHTNING)
    with running_hub(tmp_path / "kits", sites=NAMES) as hub:
        first, second = (str(hub.kits / name) for name in NAMES)
        commands = [[str(program), first], *local_processes(str(program), second)]
        finished = support.run_programs(commands, timeout=160, preload=["pytorch_lightning"])
    for each in finished:
        assert each.status == 0, each.errors
    words = "\n".join(each.output for each in finished).split("done ")[1:]
    found = sorted(json.loads(word.splitlines()[0]) for word in words)
    assert [place for place, _ in found] == [[rank, 4, rank % 2, 3] for rank in range(4)]
    assert sorted(row for _, seen in found for row in seen) == list(range(48))  # each sample at one process


PLAIN = """
import os, signal, sys, torch, dadplug
from torch import nn

torch.set_num_threads(1)
dadplug.connect(kit=sys.argv[1], timeout=100)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
reduction = dadplug.GradientReduction(model, mode=sys.argv[2], timeout=100)
for step in range(6):
    if step == 3 and reduction.site_rank == int(sys.argv[3]):
        raise ValueError("bad data")
    if step == 3 and reduction.site_rank == int(sys.argv[4]):
        os.kill(os.getpid(), signal.SIGKILL)
    model(torch.randn(8, 6)).square().mean().backward()
    reduction.synchronize()
"""


@pytest.mark.parametrize(
    ("mode", "raises", "killed"),
    [("rankdad", "3", "-1"), ("dsgd", "-1", "2")],
    ids=["a process raises", "the first process is killed"],
)
def test_the_others_learn_which_process_has_ended_and_why(tmp_path, mode, raises, killed):
    program = tmp_path / "plain.py"
    program.write_text(PLAIN)
    with running_hub(tmp_path / "kits", sites=NAMES, grace=0.5) as hub:
        commands = [
            command
            for name in NAMES
            for command in local_processes(str(program), str(hub.kits / name), mode, raises, killed)
        ]
        first, second, third, fourth = support.run_programs(commands, timeout=160, destructors=True)
        hub.await_line("saxony has left")
    assert [each.status for each in (first, second)] == [1, 1]
    if raises == "3":
        lost = "process 1 of site 1 (saxony) is gone: ValueError: bad data"
        assert "ValueError: bad data" in fourth.errors
        assert f"SiteError: {lost}" in third.errors
        assert all(f"SiteError: site 1 (saxony) is gone: {lost}" in each.errors for each in (first, second))
    else:
        assert third.status == -9
        assert "SiteError: process 0 of site 1 (saxony) is gone" in fourth.errors
        assert all("SiteError: site 1 (saxony) is gone" in each.errors for each in (first, second))


# Sites that may leave: the processes of each act as one site


ALL = ["a", "a1", "b", "b1", "c", "c1"]


def leaving(folder: Path, sealed: bool = False, **settings: object) -> Fleet:
    """Return three sites of two processes each, which train with two sites, too."""
    settings = {"mode": "rankdad", "merge": "owner", "exact": True} | settings
    return Fleet(folder, sealed_hub(folder) if sealed else "abc", processes=2, min_sites=2, **settings)


def is_one_process(fleet: Fleet, processes: list[str], exact: bool = True) -> dict[int, dict]:
    """Check that all processes have the same bits, those of one process with the rows of all present sites."""
    lines = fleet.lines(processes[0])
    if exact:
        is_exact(lines)
    for name in processes:
        same_bits(lines, fleet.lines(name))
    return lines


@pytest.mark.parametrize("sealed", [False, True], ids=["open", "sealed"])
@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "dsgd", "merge": "all", "talks": True},
        {"mode": "dad", "merge": "all"},
        {"merge": "all", "wraps": True},
        {"merge": "owner"},
        {"merge": "owner", "late": "skip", "meets": True},
    ],
    ids=["dsgd", "dad", "rankdad", "owner", "owner-skip"],
)
def test_processes_of_a_site_that_may_leave_are_as_one(tmp_path, settings, sealed):
    with leaving(tmp_path, sealed, steps=7, stops=False, **settings) as fleet:
        fleet.start("ab")
        fleet.start("c", processes=1)
        fleet.end(ALL[:5])
    is_one_process(fleet, ALL[:5])


def test_a_site_sends_the_bytes_of_one_with_one_process(tmp_path):
    sent = []
    for count in (1, 2):
        with leaving(tmp_path / str(count), steps=4, stops=False) as fleet:
            fleet.start("abc", processes=count)
            fleet.end([name for name in ALL if name in fleet.processes])
            sent.append([[line["bytes"] for line in fleet.lines(name).values()] for name in "abc"])
    assert sent[0] == sent[1]
    assert {nbytes for _, nbytes in (line["bytes"] for line in fleet.lines("b1").values())} == {0}


@pytest.fixture(scope="module")
def two_and_one(tmp_path_factory):
    """Processes of two sites, which have two and one."""
    places = (NAMES[0], NAMES[0], NAMES[1])
    with (
        running_hub(tmp_path_factory.mktemp("hub") / "kits", NAMES) as hub,
        support.Sites(3, kits=[hub.kits / name for name in places]) as three,
    ):
        yield three


def test_a_process_without_data_has_no_weight_in_its_site(two_and_one):
    """Process 1 calls idle() in a step, in which its site has the rows of process 0."""
    for mode in ("dsgd", "auto", "rankdad"):
        options = {name: value for name, value in EXACT[mode].items() if name != "sync_batchnorm"}
        results = two_and_one.run(trains, mode, options | {"min_sites": 2})
        assert max(worst for worst, _, _ in results) < 1e-9, (mode, results)
        assert results[0][1] > 0 == results[1][1]
    assert all("NaN or Inf at site 0 (bavaria)" in text for text in two_and_one.run(finds_nan))


def scaled(mode: str, options: dict, scale: float) -> list[torch.Tensor]:
    """Return gradients without the loss scale; the process that sends for its site has none in two of the steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 8)).double()
    reduction = GradientReduction(model, mode, min_sites=2, **options)
    gradients = []
    for step in range(4):
        model.zero_grad()
        if step % 2 == 0 and dist.get_rank() == 0:
            reduction.idle()
        else:
            inputs = torch.randn(9, 12, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            with reduction.loss_scale(scale):
                (scale * model(inputs.double()).square().mean()).backward()
            reduction.synchronize()
        gradients.append(model[0].weight.grad / scale)
    reduction.detach()
    return gradients


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("dsgd", {"wire": "int8"}),
        ("rankdad", {"rank": 2, "error_feedback": True, "merge": "all"}),
        ("rankdad", {"rank": 2, "error_feedback": True, "merge": "owner"}),
    ],
    ids=["dsgd", "rankdad", "owner"],
)
def test_a_process_without_data_takes_the_loss_scale_of_its_site(two_and_one, mode, options):
    """What is not sent is kept without the scale, from the first step on."""
    plain, others = (two_and_one.run(scaled, mode, options, scale) for scale in (1.0, 1024.0))
    for process in range(3):
        torch.testing.assert_close(others[process], plain[process], rtol=1e-6, atol=1e-9)


def finds_nan() -> str:
    model = nn.Linear(3, 2)
    return nan_at(1, model, GradientReduction(model, mode="dad", min_sites=2))


@pytest.mark.parametrize(
    ("how", "lost", "sealed"), [("header", "b", False), ("late", "a", False), ("sent", "b", True), ("late", "b", True)]
)
def test_a_site_with_several_processes_is_killed_in_mid_step_and_returns(tmp_path, how, lost, sealed):
    others = "abc".replace(lost, "")
    with leaving(tmp_path, sealed, pause=0.1) as fleet:
        fleet.start(others)
        fleet.start(lost, leave=3, how=how, leaver=-1 if how == "sent" else 0)
        fleet.end(lost, -9)
        errors = fleet.end([f"{lost}1"], -9 if how == "sent" else 1)
        assert how == "sent" or f"SiteError: process 0 of site {ord(lost) - ord('a')} ({lost}) is gone" in errors
        fleet.start(lost)
        fleet.hub.await_line(f"{lost} joins", ENDED)
        fleet.stop(8, others[0])
        fleet.end(ALL)
    present = presence(is_one_process(fleet, sorted(ALL, key=lambda name: name.startswith(lost))))
    assert present[3] == [ord(name) - ord("a") for name in others]
    assert present[max(present)] == [0, 1, 2]


def test_a_site_ends_with_one_of_its_processes_and_the_others_go_on(tmp_path):
    with leaving(tmp_path, pause=0.03, steps=12, stops=False) as fleet:
        fleet.start("ac")
        fleet.start("b", leave=3, leaver=1)
        fleet.end(["b1"], -9)
        lost = "process 1 of site 1 (b) is gone: its process has ended without a reason"
        assert f"SiteError: {lost}" in fleet.end("b", 1)
        fleet.end(["a", "a1", "c", "c1"])

        def said() -> bool:
            return any(f"b has left: {lost}" in line for line in fleet.hub.log)

        support.until(said, lambda: f"the hub has not said that b has left: {fleet.hub.log}", 10)
    present = presence(is_one_process(fleet, ["a", "a1", "c", "c1"]))
    assert [present[step] for step in (2, 3, 11)] == [[0, 1, 2], [0, 2], [0, 2]]


def test_processes_of_a_site_that_was_stopped_join_again(tmp_path):
    with leaving(tmp_path, pause=0.1, site_timeout=1.0) as fleet:
        fleet.start("abc")
        fleet.await_step("b", 2)
        for name in ("b", "b1"):
            fleet.freeze(name)
        fleet.await_step("a", max(fleet.lines("b")) + 4)
        for name in ("b", "b1"):
            fleet.thaw(name)
        fleet.hub.await_line("b joins", ENDED)
        fleet.stop(8)
        fleet.end(ALL)
    present = presence(is_one_process(fleet, ["a", "a1", "c", "c1", "b", "b1"]))
    assert {len(each) for each in present.values()} == {2, 3}


def test_a_site_returns_with_more_processes_and_the_hub_is_lost(tmp_path):
    processes = ["a", "a1", "b", "b1", "b2"]
    settings = {"mode": "rankdad", "merge": "owner", "exact": True, "pause": 0.05, "min_sites": 1}
    with Fleet(tmp_path, MortalHub(tmp_path / "hub", "ab"), **settings) as fleet:
        fleet.start("a", processes=2)
        fleet.start("b", leave=3)
        fleet.end("b", -9)
        fleet.hub.await_line("b has left", ENDED)
        fleet.start("b", processes=3)
        fleet.hub.await_line("b joins", ENDED)
        fleet.await_more("a", 3)
        fleet.hub.restart()
        fleet.await_more("a", 5)
        fleet.stop(10)
        fleet.end(processes)
    present = presence(is_one_process(fleet, processes))
    assert present[3] == [0]
    assert present[max(present)] == [0, 1]


def refuses_what_one_process_can_do() -> None:
    model = nn.Linear(3, 2)
    private = DifferentialPrivacy(max_grad_norm=1.0, noise_multiplier=1.0, expected_batch=4)
    for options in ({"privacy": private}, {"private": ("bias",)}):
        with pytest.raises(
            ValueError, match=f"{next(iter(options))}= with min_sites goes with one process at each site"
        ):
            GradientReduction(model, min_sites=1, **options)
    with pytest.raises(ValueError, match="embeddings with max_norm and min_sites go with one process"):
        GradientReduction(nn.Sequential(nn.Embedding(3, 2, max_norm=1.0)), min_sites=1)
    reduction = GradientReduction(model, min_sites=1)
    with pytest.raises(ValueError, match="noise with min_sites go with one process at each site"):
        _ = reduction.noise
    with pytest.raises(ValueError, match=r"collectives of torch\.distributed do not go with min_sites"):
        dist.barrier()


def refuses_local_steps() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match="LocalSGD with min_sites goes with one process at each site"):
        LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), min_sites=1)


@pytest.mark.parametrize("refuses", [refuses_what_one_process_can_do, refuses_local_steps])
def test_what_needs_one_process_at_each_site_is_refused(tmp_path, refuses):
    with running_hub(tmp_path / "kits", NAMES) as hub:
        kits = [hub.kits / NAMES[rank // 2] for rank in range(4)]
        with support.Sites(4, kits=kits) as four:
            four.run(refuses)
