"""Listeners of sites: one address each, no pickles, unauthorised connections refused at once."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import support
import torch
import torch.distributed as dist

from dadplug.exchange import Traffic, handshake, open_transport, rendezvous
from dadplug.exchange.status import Member, Silence, Status, StatusServer, ask, tell


def listeners() -> list[tuple[str, int]]:
    """Addresses and ports on which this process listens."""
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            links.append(os.readlink(entry))
    own = {link[8:-1] for link in links if link.startswith("socket:[")}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in own:
                address, port = fields[1].split(":")
                found.append((address, int(port, 16)))
    return found


def listens() -> tuple[list[tuple[str, int]], int, bool, bool]:
    meeting = open_transport(None, Traffic(), torch.device("cpu"), 60)
    gather = meeting.gather([1, 1], torch.float32)
    gather.launch()
    gather.wait()
    found = listeners()
    meeting.close()
    hooked = sys.excepthook.__module__.startswith("dadplug")
    return found, int(os.environ["MASTER_PORT"]), "GLOO_SOCKET_IFNAME" in os.environ, hooked


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_sites_listen_on_one_address_only_and_leave_the_process_as_it_is(sites):
    results = sites(2).run(listens)
    for found, _, reported, hooked in results:
        assert found
        assert not [address for address, _ in found if not address.strip("0")]  # 0.0.0.0 and [::]
        assert not reported
        assert not hooked
    found, port, _, _ = results[0]
    assert ("0100007F", port) in found  # 127.0.0.1


class Harmful:
    def __reduce__(self):
        return exec, ("import sys; sys.harmed = True",)


def gathers_with_a_stranger(size: int | None) -> tuple[str, bool]:
    """Site 1 sends a pickle to a site that gathers objects, or announces a size."""
    meeting = open_transport(None, Traffic(), torch.device("cpu"), 60)
    message = ""
    try:
        if dist.get_rank() == 0:
            meeting.gather_objects("hello")
        elif size is None:
            dist.all_gather_object([None, None], Harmful(), group=meeting.group)
        else:
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
            dist.all_gather(sizes, torch.tensor([size]), group=meeting.group)
    except Exception as error:
        message = str(error)
    dist.barrier()
    meeting.close()
    return message, hasattr(sys, "harmed")


def test_pickles_of_another_site_are_not_run(sites):
    (message, harmed), _ = sites(2).run(gathers_with_a_stranger, None)
    assert "a message from another site is damaged" in message
    assert not harmed


@pytest.mark.parametrize("size", [1 << 62, (1 << 30) + 1, -1])
def test_sizes_are_checked_before_memory_is_taken(sites, size):
    (message, _), _ = sites(2).run(gathers_with_a_stranger, size)
    assert "site 1 (" in message
    assert f") announces an object of {size} bytes" in message


def takes_broadcast_bytes(size: int) -> str:
    transport = open_transport(None, Traffic(), torch.device("cpu"), 60)
    message = ""
    if not dist.get_rank():
        transport.broadcast(torch.tensor([size]))
    else:
        try:
            transport.broadcast_bytes(b"")
        except (ValueError, RuntimeError) as error:
            message = str(error)
    dist.barrier()
    transport.close()
    return message


@pytest.mark.parametrize("size", [1 << 60, -1])
def test_sizes_of_broadcasts_are_checked_before_memory_is_taken(sites, size):
    _, message = sites(2).run(takes_broadcast_bytes, size)
    assert "site 0 (" in message
    assert f"announces {size} bytes: there may be" in message


@support.at_sites(2)
def test_an_object_that_cannot_be_sent_is_an_error_on_all_sites() -> None:
    meeting = open_transport(None, Traffic(), torch.device("cpu"), 60)
    messages = []
    for item in (print, {1: {2: object()}}):
        try:
            meeting.gather_objects(item if dist.get_rank() else 1)
        except TypeError as error:
            messages.append(str(error))
    assert meeting.gather_objects(meeting.rank) == [0, 1]  # and on it goes
    meeting.close()
    assert len(messages) == 2
    assert all("site 1 (" in message and "What can be sent" in message for message in messages)


def test_status_requests_tell_processes_that_live_from_others(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    server = StatusServer("this one")
    stopped = socket.create_server(("127.0.0.1", 0))  # takes calls, and answers none
    free = socket.create_server(("127.0.0.1", 0))
    gone = free.getsockname()
    free.close()
    members = {
        0: server.member,
        1: server.member._replace(token=b"x" * 16),
        2: Member("stopped", *stopped.getsockname(), b"y" * 16),
        3: Member("gone", *gone, b"z" * 16),
    }
    answers = ask({rank: members[rank] for rank in (0, 1, 3)}, 60.0)
    assert isinstance(answers[0], Status)
    assert "step" in answers[0].place
    assert answers[1] is Silence.REFUSED
    assert answers[3] is Silence.REFUSED
    assert ask({2: members[2]}, 0.5) == {2: Silence.UNANSWERED}
    stopped.close()


def test_reports_arrive_in_order_and_garbage_does_not(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    one, other = StatusServer("one"), StatusServer("other")
    place = (other.member.host, other.member.port)
    slow = socket.create_connection(place)
    slow.sendall(other.member.token[:3])
    for garbage in (b"", b"\x80\x04N.", b"GET / HTTP/1.1\r\n\r\n" * 100, other.member.token + b"!" + b"\xff" * 40):
        with socket.create_connection(place) as intruder:
            intruder.sendall(garbage)
    with socket.create_connection(place) as intruder:  # a member with a message that is none
        intruder.sendall(other.member.token + b"!" + (4).to_bytes(4, "little") + b"\x80\x04N.")
    token = other.member.token
    first, second = (one.make_reports([token], reason) for reason in ("", "the disk is full"))
    for reports in (second, first):
        tell([other.member], reports, 60.0)
    assert other.report_of(one.member.token) == second[token]
    time.sleep(0.01)
    slow.close()
    assert isinstance(ask({0: other.member}, 60.0)[0], Status)


def test_a_call_returns_its_result_or_raises_its_error():
    assert handshake.within(60.0, lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        handshake.within(60.0, lambda: 1 // 0)


def test_a_call_that_takes_too_long_or_whose_check_fails_is_abandoned(monkeypatch):
    monkeypatch.setattr(handshake, "_CHECK_SECONDS", 0.01)
    never = threading.Event()
    with pytest.raises(TimeoutError):
        handshake.within(0.05, never.wait)
    checks = iter(range(3))

    def check() -> None:
        if next(checks) == 2:
            raise ConnectionError("it has ended")

    with pytest.raises(ConnectionError, match="it has ended"):
        handshake.within(60.0, never.wait, check)
    never.set()


# The place of a process as SLURM announces it


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node7", "node7"),
        ("node[01-04,07],gpu3", "node01"),
        ("a,b", "a"),
        ("rack[2-3]-n[10,12]", "rack2-n10"),
        ("gpu[9].example.org", "gpu9.example.org"),
    ],
)
def test_the_first_node_of_a_step_of_slurm_hosts_the_rendezvous(nodes, first):
    step = {"SLURM_JOB_ID": "99", "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "5", "SLURM_PROCID": "4"}
    found = rendezvous.launch_environment(step | {"SLURM_STEP_NODELIST": nodes})
    assert (found["RANK"], found["WORLD_SIZE"], found["MASTER_ADDR"]) == ("4", "5", first)
    assert found["MASTER_PORT"] == "20696"
    chosen = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "8998"}
    assert rendezvous.launch_environment(step | chosen).items() >= chosen.items()


@pytest.mark.parametrize(
    "environment",
    [
        {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_JOB_ID": "9", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"},  # a batch script without srun
        {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "WORLD_SIZE": "8", "RANK": "1"},  # torchrun in a step
        {},
    ],
)
def test_only_a_step_of_several_tasks_has_its_sites_from_slurm(environment):
    assert rendezvous.launch_environment(environment) == environment
