"""The hub's metrics, its journal as JSON and in a file that is moved, and its status at a site."""

import json
import math
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from connect_proxy import running_proxy
from prometheus_client.parser import text_string_to_metric_families
from running_hub import TestSite, close_step, running_hub, together, until
from support import refuses

import dadplug
from dadplug.errors import FrameError, KitError
from dadplug.exchange.rounds import Spent
from dadplug.hub import check
from dadplug.hub.server import journal
from dadplug.hub.server import status as hub_status
from dadplug.hub.server.journal import Journal, JournalFile
from dadplug.hub.server.status import Meter, MetricsServer, Outputs, for_sites, snapshot
from dadplug.hub.wire.messages import Kind
from dadplug.tools.cli.commands import Exit, main

ROOT = Path(__file__).resolve().parents[2]


def read(address, path="/metrics"):
    with urllib.request.urlopen(f"http://{address[0]}:{address[1]}{path}", timeout=20) as answer:
        return answer.read().decode()


def samples(text):
    families = text_string_to_metric_families(text)
    return {(each.name, *sorted(each.labels.values())): each.value for family in families for each in family.samples}


@pytest.fixture
def server():
    made = MetricsServer(("127.0.0.1", 0))
    yield made
    made.close()


def test_metrics_are_those_of_the_status(hub, server):
    a, b = together(hub)
    a.send(Kind.PAYLOAD, bytes(100_000))
    b.message(100_000)
    a.control(Spent(2.5, 1e-5))
    b.control(Spent(math.inf, 1e-6))
    close_step([a, b])
    meter = Meter()
    until(lambda: all(site["epsilon"] for site in snapshot(hub.hub, meter)["sites"]))
    status = snapshot(hub.hub, meter)
    server.show(status)
    found = samples(read(server.address))
    page = (ROOT / "docs/reference/hub.md").read_text()
    assert {name for name, *_ in found} == set(re.findall(r"`(dadplug_\w+)`", page.partition("## Metrics")[2]))
    assert found["dadplug_hub_info", dadplug.__version__, status["project"]] == 1
    assert found["dadplug_hub_steps_total",] == 1
    assert found["dadplug_hub_training",] == 1
    assert found["dadplug_hub_paused",] == 0
    assert 0 < found["dadplug_hub_step_seconds",] < 60
    assert found["dadplug_hub_up_seconds",] == status["up_seconds"] > 0
    assert 100_000 < found["dadplug_site_received_bytes_total", "a"] < 110_000
    assert found["dadplug_site_sent_bytes_total", "b"] == status["sites"][1]["bytes_to"] > 100_000
    assert found["dadplug_site_epsilon", "1e-05", "a"] == 2.5
    assert found["dadplug_site_epsilon", "1e-06", "b"] == math.inf
    assert found["dadplug_site_state", "a", "member"] == 1
    assert found["dadplug_site_state", "a", "absent"] == 0
    assert found["dadplug_certificate_days", "hub"] == status["certificate_days"] > 0
    assert found["dadplug_certificate_days", "b"] == status["sites"][1]["certificate_days"]
    b.cut()
    until(lambda: snapshot(hub.hub, meter)["sites"][1]["state"] == "disconnected")
    server.show(snapshot(hub.hub, meter))
    assert samples(read(server.address))["dadplug_site_state", "b", "disconnected"] == 1


def test_the_hub_is_healthy_while_it_gives_a_status(server, monkeypatch):
    assert read(server.address, "/healthz") == "ok\n"
    assert read(server.address) == ""
    monkeypatch.setattr(hub_status, "_HEALTHY_SECONDS", 0.0)
    refuses(
        (lambda: read(server.address, "/healthz"), "503"),
        (lambda: read(server.address, "/status"), "404"),
        (lambda: MetricsServer(server.address), r"cannot serve metrics at 127\.0\.0\.1", KitError),
        error=urllib.error.HTTPError,
    )


