"""Ways in which a served model computes."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

from dadplug import schedules
from dadplug.schedules import Record, Serving
from dadplug.serving import schedule
from dadplug.serving.backends import runner_of
from dadplug.tuning import tune
from dadplug.tuning.tasks import ServingTask, label


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.second, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.alone = nn.BatchNorm2d(8)
        self.last, self.last_norm = nn.Linear(8, 5), nn.BatchNorm1d(5)

    def forward(self, images):
        hidden = self.first(images)
        hidden = hidden + self.norm(self.second(hidden)) + self.alone(hidden)
        return self.last_norm(self.last(hidden.mean((2, 3))))


class Shifted(nn.Module):
    def forward(self, outputs):
        return outputs + 0.1


def trained():
    model = Residual()
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    return model.eval()


def norms(module):
    return sum(isinstance(each, (nn.BatchNorm1d, nn.BatchNorm2d)) for each in module.modules())


def test_normalisations_become_part_of_the_layers_before_them():
    model = trained()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    new = schedule.fused(model)
    called = {node.target for node in new.graph.nodes if node.op == "call_module"}
    assert {each for each in called if "norm" in each or each == "first.1"} == set()
    assert "alone" in called
    images = torch.randn(4, 3, 6, 6)
    torch.testing.assert_close(new(images), model(images), rtol=1e-4, atol=1e-5)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def test_what_is_used_twice_is_not_fused():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.other = nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2), nn.BatchNorm1d(2)

        def forward(self, inputs):
            once = self.conv(inputs)
            return self.norm(once) + once + self.other(self.conv(inputs))

    model = Shared().eval()
    assert schedule.fused(model) is model


@pytest.fixture
def compiled(monkeypatch):
    """Replace torch.compile, which takes a minute, by what records its calls."""
    calls = []
    monkeypatch.setattr(torch, "compile", lambda module, **options: calls.append(module) or module)
    return calls


def test_all_ways_give_the_outputs_of_the_model(compiled):
    model, example = trained(), np.random.default_rng(0).normal(size=(3, 3, 6, 6)).astype(np.float32)
    expected = runner_of(model)(example)
    for backend in ("eager", "compiled"):
        for last in (False, True):
            for fused in (False, True):
                run = schedule.make_run(model, Serving(backend, last, fused), example)
                torch.testing.assert_close(run(example), expected, rtol=1e-4, atol=1e-5)
    assert len(compiled) == 4


def test_a_served_model_computes_as_it_was_tuned(compiled):
    model, key = trained(), schedule.key_of(trained())
    record = Record(served={key: Serving("compiled", True, True, "3,6,6")}, tuned=True)
    example = schedule.example_of(model, (3, 6, 6))
    expected = runner_of(model)(example)
    schedule.scheduled(model)
    assert not compiled
    with schedules.replaced(record), warnings.catch_warnings():
        warnings.simplefilter("error")
        found = schedule.scheduled(model)(example)
    assert norms(compiled[0]) == 1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    other = nn.Sequential(nn.Linear(8, 5))
    assert schedule.key_of(other) != key
    with schedules.replaced(record):
        schedule.scheduled(other)
    assert len(compiled) == 1


@pytest.mark.parametrize("fails", ["raises", "is wrong"])
def test_a_way_that_fails_is_not_used(monkeypatch, fails):
    def compile_badly(module, **options):
        if fails == "raises":
            raise RuntimeError("no compiler")
        return nn.Sequential(module, Shifted())

    monkeypatch.setattr(torch, "compile", compile_badly)
    model = trained()
    record = Record(served={schedule.key_of(model): Serving("compiled", shape="3,6,6")}, tuned=True)
    example = schedule.example_of(model, (3, 6, 6))
    with schedules.replaced(record), pytest.warns(UserWarning, match="served as it is"):
        run = schedule.scheduled(model)
    assert torch.equal(run(example), runner_of(model)(example))
    task = ServingTask(model, (3, 6, 6), lambda: False)
    assert all("compiled" not in way for (way,) in task.space.configs())
    assert any(note.startswith("compiled") for note in task.notes)


def test_tuning_a_model_stores_its_way(compiled, tmp_path, monkeypatch):
    monkeypatch.setenv("DADPLUG_TUNING", str(tmp_path))
    schedules.forget()
    wanted = label(Serving("compiled", True, True))

    def measure(task, config, samples):
        return 0.5 if config == (wanted,) else 1.0

    model = trained()
    result = tune(model, 1000, input_shape=(3, 6, 6), timer=measure, progress=False)
    assert schedules.load().served == {schedule.key_of(model): Serving("compiled", True, True, "3,6,6")}
    assert result.rows[-1].task == "served model"
    assert "compiled, channels last, fused" in result.table()
    other = nn.Sequential(nn.Linear(6, 2))
    tune(other, 1000, input_shape=(6,), timer=measure, progress=False)
    assert set(schedules.load().served) == {schedule.key_of(model), schedule.key_of(other)}
    schedules.forget()
