"""The benchmarks do what they say, at a few steps; the figures are theirs. `make check-benchmarks` runs this."""

import argparse
import contextlib
import io
import json
import sys
from pathlib import Path

import forkserver
import pytest
import support
import torch

FOLDER = Path(__file__).parent


def program(name):
    """Import a benchmark; its neighbours are found as when it runs."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return support.load(str(FOLDER / f"{name}.py"))


@pytest.mark.parametrize("name", ["dad", "rankdad:wire=bf16+error_feedback=true", "powersgd"])
@support.at_sites(2)
def test_sites_that_use_other_layers_at_other_times_stay_in_step(name: str) -> None:
    soak = program("soak")
    verdict = soak.soak(name, argparse.Namespace(seed=0, steps=40, delay=0.001, look=10, timeout=200))
    verdict.memory.clear()  # kernels compile in so few steps
    assert verdict.steps == 40
    assert not verdict.fault()


def test_a_fault_of_a_long_run_is_found():
    verdict = program("soak").Verdict
    assert "differs" in verdict(first_difference="a.weight differs").fault()
    assert "off autograd" in verdict(worst_gradient=1e-2).fault()
    assert "off autograd" in verdict(worst_gradient=float("nan")).fault()
    assert "grown from 100 to 120" in verdict(memory=[100.0, 104.0, 120.0]).fault()
    assert not verdict(worst_gradient=1e-6, memory=[100.0, 120.0, 105.0]).fault()


def test_methods_are_named_with_their_options():
    parse = program("attach").parse
    assert parse("ddp") == ("ddp", {})
    assert parse("topk:density=0.05") == ("topk", {"density": 0.05})
    assert parse("rankdad:rank=2+wire=bf16+error_feedback=true") == (
        "rankdad",
        {"rank": 2, "wire": "bf16", "error_feedback": True},
    )


def measure(name):
    step_time = program("step_time")
    arguments = argparse.Namespace(model="lstm", rank=2, batch_size=2, steps=4, seconds=9.0, optimizer="sgd")
    arguments.shape, arguments.rates, arguments.warm_up = False, ["unknown"], 5
    ((rate, measured),) = step_time.measure(name, arguments)
    assert rate == "unknown"
    assert 3 <= measured.steps <= 4
    assert measured.peak > 0
    return measured.seconds


@pytest.mark.parametrize("name", ["ddp-powersgd", "rankdad"])
def test_step_times(name):
    assert all(seconds > 0 for seconds in support.sites(2).run(measure, name))


def count_cost():
    step_cost = program("step_cost")
    step, _ = step_cost.step_of(step_cost.MODELS["mnistnet"], "dad")
    for _ in range(3):
        step()
    return step_cost.milliseconds(step, 1), step_cost.calls(step)


def test_the_cost_of_a_step_is_its_processor_time_and_its_calls():
    assert all(milliseconds > 0 and calls > 0 for milliseconds, calls in support.sites(2).run(count_cost))


@pytest.mark.parametrize(
    ("model", "library", "extra"),
    [("plainconv", "dynamic_network_architectures", "nnunet"), ("unet", "monai", "monai")],
)
def test_models_of_volumes_name_the_extra_that_they_need(monkeypatch, model, library, extra):
    for name in [library, *(each for each in sys.modules if each.startswith(f"{library}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf"needs {library} .*pip install 'dadplug\[{extra}\]'.*make .venv-trainers"):
        program("volumes").VOLUMES[model].build()


def train_each_way():
    """Each way trains the same model on the same rows by the same options, and ends with the same parameters."""
    overhead = program("trainer_overhead")
    arguments = argparse.Namespace(model="mnistnet", mode="dad", batch_size=2, steps=2, rounds=1, ways="drop-in")
    assert set(overhead.measure(arguments)) == {"plain", "drop-in"}
    ends = []
    for name in overhead.WAYS:
        task = overhead.train(name, arguments)
        assert len(task.ticks) == overhead.WARM_UP + 2
        ends.append([parameter.detach().clone() for parameter in task.model.parameters()])
    for other in ends[1:]:
        assert all(torch.equal(p, q) for p, q in zip(ends[0], other))
    return list(overhead.WAYS)


def test_the_overhead_of_trainers_is_that_of_one_training():
    pytest.importorskip("accelerate")
    assert {"plain", "drop-in", "accelerate"} <= set(support.sites(2).run(train_each_way)[0])
    table = program("trainer_overhead").table({"plain": (0.01, 0.0), "drop-in": (0.0115, 0.001)})
    assert "| drop-in | 11.50 | +1.00 ms (+10.0%) |" in table


def learn(name):
    timed = program("time_to_accuracy")
    data = timed.load_dataset("digits")
    model, data = timed.build_for(data, "MNISTNet")
    arguments = argparse.Namespace(
        dataset="digits", method=name, rank=2, lr=None, batch_size=8, every=2, limit=60.0, steps=4, target=None
    )
    return timed.train(arguments, model, data, 0)


@pytest.mark.parametrize("name", ["ddp", "dad"])
def test_accuracy_is_looked_at_every_few_steps(name):
    one, other = support.sites(2).run(learn, name)
    assert one["steps"] == other["steps"] == 4
    assert one["curve"] == other["curve"]
    assert len(one["curve"]) == 2
    assert all(0 <= value <= 1 for _, value in one["curve"])


def test_a_table_of_step_times_says_what_failed():
    rows = [
        {"model": "vit", "method": "ddp", "rate": "10mbit", "ms": 2000.0, "bytes": 4_000_000, "steps": 3},
        {"model": "vit", "method": "dad", "rate": "10mbit", "ms": 20.0, "bytes": 40_000, "steps": 3},
        {"model": "vit", "method": "topk", "rate": "10mbit", "error": "SiteError: gone"},
    ]
    table = program("two_site_link").table(rows, ["10mbit", "none"])
    assert "| ViT | dad | 0.04 | 20 (100 x) |  |" in table
    assert "| ViT | topk | - | failed [1] |  |" in table
    assert "[1] SiteError: gone" in table


def test_a_table_of_times_to_accuracy_estimates_what_was_given_up():
    curve, target = [(1.0, 0.5), (2.0, 0.9), (3.0, 0.95)], 0.9
    rows = [
        {"method": "ddp", "rate": "none", "seed": 0, "target": target, "curve": curve, "steps": 30, "step": 0.1},
        {"method": "ddp", "rate": "10mbit", "seed": 0, "target": target, "curve": curve[:1], "steps": 2, "step": 4.0},
        {"method": "dad", "rate": "10mbit", "seed": 0, "target": target, "curve": curve, "steps": 30, "step": 0.1},
        {"method": "topk", "error": "SiteError: gone"},
    ]
    table = program("time_to_accuracy").table(rows, ["none", "10mbit"])
    assert "| DDP | 30 | 2 s (1 x) | ~ 120 s (1 x) |" in table
    assert "| dad | 30 | - | 2 s (60 x) |" in table
    assert "topk: SiteError: gone" in table


@support.at_sites(2)
def test_peers_of_local_steps():
    """The peers are what dadplug's local steps are without overlap."""
    ways = program("local_ways")
    same = {
        "mean:every=2": "overlap=false",
        "diloco:every=2": "outer_lr=0.7+outer_momentum=0.9+overlap=false+wire=bf16",
    }
    for peer, options in same.items():
        models = []
        for name in (peer, f"localsgd:every=2+{options}"):
            torch.manual_seed(0)
            models.append(torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 4)))
            way = ways.Way(models[-1], name, rank=2)
            torch.manual_seed(1 + torch.distributed.get_rank())
            for _ in range(4):
                way.optimizer.zero_grad()
                way.model(torch.randn(8, 6)).square().mean().backward()
                way.step()
            assert way.every == 2
            sent = 1e6 * way.megabytes_sent()
            numbers = 2 * sum(each.numel() for each in models[-1].parameters())  # two agreements, in a ring of two
            width = 4 if peer.startswith("mean") else 2  # bytes
            assert sent == pytest.approx(numbers * width) if name == peer else sent > numbers * width
            way.detach()
        for one, other in zip(models[0].parameters(), models[1].parameters()):
            assert torch.allclose(one, other, rtol=1e-2, atol=2e-4), name


