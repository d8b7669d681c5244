"""Units of systemd that `python -m dadplug service` writes."""

import configparser
import shutil
import subprocess
import sys

import hub_kits
import pytest

from dadplug.errors import KitError
from dadplug.hub.pki.kits import Kit
from dadplug.hub.service import Service
from dadplug.tools.cli.commands import main


@pytest.fixture
def kits(tmp_path):
    return hub_kits.make(tmp_path / "kits")


def written(capsys, folder, *arguments):
    """Run the command; return the unit, what is printed, and the unit's path."""
    assert main(["service", *map(str, arguments[:1]), "--out", str(folder), *map(str, arguments[1:])]) == 0
    printed = capsys.readouterr().out
    (path,) = folder.glob("*.service")
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str
    unit.read_string(path.read_text())
    return unit, printed, path


def test_the_unit_of_the_hub(kits, tmp_path, capsys):
    unit, printed, path = written(capsys, tmp_path, kits / "hub", "--", "--metrics", "127.0.0.1:9464")
    assert path.name == "dadplug-hub-study.service"
    service = unit["Service"]
    command = f"{sys.executable} -m dadplug hub {kits / 'hub'} --metrics 127.0.0.1:9464"
    assert service["ExecStart"] == command
    assert service["LoadCredential"] == f"key.pem:{kits / 'hub' / 'key.pem'}"
    assert (service["DynamicUser"], service["Restart"]) == ("yes", "on-failure")
    assert (service["ProtectSystem"], service["MemoryDenyWriteExecute"]) == ("strict", "yes")
    assert (service["CapabilityBoundingSet"], service["PrivateDevices"]) == ("", "yes")
    assert "systemctl enable --now dadplug-hub-study" in printed
    assert f"chmod 755 {kits / 'hub'}" in printed


def test_the_unit_of_a_site(kits, tmp_path, capsys):
    (kits / "a" / "policy.toml").chmod(0o600)
    (tmp_path / "secret").write_text("words")
    arguments = ["--user", "train", "--devices", "--passphrase-file", tmp_path / "secret"]
    program = ["--", sys.executable, "/srv/train.py", "a b", "$x", "100%", 'say "no"']
    unit, printed, path = written(capsys, tmp_path, kits / "a", *arguments, *program)
    assert path.name == "dadplug-site-study-a.service"
    service = unit["Service"]
    assert service["ExecStart"].endswith(r'/srv/train.py "a b" "$$x" "100%%" "say \"no\""')
    assert (service["User"], "DynamicUser" in service, "PrivateDevices" in service) == ("train", False, False)
    assert "MemoryDenyWriteExecute" not in service  # numba compiles
    lines = [line for line in path.read_text().splitlines() if line.startswith("LoadCredential=")]
    assert [line.split(":")[0] for line in lines] == [
        "LoadCredential=key.pem",
        "LoadCredential=policy.toml",
        "LoadCredential=passphrase",
    ]
    assert f"chown -R train {kits / 'a'}" in printed


def test_a_hub_at_a_low_port_may_bind_it_and_nothing_else(tmp_path):
    kits = hub_kits.make(tmp_path / "kits", hub="hub.example.org:443")
    text = Service(Kit.load(kits / "hub")).text()
    assert "\nCapabilityBoundingSet=CAP_NET_BIND_SERVICE\nAmbientCapabilities=CAP_NET_BIND_SERVICE\n" in text


def test_a_site_needs_its_program(kits, capsys):
    with pytest.raises(KitError, match=r"needs the program that trains, after --"):
        Service(Kit.load(kits / "a"))
    assert main(["service", str(kits / "a"), "--", "no-such-program"]) == 1
    assert "needs the program that trains" in capsys.readouterr().err


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed (Debian: systemd)")
@pytest.mark.parametrize("name", ["hub", "a"])
def test_systemd_takes_the_unit_and_finds_it_safe(kits, tmp_path, capsys, name):
    program = ["--", sys.executable, "/srv/train.py"] if name == "a" else []
    _, _, path = written(capsys, tmp_path, kits / name, *program)
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)], capture_output=True, text=True, timeout=60
    )
    assert (verified.returncode, verified.stderr) == (0, "")
    exposed = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", "--threshold=25", "--no-pager", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    if "unrecognized option" in exposed.stderr:
        pytest.skip("this systemd does not rate units that are not installed")
    assert exposed.returncode == 0, exposed.stdout[-300:]
