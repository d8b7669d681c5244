"""Clicks at two sites: tables without memory of their own, where keys were over time, and the example."""

import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import support
import torch
from torch import nn

from dadplug.adapm import AdaModel, Constant, Normal, ParameterManager, Timeline
from dadplug.adapm.timeline import SiteHistory, frequent_keys, owners

ROOT = Path(__file__).resolve().parents[2]
CTR = str(ROOT / "examples" / "ctr.py")


def trains_as_one_process():
    """Each method against one process on the same global batches; on each site."""
    sys.path.insert(0, str(ROOT / "examples"))
    from ctr_methods import METHODS, Run
    from dadplug.examples.zoo.clicks import generated, split_by_time

    data = split_by_time(generated(1500))
    rank = int(os.environ["RANK"])
    run = Run(data, rank, 2, epochs=1, batch_size=32, lr=0.01, interval=0.005, options={"mode": "dsgd"})
    found = {name: METHODS[name](run) for name in ("alone", "ddp", "adapm", "adapm-manual", "no-intent")}
    rows = data.train.rows
    for name, outcome in found.items():
        (loss,), (alone,) = outcome.log_losses, found["alone"].log_losses
        exact = name == "ddp"  # the others see each other's rows about a round late
        assert loss == pytest.approx(alone, rel=1e-4 if exact else 0.02), name
        if name.startswith("adapm"):
            assert outcome.local_share[0] > 0.5
            assert len(outcome.histories) == 2
            assert all(len(site.clocks) == 19 for site in outcome.histories)
        if name == "no-intent":
            assert 0.4 < outcome.local_share[0] < 0.6
            assert all(max(site.counts["moved"]) == 0 for site in outcome.histories)
    return found["adapm"].log_losses, rows


def test_two_sites_have_the_log_loss_of_one_process(sites):
    first, second = sites(2).run(trains_as_one_process)
    assert first == second


def uses_a_huge_table():
    class Net(nn.Module):
        def __init__(self, rows: int, device: str | None, padding: int) -> None:
            super().__init__()
            self.table = nn.Embedding(rows, 4, padding_idx=padding, device=device)
            self.head = nn.Linear(4, 1)

        def forward(self, ids):
            return self.head(self.table(ids).mean(1))[:, 0]

    rank = int(os.environ["RANK"])
    ids = torch.tensor([[5, 7, 10**9 - 1], [5, 2**31, 123]])
    small = torch.tensor([[0, 1, 4], [0, 3, 2]])  # the same rows in a small table
    keys = torch.tensor([5, 7, 123, 2**31, 10**9 - 1])
    torch.manual_seed(0)
    huge, plain = Net(2**31 + 1, "meta", 7), Net(5, None, 1)
    plain.head.load_state_dict(huge.head.state_dict())
    first = torch.empty(5, 4)
    Normal(std=0.1, seed=3)(keys.numpy(), first.numpy())
    plain.table.weight.data.copy_(first)
    one, two = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (plain, huge))
    targets = torch.tensor([1.0, -1.0])
    with ParameterManager() as manager:
        net = AdaModel(huge, two, manager, initialisers={"table.weight": Normal(std=0.1, seed=3)})
        for _ in range(5):
            for model, optimizer, batch in ((plain, one, small), (net, two, ids)):
                optimizer.zero_grad()
                some = slice(None) if model is plain else slice(rank, rank + 1)
                (model(batch[some]) - targets[some]).square().mean().backward()
                if model is net:
                    net.synchronize()
                optimizer.step()
            manager.wait_sync(everywhere=True)
        table = net.managed["table.weight"].table
        torch.testing.assert_close(table.pull(keys)[:, :4], plain.table.weight.data)
        assert table.nbytes < 1e6
        manager.barrier()
        owned, _ = table.owned()
        net.close()
    return owned.tolist()


def test_a_table_on_the_meta_device_has_only_the_rows_that_are_used(sites):
    first, second = sites(2).run(uses_a_huge_table)
    assert sorted(first + second) == [5, 7, 123, 10**9 - 1, 2**31]