@support.at_sites(2)
def test_running_averages_of_local_steps():
    """Evaluations of a running average begin with the first agreed model, and are the same at all sites."""
    ways = program("local_ways")
    for name in ("mean:every=2+average=4", "localsgd:every=2+average=4+overlap=false", "rankdad:rank=2+average=32"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 4))
        way = ways.Way(model, name, rank=2)
        torch.manual_seed(1 + torch.distributed.get_rank())
        interval, agreed = 16 if way.every == 1 else 2, []
        for step in range(1, 2 * interval + 1):
            way.optimizer.zero_grad()
            way.model(torch.randn(8, 6)).square().mean().backward()
            way.step()
            if step % interval == 0:
                agreed.append([parameter.detach().clone() for parameter in way.model.parameters()])
        for first, second, found in zip(*agreed, way.evaluated.parameters(), strict=True):
            assert not torch.equal(first, second)
            torch.testing.assert_close(found.detach(), (first + second) / 2)
            others = [torch.empty_like(found) for _ in range(2)]
            torch.distributed.all_gather(others, found.detach())
            assert torch.equal(*others)
        way.detach()


def test_ways_of_local_steps_are_evaluated_after_agreements(monkeypatch, capsys):
    local = program("local_steps")
    assert not local.has_reached([0.99], 0.955)
    assert local.has_reached([0.1, 0.95, 0.96], 0.955)
    monkeypatch.setattr(sys, "argv", ["x", "--methods", "mean:every=64,mean:every=48"])
    with pytest.raises(SystemExit):
        local.main()
    assert "mean:every=48: agreements have to take place at every 64 steps" in capsys.readouterr().err


