"""The sequencer at the hub: any site may be lost and return, and the hub sends contributions on."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import forkserver
import hub_kits
import pytest
import support
import torch
import torch.distributed as dist
from local_reference import ends_equal
from running_hub import RunningHub, running_hub, until
from torch import nn

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
    return model, dadplug.ParameterServer(model, optimizer, **{"timeout": SECONDS, "staleness": 2} | options)


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


def test_the_others_go_on_without_a_killed_site_over_a_hub(tmp_path):
    with running_hub(tmp_path / "kits", NAMES) as hub, support.Sites(3, kits=kits(hub)) as group:
        ON_ONE_NETWORK.check_others_go_on(group, 3)


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
    original, version = connect.start_at_hub, connect.VERSION
    if change == "version":
        connect.VERSION = 99

    def start(transport, stream, settings):
        workers = (0, 1, 7) if change == "workers" else settings.workers
        limit = settings.limit + int(change == "limit" and transport.rank == 2)
        return original(transport, stream, settings._replace(workers=workers, limit=limit))

    connect.start_at_hub = start
    try:
        made()
    except ValueError as error:
        return str(error)
    finally:
        connect.start_at_hub, connect.VERSION = original, version
    return ""


def test_settings_that_differ_or_are_not_valid_are_refused_at_all_sites(joined):
    _, group = joined
    for change, text in (
        ("limit", "different settings: limit is "),
        ("version", "speaks version 99 of the protocol of parameter servers, the hub version 1"),
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
    folder = tmp_path / "kits"
    hub_kits.make(folder, hub=f"127.0.0.1:{support.free_port()}", hub_names=[], sites=["a", "b"], hub_at="a")
    command = ["-m", "dadplug", "hub", str(folder / "hub")]
    hub = forkserver.start(command)
    try:
        with support.Sites(2, kits=[folder / "a", folder / "b"]) as group:
            group.start(loses_the_hub, str(tmp_path))
            for rank in range(2):
                RETURNING.wait_for(tmp_path / f"training{rank}")
            hub.send_signal(signal.SIGKILL)
            hub.wait()
            hub = forkserver.start(command)
            outcomes = group.outcomes()
    finally:
        hub.kill()
        hub.wait()
    for each in outcomes:
        assert each.kind == "ok", each.value
        assert each.value.startswith("the hub at 127.0.0.1:"), each.value
        assert "if the hub was restarted, the log is lost: start all sites again" in each.value


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