def test_slow_readers_of_metrics_are_few_and_end(monkeypatch):
    monkeypatch.setattr(hub_status, "_SECONDS", 0.5)
    monkeypatch.setattr(hub_status._Handler, "timeout", 0.5)
    server = MetricsServer(("127.0.0.1", 0))
    held = [socket.create_connection(server.address, 20) for _ in range(hub_status._MOST_REQUESTS + 4)]
    for each in held:
        assert each.recv(1) == b""
        each.close()
    until(lambda: server._free._value == hub_status._MOST_REQUESTS)
    assert read(server.address, "/healthz") == "ok\n"
    server.close()


def test_a_site_reads_the_status_and_no_journal(tmp_path, capsys):
    with running_hub(tmp_path / "kits") as hub:
        other = TestSite(hub.kit("b"), hub.address)
        address = f"{hub.address[0]}:{hub.address[1]}"
        until(lambda: snapshot(hub.hub, Meter())["sites"][1]["state"] == "waiting")
        hub.hub.relay.status = for_sites(snapshot(hub.hub, Meter()))
        assert main(["status", str(hub.kits / "a"), "--address", address]) == 0
        shown = capsys.readouterr().out
        assert "1 of 2 sites" in shown
        assert "waiting for a" in shown
        assert main(["status", str(hub.kits / "a"), "--address", address, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert [site["state"] for site in found["sites"]] == ["absent", "waiting"]
        assert not {"journal", "kit_problems", "refused"} & set(found)
        assert main(["status", str(hub.kits / "hub"), "--address", address]) == 1
        assert "is the kit of the hub" in capsys.readouterr().err
        other.leave("")
    assert main(["status", str(hub.kits / "a"), "--address", address]) == 1
    assert "refuses connections. The machine is up" in capsys.readouterr().err


def test_a_status_of_any_size_is_bounded():
    handler = check.CheckHandler(0)
    head = check.Head(Kind.PAYLOAD, 0, tag=check.CheckRequest.STATUS, length=1)
    with pytest.raises(FrameError, match="asks for more than"):
        handler.handle(head, b"?", {"journal": "x" * check.MOST_BYTES})


def test_lines_of_the_journal_as_json_and_by_level():
    lines: list[str] = []
    log = Journal(lines.append, as_json=True, level="warning")
    log.write("a has joined")
    log.refuse("198.51.100.7:1", "no TLS\n", 1.0)
    log.fault("b cannot be served", ValueError("x"))
    found = [json.loads(line) for line in lines]
    assert found[0]["level"] == "warning"
    assert found[0]["event"] == r"refused 198.51.100.7:1: no TLS\n"
    assert time.strptime(found[0]["time"], "%Y-%m-%dT%H:%M:%SZ")
    assert found[1] == found[1] | {"level": "error", "event": "fault of the hub: b cannot be served: ValueError: x"}
    assert log.recent[0].endswith("UTC  a has joined")
    with pytest.raises(ValueError, match="level must be one of info, warning, error"):
        Journal(lines.append, level="loud")


def test_a_file_of_the_journal_that_is_moved_is_begun_anew(tmp_path):
    told: list[str] = []
    file = JournalFile(tmp_path / "hub.log", told.append)
    file.write_line("first")
    (tmp_path / "hub.log").rename(tmp_path / "hub.log.1")
    file.write_line("second")
    assert (tmp_path / "hub.log.1").read_text() == "first\n"
    assert (tmp_path / "hub.log").read_text() == "second\n"
    file.close()
    assert told == []


def test_a_hub_goes_on_where_its_files_cannot_be_written(tmp_path, monkeypatch):
    told: list[str] = []
    file = JournalFile(tmp_path / "hub.log", told.append)

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(file, "format", full)
    file.write_line("lost")
    file.write_line("lost, too")
    assert len(told) == 1
    assert "hub.log cannot be written" in told[0]
    monkeypatch.undo()
    file.write_line("written")
    assert (tmp_path / "hub.log").read_text() == "written\n"
    file.close()
    with pytest.raises(OSError, match="No such file"):
        Outputs(tmp_path / "missing" / "hub.log", None, None, "text", "info")
    assert journal.LEVELS[0] == "info"


# The dashboard and the alerts name metrics that exist; exit statuses and events have their numbers and levels

FOLDER = Path(__file__).parents[2] / "examples" / "operations"
DOCS = Path(__file__).parents[2] / "docs"
FILES = ("grafana-dashboard.json", "prometheus-alerts.yml")
NAME = re.compile(r"\bdadplug_[a-z_]+")


@pytest.fixture
def hub(tmp_path):
    """A running hub that reports its status, as that of the command does."""
    meter = Meter()

    def report(hub):
        hub.relay.status = for_sites(snapshot(hub, meter))

    with running_hub(tmp_path / "kits", report=report) as hub:
        yield hub


def settled(hub, condition):
    """Wait until the status of a hub that is reported meets a condition."""
    until(lambda: hub.hub.relay.status and condition([each["state"] for each in hub.hub.relay.status["sites"]]))


@pytest.fixture
def metrics(hub):
    """Names of the metrics of a hub whose sites have trained, by the names of their labels."""
    sites = together(hub)
    server = MetricsServer(("127.0.0.1", 0))
    try:
        server.show(snapshot(hub.hub, Meter()) | {"step_seconds": 0.1})
        with urllib.request.urlopen("http://{}:{}/metrics".format(*server.address), timeout=20) as answer:
            text = answer.read().decode()
    finally:
        server.close()
    assert len(sites) == 2
    families = text_string_to_metric_families(text)
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


@pytest.mark.parametrize("name", FILES)
def test_each_metric_that_is_named_exists(metrics, name):
    text = (FOLDER / name).read_text()
    named = set(NAME.findall(text))
    assert len(named) >= 8
    assert named - set(metrics) == set()


def test_the_dashboard_uses_labels_that_exist(metrics):
    panels = json.loads((FOLDER / FILES[0]).read_text())["panels"]
    assert len({panel["title"] for panel in panels}) == len(panels) >= 10
    for panel in panels:
        for target in panel["targets"]:
            (name,) = NAME.findall(target["expr"])
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= metrics[name]


def test_the_alerts_are_rules_of_prometheus(metrics):
    yaml = pytest.importorskip("yaml")
    (group,) = yaml.safe_load((FOLDER / FILES[1]).read_text())["groups"]
    assert len(group["rules"]) >= 8
    for rule in group["rules"]:
        assert {"alert", "expr", "labels", "annotations"} <= set(rule)
        labels = set().union({"instance"}, *(metrics.get(name, set()) for name in NAME.findall(rule["expr"])))
        used = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        assert used <= labels, rule["alert"]


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed (Debian: prometheus)")
def test_prometheus_takes_the_alerts():
    found = subprocess.run(["promtool", "check", "rules", str(FOLDER / FILES[1])], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


# Exit statuses


def test_exit_statuses_are_numbered_and_documented():
    page = (DOCS / "reference" / "command-line.md").read_text()
    assert [int(each) for each in Exit] == [0, 1, 2, 3, 4, 130]
    for each in Exit:
        assert f"| {each:d} | `{each.name}` |" in page


def test_a_status_with_sites_that_are_missing(hub, capsys):
    command = ["status", str(hub.kits / "b"), "--fail-missing"]
    site = TestSite(hub.kit("a"), hub.address)
    settled(hub, lambda states: states[0] != "absent")
    assert main(command) == Exit.SITES_MISSING
    assert "1 of 2 sites" in capsys.readouterr().out
    assert main(command[:-1]) == Exit.DONE
    site.close()


def test_a_status_when_all_are_there(hub, capsys):
    sites = together(hub)
    settled(hub, lambda states: states == ["member", "member"])
    assert main(["status", str(hub.kits / "b"), "--fail-missing"]) == Exit.DONE
    assert all(each.lost is None for each in sites)


def test_a_status_through_a_proxy(hub, monkeypatch, capsys):
    with running_proxy() as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        settled(hub, bool)
        assert main(["status", str(hub.kits / "b"), "--json"]) == Exit.DONE
        assert json.loads(capsys.readouterr().out)["project"] == "study"
        assert proxy.asked == [f"127.0.0.1:{hub.address[1]}"]
    assert main(["status", str(hub.kits / "b")]) == Exit.FAILED
    assert "refuses connections" in capsys.readouterr().err
