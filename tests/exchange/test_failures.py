"""Faults between sites end in an error that names the site, on every site, within seconds."""

import re
import socket
from functools import partial

import pytest
import support
from support import refuses
from torch import nn

import dadplug
from dadplug.exchange import rendezvous

pytestmark = pytest.mark.slow

TRAIN = """
model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
reduction = dadplug.GradientReduction(model, mode=MODE, rank=2, timeout=TIMEOUT)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step(inputs):
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    reduction.synchronize()
    optimizer.step()
for _ in range(3):
    step(torch.randn(8, 6))
"""


def run(code: str, tmp_path, mode: str = "dad", timeout: float = 30, world_size: int = 2, destructors: bool = False):
    code = TRAIN.replace("MODE", repr(mode)).replace("TIMEOUT", repr(timeout)) + code
    commands = support.site_scripts(code, tmp_path, world_size)
    return support.run_programs(commands, timeout=200, destructors=destructors)


@pytest.mark.parametrize(("mode", "killed"), [("dsgd", 0), ("dad", 1)])
def test_a_killed_site_is_named_at_once(tmp_path, mode, killed):  # all others: test_lost_sites.py
    code = f"""
import os, signal
for number in range(10):
    if rank == {killed} and number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    step(torch.randn(8, 6))
"""
    finished = run(code, tmp_path, mode)
    survivor = finished[1 - killed]
    assert survivor.status == 1
    assert f"SiteError: site {killed} (" in survivor.errors
    assert "is gone" in survivor.errors  # otherwise it has not answered for 30 s


def test_a_site_that_raises_tells_the_others_why(tmp_path):
    finished = run(
        "if rank == 1: raise OSError('the disk is full')\nstep(torch.randn(8, 6))", tmp_path, destructors=True
    )
    assert "site 1 (" in finished[0].errors
    assert "is gone: OSError: the disk is full" in finished[0].errors


@pytest.mark.parametrize("failed", [0, 1])
def test_a_site_that_fails_before_the_next_reduction_is_named(tmp_path, failed):
    code = f"""
import time
if rank == {failed}:
    raise ValueError("its file is missing")
time.sleep(0.5)  # it has failed when the others begin
dadplug.GradientReduction(nn.Linear(6, 5), mode="dad", timeout=30)
"""
    other = run(code, tmp_path)[1 - failed]
    assert other.status == 1
    assert f"SiteError: site {failed} (" in other.errors
    assert other.errors.endswith("is gone: ValueError: its file is missing\n")


def test_a_site_that_ends_early_is_named(tmp_path):
    finished = run("if rank == 0: step(torch.randn(8, 6))", tmp_path, destructors=True)
    assert finished[1].status == 0
    assert "it exited first. Unequal numbers of batches? Use reduction.join()" in finished[0].errors


def test_programs_that_end_with_a_reduction_print_no_errors(tmp_path):
    """Torch 2.14 keeps it until the modules are gone that its destructors would need, as this program does."""
    code = """
import builtins
from dadplug.exchange import group_transport
builtins.kept, torch.kept = (torch, group_transport), reduction
"""
    for each in run(code, tmp_path, destructors=True):
        assert each.status == 0
        assert "ignored" not in each.errors


def test_a_silent_site_is_named_after_the_timeout(tmp_path):
    known = tmp_path / "known"
    code = f"""
import pathlib, time
if rank == 1:
    while not pathlib.Path({str(known)!r}).exists(): time.sleep(0.05)
reduction._transport.timeout = 2
try:
    step(torch.randn(8, 6))
finally:
    pathlib.Path({str(known)!r}).touch()
"""
    finished = run(code, tmp_path)
    words = r"site 1 \(.*\) has not answered for 2 s: it is running \(site 1 is busy after {0}; this site is in {0}\)"
    assert re.search(words.format(r"exchange \d+ of \w+, step 3"), finished[0].errors), finished[0].errors


@pytest.mark.parametrize("mode", ["dsgd", "dad", "rankdad"])
@pytest.mark.parametrize("what", ["data", "loss"])
def test_nan_names_step_site_and_layer_on_every_site(tmp_path, mode, what):
    spoil = "inputs[0] = torch.nan" if what == "data" else "value = value * torch.nan"
    code = f"""
optimizer.zero_grad()
before = [p.detach().clone() for p in model.parameters()]
inputs = torch.randn(8, 6)
if rank == 1 and {what == "data"}: {spoil if what == "data" else "pass"}
value = model(inputs).square().mean()
if rank == 1 and {what == "loss"}: {spoil if what == "loss" else "pass"}
value.backward()
try:
    reduction.synchronize()
except dadplug.NonFiniteError as error:
    print("caught", error)
assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before))
step(torch.randn(8, 6))  # and on it goes
assert reduction.first_difference() is None
"""
    finished = run(code, tmp_path, mode)
    for each in finished:
        assert each.status == 0, each.errors
        assert "caught step 3: NaN or Inf at site 1 (" in each.output
        if mode == "dsgd":
            assert "the gradient of '1." in each.output
        else:
            layer = "input of the layer of '0.weight'" if what == "data" else "output of the layer of '1.weight'"
            assert layer in each.output


