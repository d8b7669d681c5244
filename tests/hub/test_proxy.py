"""Connections to the hub through an HTTP proxy, shared ports, and TLS inspection that is named."""

import contextlib
import datetime
import shutil
import socket
import ssl
import subprocess
import tempfile
import threading
from pathlib import Path

import hub_kits
import pytest
from connect_proxy import running_proxy
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from running_hub import TIMEOUT, exchange, running_hub, together, until
from support import free_port, refuses

from dadplug.errors import KitError, ProxyError, RefusedError
from dadplug.hub import Policy, Project, check
from dadplug.hub.pki import provision
from dadplug.hub.pki.kits import Kit
from dadplug.hub.pki.proxies import Proxy, connect, find_proxy, is_exempt
from dadplug.hub.secure import tls
from dadplug.hub.wire.messages import Kind


@pytest.fixture(autouse=True)
def _no_proxy_of_the_machine(monkeypatch):
    for name in ("https_proxy", "HTTPS_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


def use_proxy(kit, url):
    """Enter a proxy into the policy of a kit."""
    (kit / "policy.toml").write_text(f'proxy = "{url}"\n')


# Which proxy is used


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://proxy.example.org:3128", ("proxy.example.org", 3128, "")),
        ("proxy.example.org:3128", ("proxy.example.org", 3128, "")),
        ("http://[2001:db8::1]:3128/", ("2001:db8::1", 3128, "")),
        ("http://user:p%40ss%3Aword@10.0.0.1", ("10.0.0.1", 80, "user:p@ss:word")),
        ("http://user@proxy:8080", ("proxy", 8080, "user:")),
    ],
)
def test_addresses_of_proxies(text, expected):
    proxy = Proxy.parse(text, "HTTPS_PROXY")
    assert (proxy.host, proxy.port, proxy.credentials) == expected
    assert "word" not in f"{proxy} {proxy!r}"


@pytest.mark.parametrize(
    "text",
    [
        "https://proxy:1",
        "socks5://proxy:1",
        "http://",
        "http://proxy:99999",
        "http://proxy/path",
        "http://u%0a:p@proxy",
    ],
)
def test_addresses_that_cannot_be_used(text):
    refuses(
        (lambda: Proxy.parse(text, "HTTPS_PROXY"), "HTTPS_PROXY: proxy must be http://HOST:PORT"),
        (lambda: Policy.parse({"proxy": text}, "policy.toml"), "proxy must be"),
        error=KitError,
    )


@pytest.mark.parametrize(
    ("exempt", "host", "expected"),
    [
        ("*", "hub.example.org", True),
        ("example.org", "hub.example.org", True),
        (".example.org", "hub.example.org", True),
        ("*.example.org, other", "HUB.example.org", True),
        ("ample.org", "hub.example.org", False),
        ("hub.example.org:8470", "hub.example.org", True),
        ("hub.example.org:443", "hub.example.org", False),
        ("10.0.0.0/8", "10.1.2.3", True),
        ("10.0.0.0/8", "11.1.2.3", False),
        ("2001:db8::/32", "2001:db8::7", True),
        ("[::1]:8470,::2", "::1", True),
        ("", "hub.example.org", False),
    ],
)
def test_exemptions(exempt, host, expected):
    assert is_exempt(host, 8470, exempt) is expected


def test_the_kit_counts_before_the_environment():
    environment = {"HTTPS_PROXY": "http://upper:1", "https_proxy": "http://lower:1"}
    assert find_proxy("", "hub", 1, {}) is None
    assert find_proxy("", "hub", 1, environment).host == "lower"
    assert find_proxy("", "hub", 1, {"HTTPS_PROXY": "http://upper:1"}).source == "HTTPS_PROXY"
    assert find_proxy("", "hub", 1, environment | {"NO_PROXY": "hub"}) is None
    assert find_proxy("http://kit:1", "hub", 1, environment | {"NO_PROXY": "hub"}).host == "kit"
    assert find_proxy("direct", "hub", 1, environment) is None


