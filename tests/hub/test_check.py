"""`python -m dadplug check`: verdicts and advice for kits and hubs that work, and for all that can be wrong."""

import contextlib
import re
import shutil
import socket
import ssl
import threading
import time
import traceback
from datetime import timedelta

import hub_kits
import pytest
import torch
from frame_parts import Frame
from running_hub import TIMEOUT, TestSite, running_hub, together, until
from support import free_port

import dadplug
from dadplug.errors import FrameError, RefusedError
from dadplug.hub import Project, check
from dadplug.hub.check import MOST_BYTES, NUMBER, CheckHandler, CheckRequest
from dadplug.hub.pki import provision
from dadplug.hub.pki.kits import current_time
from dadplug.hub.secure import tls
from dadplug.hub.server.acceptor import Acceptor
from dadplug.hub.server.status import Meter, snapshot, table
from dadplug.hub.wire.messages import Head, Kind
from dadplug.tools.cli.commands import main

ITEMS = [
    "kit",
    "certificate",
    "authority",
    "revocations",
    "policy",
    "name",
    "port",
    "TLS",
    "hub",
    "clock",
    "round trip",
]


def findings(folder, address=None, timeout=TIMEOUT):
    return list(check.check_kit(folder, address, timeout))


def failure(folder, address=None, timeout=TIMEOUT):
    """Return the only finding that has failed; it is the last one."""
    found = findings(folder, address, timeout)
    assert [each for each in found if each.state == "failed"] == [found[-1]]
    assert found[-1].advice
    return found[-1]


def running(capsys, *arguments) -> tuple[int, str]:
    """Run the command; return its exit status and what it prints."""
    status = main(["check", *map(str, arguments)])
    return status, capsys.readouterr().out


def test_a_kit_that_works(hub, tmp_path, capsys):
    found = findings(tmp_path / "kits" / "a")
    assert [each.item for each in found] == [*ITEMS, "rate"]
    assert {each.state for each in found} == {"ok"}
    assert "TLSv1.3" in found[ITEMS.index("TLS")].text
    assert "site a runs the hub" in found[ITEMS.index("policy")].text
    status, text = running(capsys, tmp_path / "kits" / "b")
    assert status == 0
    assert text.splitlines()[-1] == "ok: this site can take part"
    status, text = running(capsys, tmp_path / "kits" / "b", "--address", f"localhost:{hub.address[1]}")
    assert status == 1
    assert "does not have the host name that the site connects to" in text
    assert "--hub-name" in text


def test_one_check_a_site_at_a_time(hub, tmp_path):
    first = TestSite(hub.kit("a"), hub.address, "check")
    found = failure(tmp_path / "kits" / "a")
    assert found.item == "hub"
    assert "another process is connected" in found.text
    assert "Repeat it" in found.advice
    assert findings(tmp_path / "kits" / "b")[-1].item == "rate"
    first.leave()
    until(lambda: not hub.hub.relay.sessions)
    assert findings(tmp_path / "kits" / "a")[-1].item == "rate"


@pytest.mark.parametrize(
    ("ahead", "state"), [(0, "ok"), (-60, "note"), (60, "note"), (4000, "failed"), (-4000, "failed")]
)
def test_the_difference_of_the_clocks(tmp_path, monkeypatch, ahead, state):
    real = check.time.time_ns
    monkeypatch.setattr(CheckHandler.__init__, "__defaults__", (lambda: real() + ahead * 10**9,))
    with running_hub(tmp_path / "kits"):
        found = check.check_kit(tmp_path / "kits" / "a", timeout=TIMEOUT)
        clock = next(each for each in found if each.item == "clock")
    assert clock.state == state
    assert ("NTP" in clock.advice) == (state != "ok")
    if ahead:
        assert f"{abs(ahead)}." in clock.text or f"{abs(ahead) - 1}.9" in clock.text
        assert ("ahead" in clock.text) == (ahead > 0)


# What is wrong with the way


def test_a_hub_that_is_down(tmp_path, capsys):
    with running_hub(tmp_path / "kits"):
        pass
    found = failure(tmp_path / "kits" / "a")
    assert (found.item, "refuses connections" in found.text) == ("port", True)
    assert "start the hub" in found.advice
    status, text = running(capsys, tmp_path / "kits" / "a")
    assert status == 1
    assert text.splitlines()[-1] == "failed"


@pytest.fixture
def kits(tmp_path):
    return hub_kits.make(tmp_path / "kits", hub="127.0.0.1:8470")


