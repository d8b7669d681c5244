"""Exit reasons stay readable for sites that ask late, and do not count in later sessions."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from dadplug.exchange import Traffic, open_transport, status
from dadplug.exchange.status import ExitReport, ProcessSites, ReportHistory, StatusServer, ask, introduce

CLOSED = RuntimeError("Connection closed by peer")


def asks_late(received: bool) -> list[str]:
    """Site 0 fails in one session, and begins the next two before site 1 finds out that the first has ended.

    Args:
        received: whether the reports arrive as messages; otherwise site 1 only has the answers to its requests.
    """
    meeting = open_transport(None, Traffic(), torch.device("cpu"), 60)
    sites, messages = meeting.sites, []
    send, grace = status.tell, status._GRACE_SECONDS
    status._GRACE_SECONDS = 0.0
    if not received:
        status.tell = lambda *_: None
    try:
        if dist.get_rank() == 0:
            sites.announce("ValueError: broken")
            introduce(dist.group.WORLD, 60)
            sites.announce("KeyError: broken again")
            introduce(dist.group.WORLD, 60)
        dist.barrier()
        if dist.get_rank() == 1:
            messages.append(str(sites.lost(CLOSED, 60)))
            for _ in range(2):
                introduce(dist.group.WORLD, 60)
                messages.append(str(sites.lost(CLOSED, 60)))
        dist.barrier()
    finally:
        status.tell, status._GRACE_SECONDS = send, grace
        meeting.close()
    return messages


@pytest.mark.parametrize("received", [True, False])
def test_a_site_that_asks_late_gets_the_reason_of_its_own_session(sites, received):
    _, (first, second, third) = sites(2).run(asks_late, received)
    assert first.startswith("site 0 (")
    assert first.endswith("is gone: ValueError: broken")
    assert second.endswith("is gone: KeyError: broken again")
    assert third.endswith("a fault of the link")  # nobody has failed in the last session


@pytest.fixture
def servers(monkeypatch) -> list[StatusServer]:
    """Status servers of three processes, the first of which is this one."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    found = [StatusServer(name) for name in ("one", "two", "three")]
    monkeypatch.setattr(status, "status_server", lambda *_: found[0])
    monkeypatch.setattr(status, "_watch_exit", lambda sites: None)
    monkeypatch.setattr(status, "_GRACE_SECONDS", 0.0)
    yield found
    for server in found:
        server.close_descriptors()


def failure(sites: ProcessSites) -> str:
    return str(sites.lost(CLOSED, 60))


def test_an_error_before_a_session_is_the_reason_why_it_does_not_begin(servers):
    own, other, _ = servers
    sites = ProcessSites(0, [own.member, other.member])
    other.make_reports([own.member.token], "OSError: no data")
    sites.begin_session()  # which the other site never does
    assert failure(sites) == "site 1 (two) is gone: OSError: no data"
    other.begin_session([own.member.token])
    assert "a fault of the link" in failure(sites)


def test_a_site_that_failed_in_an_earlier_session_does_not_hide_one_whose_process_has_ended(servers):
    own, other, third = servers
    sites = ProcessSites(0, [server.member for server in servers])
    other.make_reports([own.member.token], "OSError: no data")
    sites.begin_session()
    third.close_descriptors()
    assert failure(sites).startswith("site 2 (three) is gone: its process has ended without a reason")


def test_a_history_holds_the_last_report_of_each_of_the_last_sessions():
    history = ReportHistory()
    assert history.find(0) is None
    assert history.last is None
    reports = [
        ExitReport(b"", 2 * session + again, session, f"{session}, {again}")
        for session in range(20)
        for again in (1, 0)
    ]
    for report in reports:
        history.add(report)
    assert [history.find(session).reason for session in (13, 19)] == ["13, 1", "19, 1"]
    assert history.find(0).session == 12
    assert history.find(20) is None
    withdrawal = ExitReport(b"", 50, 20, None)
    history.add(withdrawal)
    assert history.find(19).reason == "19, 1"
    assert history.find(20) is None
    assert history.last == withdrawal


def test_a_process_is_known_to_exchange_while_one_of_its_threads_waits(servers):
    member, traffic = servers[1].member, Traffic()
    assert not ask({1: member}, 10)[1].exchanging
    with traffic.waiting(), ThreadPoolExecutor(1) as pool:
        assert pool.submit(ask, {1: member}, 10).result()[1].exchanging
    assert not ask({1: member}, 10)[1].exchanging