def test_the_project_file_gives_kits_their_proxy(tmp_path):
    entries = {"proxy": "http://proxy:3128", "policy": {"b": {"proxy": "direct", "rate_limit": 10}}}
    provision.provision(Project.parse(hub_kits.PROJECT | entries), tmp_path / "kits")
    first, second = (Kit.load(tmp_path / "kits" / name).policy for name in "ab")
    assert (first.proxy, first.rate_limit) == ("http://proxy:3128", None)
    assert (second.proxy, second.rate_limit) == ("direct", 10)
    assert (tmp_path / "kits" / "a" / "policy.toml").stat().st_mode & 0o077 == 0
    for wrong in (
        {"proxy": 3},
        {"rate_limit": 0},
        {"rate_limit": True},
        {"rate_limit": "fast"},
        {"hub_timeout": 0},
        {"hub_timeout": "long"},
    ):
        with pytest.raises(KitError, match=f"{next(iter(wrong))} must be"):
            Policy.parse(wrong, "policy.toml")


# The tunnel


@pytest.mark.parametrize("credentials", ["", "user:p@ss word"])
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_sites_train_through_a_proxy(tmp_path, credentials, family):
    with running_hub(tmp_path / "kits") as hub, running_proxy(credentials=credentials, family=family) as proxy:
        use_proxy(tmp_path / "kits" / "a", proxy.url.replace("p@ss word", "p%40ss%20word"))
        sites = together(hub)
        exchange(*sites)
        sites[0].send(Kind.PAYLOAD, bytes(300_000), exchange=1)
        assert sites[1].message(300_000) == bytes(300_000)
        assert proxy.asked == [f"127.0.0.1:{hub.address[1]}"]
        assert proxy.passed > 300_000
        assert b"still here" not in proxy.url.encode()


def test_a_hub_with_an_ipv6_address(tmp_path):
    kits = hub_kits.make(tmp_path / "kits", hub=f"[::1]:{free_port()}", hub_names=[])
    with running_hub(kits) as hub, running_proxy() as proxy:
        use_proxy(kits / "a", proxy.url)
        exchange(*together(hub))
        assert proxy.asked == [f"[::1]:{hub.address[1]}"]


def test_a_check_says_that_it_goes_through_the_proxy(tmp_path, monkeypatch):
    with running_hub(tmp_path / "kits") as hub, running_proxy() as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        found = {each.item: each for each in check.check_kit(tmp_path / "kits" / "a", timeout=TIMEOUT)}
        assert {each.state for each in found.values()} == {"ok"}
        assert f"goes through http://127.0.0.1:{proxy.address[1]} (from HTTPS_PROXY)" in found["proxy"].text
        assert "rate" in found
        monkeypatch.setenv("NO_PROXY", "127.0.0.0/8")
        assert "proxy" not in {each.item for each in check.check_kit(tmp_path / "kits" / "b", timeout=TIMEOUT)}
        assert len(proxy.asked) == 1
        assert hub.log