def test_a_table_of_local_steps_has_the_ratio_to_the_fastest_peer():
    def rows(method, steps, step):
        found = [{"best": 0.96, "steps": each, "megabytes": None, "seed": seed} for seed, each in enumerate(steps)]
        found.append({"rate": "10mbit", "taken": 10, "step": step, "seed": 0})
        return [row | {"method": method, "split": "iid"} for row in found]

    runs = rows("diloco:every=32", (300, 340), 0.1) + rows("mean:every=64", (200, None), 0.05)
    runs += [*rows("localsgd:every=32", (310, 330), 0.05), {"method": "ddp", "error": "SiteError: gone"}]
    table = program("local_steps").table(runs)
    assert "| diloco, every 32 (peer) | 320 | - | 32.0 s (1.00) |" in table
    assert "| mean, every 64 (peer) | 200 (1 of 2) | - | - |" in table
    assert "| localsgd, every 32 | 320 | - | 16.0 s (0.50) |" in table
    assert "DDP (peer): SiteError: gone" in table


def test_a_table_of_large_models_has_predictions_and_times_alone():
    def row(method, rate, seconds, sent):
        return {"model": "gpt2", "method": method, "rate": rate, "seconds": seconds, "bytes": sent, "peak": 2.5e9}

    rows = [row("alone", "none", each, 100) for each in (3.8, 4.0, 4.6)]
    rows += [row("ddp", "none", 5.0, 500_000_000), row("ddp", "100mbit", 50.0, 500_000_000)]
    rows += [row("rankdad:rank=8", "10mbit", 3.6, 4_000_000), row("rankdad:rank=8", "none", 3.2, 4_000_000)]
    rows.append({"model": "gpt2", "method": "dad", "rate": "none", "error": "SiteError: gone"})
    table = program("large_models").table(rows)
    assert "| GPT-2 small | MB a step | peak memory, GB | 10 Mbit/s | 100 Mbit/s | unshaped |" in table
    assert "| one process alone | 0 | 2.50 |  |  | 4 |" in table
    assert "| DDP | 500 | 2.50 | ~ 405 (101) | 50 (12.5) | 5 (1.25) |" in table
    assert "| rankdad, rank 8 | 4 | 2.50 | 3.6 (0.9) | ~ 3.52 (0.88) | 3.2 (0.8) |" in table
    assert "| dad | SiteError: gone |" in table
    assert "100 Mbit/s, GPT-2 small, DDP: 0.90" in table


