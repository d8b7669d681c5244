"""Sites that are lost in mid-training and return, with a sequencer at a site or at the hub."""

import hashlib
import os
import signal
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import support
import torch
import torch.distributed as dist
from cutting_relay import relayed_hub
from fleet import MortalHub
from local_reference import ends_equal
from msgspec.structs import replace
from running_hub import RunningHub, running_hub, until
from server_log import keys, recorded
from support import refuses
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dadplug
from dadplug.parameter_server import connect

RETURNING = support.load(str(Path(__file__).with_name("test_returning.py")))
ON_ONE_NETWORK = support.load(str(Path(__file__).with_name("test_parameter_server.py")))
NAMES = ("a", "b", "c")
SECONDS = 60.0


def kits(hub: RunningHub) -> list[Path]:
    return [hub.kits / name for name in NAMES]


def made(width: int = 12, **options) -> tuple[nn.Module, dadplug.ParameterServer]:
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return model, dadplug.ParameterServer(
        model, optimizer, **{"timeout": SECONDS, "staleness": 2} | options, weighting="samples"
    )


def backward(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    model(torch.randn(4, 6, generator=generator)).square().mean().backward()


def bits(model: nn.Module) -> bytes:
    return b"".join(value.numpy().tobytes() for value in model.state_dict().values())


@pytest.fixture(scope="module")
def joined(tmp_path_factory):
    """A hub and its sites, for the tests that lose none."""
    with running_hub(tmp_path_factory.mktemp("hub") / "kits", NAMES) as hub, support.Sites(3, kits=kits(hub)) as group:
        yield hub, group


def test_without_staleness_it_has_the_bits_of_the_reduction_over_a_hub(joined):
    _, group = joined
    group.run(ON_ONE_NETWORK.follows_reduction, "rankdad")
    found = group.run(ON_ONE_NETWORK.follows_its_log, "dad", {"staleness": 4})
    assert 0 <= found[0]["oldest"] <= 4


def test_a_killed_site_returns_over_a_hub(tmp_path):
    with running_hub(tmp_path / "kits", NAMES) as hub:
        RETURNING.check_return(tmp_path, kits(hub), quorum=2, late="keep")
        assert (tmp_path / "address2").read_text().startswith(f"hub:{kits(hub)[2].resolve()}/")


def test_site_0_is_killed_and_returns_to_the_bits_of_the_others(tmp_path):
    with running_hub(tmp_path / "kits", NAMES, grace=0.5) as hub:
        RETURNING.check_return(tmp_path, kits(hub), lost=0, late="keep")
        hub.await_line("a returns to its parameter server")
        hub.await_line("a sequencer has ended: all of its sites have left")


def trains_two() -> tuple:
    """Train two models at once, by a parameter server of each."""
    pairs = [made(12), made(20, mode="dsgd", staleness=0)]
    for phase in range(2):
        for step in range(3):
            for model, server in pairs:
                backward(model, 10 * phase + step)
                server.step()
        for _, server in pairs:
            server.finish()
    assert not any(server._service for _, server in pairs)
    states = [bits(model) for model, _ in pairs], [server.version for _, server in pairs]
    for _, server in pairs:
        server.detach()
    return states


def test_two_parameter_servers_of_one_run_have_a_sequencer_each(joined):
    hub, group = joined
    before = len(hub.log)
    first, second, third = group.run(trains_two)
    again = group.run(trains_two)[0]  # in a hub that has served others
    assert first == second == third
    assert again[1][1] == first[1][1] == 6

    def begun() -> int:
        return sum("a sequencer orders the contributions of a, b, c" in line for line in hub.log[before:])

    until(lambda: begun() >= 4, lambda: f"{begun()} sequencers have begun")  # the journal is read by a thread
    assert begun() == 4


def counts_bytes() -> tuple[int, int]:
    model, server = made(400, mode="dsgd")
    sent = []
    post = server._log.post

    def counted(peer, frame):
        sent.append(len(frame.body))
        post(peer, frame)

    server._log.post = counted
    for step in range(6):
        backward(model, step)
        server.step()
    ends_equal(server)
    return sum(sent), bits(model)


def test_each_site_sends_its_contribution_once_and_the_hub_sends_it_to_the_others(joined):
    hub, group = joined
    group.run(counts_bytes)  # after it all tunnels are open
    sessions = [hub.hub.relay.sessions["parameters", slot] for slot in range(3)]
    before = [(each.bytes_in, each.bytes_out) for each in sessions]
    found = group.run(counts_bytes)
    after = [(each.bytes_in, each.bytes_out) for each in sessions]
    sent = [each[0] for each in found]
    assert max(sent) - min(sent) < 0.02 * max(sent)
    for size, (in_before, out_before), (in_after, out_after) in zip(sent, before, after, strict=True):
        assert size <= in_after - in_before < 1.1 * size  # once
        assert 2 * size <= out_after - out_before < 2.2 * size  # those of the two other sites


def starts_differently(change: str) -> str:
    """Start with settings that differ at the last site; return the error."""
    original, version = connect.start_sequencer, connect.VERSION
    if change == "version":
        connect.VERSION = 99

    def start(transport, connected, place, settings):
        workers = (0, 1, 7) if change == "workers" else settings.workers
        limit = settings.limit + int(change == "limit" and transport.rank == 2)
        return original(transport, connected, place, replace(settings, workers=workers, limit=limit))

    connect.start_sequencer = start
    try:
        made()
    except ValueError as error:
        return str(error)
    finally:
        connect.start_sequencer, connect.VERSION = original, version
    return ""


def test_settings_that_differ_or_are_not_valid_are_refused_at_all_sites(joined):
    _, group = joined
    for change, text in (
        ("limit", "different settings: limit is "),
        ("version", f"speaks version 99 of the protocol of parameter servers, the hub version {connect.VERSION}"),
        ("workers", "the settings of a sequencer are out of range"),
    ):
        found = group.run(starts_differently, change)
        assert all(text in each for each in found), found
    assert group.run(trains_two)[0][1][1] == 6  # the hub goes on


def test_without_the_service_a_hub_is_named(tmp_path):
    with running_hub(tmp_path / "kits", NAMES, service=None) as hub, support.Sites(3, kits=kits(hub)) as group:
        found = group.run(starts_differently, "")
    assert all("has no sequencer for parameter servers" in each for each in found), found


def loses_the_hub(folder: str) -> str:
    """Train until the hub is lost; return the error."""
    model, server = made(site_timeout=20.0)
    step = 0
    try:
        while True:
            backward(model, step)
            server.step()
            step += 1
            if step == 5:
                (Path(folder) / f"training{dist.get_rank()}").touch()
            time.sleep(0.002)
    except dadplug.SiteError as error:
        return str(error)


def test_a_hub_that_is_killed_and_restarted_is_named_at_all_sites(tmp_path):
    with MortalHub(tmp_path, "ab") as hub, support.Sites(2, kits=[hub.kits / name for name in "ab"]) as group:
        group.start(loses_the_hub, str(tmp_path))
        for rank in range(2):
            RETURNING.wait_for(tmp_path / f"training{rank}")
        hub.restart()
        outcomes = group.outcomes()
    for each in outcomes:
        assert each.kind == "ok", each.value
        assert each.value.startswith("the hub at 127.0.0.1:"), each.value
        assert "if the hub was restarted, the log is lost: start all sites again" in each.value


def trains_until(stop: str, sign: str) -> tuple:
    """Train until a file exists; return the bits of the model, and the sites that have left meanwhile.

    The file `sign` of the site holds the number of its steps.
    """
    model, server = made(site_timeout=4.0, hub_timeout=100.0)
    step = 0
    while not Path(stop).exists():
        backward(model, step)
        server.step()
        step += 1
        Path(f"{sign}{dist.get_rank()}").write_text(str(step))
        time.sleep(0.02)
    server.finish()
    left = [reason for reason in server._log.left.values() if "detach()" not in reason]
    server.detach()
    return bits(model), left


@pytest.mark.parametrize("sealed", [False, True])
def test_a_cut_of_every_link_loses_no_site(tmp_path, sealed):
    """All links are dead for longer than a site may be silent, at the hub and at its sequencer, or that of site 0."""
    served = relayed_hub(tmp_path, NAMES, sealed, site_timeout=2.0)
    with served as hub, support.Sites(3, kits=kits(hub)) as group:
        stop = tmp_path / "stop"
        group.start(trains_until, str(stop), str(tmp_path / "training"))

        def steps() -> list[int]:
            return [int(path.read_text() or 0) for path in sorted(tmp_path.glob("training*"))]

        until(lambda: sum(step >= 5 for step in steps()) == 3, steps)
        for relay in hub.relays:
            relay.hold = True
        hub.await_line("no site can be heard")
        time.sleep(5.5)  # longer than `site_timeout` of the parameter server
        before = steps()
        for relay in hub.relays:
            relay.hold = False
        hub.await_line("sites can be heard again")
        until(lambda: all(now > step + 5 for now, step in zip(steps(), before, strict=True)), steps)
        stop.touch()
        outcomes = group.outcomes()
    for each in outcomes:
        assert each.kind == "ok", each.value
        assert each.value == (outcomes[0].value[0], [])


def stays_at_site_0() -> bool:
    _, server = made()
    found = server._service is not None, server.return_address
    ends_equal(server)
    return found


def test_sealed_projects_keep_the_sequencer_at_site_0(tmp_path):
    from sealed_sites import sealed_hub

    with sealed_hub(tmp_path, ("a", "b")) as hub, support.Sites(2, kits=[hub.kits / each for each in "ab"]) as group:
        assert group.run(stays_at_site_0) == [(True, ""), (False, "")]


def orders_epochs(folder: str, resumes: bool) -> int:
    """Train on dealt batches, or resume; return the number of epochs that have begun."""
    data = torch.utils.data.TensorDataset(torch.arange(6.0))
    path = Path(folder) / f"state{dist.get_rank()}"
    _, server = made(deal="shared")
    if resumes:
        server.load_state_dict(torch.load(path, weights_only=False))
    for _ in server.loader(torch.utils.data.DataLoader(data, batch_size=2)):
        pass
    server.finish()
    found = server.state_dict()["epochs"]
    torch.save(server.state_dict(), path)
    server.detach()
    return found


def test_the_number_of_epochs_is_in_the_checkpoints_of_all_sites(joined, tmp_path):
    _, group = joined
    assert group.run(orders_epochs, str(tmp_path), False) == [1] * 3
    assert group.run(orders_epochs, str(tmp_path), True) == [2] * 3
    with support.Sites(2) as group:  # where site 0 has the sequencer
        assert group.run(orders_epochs, str(tmp_path), True) == [3] * 2


# A site that is killed in mid-training, and returns from the state of another one and the log


SAMPLES, PHASES = 96, 3


def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SAMPLES, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def made_server(rejoin: str | None = None, **more) -> tuple[nn.Module, dadplug.ParameterServer]:
    model, optimizer = network()
    options = {"mode": "rankdad", "rank": 2, "staleness": 3, "deal": "shared", "timeout": 100.0} | more
    state = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1000)}
    return model, dadplug.ParameterServer(
        model, optimizer, rejoin=rejoin, state=state, **{"weighting": "samples"} | options
    )


