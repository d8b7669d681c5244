"""The dashboard and the alerts name metrics that exist; exit statuses and events have their numbers and levels."""

import json
import re
import shutil
import subprocess
import urllib.request
from pathlib import Path

import pytest
from connect_proxy import running_proxy
from prometheus_client.parser import text_string_to_metric_families
from running_hub import TestSite, running_hub, together, until

from dadplug.hub.server.status import Meter, MetricsServer, for_sites, snapshot
from dadplug.tools.cli.commands import Exit, main

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