def test_a_long_table_is_measured_in_pieces(tmp_path, monkeypatch):
    drive, server, local = program("drive"), program("parameter_server"), program("local_steps")
    results = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["x", "--cases", "equal,slow", "--seeds", "2", "--out", str(tmp_path / "out")])
    _, arguments = server.parse_arguments()
    runs = server.missing(arguments, "rpc")
    assert [(run["seed"], run["case"]) for run in runs] == [(0, "equal"), (0, "slow"), (1, "equal"), (1, "slow")]
    lines = [{**runs[1], "seconds": 2.0, "batches": 4}, {**runs[0], "rate": "1mbit"}, {"method": "rpc", "error": "x"}]
    results.write_text("\n".join(map(json.dumps, lines)))
    drive.begin(results, keep=True)
    assert drive.read(results) == lines[:2]
    assert server.missing(arguments, "rpc") == [runs[0], *runs[2:]]
    drive.begin(results, keep=False)
    assert drive.read(results) == []
    given = argparse.Namespace(result=str(results), splits="iid", seeds=2, rates="1mbit,2mbit")
    for expected, line in (
        ((0, ""), {"steps": 20, "best": 0.9}),
        ((0, "1mbit"), {"rate": "1mbit"}),
        ((0, "2mbit"), {"rate": "2mbit"}),
        ((1, ""), {"steps": None, "best": 0.5}),
    ):
        label, _, rate = next(local.missing(given, "ddp"))
        assert (label["seed"], rate) == expected
        with results.open("a") as file:
            file.write(json.dumps(label | line) + "\n")
    assert next(local.missing(given, "ddp"), None) is None


def test_verdicts_of_several_comparisons_are_counted():
    runs = [
        {"best": best, "leaders": [best] if best else ["dad", "ddp"], "losses": [0.5, 0.6]} for best in ("dad", None)
    ]
    compare = program("compare_runs")
    assert compare.agrees([runs[0]] * 4 + runs[1:])
    assert not compare.agrees([runs[0]] * 3 + runs[1:] * 2)
    table = compare.table([runs[0], runs[0], runs[1]], 3)
    assert "| 3 | no difference between dad, ddp | 0.5000, 0.6000 |" in table
    assert "dad, in 2 of 3" in table


@pytest.mark.parametrize(("name", "millions"), [("bert", 109), ("vit-base", 87), ("gpt2", 124)])
def test_large_models_have_the_parameters_of_their_originals(name, millions):
    pytest.importorskip("transformers")
    with torch.device("meta"):  # without memory
        model = program("workloads").LARGE[name].build()
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6) == millions


def test_times_to_a_loss_count_the_steps_until_then():
    to_loss = program("time_to_loss")
    assert to_loss.steps_to([4.0, 3.0, 2.0], every=16, target=2.5) == 24
    assert to_loss.steps_to([4.0, 3.0], every=16, target=2.5) is None
    times = {
        rate: {"seconds": seconds, "bytes": 8000, "predicted": False} for rate, seconds in (("none", 1), ("10mbit", 5))
    }
    fast = {rate: each | {"seconds": 0.5} for rate, each in times.items()}
    rows = [
        {"method": "ddp", "every": 16, "steps": 32, "curve": [4.0, 3.0, 2.0], "times": times},
        {"method": "rankdad", "every": 16, "steps": 32, "curve": [4.0, 3.5, 3.0, 2.5, 2.0], "times": fast},
        {"method": "rankdad", "every": 16, "steps": 32, "curve": [4.0, 3.5, 3.0, 2.5, 2.0], "times": {}},
    ]
    table = to_loss.table(rows, ["none", "10mbit"])
    assert "| DDP | 32 | 8 | 32.0 s (1) | 160.0 s (1) |" in table
    assert "| rankdad | 64 | 8 | 32.0 s (1) | 32.0 s (5) |" in table


