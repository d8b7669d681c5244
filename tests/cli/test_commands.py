"""The commands of `python -m dadplug`."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from dadplug.examples.runs import RunProgress

from dadplug.hub.pki.kits import Kit
from dadplug.tools.cli.commands import COMMANDS, Exit, main

ROOT = Path(__file__).resolve().parents[2]
PROJECT = 'name = "study"\nhub = "hub.example.org:8470"\nsites = ["a", "b"]\nown_keys = ["b"]\n'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "project.toml").write_text(PROJECT)
    return tmp_path


def run(line: str, capsys) -> str:
    """Run a command that succeeds, and return what it prints."""
    assert main(line.split()) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_kits_from_provisioning_to_revocation(folder, capsys):
    printed = run("provision project.toml --out kits", capsys)
    assert "kits/a: the kit of slot 0; holds a secret key" in printed
    assert "b: makes its key itself" in printed
    printed = run("request b --project study --kit own", capsys)
    number = printed.strip().rpartition(" ")[2]
    assert len(number.split(":")) == 16
    printed = run("sign b own/request.pem --days 10", capsys)
    assert f"fingerprint of the key: {number}" in printed
    for path in (folder / "kits" / "b").iterdir():
        (folder / "own" / path.name).write_bytes(path.read_bytes())
    assert Kit.load("own").slot == 1
    first = Kit.load("kits/a").certificate.serial_number
    assert "kits/a/certificate.pem: renewed" in run("renew a --days 20", capsys)
    second = Kit.load("kits/a").certificate.serial_number
    assert second != first
    assert f"revoked the certificate {first:x} of a" in run(f"revoke a --serial {first:x}", capsys)
    assert Kit.load("kits/hub").revoked == {first}
    assert f"{second:x}" in run("revoke a", capsys)
    assert "were revoked already" in run("revoke a", capsys)
    assert "holds a secret key" in run("renew a --new-key", capsys)
    assert Kit.load("kits/a").certificate.serial_number not in Kit.load("kits/hub").revoked
    run("renew hub --hub-name 10.0.0.5", capsys)
    assert Kit.load("kits/hub").roster.hub_names == ("hub.example.org", "10.0.0.5")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("provision nothing.toml", "nothing.toml: No such file"),
        ("renew a", "the authority's folder is needed"),
        ("sign b nothing.pem", "nothing.pem: No such file"),
        ("request ../b --project study", "the name of a site must begin"),
    ],
)
def test_an_error_is_one_line(folder, capsys, line, reason):
    assert main(line.split()) == 1
    errors = capsys.readouterr().err
    assert errors.startswith("error: ")
    assert reason in errors
    assert errors.count("\n") == 1


def test_days_out_of_range_are_an_error(folder, capsys):
    run("provision project.toml", capsys)
    for days in ("-5", "999999999"):
        assert main(["renew", "a", f"--days={days}"]) == 1
        assert "days must be a whole number of days from 1 to 36500" in capsys.readouterr().err


def test_every_command_has_help(capsys):
    for name in COMMANDS.choices:
        with pytest.raises(SystemExit) as end:
            main([name, "--help"])
        assert end.value.code == 0
        assert "show this help message" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--help"])
    printed = capsys.readouterr().out
    assert all(name in printed for name in COMMANDS.choices)
    with pytest.raises(SystemExit) as end:
        main(["unknown"])
    assert end.value.code == 2


def python(code: str) -> str:
    program = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert program.returncode == 0, program.stderr
    return program.stdout


def test_making_kits_does_not_load_torch(folder):
    code = f"""
import sys
from dadplug.tools.cli.commands import main
assert main(["provision", {str(folder / "project.toml")!r}, "--out", {str(folder / "kits")!r}]) == 0
print({{"torch", "numpy"}} & set(sys.modules))
"""
    assert python(code).endswith("set()\n")


def test_without_cryptography_the_extra_is_named(folder):
    code = f"""