def test_nan_passes_where_a_scaler_deals_with_it(tmp_path):
    code = """
reduction.detach()
for mode in ("dsgd", "dad", "rankdad"):
    reduction = dadplug.GradientReduction(model, mode=mode, rank=2, check_finite=False)
    for number in range(3):
        model.zero_grad()
        (model(torch.randn(8, 6)).square().mean() * (torch.inf if number == 1 and rank == 1 else 1)).backward()
        reduction.synchronize()
        finite = [bool(torch.isfinite(p.grad).all()) for p in model.parameters()]
        assert not any(finite) if number == 1 else all(finite), (mode, number, finite)
    reduction.detach()
"""
    for each in run(code, tmp_path):
        assert each.status == 0, each.errors


def test_models_that_differ_are_told_apart(tmp_path):
    code = """
for model in (nn.Linear(6, 4 + rank), nn.Sequential(nn.Linear(6, 4)) if rank else nn.Linear(6, 4)):
    try:
        dadplug.GradientReduction(model)
    except dadplug.MismatchError as error:
        print(error)
try:
    dadplug.GradientReduction(nn.Linear(6, 4), mode="dad" if rank else "dsgd")
except dadplug.MismatchError as error:
    print(error)
from dadplug.step.model_sync import sameness
sameness.SITES_VERSION = 7 + rank  # as another release has it
try:
    dadplug.GradientReduction(nn.Linear(6, 4))
except dadplug.MismatchError as error:
    print(error)
"""
    for each in support.run_programs(support.site_scripts(code, tmp_path)):
        shape, name, mode, release = each.output.splitlines()
        assert "tensor weight is float32[4, 6], trained at site 0" in shape
        assert "and float32[5, 6], trained at site 1" in shape
        assert "tensor weight is float32[4, 6], trained at site 0" in name
        assert "and absent at site 1" in name
        assert "option mode is 'dsgd' at site 0" in mode
        assert "version of dadplug's messages is 7 at site 0" in release


@pytest.mark.parametrize(
    ("change", "words"),
    [
        # as if it had called synchronize() again
        ("reduction._step += 1", ["is at step 4 and", "every site must call synchronize() equally often"]),
        ("model[0].requires_grad_(False)", ["trains other parameters than"]),
    ],
)
def test_a_site_that_trains_otherwise_is_told(tmp_path, change, words):
    code = f"""
if rank == 0:
    {change}
try:
    step(torch.randn(8, 6))
except dadplug.MismatchError as error:
    print(error)
"""
    for each in run(code, tmp_path):
        assert all(word in each.output for word in words)


CALLS = {
    "average": "reduction.average_buffers()",
    "broadcast": "reduction.broadcast_buffers()",
    "objects": "reduction.gather_objects(0.5)",
    "difference": "reduction.first_difference()",
    "step": "step(torch.randn(8, 6))",
    "build": "dadplug.GradientReduction(nn.Linear(2, 2), timeout=60)",
}
PLACE = r"is in (\w+\(\), )?exchange \d+ of \w+, step 1"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("step", "average"),
        ("broadcast", "step"),
        ("broadcast", "average"),
        ("objects", "difference"),  # both gather objects, which one took for the other's
        ("step", "build"),
    ],
)
def test_sites_that_make_different_calls_are_told_both(tmp_path, first, second):
    code = f"""
reduction.detach()
model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))
reduction = dadplug.GradientReduction(model, mode="dsgd", timeout=60)
step(torch.randn(8, 6))
if rank == 0:
    {CALLS[first]}
else:
    {CALLS[second]}
"""
    for each in run(code, tmp_path, timeout=60):
        assert "MismatchError: the sites do not make the same calls: site 0 (" in each.errors
        assert "SiteError" not in each.errors
        assert re.search(rf"site 0 \(.*\) {PLACE}, and site 1 \(.*\) {PLACE}", each.errors), each.errors[-900:]


def test_a_further_forward_pass_of_one_site_is_told_with_the_step(tmp_path):
    code = """
reduction.detach()
model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))
reduction = dadplug.GradientReduction(model, mode="dsgd", sync_batchnorm=True, timeout=60)
step(torch.randn(8, 6))
if rank == 0:
    model(torch.randn(8, 6))
step(torch.randn(8, 6))
"""
    for each in run(code, tmp_path, timeout=60):
        assert re.search(rf"site 0 \(.*\) {PLACE}, and site 1 \(.*\) {PLACE}", each.errors), each.errors[-900:]


def connect(*places: str) -> list[support.Finished]:
    """Run programs that connect with these arguments, and end."""
    return support.run_programs([["-c", f"import dadplug\ndadplug.connect({place})"] for place in places], timeout=200)


def test_a_site_that_never_comes_is_named():
    port = support.free_port()
    first, second = connect(*(f"{rank}, 3, 'tcp://127.0.0.1:{port}', timeout=2" for rank in range(2)))
    for each in (first, second):
        assert each.status == 1
        assert "waited 2 s for 3 sites: site 2 did not come" in each.errors or (
            each is second and "site 0, which hosts the rendezvous, ended" in each.errors
        )