def test_a_table_of_fine_tuning_has_the_points_inside_the_range():
    curves = {"ddp": [[3.0, 2.0, 1.0], [3.0, 2.2, 1.2]], "rankdad": [[3.0, 2.4, 1.0], [3.0, 2.3, 1.2]]}
    rows = [
        {"method": method, "seed": seed, "every": 10, "curve": curve, "bytes": 2_000 * len(method)}
        for method, own in curves.items()
        for seed, curve in enumerate(own)
    ]
    table = program("fine_tuning").table(rows)
    assert "| DDP | 6 | 2.100 (2.000 to 2.200) | 1.100 (1.000 to 1.200) | 3 of 3 |" in table
    assert "| rankdad | 14 | 2.350 (2.300 to 2.400) | 1.100 (1.000 to 1.200) | 2 of 3 |" in table


@support.at_sites(2)
def test_a_tied_model_learns_by_low_rank_factors() -> None:
    tuning = program("fine_tuning")
    assert len(tuning.text("*.md", ("docs",), "site")) > 10 * tuning.LENGTH
    arguments = argparse.Namespace(rank=2, every=4)
    phrase = torch.arange(100).repeat(20)
    torch.manual_seed(0)
    model = tuning.tied_model()
    data = phrase, phrase, arguments
    curve, nbytes = tuning.train(model, "rankdad:dense=lowrank", *data, steps=12, seed=0, rate=2e-3)
    assert 0 < nbytes < tuning.dense_bytes(model) / 10
    assert len(curve) == 4
    assert curve[-1] < 0.95 * curve[0]


def test_ways_to_connect_are_compared_block_by_block():
    hub = program("hub")
    plain = hub.Way([[0.010, 0.012, 0.014], [0.020, 0.022, 0.024]], 6000)
    over = hub.Way([[0.012, 0.015, 0.018], [0.022, 0.025, 0.028]], 6120)
    found = hub.row("dad", "100mbit", "mnistnet", {"plain": plain, "hub": over})
    assert found["difference"] == pytest.approx(3.0)
    assert found["ratio"] == pytest.approx((15 / 12 + 25 / 22) / 2)
    assert (found["plain bytes"], found["hub bytes"], found["steps"]) == (1000, 1020, 6)


@pytest.mark.slow
def test_steps_over_plain_streams_and_over_the_hub(monkeypatch):
    pytest.importorskip("cryptography")
    monkeypatch.setattr(sys, "executable", forkserver.interpreter())
    hub = program("hub")
    arguments = argparse.Namespace(model="lstm", warm_up=2, steps=3, seconds=60.0, blocks=2)
    with hub.Loopback() as link, hub.running_pairs(link) as pairs:
        ways = hub.measure(pairs, "rankdad", arguments)
    assert {name: [len(block) for block in way.blocks] for name, way in ways.items()} == {
        "plain": [3, 3],
        "hub": [3, 3],
    }
    assert all(seconds > 0 for way in ways.values() for seconds in way.times)


def logs_of(order, present):
    """Return logs of sites that use the samples of their order in steps in which they are present."""
    elastic = program("elastic_logs")
    logs = [elastic.Log(Path("none")) for _ in range(2)]
    for step, ranks in enumerate(present):
        for rank in ranks:
            logs[rank].rows[step] = order(rank).batch(step).tolist()
            logs[rank].done[step] = {"step": step, "present": ranks, "digest": step}
    return logs