@pytest.mark.parametrize(
    ("answer", "reason", "lasting", "advice"),
    [
        (b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n", "407 .*requires a user", True, "USER:PASSWORD"),
        (b"HTTP/1.0 403 Forbidden\r\nX: y\r\n\r\n<html>", "403 Forbidden: its rules", True, "allow CONNECT 127.0.0.1"),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", "503 .*cannot connect to the hub", False, "whether the hub runs"),
        (b"HTTP/1.1 504 Gateway Timeout\r\n\r\n", "504 .*not answered it in time", False, "whether the hub runs"),
        (b"HTTP/1.1 418 \x1b[2J\r\n\r\n", r"418 \\x1b\[2J: it has refused", False, "allow CONNECT"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "does not answer as an HTTP proxy: 'SSH-2.0", False, "address"),
        (b"HTTP/1.1 200 OK\r\n\r\nextra", "bytes of its own", True, "address"),
        (b"HTTP/1.1 200 OK\r\n", "its answer is incomplete", False, "address"),
        (b"x" * 20000, "more than 16384 bytes", False, "address"),
        (b"", "has not answered CONNECT 127.0.0.1:8470 within 0.5 s", False, "address"),
    ],
)
def test_a_proxy_that_does_not_connect(tmp_path, answer, reason, lasting, advice):
    kits = hub_kits.make(tmp_path / "kits", hub="127.0.0.1:8470", hub_names=[])
    with running_proxy(answer=answer) as proxy:
        use_proxy(kits / "a", proxy.url)
        with pytest.raises(ProxyError, match=reason) as caught:
            tls.dial(Kit.load(kits / "a"), 0.5)
        assert caught.value.lasting is lasting
        assert f"the proxy http://127.0.0.1:{proxy.address[1]} (from policy.toml)" in str(caught.value)
        found = [*check.check_kit(kits / "a", timeout=0.5)][-1]
    assert (found.item, found.state) == ("proxy", "failed")
    assert advice in found.advice


def test_a_proxy_that_is_not_there(tmp_path):
    kits = hub_kits.make(tmp_path / "kits", hub="127.0.0.1:8470", hub_names=[])
    use_proxy(kits / "a", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ProxyError, match=r"cannot be reached: .*refused"):
        tls.dial(Kit.load(kits / "a"), TIMEOUT)
    found = [*check.check_kit(kits / "a", timeout=5.0)][-1]
    assert (found.item, found.state) == ("proxy", "failed")
    assert "(from policy.toml)" in found.text
    assert "refuses connections" in found.text
    (kits / "a" / "policy.toml").write_text('proxy = "socks5://proxy:1"\n')
    with pytest.raises(KitError, match=r"policy.toml: proxy must be"):
        Kit.load(kits / "a")


def test_a_start_ends_at_once_where_waiting_is_of_no_use(tmp_path):
    from dadplug.hub.site.link import HubLink

    kits = hub_kits.make(tmp_path / "kits", hub="127.0.0.1:8470", hub_names=[])
    with running_proxy(credentials="user:password") as proxy:
        use_proxy(kits / "a", proxy.url.replace("password", "wrong"))
        with pytest.raises(RefusedError, match="407"):
            HubLink(Kit.load(kits / "a")).start(TIMEOUT)


# Ports that are shared, and inspection


def hello_of_a_site(kits, host):
    """Return the first bytes that a site sends to its hub."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = []

        def take():
            connection, _ = server.accept()
            found.append(connection.recv(4096))
            connection.close()

        thread = threading.Thread(target=take)
        thread.start()
        with contextlib.suppress(OSError):
            tls.encrypt(Kit.load(kits / "a"), socket.create_connection(server.getsockname()), host, 443)
        thread.join()
    return found[0]


def test_the_first_message_names_the_hub_and_the_protocol(tmp_path):
    """A reverse proxy chooses by SNI or ALPN, which are not encrypted."""
    kits = hub_kits.make(tmp_path / "kits")
    sent = hello_of_a_site(kits, "hub.example.org")
    assert b"\x00\x00\x0fhub.example.org" in sent
    assert b"\x00\x10\x00\x0a\x00\x08\x07dadplug" in sent
    assert b"\x07dadplug" in hello_of_a_site(kits, "10.0.0.5")


def test_hub_and_site_agree_on_the_protocol(hub):
    with tls.dial(hub.kit("a"), TIMEOUT, hub.address) as connection:
        assert connection.tls.selected_alpn_protocol() == "dadplug"


@contextlib.contextmanager
def inspector(folder):
    """Run a server that shows a certificate for the hub's name of another authority, as inspecting proxies do."""
    key = ec.generate_private_key(ec.SECP256R1())
    issuer, subject = (
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in ("Institute Web Filter CA", "127.0.0.1")
    )
    now = datetime.datetime.now(datetime.timezone.utc)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    builder = builder.serial_number(7).not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
    pem = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    private = serialization.PrivateFormat.PKCS8
    secret = key.private_bytes(serialization.Encoding.PEM, private, serialization.NoEncryption())
    (folder / "inspector.pem").write_bytes(secret + pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "inspector.pem")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with contextlib.suppress(OSError), context.wrap_socket(connection, server_side=True) as encrypted:
                    encrypted.recv(1)

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("through_proxy", [False, True])
def test_tls_inspection_is_named_with_its_issuer(tmp_path, through_proxy):
    kits = hub_kits.make(tmp_path / "kits", hub="127.0.0.1:8470", hub_names=[])
    with inspector(tmp_path) as address, running_proxy(target=address) as proxy:
        if through_proxy:
            use_proxy(kits / "a", proxy.url)
        where = None if through_proxy else address
        with pytest.raises(RefusedError, match=r"TLS inspection: .*'Institute Web Filter CA' has issued it"):
            tls.dial(Kit.load(kits / "a"), TIMEOUT, where)
        found = [*check.check_kit(kits / "a", where, TIMEOUT)][-1]
    assert (found.item, found.state) == ("TLS", "failed")
    assert "Institute Web Filter CA" in found.text
    assert "exempt the hub's address from TLS inspection" in found.advice


# The proxy of Debian


@contextlib.contextmanager
def squid(folder, rules):
    """Run squid on loopback."""
    port = free_port()
    (folder / "squid.conf").write_text(
        f"http_port 127.0.0.1:{port}\npid_filename {folder}/squid.pid\ncoredump_dir {folder}\nshutdown_lifetime 0\n"
        f"access_log stdio:{folder}/access.log\ncache_log {folder}/cache.log\ncache deny all\n{rules}"
    )
    folder.chmod(0o777)
    errors = folder / "errors"
    with errors.open("wb") as log:
        program = subprocess.Popen(["squid", "-N", "-f", str(folder / "squid.conf")], stdout=log, stderr=log)
    try:

        def answers():
            assert program.poll() is None, errors.read_text()
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
                return True
            return False

        until(answers)
        yield f"127.0.0.1:{port}"
    finally:
        program.kill()
        program.wait()


@pytest.mark.skipif(not shutil.which("squid"), reason="squid is not installed (Debian: apt-get install squid)")
def test_sites_train_through_squid(tmp_path, request):
    folder = Path(tempfile.mkdtemp(prefix="squid"))  # squid gives root's rights up, and cannot enter pytest's folders
    request.addfinalizer(lambda: shutil.rmtree(folder))
    (folder / "password.sh").write_text(
        '#!/bin/sh\nwhile read -r line; do case "$line" in "lab secret") echo OK;; *) echo ERR;; esac; done\n'
    )
    (folder / "password.sh").chmod(0o755)
    with running_hub(tmp_path / "kits") as hub:
        rules = (
            f"auth_param basic program {folder}/password.sh\nauth_param basic children 1\n"
            f"acl known proxy_auth REQUIRED\nacl hub port {hub.address[1]}\n"
            "http_access deny !known\nhttp_access allow CONNECT hub\nhttp_access deny all\n"
        )
        with squid(folder, rules) as address:
            use_proxy(tmp_path / "kits" / "a", f"http://lab:secret@{address}")
            sites = together(hub)
            sites[0].send(Kind.PAYLOAD, bytes(2_000_000), exchange=1)
            assert sites[1].message(2_000_000) == bytes(2_000_000)
            found = [*check.check_kit(tmp_path / "kits" / "a", timeout=TIMEOUT)]
            assert {each.state for each in found} == {"ok"}
            for url, status in ((f"http://lab:wrong@{address}", 407), (f"http://lab:secret@{address}", 403)):
                port = hub.address[1] if status == 407 else free_port()
                with pytest.raises(ProxyError) as caught:
                    connect("127.0.0.1", port, Proxy.parse(url, "policy.toml"), TIMEOUT)
                assert (caught.value.status, caught.value.lasting) == (status, True)
