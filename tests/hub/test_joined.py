"""Sites that are connected by their kits: torch.distributed, the trainers and the commands over a hub."""

import os
import re
import selectors
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import support
import torch
import torch.distributed as dist
from running_hub import RunningHub, TestSite, close_step, running_hub, together, until
from support import refuses
from torch import nn

import dadplug
from dadplug.errors import RefusedError, TryAgainError
from dadplug.exchange.rounds import Requirements
from dadplug.hub.server.journal import Journal
from dadplug.hub.server.membership import Phase
from dadplug.hub.server.relay import Relay
from dadplug.hub.server.session import HubStreams, Session
from dadplug.hub.wire.messages import (
    FRESH,
    PIECE_BYTES,
    VERSION,
    Accept,
    Close,
    Drop,
    Head,
    Hello,
    Join,
    Joined,
    Kind,
    Position,
    RoundKind,
    Rules,
    SendState,
    Start,
    Welcome,
)
from dadplug.parameter_server.service import SequencerHost

NAMES = ("bavaria", "saxony")


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    with running_hub(tmp_path_factory.mktemp("hub") / "kits", sites=NAMES, policy={"allow_pickle": True}) as hub:
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


def speaks_by_collectives() -> None:
    rank = dist.get_rank()
    assert (dist.get_backend(), dist.get_world_size()) == ("dadplug", 2)
    objects: list = [None, None]
    dist.all_gather_object(objects, {"rank": rank, "list": list(range(rank * 1000))})
    assert [len(each["list"]) for each in objects] == [0, 1000]
    scattered: list = [None]
    dist.scatter_object_list(scattered, ["a", "b"] if rank == 0 else None, src=0)
    assert scattered == ["ab"[rank]]
    total = torch.arange(40_000.0) * (rank + 1)
    work = dist.all_reduce(total, async_op=True)
    assert work.get_future().wait()[0] is not None
    assert torch.equal(total, torch.arange(40_000.0) * 3)


def functional_collectives() -> list:
    """Those that DTensor, FSDP2 and compiled programs call, by C++."""
    from torch.distributed import _functional_collectives as functional
    from torch.distributed import tensor

    rank, world = dist.get_rank(), dist.group.WORLD
    own, pair = torch.full((1, 2), rank + 1.0), torch.arange(4.0) * (rank + 1)
    several = functional.all_gather_into_tensor_coalesced([own, own.flatten()[:1] + 4], world)
    parts = functional.reduce_scatter_tensor_coalesced([pair, pair[:2]], "sum", [0, 0], world)
    mesh = dist.init_device_mesh("cpu", (2,))
    spread = tensor.distribute_tensor(torch.arange(5.0), mesh, [tensor.Shard(0)])
    found = [functional.all_gather_tensor(own, 0, world), *several, *parts, spread.full_tensor()]
    return [each.flatten().tolist() for each in found]


def test_functional_collectives_and_dtensors_work_over_the_hub(group):
    same, last = [[1.0, 1.0, 2.0, 2.0], [1.0, 1.0, 2.0, 2.0], [5.0, 6.0]], [0.0, 1.0, 2.0, 3.0, 4.0]
    assert group.run(functional_collectives) == [
        [*same, [0.0, 3.0], [0.0], last],
        [*same, [6.0, 9.0], [3.0], last],
    ]