@pytest.mark.slow
def test_goodput_is_swept_and_drawn(tmp_path):
    flags = ["--quick", "--methods", "dsgd", "--out", str(tmp_path / "out")]
    (only,) = support.run_programs([[str(FOLDER / "goodput.py"), *flags]], timeout=200)
    assert only.status == 0, only.errors
    assert "| dsgd | unshaped |" in (tmp_path / "out.md").read_text()
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_the_order_of_a_site_has_each_of_its_samples_once_an_epoch():
    order = program("returning_site").Order(samples=50, sites=3, rank=1, batch_size=4, seed=0)
    epochs = [[int(row) for step in range(4 * each, 4 * each + 4) for row in order.batch(step)] for each in range(3)]
    assert all(len(set(epoch)) == 16 and all(row % 3 == 1 for row in epoch) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_a_wrong_use_of_the_data_is_found():
    elastic, site = program("elastic_logs"), program("returning_site")

    def order(rank):
        return site.Order(samples=24, sites=2, rank=rank, batch_size=4, seed=0)

    present = [[0, 1], [1], [0, 1], [0, 1], [0, 1], [0, 1]]
    assert elastic.use_of_data(logs_of(order, present), 6, order) == (44, 4, [])
    logs = logs_of(order, present)
    logs[0].rows[3] = logs[0].rows[4]
    faults = elastic.use_of_data(logs, 6, order)[2]
    assert "site 0 has used 4 samples twice in epoch 1" in faults
    logs = logs_of(order, present)
    del logs[1].rows[2]
    assert elastic.use_of_data(logs, 6, order)[2] == ["site 1 has used other samples in epoch 0 than it should have"]


def test_different_replicas_and_growth_are_found():
    elastic, site = program("elastic_logs"), program("returning_site")
    logs = logs_of(lambda rank: site.Order(24, 2, rank, 4, 0), [[0, 1]] * 3)
    assert not elastic.different_replicas(logs)
    logs[0].done[1]["digest"] = 7
    assert elastic.different_replicas(logs) == ["digest differs between sites 0 and 1 after step 1"]
    outcome = elastic.Outcome()
    outcome.memory["hub"], outcome.descriptors["hub"] = [80, 100, 100, 101, 105, 104], [9, 11, 11, 10, 11, 11]
    assert not elastic.grown(outcome)
    outcome.memory["hub"][-1], outcome.descriptors["hub"][-1] = 120, 12
    assert len(elastic.grown(outcome)) == 2


@pytest.mark.slow
def test_training_goes_on_while_sites_are_killed_and_return(tmp_path):
    pytest.importorskip("cryptography")
    settings = {
        "steps": 60,
        "kills": 2,
        "stops": 0,
        "seeds": 1,
        "sites": 2,
        "batch-size": 4,
        "pace": 0.02,
        "out": tmp_path,
    }
    command = [str(FOLDER / "elastic.py"), *(f"--{name}={value}" for name, value in settings.items())]
    (done,) = support.run_programs([command])
    assert "seed 0, 2 kills: accuracy" in done.output, done.errors
    assert "pause at kills" in done.output
    assert not [line for line in done.output.splitlines() if "differs between" in line or "has used" in line]


# The benchmark of many sites counts steps that all sites take together


def count(target):
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    many = support.load(str(FOLDER / "many_sites.py"))
    case = {"sites": 2, "seeds": 1, "first_seed": 0, "rank": 2, "methods": many.DIGITS_METHODS}
    arguments = argparse.Namespace(**case, target=target, most_steps=4)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        many.count_steps(arguments)
    return [json.loads(line) for line in printed.getvalue().splitlines()]


def test_sites_count_steps_until_an_accuracy_or_the_limit():
    rows, nothing = support.sites(2).run(count, 1.0)
    assert [row["method"] for row in rows] == ["rankdad:merge=all", "rankdad:merge=owner"]
    assert all(row["steps"] == 0 and 0 < row["best"] < 1 for row in rows)
    assert not nothing


def test_sites_stop_together_at_the_target():
    rows, _ = support.sites(2).run(count, 0.01)
    assert [row["steps"] for row in rows] == [2, 2]


# The verdicts of the benchmark of peak memory


@pytest.mark.parametrize(
    ("method", "beyond", "beyond_alone", "expected"),
    [
        ("alone", 9.0, 0.0, ""),
        ("ddp-powersgd", 9.0, 9.0, ""),
        ("dad", 2.0, 5.0, "yes"),
        ("topk", 4.0, 5.0, "with its state"),
        ("topk", 5.5, 5.0, "NO"),
        ("dad", float("nan"), 5.0, ""),
        ("dad:fused=true", 1.0, float("nan"), "yes"),
        ("dad:fused=true", 1.0, 0.0, "NO"),
        ("dad:fused=true", 5.5, -1.0, "NO"),
        ("dad:fused=true", float("nan"), -1.0, "yes"),
    ],
)
def test_peaks_of_memory_are_compared_with_what_is_promised(method, beyond, beyond_alone, expected):
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))  # for its neighbours
    verdict = support.load(str(FOLDER / "memory.py")).verdict
    assert verdict(method, 2.0, 3.0, beyond, beyond_alone) == expected