def test_a_rendezvous_without_site_0_is_told():
    (only,) = connect(f"1, 2, 'tcp://127.0.0.1:{support.free_port()}', timeout=1")
    assert "site 1 did not reach site 0 at 127.0.0.1" in only.errors


def test_a_port_in_use_is_told():
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        (only,) = connect(f"0, 2, 'tcp://127.0.0.1:{port}', timeout=5")
    assert f"port {port} is in use on this machine" in only.errors


def test_two_programs_with_rank_0_are_told():
    port = support.free_port()
    finished = connect(*[f"0, 2, 'tcp://127.0.0.1:{port}', timeout=6"] * 2)
    assert any("another process with rank 0 is at" in each.errors for each in finished)


@pytest.mark.parametrize(
    ("arguments", "contradiction"),
    [
        ("rank, 2, URL", ""),
        ("rank, 2, URL.replace('127.0.0.1', 'localhost')", ""),
        ("", ""),
        ("1 - rank, 2, URL", "rank="),
        ("rank, 3, URL", "num_nodes=2"),
        ("rank, 2, 'tcp://127.0.0.1:1'", "dist_url=tcp://127.0.0.1:1"),
    ],
)
def test_a_second_connect_that_contradicts_the_first_is_an_error(tmp_path, arguments, contradiction):
    code = """
from dadplug.exchange import rendezvous
URL = "tcp://{}:{}".format(*rendezvous._joined[1])
try:
    dadplug.connect(ARGUMENTS)
except ValueError as error:
    print(error)
"""
    for each in support.run_programs(support.site_scripts(code.replace("ARGUMENTS", arguments), tmp_path)):
        assert each.status == 0, each.errors
        assert contradiction in each.output
        assert bool(each.output) == bool(contradiction)


def test_two_sites_of_one_rank_are_told():
    port = support.free_port()
    finished = connect(*(f"{rank}, 3, 'tcp://127.0.0.1:{port}', timeout=2" for rank in "011"))
    assert any("another process already claims rank 1" in each.errors for each in finished)


@pytest.mark.parametrize("counts", [(2, 3), (3, 2)])
def test_sites_with_different_numbers_of_sites_are_told(counts):
    port = support.free_port()
    places = [f"{rank}, {count}, 'tcp://127.0.0.1:{port}', timeout=60" for rank, count in enumerate(counts)]
    for rank, finished in enumerate(connect(*places)):
        assert "MismatchError: configuration differs between sites: the number of sites is" in finished.errors
        assert f"{counts[rank]} at site {rank}" in finished.errors
        assert f"{counts[1 - rank]} at site {1 - rank}" in finished.errors


def test_wrong_places_timeouts_and_backends_are_told(tmp_path):
    url, connect = "tcp://127.0.0.1:1", dadplug.connect
    places = ({"rank": 0, "num_nodes": 2, "dist_url": url}, {"kit": tmp_path})
    timeouts = [partial(connect, **place, timeout=wrong) for place in places for wrong in (0, float("inf"), "300")]
    refuses(
        (lambda: connect(2, 2, url), "rank must lie in 0 to 1 for 2 sites, got 2"),
        (lambda: connect(-1, 2, url), "rank must lie in 0 to 1"),
        (lambda: connect("0", 2, url), "rank must be a whole number, got '0'"),
        (lambda: connect(0, "2", url), "num_nodes must be a whole number, got '2'"),
        (lambda: connect(0, 0, url), "num_nodes must be at least 1"),
        (lambda: connect(0, 2, "http://127.0.0.1:1"), "should read tcp://HOST:PORT"),
        (lambda: connect(0, 2, "tcp://127.0.0.1"), "should read tcp://HOST:PORT"),
        (lambda: connect(0, 2, "tcp://127.0.0.1:port"), "should read tcp://HOST:PORT"),
        (lambda: connect(0, 2, None), "go together"),
        *((call, "timeout must be a positive number of seconds, got") for call in timeouts),
        (lambda: rendezvous._backend("smoke"), "unknown backend 'smoke'; valid ones are gloo, nccl and mpi"),
    )


def test_announced_sites_without_a_group_are_an_error(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"announces 2 sites .* call dadplug.connect\(\)"):
        dadplug.GradientReduction(nn.Linear(2, 2))


def test_a_site_says_with_whom_it_trains(tmp_path):
    for finished in support.run_programs(support.site_scripts("pass", tmp_path, 2), timeout=60):
        assert re.search(
            r"connected as site \d of 2 \(site 0: .*, site 1: .*\); site 0 is at 127\.0\.0\.1", finished.errors
        )
    alone = "import dadplug, torch\ndadplug.connect()\ndadplug.GradientReduction(torch.nn.Linear(2, 2))"
    (finished,) = support.run_programs([["-c", alone]], timeout=60)
    assert "this site trains alone (rank 0 of 1 site)" in finished.errors
