"""Programs started by fork behave as programs that the shell starts."""

import os
import signal
import time
from pathlib import Path

import forkserver
import pytest
import support

ENDS = """
import atexit, os, signal, subprocess, sys, threading
atexit.register(print, "at exit", sys.argv[1:], os.environ["GREETING"], os.getcwd(), __name__)
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
status = subprocess.run([sys.executable, "-u", "-c", "import sys; sys.exit(len(input()))"], input=b"four").returncode
assert status == 4, status
killed = subprocess.run([sys.executable, "-c", "import os; os.abort()"]).returncode
assert killed == -signal.SIGABRT, killed
assert "dadplug" not in sys.modules
class Held:
    def __del__(self):
        print("destroyed")
held = Held()
ended = threading.main_thread().join
atexit.register(lambda: None if joined else os.abort())
joined = []
threading.Thread(target=lambda: joined.append(ended())).start()
if sys.argv[1] == "fails":
    raise SystemExit("no more")
"""


def test_a_program_has_its_own_arguments_environment_folder_and_end(tmp_path):
    script = tmp_path / "ends.py"
    script.write_text(ENDS)
    commands = [["-c", ENDS, "well"], [str(script), "fails"]]
    well, fails = support.run_programs(commands, env={"GREETING": "hello"}, folder=tmp_path, bare=True)
    assert well.output == f"at exit ['well'] hello {tmp_path} __main__\ndestroyed\n", well.errors
    assert fails.output == f"at exit ['fails'] hello {tmp_path} __main__\ndestroyed\n", fails.errors
    assert (well.status, fails.status) == (0, 1)
    assert (well.errors, fails.errors) == ("", "no more\n")
    (raised,) = support.run_programs([["-c", "1 / 0"]])
    assert raised.status == 1
    assert raised.errors.endswith("ZeroDivisionError: division by zero\n")


STARTS = """
import subprocess, sys
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]).wait())
"""


def test_killing_a_program_ends_what_it_has_started():
    program = forkserver.start(["-c", STARTS])
    children = f"/proc/{program.pid}/task/{program.pid}/children"
    if not os.path.exists(children):
        pytest.skip("finds processes in /proc")
    while not (started := open(children).read().split()):  # noqa: SIM115
        time.sleep(0.02)
    os.kill(int(started[0]), signal.SIGKILL)
    assert program.wait(200) == 0
    assert program.read()[0] == "-9\n"
    assert program.poll() == 0


def test_programs_are_killed_where_the_wait_for_them_ends(monkeypatch):
    waited = []
    wait = forkserver.Program.wait

    def interrupted(program, timeout=None):
        if timeout and program not in waited:  # else it is a look, as at the server
            waited.append(program)
            raise KeyboardInterrupt
        return wait(program, timeout)

    monkeypatch.setattr(forkserver.Program, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        support.run_programs([["-c", "import time; time.sleep(100)"]])
    assert waited[0].wait(200) == -signal.SIGKILL


def answers(value):
    if value == "raise":
        raise ValueError("no answer")
    if value == "sleep":
        time.sleep(100)
    return value


def test_what_came_of_a_call_is_told_by_site():
    with support.Sites(2) as group:
        assert group.run(answers, 3) == [3, 3]
        group.start(answers, "raise")
        assert [each.kind for each in group.outcomes()] == ["failed"] * 2
        group.start(answers, "sleep")
        group.kill(0)
        group.processes[0].wait(200)
        ended, late = group.outcomes(timeout=1)
        assert (ended.kind, late.kind) == ("ended", "late")
    assert not group.alive


def test_a_group_pauses_while_another_one_is_used(sites):
    pair, three = sites(2), sites(3)
    status = Path(f"/proc/{pair.processes[1].pid}/status")
    while status.exists() and "(stopped)" not in status.read_text():
        time.sleep(0.01)
    assert three.run(answers, 4) == [4] * 3
    assert pair.run(answers, 5) == [5] * 2