def train(model: nn.Module, server: dadplug.ParameterServer, folder: Path, process: str, lost: int) -> list:
    """Train in the phases that are left; return the log, with what each of this process's contributions was of."""
    data = TensorDataset(torch.eye(SAMPLES), torch.arange(SAMPLES))
    loader = server.loader(DataLoader(data, batch_size=4, shuffle=True))
    log = recorded(server)
    with (folder / process).open("a", buffering=1) as file:
        for phase in range(server.phases, PHASES):
            for number, (inputs, indices) in enumerate(loader):
                file.write(f"{phase} " + " ".join(map(str, indices.tolist())) + "\n")
                if process == "back" and phase == PHASES - 1:
                    (folder / "working").touch()
                nn.functional.cross_entropy(model(inputs), indices % 3).backward()
                if process == str(lost) and phase == 1 and number == 2:
                    (folder / "killed").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                if (
                    process not in ("back", str(lost)) and number == 1 and phase > 0
                ):  # so that both processes have batches
                    wait_for(folder / ("killed" if phase == 1 else "working"))
                if process == str(2 - lost // 2) and phase == 1 and number == 1:  # not the one whose state is taken
                    wait_for(folder / "returned")
                server.step()
            server.finish()
    return keys(log)


def wait_for(path: Path) -> None:
    until(path.exists, lambda: path, 100.0)


def summary(model: nn.Module, server: dadplug.ParameterServer) -> tuple:
    moments = server._optimizer.optimizer.state_dict()["state"].values()
    tensors = [*model.state_dict().values(), *(value for each in moments for value in each.values())]
    state = [value.numpy().tobytes() for value in tensors]
    if (norms := server._norms) is not None:
        committed = norms.state_dict()
        assert sorted(committed) == [0, 1, 2]
        state += [str(age).encode() + packed["1"].numpy().tobytes() for _, (age, packed) in sorted(committed.items())]
    return hashlib.sha256(b"".join(state)).hexdigest(), server.version, server.phases


def trains(folder: str, options: dict, lost: int) -> tuple:
    rank = dist.get_rank()
    model, server = made_server(**options)
    (Path(folder) / f"address{rank}").write_text(server.return_address)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        log = train(model, server, Path(folder), str(rank), lost)
    found = summary(model, server)
    first, *others = [each for each in range(3) if each != lost]
    if rank == first:  # the sequencer's process ends last
        for other in (*others, "back"):
            wait_for(Path(folder) / f"done{other}")
    (Path(folder) / f"done{rank}").touch()
    server.detach()
    return found, log, [str(each.message) for each in caught]


def returns(folder: str, options: dict, lost: int) -> tuple:
    folder = Path(folder)
    wait_for(folder / f"address{lost}")
    address = (folder / f"address{lost}").read_text()
    refuses(
        (lambda: made_server("nowhere"), "rejoin should be the return_address"),
        (
            lambda: dadplug.ParameterServer(*network(), role="server", rejoin=address, weighting="samples"),
            "unknown role 'server'",
        ),
    )
    wait_for(folder / "killed")
    refuses(
        (lambda: made_server(f"{address.rsplit('/', 2)[0]}/{'0' * 32}/{lost}"), "cannot be reached"),
        (
            lambda: made_server(address, **options | {"staleness": 1}),
            f"option staleness is 3 at the other sites and 1 at site {lost}",
            dadplug.MismatchError,
        ),
        error=dadplug.SiteError,
    )
    model, server = made_server(address, **options)
    assert server.phases == 1
    assert server.version > 0
    (folder / "returned").touch()
    with pytest.raises(RuntimeError, match="this site has returned into a training"):
        server.gather_objects(1)
    log = train(model, server, folder, "back", lost)
    found = summary(model, server)
    (folder / "doneback").touch()
    server.detach()
    return found, log


def test_a_killed_site_returns_and_has_the_bits_of_the_others(tmp_path):
    check_return(tmp_path, sync_batchnorm=True)


def check_return(tmp_path: Path, kits: Sequence[Path] = (), lost: int = 2, **options) -> None:
    with support.Sites(3, kits=kits) as group, support.Sites(1) as other:
        group.start(trains, str(tmp_path), options, lost)
        other.start(returns, str(tmp_path), options, lost)
        outcomes = group.outcomes()
        killed = outcomes.pop(lost)
        first, second = outcomes
        (back,) = other.outcomes()
    assert killed.kind == "ended", killed.value
    assert [each.kind for each in (first, second, back)] == ["ok"] * 3, [first.value, second.value, back.value]
    assert first.value[0] == second.value[0] == back.value[0]
    assert first.value[0][2] == PHASES
    log = first.value[1]
    assert second.value[1] == log
    assert log[-len(back.value[1]) :] == back.value[1]
    assert any(f"site {lost}" in each and "has left, and the others go on" in each for each in first.value[2])
    assert len(set(log)) == len(log)
    lines = [[line.split() for line in (tmp_path / name).read_text().splitlines()] for name in ("0", "1", "2", "back")]
    numbers = sorted(number for site, number in log if site == lost)
    assert numbers == list(range(len(numbers)))  # each number once, over both processes
    by_number = {(site, number): line for site in {0, 1, 2} - {lost} for number, line in enumerate(lines[site])}
    of_lost = lines[lost][: len(numbers) - len(lines[3])] + lines[3]
    by_number |= {(lost, number): line for number, line in enumerate(of_lost)}
    assert lines[3]
    for phase in range(PHASES):
        used = [int(index) for key in log for index in by_number[key][1:] if by_number[key][0] == str(phase)]
        assert sorted(used) == list(range(SAMPLES))


def halts(folder: str, killed: bool) -> tuple:
    """Train with a checkpoint after each phase, and lose site 0, or go on from the last checkpoint."""
    rank, path = dist.get_rank(), Path(folder) / f"checkpoint{dist.get_rank()}.pt"
    model, optimizer = network()
    kept = torch.load(path, weights_only=False) if path.exists() else None
    if kept is not None:
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
    server = dadplug.ParameterServer(
        model, optimizer, rank=2, staleness=2, error_feedback=True, timeout=100.0, weighting="samples"
    )
    if kept is not None:
        server.load_state_dict(kept["server"])
    phases = kept["phases"] if kept else 0
    refused = ""
    try:
        for phase in range(phases, 3):
            for step in range(4):
                indices = torch.arange(8 * rank + 4 * (step % 2), 8 * rank + 4 * (step % 2) + 4)
                nn.functional.cross_entropy(model(torch.eye(SAMPLES)[indices]), indices % 3).backward()
                if killed and rank == 0 and (phase, step) == (1, 2):
                    os.kill(os.getpid(), signal.SIGKILL)
                server.step()
            server.finish()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "server": server.state_dict()}
            torch.save(state | {"phases": phase + 1}, path)
    except dadplug.SiteError as error:
        refused = str(error)
    server.detach()
    return refused, phases, summary(model, server)


