"""Starting several sites on one machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from dadplug.processes import launch_sites

WAITING = """
import os, sys, time
if "RANK" in os.environ:
    os.write(1, f"{os.getpid()}\\n".encode())
    time.sleep(100)
from dadplug.processes import launch_sites
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


def test_the_first_site_that_fails_gives_the_status(tmp_path):
    script = tmp_path / "failing.py"
    script.write_text("import os, sys; sys.exit(3 if os.environ['RANK'] == '1' else 0)")
    assert launch_sites([str(script)], 2) == 3