def test_a_firewall_that_drops_packets(kits):
    """A listener whose queue is full answers nothing, as a firewall does."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, contextlib.ExitStack() as opened:
        for _ in range(3):
            filling = opened.enter_context(socket.socket())
            filling.setblocking(False)
            filling.connect_ex(server.getsockname())
        found = failure(kits / "a", server.getsockname(), 0.5)
    assert (found.item, "does not answer within 0.5 s" in found.text) == ("port", True)
    assert "firewall" in found.advice


def test_a_hub_with_ipv6_alone(tmp_path):
    place = f"[::1]:{free_port()}"
    hub_kits.make(tmp_path / "kits", hub=place, hub_names=[], sites=["a", "b"])
    with running_hub(tmp_path / "kits") as hub:
        assert findings(hub.kits / "a")[-1].item == "rate"
        assert place in hub.await_line("listens at")
        sites = together(hub)
        sites[0].send(Kind.PAYLOAD, b"payload")
        assert sites[1].take(Kind.PAYLOAD).body == b"payload"


def test_a_hub_without_descriptors(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(Acceptor, "_accept", lambda self, now, most: self._pause(True))
    found = failure(tmp_path / "kits" / "a", timeout=0.5)
    assert (found.item, "has not answered within 0.5 s" in found.text) == ("TLS", True)
    assert "ulimit -n" in found.advice
    monkeypatch.undo()
    assert findings(hub.kits / "a")[-1].item == "rate"


def test_a_hub_that_only_pings(tmp_path, monkeypatch):
    monkeypatch.setattr(CheckHandler, "handle", lambda *_: [])
    with running_hub(tmp_path / "kits"):
        found = failure(tmp_path / "kits" / "a", timeout=2.0)
    assert (found.item, found.text) == ("measurements", "the hub has not answered TIME within 2 s")


def test_a_handshake_that_trickles(kits):
    """What arrives byte by byte does not make the wait longer."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def trickle():
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(b"\x16\x03\x03\x40\x00")
                for _ in range(100):
                    connection.sendall(b"\0")
                    time.sleep(0.05)

        thread = threading.Thread(target=trickle)
        thread.start()
        begin = time.monotonic()
        found = failure(kits / "a", server.getsockname(), 0.5)
        took = time.monotonic() - begin
        thread.join()
    assert (found.item, "has not answered within 0.5 s" in found.text) == ("TLS", True)
    assert took < 4


def test_a_name_that_does_not_resolve(kits, monkeypatch):
    def fail(*args, **kwargs):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    found = failure(kits / "a", ("hub.example.org", 8470))
    assert (found.item, "Name or service not known" in found.text) == ("name", True)
    released = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: released.wait(TIMEOUT))
    found = failure(kits / "a", ("hub.example.org", 8470), 0.2)
    released.set()
    assert (found.item, "within 0.2 s" in found.text) == ("name", True)


@contextlib.contextmanager
def answering(content: bytes):
    """Run a server that answers each connection with some bytes; None to close it, empty to remain silent."""
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as kept:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    kept.enter_context(connection)
                    if content:
                        connection.sendall(content)

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    ("content", "reason", "advice"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", "does not speak TLS", "Something else listens"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not speak TLS|speaks HTTP", "listens at this port"),
        (b"", "has not answered within 0.5 s", "Something else may listen"),
    ],
)
def test_something_else_listens(kits, content, reason, advice):
    with answering(content) as address:
        found = failure(kits / "a", address, 0.5)
    assert found.item == "TLS"
    assert re.search(reason, found.text)
    assert advice in found.advice


def without_tls_1_3(make):
    """Return a function that makes a context as where the settings of OpenSSL end with TLS 1.2."""

    def made(kit):
        context = make(kit)
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        return context

    return made


@pytest.mark.parametrize(
    ("end", "text", "advice"),
    [
        ("hub_context", "requires another version of TLS", "or the hub's own OpenSSL"),
        ("site_context", "the settings of OpenSSL on this machine", "openssl.cnf of this machine"),
    ],
)
def test_an_end_whose_openssl_ends_with_tls_1_2(tmp_path, monkeypatch, end, text, advice):
    monkeypatch.setattr(tls, end, without_tls_1_3(getattr(tls, end)))
    with running_hub(tmp_path / "kits") as hub:
        found = failure(hub.kits / "a")
        if end == "hub_context":
            hub.await_line("OpenSSL on this machine do not allow TLS 1.3")
    assert (found.item, text in found.text) == ("TLS", True)
    assert advice in found.advice
    assert "version of dadplug" not in found.advice


# What is wrong with the kit


def test_certificates_that_have_expired_or_will_soon(hub, tmp_path):
    kits = tmp_path / "kits"
    provision.renew(kits, "a", days=10)
    found = {each.item: each for each in findings(kits / "a")}
    assert found["certificate"].state == "note"
    assert "(9 days)" in found["certificate"].text or "(10 days)" in found["certificate"].text
    assert "`python -m dadplug renew a`" in found["certificate"].advice
    assert found["rate"].state == "ok"
    provision.renew(kits, "b", days=1, now=current_time() - timedelta(days=5))
    found = {each.item: each for each in findings(kits / "b")}
    assert found["certificate"].state == found["hub"].state == "failed"
    assert "expired on" in found["certificate"].text
    assert "expired by the other end's clock" in found["hub"].text
    assert hub.log


