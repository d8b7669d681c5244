"""Registries, errors, logs and processes."""

import importlib
import inspect
import json
import logging
import os
import pkgutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import refuses

import dadplug
from dadplug import errors
from dadplug.errors import LoadError
from dadplug.support import processes
from dadplug.support.processes import launch_sites
from dadplug.support.registry import Registry, import_named


@pytest.fixture
def shapes():
    shapes: Registry[str, int] = Registry("shape")
    shapes.register("Square_one", "box")(1)
    shapes.register("circle")(2)
    return shapes


def test_names_are_found_by_any_spelling_and_listed_once(shapes):
    assert [shapes[name] for name in ("Square_one", "SQUARE-ONE", "squareone", "Box", "circle")] == [1, 1, 1, 1, 2]
    assert list(shapes) == ["Square_one", "circle"]
    assert shapes.get("cube") is None
    modes: Registry[str, int] = Registry("mode", exact=True)
    modes.register("dad")(1)
    types: Registry[type, str] = Registry("type")
    types.register(int)("whole")
    assert types[int] == "whole"
    refuses(
        (lambda: shapes["cube"], "unknown shape 'cube'; valid ones are Square_one, circle"),
        (lambda: modes["DAD"], "unknown mode 'DAD'"),
        (lambda: types[str], "unknown type <class 'str'>"),
    )
    shapes.register("circle")(3)
    assert shapes["Circle"] == 3
    del shapes["circle"]
    refuses((lambda: shapes["circle"], r"valid ones are Square_one$"))


def test_listeners_hear_of_later_entries(shapes):
    heard = []
    shapes.on_register(heard.append)
    shapes.register("line", "stroke")(4)
    assert heard == ["line"]


def test_modules_are_imported_when_an_entry_of_theirs_is_looked_up(shapes, tmp_path, monkeypatch):
    code = "import sys\nsys.modules['deferring'].shapes.register('cube')(8)\n"
    (tmp_path / "cube_module.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "deferring", SimpleNamespace(shapes=shapes))
    heard = []
    shapes.on_register(heard.append)
    shapes.defer("cube_module", "cube", "none")
    assert shapes.names == ("Square_one", "circle", "cube", "none")
    assert (shapes["circle"], "cube_module" in sys.modules) == (2, False)
    refuses((lambda: shapes["torus"], r"valid ones are Square_one, circle, cube, none$"))
    assert (shapes["cube"], "cube_module" in sys.modules) == (8, True)
    assert shapes.names == ("Square_one", "circle", "cube", "none")
    assert heard == []  # the name has been known before
    refuses((lambda: shapes["none"], "unknown shape 'none'"))


def test_what_cannot_be_imported_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("beside_this.py").touch()
    assert import_named("json:JSONDecoder.decode") is json.JSONDecoder.decode
    beside = r"No module named 'beside_this'; for the file, write beside_this\.py:net"
    refuses(
        (lambda: import_named("nothing"), "'nothing' does not read like FILE.py:NAME or MODULE:NAME"),
        (lambda: import_named("none.py:net"), r"there is no file none\.py"),
        (lambda: import_named("nowhere_to_be_found:net"), "nowhere_to_be_found:net: No module named"),
        (lambda: import_named("json:JSONDecoder.net"), r"json has no JSONDecoder\.net"),
        (lambda: import_named("beside_this:net"), beside),
        error=LoadError,
    )


# One base for every error, and one place where all of them are found


def error_classes():
    """Yield the public error classes that any module of the package defines."""
    for info in pkgutil.walk_packages(dadplug.__path__[:1], "dadplug."):
        if info.name.endswith("__main__"):
            continue
        try:
            module = importlib.import_module(info.name)
        except ImportError:
            continue
        for name, found in inspect.getmembers(module, inspect.isclass):
            if issubclass(found, Exception) and found.__module__ == info.name and not name.startswith("_"):
                yield found


def test_every_error_derives_from_one_base_and_is_found_in_one_module():
    found = set(error_classes())
    assert len(found) > 20
    for each in found:
        assert issubclass(each, errors.DadplugError), each
        assert getattr(errors, each.__name__) is each


@pytest.mark.parametrize(
    ("error", "before"),
    [("SiteError", RuntimeError), ("KitError", ValueError), ("InputError", ValueError), ("TryAgainError", OSError)],
)
def test_errors_keep_the_built_in_class_that_programs_catch(error, before):
    with pytest.raises(before, match="reason"):
        raise getattr(errors, error)("reason")


def test_the_base_is_offered_by_the_package():
    assert dadplug.DadplugError is errors.DadplugError
    assert dadplug.errors is errors


# Messages of the package reach a person, once


PROGRAM = "from dadplug.support.logs import get_logger; import logging; {}; get_logger('dadplug.test').{}('a message')"


def said(setup: str, level: str = "info") -> str:
    """Return what a program writes to standard error."""
    return subprocess.run([sys.executable, "-c", PROGRAM.format(setup, level)], capture_output=True, text=True).stderr


def test_messages_are_shown_with_the_time_without_any_setup():
    (line,) = said("pass").splitlines()
    assert line.endswith("dadplug: a message")
    assert line[2] == line[5] == ":"


def test_a_program_with_logging_of_its_own_gets_each_message_once_in_its_format():
    assert said("logging.basicConfig(format='own %(message)s')") == "own a message\n"


@pytest.mark.parametrize(("level", "lines"), [("info", 0), ("warning", 1)])
def test_a_level_of_the_program_holds(level, lines):
    assert len(said("logging.getLogger('dadplug').setLevel(logging.WARNING)", level).splitlines()) == lines


def test_messages_propagate(caplog):
    from dadplug.support.logs import get_logger

    with caplog.at_level(logging.INFO, "dadplug"):
        get_logger("dadplug.test").info("a message")
    assert caplog.messages == ["a message"]


# Starting several sites on one machine


WAITING = """
import os, sys, time
if "RANK" in os.environ:
    os.write(1, f"{os.getpid()}\\n".encode())
    time.sleep(100)
from dadplug.support.processes import launch_sites
sys.exit(launch_sites([__file__], 2))
"""


def test_sigterm_ends_the_sites_too(tmp_path):
    script = tmp_path / "waiting.py"
    script.write_text(WAITING)
    launcher = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    sites = [int(launcher.stdout.readline()) for _ in range(2)]
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(200) == 128 + signal.SIGTERM
    launcher.stdout.close()
    assert not any(os.path.exists(f"/proc/{site}") for site in sites)


@pytest.mark.parametrize(("end", "status"), [("os._exit(3)", 3), ("os.kill(os.getpid(), 9)", 137)])
def test_the_first_site_that_fails_gives_the_status(tmp_path, caplog, end, status):
    script = tmp_path / "failing.py"
    script.write_text(f"import os\nif os.environ['RANK'] == '1':\n    {end}")
    assert launch_sites([str(script)], 2) == status
    messages = [record.message.partition(";")[0] for record in caplog.records]
    assert messages == (["site 1 was ended by signal 9 (Killed)"] if status == 137 else [])


def test_a_site_that_is_killed_while_another_waits_for_it_ends_both(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(processes, "_GRACE", 1.0)
    script = tmp_path / "waiting.py"
    script.write_text("import os, time\nif os.environ['RANK'] == '1':\n    os.kill(os.getpid(), 9)\ntime.sleep(60)")
    assert launch_sites([str(script)], 2) == 137
    assert caplog.messages == ["site 1 was ended by signal 9 (Killed); the others have 1 s to exit"]
