"""Messages of the package reach a person, once."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

PROGRAM = "from dadplug.logs import get_logger; import logging; {}; get_logger('dadplug.test').{}('a message')"


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
    from dadplug.logs import get_logger

    with caplog.at_level(logging.INFO, "dadplug"):
        get_logger("dadplug.test").info("a message")
    assert caplog.messages == ["a message"]
