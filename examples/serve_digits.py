"""Serve a global model and one for each of two sites, and let feedback find the right one for each site.

    python examples/serve_digits.py

Site a has the digits 0 to 4, site b 5 to 9. Each has trained a model on its own digits, and both a global one. The
program serves all three over HTTP, sends the requests of each site with its name as the context, and reports the right
digit after each answer. It prints how the weights of the models move. http://127.0.0.1:8000/status draws them.
`--in-process` leaves out HTTP, and does not need LitServe.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dadplug.data import load_dataset

SITES = {"a": range(5), "b": range(5, 10)}


def network() -> nn.Module:
    """Return the network of all three models."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def tensors(dataset: Any, digits: range) -> tuple[Tensor, Tensor]:
    """Return the images and labels of some digits."""
    samples = [dataset[index] for index in range(len(dataset))]
    images, labels = torch.stack([image for image, _ in samples]), torch.tensor([int(label) for _, label in samples])
    chosen = (labels >= digits.start) & (labels < digits.stop)
    return images[chosen], labels[chosen]


def train(images: Tensor, labels: Tensor, steps: int) -> nn.Module:
    """Return a trained network."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(steps):
        batch = torch.randint(len(labels), (64,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    return model


def train_all(folder: Path, steps: int) -> dict[str, Path]:
    """Train the three models, and return the files of their weights."""
    torch.manual_seed(0)
    data = load_dataset("digits").train
    files = {}
    for name, digits in {"global": range(10), **{f"site-{site}": digits for site, digits in SITES.items()}}.items():
        files[name] = folder / f"{name}.pt"
        torch.save(train(*tensors(data, digits), steps).state_dict(), files[name])
        print(f"trained {name}")
    return files


@contextlib.contextmanager
def served(files: dict[str, Path], port: int) -> Iterator[Any]:
    """Serve the models over HTTP in a process of its own, and return a client."""
    from dadplug.runners.serving import PredictionClient

    command = [sys.executable, "-m", "dadplug", "serve", *(f"{name}={path}" for name, path in files.items())]
    command += ["--builder", f"{__file__}:network", "--policy", "exp4", "--context", "site", "--port", str(port)]
    server = subprocess.Popen([*command, "--input-shape", "1,28,28"])
    client = PredictionClient(f"http://127.0.0.1:{port}", context="site")
    try:
        while True:
            with contextlib.suppress(OSError):
                client.status()
                break
            if server.poll() is not None:
                sys.exit("the server has ended")
            time.sleep(0.1)
        yield client
    finally:
        client.close()
        server.terminate()
        server.wait()


@contextlib.contextmanager
def in_process(files: dict[str, Path]) -> Iterator[Any]:
    """Serve the models in this program."""
    from dadplug.serving import Model, Predictor

    models = {name: Model(path, builder=network, input_shape=(1, 28, 28)) for name, path in files.items()}
    with Predictor(models, policy="exp4", context="site") as predictor:
        yield predictor


def main() -> None:
    """Train, serve, ask, report the right answers, print the weights."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1000, help="number of requests (default: %(default)d)")
    parser.add_argument("--steps", type=int, default=150, help="training steps of each model (default: %(default)d)")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--in-process", action="store_true", help="without HTTP")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        files = train_all(Path(folder), options.steps)
        predictor = stack.enter_context(in_process(files) if options.in_process else served(files, options.port))
        data = {site: tensors(load_dataset("digits").test, digits) for site, digits in SITES.items()}
        right = dict.fromkeys(SITES, 0)
        for number in range(options.requests):
            site = "ab"[number % 2]
            images, labels = data[site]
            index = number // 2 % len(labels)
            answer = predictor.predict(images[index], context=site)
            right[site] += answer.label == int(labels[index])
            predictor.feedback(answer.id, int(labels[index]))
            if number + 1 in (20, 100, options.requests):
                show(number + 1, predictor.status()["weights"])
        for site, count in right.items():
            print(f"site {site}: {100 * count / (options.requests / 2):.1f} % of the answers were right")


def show(requests: int, weights: dict[str, dict[str, float]]) -> None:
    """Print the weights of each site."""
    for site, values in weights.items():
        shares = ", ".join(f"{name} {value:.3f}" for name, value in values.items())
        print(f"after {requests:4} requests, site {site}: {shares}")


if __name__ == "__main__":
    main()