import sys
sys.modules["cryptography"] = None
import dadplug.hub
from dadplug.tools.cli.commands import main
sys.stderr = sys.stdout
assert main(["provision", {str(folder / "project.toml")!r}]) == 1
"""
    assert "error: kits need the package cryptography, which is not installed: pip install 'dadplug[hub]'" in python(
        code
    )


def test_without_a_command_the_help_is_shown(capsys):
    assert main([]) == 2
    help_text = capsys.readouterr().err
    assert {line.split()[0] for line in help_text.splitlines() if line.startswith("    ")} >= set(COMMANDS.choices)
    assert "hub, which all sites connect to" in help_text


def test_the_module_is_a_program():
    command = [sys.executable, "-m", "dadplug", "provision"]
    program = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert program.returncode == 2
    assert "usage: python -m dadplug provision" in program.stderr


# The progress of a run, on a terminal and in a file


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run_progress(**settings) -> None:
    progress = RunProgress("rankdad", epochs=2, steps=3, **settings)
    for epoch in range(2):
        for step in range(3 - epoch):  # the second epoch is shorter at this site
            progress.step(loss=f"{3 * epoch + step}.5")
        progress.end_epoch(accuracy=f"0.{epoch + 1}")
    progress.close()


def test_a_file_gets_one_line_an_epoch(capsys):
    run_progress()
    out, err = capsys.readouterr()
    assert out == "rankdad: epoch 1/2, loss=2.5, accuracy=0.1\nrankdad: epoch 2/2, loss=4.5, accuracy=0.2\n"
    assert err == ""


def test_a_terminal_gets_one_bar_that_ends_full(capsys, monkeypatch):  # so that the stream is restored first
    pytest.importorskip("tqdm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    run_progress()
    assert capsys.readouterr().out == ""
    last = sys.stderr.getvalue().rstrip("\n").rpartition("\r")[2]
    assert last.startswith("rankdad: 100%")
    assert "6/6" in last
    assert "epoch=2/2, loss=4.5, accuracy=0.2" in last
    assert sys.stderr.getvalue().count("\n") == 1


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_other_sites_show_nothing(capsys, monkeypatch, stream):
    monkeypatch.setattr(sys, "stderr", stream())
    run_progress(shown=False)
    assert capsys.readouterr().out == ""
    assert sys.stderr.getvalue() == ""


AUDIT_TASK = """
import torch
from torch import nn


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
    return model, torch.optim.SGD(model.parameters(), 0.1), nn.CrossEntropyLoss()
"""


def test_audit_prints_a_table_and_writes_reports(tmp_path, capsys):
    (tmp_path / "audited.py").write_text(AUDIT_TASK)
    given = ["audit", f"{tmp_path}/audited.py:build", "digits", "--mode", "dad", "--batch-size", "4"]
    files = [
        f"--{kind}={tmp_path}/report.{end}" for kind, end in (("json", "json"), ("html", "html"), ("picture", "png"))
    ]
    assert main([*given, *files, "--option", "wire=int8"]) == 0
    assert "100%" in capsys.readouterr().out
    assert json.loads((tmp_path / "report.json").read_text())["options"] == {"wire": "int8"}
    assert (tmp_path / "report.html").stat().st_size > 1000
    assert (tmp_path / "report.png").stat().st_size > 1000
    assert main([*given, "--fail-above", "0.5"]) == 1
    assert main([*given, "--fail-above", "1", "--seconds", "1e-9"]) == 1  # nothing was tried
    for wrong, message in (
        (("--option", "rank=0"), "rank must be"),
        (("--option", "banana=1"), "unknown option"),
        (("--option", "seconds=3"), "--option seconds= is no option of a mode"),
        (("--html", f"{tmp_path}/absent/report.html"), "there is no folder"),
        (("--json", f"{tmp_path}/report.txt"), "should end in .json"),
    ):
        with pytest.raises(SystemExit):
            main([*given, *wrong])
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("file", ["--html=report.html", "--picture=report.png"])
def test_audit_names_a_missing_matplotlib_before_it_starts(monkeypatch, capsys, file):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main(["audit", "absent.py:build", "digits", file])
    assert "a picture needs matplotlib: pip install 'dadplug[examples]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("build", "data", "message"),
    [
        ("pair", "digits", "build() must return (model, optimizer, criterion), got Sequential, SGD"),
        ("swapped", "digits", "build() must return (model, optimizer, criterion), got SGD, Sequential, "),
        ("number", "digits", "build() must return (model, optimizer, criterion), got int"),
        ("stranger", "digits", "the optimizer of build() has no parameter of its model"),
        ("build", "wrong.py:build", "wrong.py:build: tuple is no data set"),
        ("build", "wrong.py:number", "wrong.py:number: int is no data set"),
        (
            "build",
            "digit",
            "'digit' is no FILE.py:NAME or MODULE:NAME, nor a data set's name: clicks, criteo, ",
        ),
    ],
)
def test_wrong_functions_of_a_user_are_named(tmp_path, monkeypatch, capsys, build, data, message):
    monkeypatch.chdir(tmp_path)
    functions = ("pair(): return build()[:2]", "swapped(): return build()[1], build()[0], build()[2]")
    functions += ("stranger(): return build()[0], *build()[1:]",)
    Path("wrong.py").write_text("\n".join([AUDIT_TASK, "number = 3", *(f"def {each}" for each in functions)]))
    monkeypatch.delitem(sys.modules, "wrong", raising=False)
    with pytest.raises(SystemExit):
        main(["audit", f"wrong.py:{build}", data])
    assert message in capsys.readouterr().err


def test_an_interrupt_is_one_line(monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("dadplug.hub.pki.project.Project.load", interrupted)
    assert main(["provision", "project.toml"]) == Exit.INTERRUPTED == 130
    assert capsys.readouterr().err == "interrupted\n"
