"""Models that are trained in the program that serves them: present weights, evaluation mode, nothing changed."""

import threading

import numpy as np
import pytest
import torch
from torch import nn

from dadplug.serving import Predictor

X = torch.tensor([1.0, -2.0, 3.0, 0.5])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.parts = [self.drop, nn.Dropout(0.5)]  # one of them is no submodule
        self.last, self.scale, self.cache = nn.Linear(6, 3), 1.0, {}

    def forward(self, x):
        if not self.training:
            self.cache["last"] = x = x * 1  # which a backward pass could not use, if it came from inference mode
        return self.scale * self.last(self.parts[0](self.norm(self.first(x))))


def add(model):
    with torch.no_grad():
        model.first.weight.add_(1)


def add_to_data(model):
    model.first.bias.data += 1


def write_by_numpy(model):
    model.last.weight.detach().numpy()[:] = 0.5


def step(model):
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    model(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()


def forward_alone(model):
    model(torch.randn(5, 4))  # running statistics


def replace(model):
    model.last = nn.Linear(6, 3)


def replace_parameter(model):
    model.last.bias = nn.Parameter(torch.ones(3))


def load(model):
    model.load_state_dict(Net().state_dict(), assign=True)


def scale(model):
    model.scale = 2.0


def live(seed=0):
    torch.manual_seed(seed)
    return Net()


def expected(model):
    training = {module: module.training for module in model.modules()}
    state = {name: each.clone() for name, each in model.state_dict().items()}
    with torch.no_grad():
        value = model.eval()(X[None])[0].numpy()
    model.cache.clear()
    for module, mode in training.items():
        module.training = mode
    assert all(torch.equal(each, state[name]) for name, each in model.state_dict().items())
    return value


CHANGES = (add, add_to_data, write_by_numpy, step, forward_alone, replace, replace_parameter, load, scale)


@pytest.mark.parametrize("wrap", [lambda model: model, torch.compile], ids=["plain", "compiled"])
def test_answers_are_those_of_the_present_weights(wrap):
    model = live()
    with Predictor({"m": wrap(model)}, deadline=60) as predictor:
        for change in CHANGES:
            model.drop.eval()  # one that the program has frozen
            before = {module: module.training for module in model.modules()}
            for _ in range(2):
                np.testing.assert_allclose(predictor.predict(X).output, expected(model), rtol=1e-5, atol=1e-6)
            assert {module: module.training for module in model.modules()} == before
            assert not model.cache
            change(model)
        np.testing.assert_allclose(predictor.predict(X).output, expected(model), rtol=1e-5, atol=1e-6)
        assert predictor.status()["cache"]["hits"] == len(CHANGES)


def test_training_goes_on_beside_it():
    model, alone = live(), live()
    losses = {each: [] for each in (model, alone)}
    with Predictor({"m": model}, deadline=60, cache_bytes=0) as predictor:
        ended = threading.Event()

        def ask():
            while not ended.is_set():
                predictor.predict(X)

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            for each, found in losses.items():
                torch.manual_seed(1)
                optimizer = torch.optim.SGD(each.parameters(), 1e-3)
                for _ in range(50):
                    optimizer.zero_grad()
                    loss = each(torch.randn(8, 4)).square().sum()
                    loss.backward()
                    optimizer.step()
                    found.append(loss.item())
        finally:
            ended.set()
            thread.join()
    assert losses[model] == losses[alone]


@pytest.mark.filterwarnings("ignore")
def test_a_scripted_model_answers_in_evaluation_mode():
    model = torch.jit.script(nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.9)))
    with Predictor({"m": model}, deadline=60) as predictor:
        answers = [predictor.predict(X).output for _ in range(2)]
        with torch.no_grad():
            expected = nn.functional.linear(X, *model.parameters()).numpy()
    assert model.training
    for each in answers:
        np.testing.assert_allclose(each, expected, rtol=1e-5)
