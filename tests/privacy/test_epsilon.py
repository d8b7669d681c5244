"""What sites say about epsilon, in logs and in the status of a hub."""

import json
import math

import pytest
import support
from dadplug.callbacks import monitors
from running_hub import running_hub
from support import refuses
from torch import nn

import dadplug
from dadplug import DifferentialPrivacy
from dadplug.errors import FrameError
from dadplug.exchange.rounds import Spent
from dadplug.hub.server.status import Meter, snapshot
from dadplug.hub.wire.messages import pack_control, read_control

DELTA = 1e-5
NAMES = ("bavaria", "saxony")
PROGRAM = """
import sys; sys.path[:] = {path!r}
import torch, dadplug
torch.set_num_threads(1)
dadplug.connect(kit=sys.argv[1], timeout=200)
privacy = dadplug.DifferentialPrivacy({noise}, 1.0, 0.1, 4)
reduction = dadplug.GradientReduction(torch.nn.Linear(4, 2), mode="dsgd", privacy=privacy)
if {noise}:
    print(reduction.epsilon(1e-5))
reduction.idle()
if not {noise}:
    print(reduction.epsilon(1e-5))
reduction.detach()
"""


def test_a_monitor_has_the_epsilon_of_some_steps_and_means_do_not_reduce_it():
    pytest.importorskip("opacus.accountants")
    reduction = dadplug.GradientReduction(nn.Linear(4, 2), mode="dsgd", privacy=DifferentialPrivacy())
    monitor, means, found = monitors.PrivacyMonitor(DELTA, every=4), monitors.Means(), {}
    for step in range(1, 10):
        reduction.idle()
        values = monitor.end(reduction, 4)
        means.add(values, totals=monitor.totals)
        if values:
            found[step] = values["privacy/epsilon"]
            assert values == {"privacy/epsilon": reduction.epsilon(DELTA)}
    assert list(found) == [1, 4, 8]
    assert 0 < found[1] < found[4] < found[8]
    assert means.take() == {"privacy/epsilon": found[8]}


def test_a_monitor_needs_privacy_and_a_delta():
    refuses(
        (lambda: monitors.PrivacyMonitor(0.0), "delta must be"),
        (lambda: monitors.PrivacyMonitor(DELTA, every=0), "every must be at least 1"),
    )
    reduction = dadplug.GradientReduction(nn.Linear(4, 2), mode="dsgd")
    reduction.idle()
    with pytest.raises(ValueError, match="needs privacy="):
        monitors.PrivacyMonitor(DELTA).end(reduction, 4)


@pytest.mark.parametrize("epsilon", [-1.0, math.nan, True, "3"])
def test_a_hub_takes_numbers_only(epsilon):
    with pytest.raises(FrameError, match=r"damaged control message: .* at `\$\.epsilon`"):
        read_control(pack_control(Spent(epsilon, DELTA), 0)[32:], 2)
    assert read_control(pack_control(Spent(math.inf, DELTA), 0)[32:], 2) == Spent(math.inf, DELTA)


def test_the_status_of_a_hub_has_the_epsilon_of_each_site(tmp_path):
    with running_hub(tmp_path / "kits", sites=NAMES) as hub:
        commands = []
        for name, noise in zip(NAMES, (0.0, 1.0)):  # of which the first has no bound, and the second is asked too early
            script = tmp_path / f"{name}.py"
            script.write_text(PROGRAM.format(path=support.sys.path, noise=noise))
            commands.append([str(script), str(hub.kits / name)])
        ended = support.run_programs(commands)
        status = snapshot(hub.hub, Meter())
    assert [each.output.split()[-1:] for each in ended] == [["inf"], ["0.0"]], [each.errors for each in ended]
    assert [site["epsilon"] for site in status["sites"]] == ["inf", "0"]
    assert [site["delta"] for site in status["sites"]] == [DELTA, DELTA]
    assert json.loads(json.dumps(status)) == status