def test_after_the_loss_of_site_0_all_start_again_from_the_last_checkpoint(tmp_path):
    with support.Sites(2) as group:
        group.start(halts, str(tmp_path), True)
        first, second = group.outcomes()
    assert first.kind == "ended"
    assert second.kind == "ok", second.value
    assert second.value[0].startswith("site 0")
    assert "it has the sequencer, without which training cannot go on" in second.value[0]
    with support.Sites(2) as group:
        first, second = group.run(halts, str(tmp_path), False)
    assert first == second
    assert first[:2] == ("", 1)
    kept = torch.load(tmp_path / "checkpoint0.pt", weights_only=False)
    assert (kept["phases"], kept["server"]["version"]) == (3, first[2][1])  # versions go on from the checkpoint's


def test_a_returning_site_applies_all_that_precedes_the_answer():
    """The answer comes while an entry is applied, behind another one: a contribution would be of an old version."""
    log, applied = SimpleNamespace(first=None, commits=["first"]), []

    def apply_arrived() -> None:
        taken, log.commits = log.commits, []
        applied.extend(taken)
        if taken == ["first"]:
            log.commits, log.first = ["second"], 4

    log.wait = lambda until: None
    dadplug.ParameterServer._catch_up(SimpleNamespace(_log=log, _apply_arrived=apply_arrived))
    assert applied == ["first", "second"]