def test_torch_distributed_works_over_the_hub(group):
    group.run(speaks_by_collectives)


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
    refuses(
        (
            lambda: wrapped.wait(["nothing"], timedelta(seconds=0.05)),
            r"wait of .*prefix/nothing at the store of the hub at .* has timed out",
        ),
        (lambda: store.set("large", "x" * (PIECE_BYTES // 2 + 1)), f"takes {PIECE_BYTES // 2} at most"),
        error=dist.DistStoreError,
    )
    dist.barrier()


def test_the_store_is_that_of_torch(group):
    group.run(uses_the_store)


def connects_again(kit: str) -> None:
    dadplug.connect(kit=kit)
    other = Path(kit).parent / NAMES[1 - dist.get_rank()]
    with pytest.raises(ValueError, match="is connected by the kit"):
        dadplug.connect(kit=other)


def test_the_same_kit_can_be_given_twice_and_no_other(group, hub):
    for rank, name in enumerate(NAMES):
        group._pipes[rank].send((__file__, "connects_again", (str(hub.kits / name),)))
    assert [outcome.kind for outcome in group.outcomes()] == ["ok", "ok"]


def fits_by_lightning(stock: bool) -> tuple:
    from dadplug.runners._lightning.strategy import SiteEnvironment
    from dadplug.runners.pytorch_lightning import DADStrategy
    from lightning_zoo import Seen, trainer
    from pytorch_lightning.strategies import DDPStrategy
    from torch.utils.data import DataLoader, TensorDataset

    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(70, 8, generator=generator)
    data = TensorDataset(inputs, (inputs[:, :4] + 0.3 * inputs[:, 4:]).argmax(1), torch.arange(70))
    strategy = DADStrategy("dsgd", weighting="uniform")
    if stock:
        strategy = DDPStrategy(process_group_backend="dadplug", cluster_environment=SiteEnvironment())
    current = trainer(strategy, num_nodes=2 if stock else 1, max_epochs=4, precision="32-true")
    torch.manual_seed(0)
    module = Seen(nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 4)))
    current.fit(module, *(DataLoader(data, batch_size=5, shuffle=shuffle) for shuffle in (True, False)))
    metrics = {name: float(value) for name, value in current.callback_metrics.items()}
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


@pytest.mark.parametrize(
    ("trainer", "kind", "how"), [("catalyst", "sgd", "auto"), ("lightning", "adagrad", "function")]
)
def test_embeddings_are_managed_in_both_trainers(group, trainer, kind, how):
    pytest.importorskip("catalyst")
    pytest.importorskip("pytorch_lightning")
    trains = shared("test_adapm_trainers.py").test_sites_with_rows_of_their_own_are_one_process
    group.run(trains, trainer, kind, how)


def test_no_site_listens(group):
    """After the trainers, so that whatever they open is seen."""
    assert group.run(listeners) == [[], []]


# Programs at sites with kits: exit reasons, commands, and arguments that do not go together


HEAD = """
import sys, torch, dadplug, torch.distributed as dist
from torch import nn
torch.set_num_threads(1)
dadplug.connect(kit=sys.argv[1], timeout=200)
rank = dist.get_rank()
"""
ENDS = {
    "plain loop": """
reduction = dadplug.GradientReduction(model := nn.Linear(4, 4), mode="dad")
for step in range(100):
    if step == 3 and rank == 1:
        raise ValueError("the scanner is broken")
    model(torch.ones(2, 4)).sum().backward()
    reduction.synchronize()
""",
    "collectives": """
for step in range(100):
    if step == 3 and rank == 1:
        raise ValueError("the scanner is broken")
    dist.all_reduce(torch.ones(3))
""",
    "Catalyst": """
from catalyst import dl
from catalyst_training import train
class Breaks(dl.Callback):
    def __init__(self): super().__init__(order=1)
    def on_batch_end(self, runner):
        if rank == 1: raise ValueError("the scanner is broken")
train("dad", callbacks=[Breaks()])
""",
    "Lightning": """
import pytorch_lightning as pl
class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 4)
    def training_step(self, batch, batch_idx):
        if rank == 1 and batch_idx == 3: raise ValueError("the scanner is broken")
        return self.net(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
from dadplug.runners.pytorch_lightning import DADStrategy
trainer = pl.Trainer(strategy=DADStrategy("dad"), accelerator="cpu", devices=1, max_epochs=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(40, 4), batch_size=2))
""",
}


def run_sites(folder: Path, hub: RunningHub, code: str, **options: object) -> list[support.Finished]:
    """Run a program at all sites of a hub."""
    script = folder / "site.py"
    script.write_text(code)
    return support.run_programs([[str(script), str(hub.kits / name)] for name in NAMES], **options)


@pytest.mark.parametrize("program", ENDS)
def test_the_reason_of_an_exit_reaches_the_other_site(tmp_path, program):
    packages = {"Catalyst": ["catalyst"], "Lightning": ["pytorch_lightning"]}.get(program, [])
    for package in packages:
        support.need(package)
    code = f"import sys; sys.path[:] = {support.sys.path!r}\n" + HEAD + ENDS[program]
    with running_hub(tmp_path / "kits", sites=NAMES) as hub:
        first, second = run_sites(tmp_path, hub, code, preload=packages)
        assert (first.status, second.status) == (1, 1)
        assert "ValueError: the scanner is broken" in second.errors
        last = first.errors.strip().splitlines()[-1]
        assert re.search(r"SiteError: site 1 \(saxony\) is gone: ValueError: the scanner is broken", last), first.errors
        hub.await_line("saxony has left: ValueError: the scanner is broken")


def test_sites_leave_without_a_reason_where_their_programs_end(tmp_path):
    code = HEAD + "dadplug.GradientReduction(nn.Linear(2, 2), mode='dsgd').first_difference()\n"
    with running_hub(tmp_path / "kits", sites=NAMES) as hub:
        for _ in range(2):  # the same hub serves the next run
            for each in run_sites(tmp_path, hub, code):
                assert each.status == 0, each.errors
        for name in NAMES:
            hub.await_line(f"{name} has left: its training is complete")


def test_sites_connect_again_after_an_error(tmp_path):
    code = """
reduction = dadplug.GradientReduction(model := nn.Linear(4, 4), mode="dad")
try:
    if rank == 1:
        raise ValueError("no data today")
    model(torch.ones(2, 4)).sum().backward()
    reduction.synchronize()
except Exception as error:
    reduction.abort(f"{type(error).__name__}: {error}")
    print(error)
reduction.detach(discard=True)
dadplug.connect(kit=sys.argv[1], timeout=200)
reduction = dadplug.GradientReduction(model, mode="dad")
model(torch.ones(2, 4)).sum().backward()
reduction.synchronize()
assert reduction.first_difference() is None
assert reduction.gather_objects(rank) == [0, 1]
"""
    with running_hub(tmp_path / "kits", sites=NAMES) as hub:
        first, second = run_sites(tmp_path, hub, HEAD + code)
    assert first.status == 0, first.errors
    assert second.status == 0, second.errors
    assert "site 1 (saxony) is gone: ValueError: no data today" in first.output


@pytest.mark.parametrize("wire", [7, 8])
def test_sites_that_exchange_different_things_say_so_and_other_releases_train(tmp_path, wire):
    code = (
        "import sys, dadplug\nfrom dadplug.hub.wire import messages\nmessages.SITES_VERSION = 7\n"
        f"if 'saxony' in sys.argv[1]: dadplug.__version__, messages.SITES_VERSION = '0.0.9', {wire}\n"
        "dadplug.connect(kit=sys.argv[1], timeout=200)\n"
    )
    with running_hub(tmp_path / "kits", sites=NAMES) as hub:
        finished = run_sites(tmp_path, hub, code)
    for each in finished:
        assert each.status == int(wire != 7), each.errors
        found = "MismatchError: the sites run different versions of dadplug: site 0 (bavaria) 0." in each.errors
        assert found == (wire != 7)
        assert ("site 1 (saxony) 0.0.9/8" in each.errors) == (wire != 7)


def test_what_is_slow_to_load_is_loaded_before_the_hub_hears_of_the_site(tmp_path):
    code = (
        "import sys, dadplug\nfrom dadplug.hub.site.link import HubLink\n"
        "def open(*arguments, **options): sys.exit(','.join({'numba'} - {*sys.modules}) or 3)\n"
        "HubLink.open = open\ndadplug.connect(kit=sys.argv[1])\n"
    )
    with running_hub(tmp_path / "kits", sites=NAMES) as hub:
        for each in run_sites(tmp_path, hub, code):
            assert each.status == 3, each.errors


# Arguments


@pytest.mark.parametrize(
    "place", [{"rank": 0}, {"num_nodes": 2}, {"dist_url": "tcp://127.0.0.1:1"}, {"backend": "gloo"}]
)
def test_a_kit_and_a_place_do_not_go_together(place):
    with pytest.raises(ValueError, match=f"leave out {next(iter(place))}"):
        dadplug.connect(kit="kits/a", **place)


def test_processes_of_a_site_on_several_machines_are_refused(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"4 processes here \(LOCAL_WORLD_SIZE\), and its variables WORLD_SIZE"):
        dadplug.connect(kit="kits/a")
    for name, value in {"WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"8 processes \(WORLD_SIZE\), of which 4 are here: .* torchrun --standalone"):
        dadplug.connect(kit="kits/a")


# Sites that join in one round, one after the other: each of them knows which others have


def test_a_site_is_told_of_those_that_have_joined_before_it_in_the_same_round(tmp_path):
    requirements = Requirements(1, 60_000)
    with running_hub(tmp_path / "kits", ("a", "b", "c")) as hub:
        a, b, c = together(hub, "abc")
        for site in (a, b, c):
            site.control(requirements)
        for site in (b, c):
            site.leave("it is away")
            assert a.action(Drop).slot == site.slot
        b, c = TestSite(hub.kit("b"), hub.address), TestSite(hub.kit("c"), hub.address)
        a.send(Kind.END, exchange=RoundKind.FIRST)
        assert a.action(Close).contributors == (0,)
        b.control(requirements)
        until(lambda: hub.hub.relay.sessions["training", 1].ready)
        a.send(Kind.END, step=2, exchange=RoundKind.FIRST)
        last = Position(hub.hub.relay.run.membership.life, 1)
        assert [b.action(Accept).position, b.action(Accept).position] == [None, last]
        assert b.action(Drop).slot == 2  # it has been away for longer
        assert b.action(Join).slot == 1
        c.control(requirements)  # while b has not got its state
        c.action(Accept)
        c.action(Accept)
        assert [c.action(Join).slot, c.action(Join).slot] == [1, 2]
        assert b.action(Join).slot == 2
        assert {a.action(SendState).joiner, a.action(SendState).joiner} == {1, 2}
        for site in (b, c):
            site.control(Joined(last))
            site.send(Kind.END, step=2, exchange=RoundKind.FIRST)
        assert c.action(Close).contributors == (0, 1, 2)


def test_a_site_that_was_away_while_the_others_have_completed_a_run_does_not_go_on_alone(tmp_path):
    with running_hub(tmp_path / "kits", ("a", "b")) as hub:
        a, b = together(hub, "ab")
        for site in (a, b):
            site.control(Requirements(1, 60_000))
        last = Position(hub.hub.relay.run.membership.life, 1)
        close_step([a, b])
        b.cut()
        assert a.action(Drop).slot == 1
        a.send(Kind.END, step=2)
        assert a.action(Close).contributors == (0,)
        a.leave()
        hub.await_line("a has left: its training is complete")
        instance = b.hello.instance
        for each in (last, FRESH):
            refused = TestSite(hub.kit("b"), hub.address, position=each, instance=instance)
            assert "have completed the run while this site was away" in refused.answer.reason
        TestSite(hub.kit("b"), hub.address, position=last._replace(step=2), instance=instance)
        hub.await_line("a run that began before the restart goes on once")  # it lacks nothing


def test_a_site_that_waits_to_join_is_told_that_the_others_have_completed_the_run(tmp_path):
    """Not one in a new process, which has had no part in the run: it takes part in the next one."""
    with running_hub(tmp_path / "kits", ("a", "b", "c")) as hub:
        a, b, c = together(hub, "abc")
        for site in (a, b, c):
            site.control(Requirements(1, 60_000))
        close_step([a, b, c])
        instance = b.hello.instance
        for site in (b, c):
            site.cut()
            assert a.action(Drop).slot == site.slot
        b, c = TestSite(hub.kit("b"), hub.address, instance=instance), TestSite(hub.kit("c"), hub.address)
        for site in (b, c):
            site.action(Accept)
        a.leave()
        reason = b.action(Drop).reason
        assert "have completed the run while this site was away, with 1 rounds" in reason
        hub.await_line(f"b has left: {reason}")
        for site in (*(TestSite(hub.kit(name), hub.address) for name in "ab"), c):
            assert site.action(Start).absent == ()


def joiner(hub: RunningHub, name: str) -> TestSite:
    """Return a site that waits to join, as a process that has been started again."""
    site = TestSite(hub.kit(name), hub.address)
    site.control(Requirements(1, 60_000))
    return site


def test_a_site_that_is_cut_off_while_it_waits_to_join_comes_back_in_its_process(tmp_path):
    with running_hub(tmp_path / "kits", ("a", "b")) as hub:
        a, b = together(hub, "ab")
        for site in (a, b):
            site.control(Requirements(1, 60_000))
        b.leave("it is away")
        assert a.action(Drop).slot == 1
        b = joiner(hub, "b")
        b.cut()
        hub.await_line("b has left: its connection was lost")
        b.dial()
        assert isinstance(b.answer, Welcome)
        assert not b.answer.resumed


def test_the_state_for_an_earlier_process_of_a_joiner_does_not_reach_the_next_one(hub_of_three):
    """The donor is held up while it sends; the joiner is started again meanwhile, and joins in the same round."""
    a, b, c = together(hub_of_three, "abc")
    for site in (a, b, c):
        site.control(Requirements(1, 60_000))
    b.leave("it is away")
    for site in (a, c):
        site.send(Kind.END, exchange=RoundKind.FIRST)
    a.action(Close)
    tries = [joiner(hub_of_three, "b")]
    until(lambda: hub_of_three.hub.relay.sessions["training", 1].ready)
    a.send(Kind.END, step=2, exchange=RoundKind.FIRST)  # c holds the round up
    requests = [a.action(SendState)]
    a.send(Kind.STATE, b"before", slot=1, step=2, tag=requests[0].number)
    assert tries[0].take(Kind.STATE).body == b"before"
    for _ in range(2):
        tries[-1].leave("it was killed")
        a.action(Drop)
        tries.append(joiner(hub_of_three, "b"))
        requests.append(a.action(SendState))
    assert [(each.donor, each.joiner) for each in requests] == [(0, 1), (2, 1), (0, 1)]
    a.send(Kind.STATE, b"for the first", slot=1, step=2, offset=6, tag=requests[0].number)
    a.send(Kind.STATE, b"for the third", slot=1, step=2, tag=requests[2].number)
    assert tries[-1].take(Kind.STATE).body == b"for the third"


# A second process of a site, whose first one may be dead without the hub knowing


def relay_of(*names: str, release: str = "1.0") -> Relay:
    """Return a relay whose sites have connected, with numbers from 1 as their processes."""
    streams = HubStreams(selectors.DefaultSelector(), SequencerHost(names))
    relay = Relay(names, 4.0, 1, 0.0, Journal(lambda line: None), streams)
    for number, name in enumerate(names, 1):
        session, _ = dials(relay, name, number, 0.0, release)
        session.stream = SimpleNamespace(notes=[])
    return relay


def dials(relay: Relay, name: str, instance: int, now: float, release: str = "1.0") -> tuple[Session, Welcome]:
    return relay.greet(name, Hello(VERSION, instance, FRESH, "training", release=release), 0, now)


@pytest.mark.parametrize("withholds", [True, False])
def test_a_donor_that_withholds_its_state_is_replaced_though_its_receiver_takes_other_frames(withholds):
    relay = relay_of("a", "b", "c")
    membership, joiner = relay.run.membership, relay.sessions["training", 2]
    membership.replace_rules(Rules(1, site_timeout=4.0))
    membership.close(2, "killed", 0.0)
    relay._act(membership.dial(2, 0.0), 0.0)
    for tenth in range(40):
        for slot in (0, 1):
            relay.sessions["training", slot].heard = tenth / 10
            if tenth in (0, 20, 25):
                membership.end(slot, membership.open_step, tenth / 10)
        if not withholds:
            joiner.take_state(0, Head(Kind.STATE, 2, tag=1), memoryview(b"part"))
        joiner.send(Head(Kind.PAYLOAD, 0).pack())
        while joiner.queue.take() is not None:
            pass
        joiner.queue.acknowledge(joiner.queue.count)
        relay.tick(tenth / 10)
    assert joiner.requests == ({1, 2} if withholds else {1})


def test_it_waits_until_the_first_one_is_silent_for_long_enough():
    relay = relay_of("a", "b")
    reason = "another process is connected as site 'a'; if it is dead, this one takes its place in 3.0 s"
    with pytest.raises(TryAgainError, match=reason):
        dials(relay, "a", 9, 1.0)
    relay.sessions["training", 0].heard = 1.2  # what it had sent before
    relay.sessions["training", 1].heard = 5.2  # otherwise no site could be heard
    relay.tick(3.0)
    with pytest.raises(TryAgainError):
        dials(relay, "a", 9, 3.0)
    relay.tick(5.3)
    dials(relay, "a", 9, 5.3)


@pytest.mark.parametrize(("release", "joins"), [("1.0/3", True), ("1.1/3", True), ("1.0/4", False), ("1.0", False)])
def test_a_site_joins_if_it_exchanges_the_same_in_any_release(release, joins):
    relay = relay_of("a", "b", release="1.0/3")
    relay.run.require(Requirements(1, 4000))
    relay.drop(relay.sessions["training", 0], "it was killed", 1.0)
    if not joins:
        reason = rf"this site has dadplug {release}, and b, which trains already, 1.0/3: all sites need the same number"
        with pytest.raises(RefusedError, match=reason):
            dials(relay, "a", 9, 2.0, release=release)
        release = "1.0/3"
    dials(relay, "a", 9, 2.0, release=release)


def test_a_lost_connection_is_awaited_for_longer_while_one_is_in_its_handshake():
    relay = relay_of("a", "b", "c")
    relay.run.require(Requirements(1, 4000))
    relay.sessions["training", 1].lose("cut", 1.0)
    relay.tick(1.19)
    relay.tick(1.3, dials=True)
    assert ("training", 1) in relay.sessions
    relay.tick(1.41, dials=True)
    assert ("training", 1) not in relay.sessions
    relay.sessions["training", 0].lose("cut", 2.0)
    relay.tick(2.21)
    assert ("training", 0) not in relay.sessions


def test_no_site_is_dropped_in_a_long_outage_since_it_does_not_get_on():
    """One site has ended the step, and the END of the other one is lost with its connection."""
    relay = relay_of("a", "b")
    relay.run.require(Requirements(2, 4000))
    relay._act(relay.run.membership.end(0, 1, 1.0), 1.0)
    for session in relay.sessions.values():
        session.heard = 1.0
    for now in (2.0, 4.5, 9.0, 400.0):
        relay.tick(now)
    for session in relay.sessions.values():
        session.heard = 401.0
    for now in (401.0, 402.0):
        relay.tick(now)
    assert len(relay.sessions) == 2
    assert relay.run.membership.sites[1].phase is Phase.MEMBER
    relay.sessions["training", 0].heard = 402.0 + Rules.progress_timeout
    relay.sessions["training", 1].heard = 402.0 + Rules.progress_timeout
    relay.tick(402.0 + Rules.progress_timeout)
    assert relay.run.membership.sites[1].phase is Phase.ABSENT