def test_first_values_of_tables_without_memory():
    net = nn.Sequential(nn.Embedding(10**6, 3, padding_idx=2, device="meta"), nn.Flatten(), nn.Linear(6, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with ParameterManager() as manager:
        with pytest.raises(ValueError, match=r"initialisers for \['other'\], but what can be managed"):
            AdaModel(net, optimizer, manager, initialisers={"other": Constant()})
        model = AdaModel(net, optimizer, manager)
        rows = model.module[0](torch.tensor([[1, 2], [1, 999_999]]))
        assert torch.equal(rows[0, 0], rows[1, 0])
        assert torch.equal(rows[0, 1], torch.zeros(3))
        assert rows[1].abs().min() > 0
        model.close()


def test_tables_without_memory_come_back_whole():
    net = nn.Sequential(nn.Embedding(20, 3, device="meta"), nn.Flatten(), nn.Linear(6, 1))
    optimizer = torch.optim.Adagrad(net.parameters(), lr=0.1)
    with ParameterManager() as manager:
        model = AdaModel(net, optimizer, manager, initialisers={"0.weight": Constant(2.0)})
        model(torch.tensor([[1, 2]])).sum().backward()
        model.synchronize()
        optimizer.step()
        state = model.state_dict()
        assert (state["0.weight"][3:] == 2.0).all()
        assert (state["0.weight"][1:3] != 2.0).all()
        model.unwrap(optimizer)
    assert torch.equal(net[0].weight, state["0.weight"])
    optimizer.zero_grad()
    net(torch.tensor([[1, 2]])).sum().backward()
    optimizer.step()
    assert not torch.equal(net[0].weight[1], state["0.weight"][1])


def watches_keys():
    rank = int(os.environ["RANK"])
    with ParameterManager() as manager:
        table = manager.table("words", 4, rows=100)
        keys = torch.tensor([0, 1, 2, 3])
        timeline = Timeline(manager, table, keys)
        table.pull(torch.arange(rank, 100, 2))
        timeline.note()
        manager.barrier()
        for wants, wanted in ((0, [0, 1]), (1, [0])):  # site 0 wants key 1 for itself, and then both want key 0
            if rank == wants:
                table.intent(torch.tensor(wanted), 0, 9)
                support.until(lambda wanted=wanted: table.here(np.array(wanted)).all(), timeout=200.0)
            manager.barrier()
        manager.advance_clock()
        table.pull(keys)
        timeline.note()
        return timeline.gather()


def test_a_timeline_shows_where_keys_were(sites, tmp_path):
    first, second = sites(2).run(watches_keys)
    assert first[0].clocks == second[0].clocks == [0, 1]
    owner, replicated = owners(first)
    assert owner.tolist()[0] == [0, 1, 0, 1]
    assert not replicated[0].any()
    assert owner[1, 1] == 0
    assert owner[1, 2:].tolist() == [0, 1]
    assert replicated[1].tolist() == [True, False, False, False]
    site = first[0]
    assert site.per_step("pulled").tolist() == [4]
    assert site.local_share[0] == pytest.approx(3 / 4)  # key 3 is away
    assert site.per_step("bytes_sent")[0] > 0
    pytest.importorskip("matplotlib")
    Timeline.draw(tmp_path / "keys.png", first, "keys")
    assert (tmp_path / "keys.png").read_bytes().startswith(b"\x89PNG")


def test_a_timeline_without_keys_or_notes():
    with ParameterManager() as manager:
        table = manager.table("words", 1, rows=5)
        with pytest.raises(ValueError, match="belong together"):
            Timeline(manager, table)
        timeline = Timeline(manager)
        timeline.note()
        assert timeline.gather()[0].clocks == [0]
    with pytest.raises(ValueError, match="call note\\(\\) twice"):
        Timeline.draw("never.png", [SiteHistory()])


def test_frequent_keys_begin_with_the_most_frequent():
    ids = torch.from_numpy(np.repeat(np.arange(50), np.arange(50, 0, -1)))
    keys = frequent_keys(ids, 10)
    assert keys[0] == 0
    assert keys[-1] == 49
    assert torch.equal(keys, keys.sort().values)
    assert len(frequent_keys(ids, 500)) == 50


def test_the_example_trains_at_two_sites_and_draws(tmp_path):
    pytest.importorskip("matplotlib")
    flags = ["--limit", "1200", "--epochs", "1", "--method", "alone,ddp,adapm", "--log-dir", str(tmp_path)]
    (only,) = support.run_programs([[CTR, *flags]])
    assert only.status == 0, only.errors
    losses = {name: float(re.search(rf"^{name} +([\d.]+)", only.output, re.M).group(1)) for name in ("alone", "adapm")}
    assert losses["adapm"] == pytest.approx(losses["alone"], rel=0.02)
    assert len((tmp_path / "adapm.png").read_bytes()) > 20_000


def test_the_example_trains_in_lightning_on_criteos_files(tmp_path):
    pytest.importorskip("pytorch_lightning")
    pytest.importorskip("matplotlib")
    from data_files import clicks_sample

    np.savez(tmp_path / "sample.npz", **clicks_sample(300))
    url = f"tcp://127.0.0.1:{support.free_port()}"
    flags = ["--trainer", "lightning", "--data", str(tmp_path), "--epochs", "1", "--batch-size", "40"]
    commands = [[CTR, "--rank", rank, *flags, "--dist-url", url, "--log-dir", str(tmp_path / "logs")] for rank in "01"]
    first, second = support.run_programs(commands, preload=["pytorch_lightning"])
    assert first.status == second.status == 0, first.errors + second.errors
    assert re.search(r"^adapm +0\.", first.output, re.M)
    assert second.output == ""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--method", "adapm,magic"], "unknown method 'magic' with plain; valid ones are alone, ddp"),
        (["--trainer", "lightning", "--method", "ddp"], "unknown method 'ddp' with lightning"),
        (["--data", "nowhere"], "there is no nowhere: give train.txt"),
        (["--limit", "0"], "limit must lie in 1 to 8000"),
        (["--batch-size", "0"], "batch-size must be at least 1, got 0"),
        (["--rank", "2"], "rank must lie in 0 to 1, got 2"),
        (["--distributed-mode", "foo"], f"unknown mode 'foo'; valid ones are {support.valid_modes()}"),
    ],
)
def test_wrong_arguments_end_the_example_before_a_site_starts(flags, message, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import ctr

    monkeypatch.setattr(ctr, "launch_sites", lambda *_: pytest.fail("it started sites"))
    with pytest.raises(SystemExit) as end:
        ctr.main(flags)
    assert end.value.code == 1
    assert capsys.readouterr().err.startswith(f"error: {message}")
