"""Selection among site models, and memory of a table served from shards.

    python benchmarks/serving_models.py                        both parts; about a minute
    python benchmarks/serving_models.py contexts --data-dir DIR   with MNIST in place of the embedded digits
    python benchmarks/serving_models.py table --rows 1000000

`contexts`: three sites have the digits 0 to 3, 4 to 6 and 7 to 9, each with a model of its own, and all have a global
one, trained on a tenth of the data. The accuracy of `exp4` in each context is compared with that of each model; then
the best model of every context answers at random, and the requests until the accuracy is back are counted. `table`:
resident memory of the process of a model with a table of so many rows by 16, before and after 10,000 Zipf lookups.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor, nn

from dadplug.adapm.shard_files import VERSION, write_index, write_whole
from dadplug.data import load_dataset
from dadplug.serving import Model, Predictor

SITES = {"a": range(4), "b": range(4, 7), "c": range(7, 10)}
LABELS = 2000
WINDOW = 200  # requests over which an accuracy is taken after a model broke
WIDTH = 16


def network() -> nn.Module:
    """Return the network of every model."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def select(data: Any, digits: range, most: int) -> tuple[Tensor, Tensor]:
    """Return images and labels of some digits."""
    images, labels = data.images, data.labels
    chosen = ((labels >= digits.start) & (labels < digits.stop)).nonzero()[:, 0][:most]
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
    return model.eval()


class Breakable:
    """A model as a function of a batch, which answers at random in some contexts' digits once it is broken."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.broken = model, False

    def __call__(self, batch: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return scores."""
        if self.broken:
            return np.random.default_rng().standard_normal((len(batch), 10))
        with torch.inference_mode():
            return self.model(torch.from_numpy(np.ascontiguousarray(batch))).numpy()


def stream(predictor: Predictor, site: str, samples: tuple[Tensor, Tensor], count: int) -> list[bool]:
    """Send requests of one site with feedback; return which answers were right."""
    images, labels = samples
    right = []
    for place in torch.randint(len(labels), (count,)).tolist():
        answer, label = predictor.predict(images[place], context=site), int(labels[place])
        right.append(answer.label == label)
        predictor.feedback(answer.id, label)
    return right


def contexts(options: argparse.Namespace) -> None:
    """Print accuracies in each context, and requests until they are back after the best model broke."""
    torch.manual_seed(0)
    data = load_dataset("mnist" if options.data_dir else "digits", options.data_dir or "data")
    few = len(data.train.labels) // 10
    models = {"global": Breakable(train(*select(data.train, range(10), few), options.steps))}
    for site, digits in SITES.items():
        models[f"site {site}"] = Breakable(train(*select(data.train, digits, len(data.train)), options.steps))
    tests = {site: select(data.test, digits, len(data.test)) for site, digits in SITES.items()}
    for site, (images, labels) in tests.items():
        alone = {name: (each(images.numpy()).argmax(1) == labels.numpy()).mean() for name, each in models.items()}
        best = max(alone, key=lambda name: alone[name])
        with Predictor(dict(models), policy="exp4", context="site", cache_bytes=0) as predictor:
            learned = stream(predictor, site, (images, labels), LABELS)
            settled = np.mean(stream(predictor, site, (images, labels), LABELS))
            models[best].broken = True
            after = stream(predictor, site, (images, labels), LABELS)
            models[best].broken = False
        second = max(value for name, value in alone.items() if name != best)
        moving = np.convolve(after, np.ones(WINDOW) / WINDOW, "valid")
        back = np.nonzero(moving >= second - 0.02)[0]
        print(
            f"context {site}: "
            + ", ".join(f"{name} {100 * value:.1f} %" for name, value in alone.items())
            + f"; exp4 {100 * np.mean(learned):.1f} % in the first {LABELS} labels, then {100 * settled:.1f} %; "
            + f"{best} broken: {100 * np.mean(after[1000:]):.1f} % after 1000 requests, "
            + (f"back within {back[0] + WINDOW} requests" if len(back) else "not back"),
            flush=True,
        )


def write_table(folder: Path, rows: int, sites: int = 2) -> None:
    """Write shards of one table, as sites that own rows at random would."""
    files = {}
    for site, keys in enumerate(torch.randperm(rows).chunk(sites)):
        values = torch.cat([keys[:, None] + torch.arange(WIDTH) / 2, torch.zeros(len(keys), WIDTH)], 1).float()
        name = f"0123abcd-site-{site}-of-{sites}.pt"
        files[name] = write_whole(folder / name, {"site": site, "tables": {"t": {"keys": keys, "values": values}}})
    table = {"rows": rows, "width": WIDTH, "columns": 2 * WIDTH, "names": ["weight"], "place": 0}
    table |= {"parts": ["sum"], "counts_steps": True, "steps": 1}
    rest = {"0123abcd-rest.pt": write_whole(folder / "0123abcd-rest.pt", {"model": {}, "optimizer": {"state": {}}})}
    write_index(folder / "index.json", {"version": VERSION, "tables": {"t": table}, "files": files, "rest": rest})


def table(options: argparse.Namespace) -> None:
    """Print how much the resident memory of a model's process grows by a table and by lookups."""
    rows = options.rows
    with tempfile.TemporaryDirectory() as name:
        grown = {}
        for label, count in (("small", 100), ("table", rows)):
            folder = Path(name) / label
            folder.mkdir()
            write_table(folder, count)
            with Predictor({"t": Model(folder)}, task="regression", cache_bytes=0, dtype="int64") as predictor:
                process = psutil.Process(predictor.status()["models"]["t"]["pid"])
                keys = np.minimum(np.random.default_rng(0).zipf(1.3, 10_000), count) - 1
                for key in keys.tolist():
                    found = predictor.predict(np.array([key])).output
                    assert float(found[0, 0]) == key
                grown[label] = process.memory_info().rss
        size = rows * WIDTH * 4
        more = grown["table"] - grown["small"]
        print(
            f"table of {rows} rows by {WIDTH}, {size / 2**20:.0f} MiB: after 10,000 lookups {more / 2**20:.1f} MiB "
            f"more resident memory than with a table of 100 rows, {more / size:.1%} of the table"
        )


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {"contexts": contexts, "table": table}


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--data-dir", help="folder with MNIST's files (default: the embedded digits)")
    parser.add_argument("--steps", type=int, default=300, help="training steps of each model (default: %(default)d)")
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the table (default: %(default)d)")
    options = parser.parse_args()
    for part in options.parts or PARTS:
        PARTS[part](options)


if __name__ == "__main__":
    main()