def test_certificates_that_end_soon_have_an_exit_status_and_are_told_by_the_hub(tmp_path, capsys):
    with running_hub(tmp_path / "kits"):
        pass
    provision.renew(tmp_path / "kits", "a", days=20)
    provision.renew(tmp_path / "kits", "hub", days=10)
    with running_hub(tmp_path / "kits") as hub:
        kit = tmp_path / "kits" / "a"
        assert running(capsys, kit)[0] == 0
        assert running(capsys, kit, "--fail-before", "5d")[0] == 0
        status, text = running(capsys, kit, "--fail-before", "14d")
        assert status == 3
        assert "ENDS IN" in text
        assert "these end within 14 days: TLS (" in text
        assert "`python -m dadplug renew hub`" in text
        hub.await_line("run `python -m dadplug renew hub`")
        site = TestSite(hub.kit("a"), hub.address)
        hub.await_line("run `python -m dadplug renew a`")
        found = snapshot(hub.hub, Meter())
        assert found["certificate_days"] in (9, 10)
        assert found["sites"][0]["certificate_days"] in (19, 20)
        assert any("THE CERTIFICATE OF a ENDS IN" in line for line in table(found))
        site.close()


def test_a_certificate_of_the_future(tmp_path):
    kits = tmp_path / "kits"
    provision.provision(
        Project.parse(hub_kits.PROJECT | {"hub": "127.0.0.1:9"}), kits, current_time() + timedelta(days=3)
    )
    found = {each.item: each for each in findings(kits / "a")}
    assert found["certificate"].state == found["authority"].state == "failed"
    assert "Correct this machine's clock" in found["certificate"].advice


def test_a_revoked_kit(tmp_path):
    kits = tmp_path / "kits"
    with running_hub(kits):
        pass
    provision.revoke(kits, "a")
    shutil.copy(kits / "authority" / "revoked.pem", kits / "hub" / "revoked.pem")
    with running_hub(kits):
        found = failure(kits / "a")
        assert (found.item, "has been revoked" in found.text) == ("hub", True)
        with pytest.raises(RefusedError, match="has been revoked") as caught:
            dadplug.connect(kit=kits / "a")
        assert len(traceback.format_exception(caught.value)) < 8  # no chain of causes
        assert not torch.distributed.is_initialized()
        assert "new kit" in found.advice
        shutil.copy(kits / "authority" / "revoked.pem", kits / "a" / "revoked.pem")
        assert {each.item for each in findings(kits / "a") if each.state == "failed"} == {"revoked", "hub"}


def test_folders_that_are_no_kits_of_sites(kits, capsys):
    for folder, reason in ((kits / "hub", "is the kit of the hub"), (kits / "nobody", "is not a folder")):
        found = failure(folder)
        assert (found.item, reason in found.text) == ("kit", True)
    (kits / "a" / "key.pem").chmod(0o644)
    status, text = running(capsys, kits / "a")
    assert status == 1
    assert "chmod 600" in text


def test_a_hub_of_a_third_party_is_pointed_out(tmp_path):
    entries = {name: value for name, value in hub_kits.PROJECT.items() if name != "hub_at"}
    provision.provision(Project.parse(entries | {"hub": "127.0.0.1:9"}), tmp_path / "kits")
    found = {each.item: each for each in findings(tmp_path / "kits" / "a")}
    assert "a third party runs the hub: modes with factors are refused" in found["policy"].text
    provision.provision(Project.parse(entries | {"hub": "127.0.0.1:9", "sealed": True}), tmp_path / "sealed")
    found = {each.item: each for each in findings(tmp_path / "sealed" / "a")}
    assert "a third party runs the hub, and cannot read what sites send" in found["policy"].text


def test_a_hub_of_another_version(tmp_path, monkeypatch):
    with running_hub(tmp_path / "kits"):
        monkeypatch.setattr(check, "VERSION", 99)
        found = failure(tmp_path / "kits" / "a")
    assert "speaks version 99 of the protocol" in found.text
    assert "same version" in found.advice


# The hub's part


def frame(tag: int, body: bytes) -> Frame:
    return Frame(Head(Kind.PAYLOAD, 0, length=len(body), tag=tag), body)


def test_the_handler_answers_and_is_bounded():
    handler = CheckHandler(0, lambda: 123456789)
    (answer,) = handler.handle(*frame(CheckRequest.TIME, b"?"))
    assert answer[-8:] == NUMBER.pack(123456789)
    assert handler.handle(*frame(CheckRequest.UP, bytes(50_000))) == []
    assert sum(map(len, handler.handle(*frame(CheckRequest.DOWN, NUMBER.pack(200_000))))) == 200_000 + 2 * 32
    with pytest.raises(FrameError, match="more than"):
        handler.handle(*frame(CheckRequest.DOWN, NUMBER.pack(MOST_BYTES)))
    for wrong in (frame(9, b"x"), frame(CheckRequest.DOWN, b"1")):
        with pytest.raises(FrameError, match="unknown request"):
            CheckHandler(0).handle(*wrong)
    for request, body in ((CheckRequest.UP, bytes(50_000)), (CheckRequest.TIME, b"?")):
        with pytest.raises(FrameError, match=f"more than {MOST_BYTES} bytes or 1000 requests"):
            repeat(CheckHandler(0), frame(request, body))


def repeat(handler: CheckHandler, request: Frame) -> None:
    for _ in range(1001):
        handler.handle(*request)