# Tests of other projects

OF_ANOTHER_PROJECT = """
import subprocess, sys

CODE = "from torch.nn.parallel import DistributedDataParallel as Class; print(Class.__mro__[1].__module__)"


def test_of_torch():
    from torch.nn.parallel import DistributedDataParallel

    assert DistributedDataParallel.__mro__[1].__module__.startswith("torch.")


def test_in_a_process():
    assert subprocess.check_output([sys.executable, "-c", CODE], text=True).strip() == "dadplug.ddp"
"""


def test_tests_of_others_run_with_the_drop_in(tmp_path):
    others = program("tests_of_others")
    (tmp_path / "test_other.py").write_text(OF_ANOTHER_PROJECT)
    found = others.run(tmp_path, ["test_other.py"], "", "dsgd", 200)
    assert found["test_other::test_in_a_process"] == "passed"
    assert "AssertionError" in found["test_other::test_of_torch"]
    plain = {"a": "passed", "b": "passed", "c": "skipped", "d": "ImportError"}
    assert others.compare(plain, {"a": "passed", "b": "AssertionError: x"}).splitlines() == [
        "1 of 2 tests that pass with torch's class pass with the drop-in",
        "  b: AssertionError: x",
        "1 tests fail with torch's class here",
    ]


def test_a_soak_over_a_hub_finds_what_grows_and_what_differs(tmp_path):
    soak = program("hub_soak")
    process = soak.Process("hub", [], tmp_path / "out")
    process.samples = [(0.0, 100_000, 3, 8)] * 10 + [(0.0, 104_000, 3, 8)] * 10
    assert process.verdict() == ""
    process.samples += [(0.0, 106_000, 4, 9)] * 5
    assert process.verdict() == "memory from 100.0 to 106.0 MB, threads from 3 to 4, descriptors from 8 to 9"
    found = soak.Soak.__new__(soak.Soak)
    found.hashes, found.problems = {}, []
    found._compare("a", 20, "same")
    found._compare("b", 20, "same")
    assert found.problems == []
    found._compare("c", 20, "other")
    assert found.problems == ["step 20: the parameters of c differ from those of a, b"]


def test_a_load_of_a_hub_moves_what_it_says(monkeypatch):
    size = program("hub_size")
    monkeypatch.setattr(size, "BYTES", 40e6)
    empty, memory, each, whole = size.measure(2, 0.2)
    assert 0 < empty <= memory
    assert min(each, whole) > 0


def test_a_sealed_run_that_differs_waits_or_can_be_read_is_found(tmp_path):
    sealed = program("hub_sealed")

    def run(name, digest, seconds, received):
        found = sealed.Run.__new__(sealed.Run)
        found.folder, found.received = tmp_path / name, tmp_path / name / "received"
        found.folder.mkdir()
        found.received.write_bytes(received)
        row = {"step": 0, "seconds": seconds, "digest": digest, "secrets": [b"of a patient".hex()]}
        for site in sealed.SITES:
            (found.folder / f"{site}.log").write_text(json.dumps(row) + "\n")
        return found

    plain = run("plain", "one", 0.1, b"the age of a patient")
    assert sealed.judge(run("good", "one", 1.0, b"noise"), plain, 5.0) == []
    assert "the parameters of a differ in step 0 and 0 others" in sealed.judge(
        run("other", "two", 1.0, b"noise"), plain, 5.0
    )
    assert "d has waited 6.0 s for step 0" in sealed.judge(run("slow", "one", 6.0, b"noise"), plain, 5.0)
    assert sealed.judge(plain, plain, 5.0) == ["1 secrets are readable at the hub"]
    blind = run("blind", "one", 1.0, b"noise")
    assert sealed.judge(blind, blind, 5.0) == ["no secret is found without sealing, either: the search is blind"]


@support.at_sites(2)
def test_private_layers_are_measured_by_site() -> None:
    private_layers = program("private_layers")
    for case in private_layers.CASES:
        assert 0 < private_layers.train(case, "private", rows=40, steps=2, seed=0) < 1
