"""Selection among site models, and memory of a table served from shards.

    python benchmarks/serving_models.py                        both parts; about two minutes
    python benchmarks/serving_models.py contexts --data-dir DIR   with MNIST in place of the embedded digits
    python benchmarks/serving_models.py table --rows 1000000

`contexts`: three sites have the digits 0 to 3, 4 to 6 and 7 to 9, each with a model of its own, and all have a global
one, trained on a tenth of the data. After 2,000 labels, the accuracy of `exp4` in each context is compared with that of
each model on the same requests: on others, samples of 2,000 differ by 0.4 points by chance. Then the best model of the
context answers at random, and the requests are counted until the accuracy of the last 200 is within 2 points of that of
the best other model. `table`: resident memory of the process of a model with a table of so many rows by 16, before and
after 10,000 Zipf lookups.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from command import parser_of
from torch import Tensor, nn

from dadplug.adapm.shards import VERSION, shard_name, write_index, write_shard, write_whole
from dadplug.data import load_dataset
from dadplug.serving import Model, Predictor

SITES = {"a": range(4), "b": range(4, 7), "c": range(7, 10)}
LABELS = 2000
WINDOW = 200  # requests over which an accuracy is taken after a model broke
WIDTH = 16

Samples = tuple[Tensor, Tensor]


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


class Stream(NamedTuple):
    """Requests of one site with feedback: which answers were right, and which each single model's would have been."""

    right: np.ndarray[Any, Any]
    alone: dict[str, np.ndarray[Any, Any]]

    def best(self) -> float:
        """Return the accuracy of the best single model on the same requests."""
        return float(max(each.mean() for each in self.alone.values()))


def stream(predictor: Predictor, models: dict[str, Breakable], site: str, samples: Samples, count: int) -> Stream:
    """Send requests of one site with feedback."""
    images, labels = samples
    places = torch.randint(len(labels), (count,))
    right = []
    for place in places.tolist():
        answer, label = predictor.predict(images[place], context=site), int(labels[place])
        right.append(answer.label == label)
        predictor.feedback(answer.id, label)
    wanted = labels[places].numpy()
    alone = {name: each(images[places].numpy()).argmax(1) == wanted for name, each in models.items()}
    return Stream(np.array(right), alone)


def contexts(options: argparse.Namespace) -> None:
    """Print accuracies in each context, and requests until they are back after the best model broke."""
    data = load_dataset("mnist" if options.data_dir else "digits", options.data_dir)
    few = len(data.train.labels) // 10
    margins, recoveries = [], []
    for seed in range(options.seeds):
        torch.manual_seed(seed)
        models = {"global": Breakable(train(*select(data.train, range(10), few), options.steps))}
        for site, digits in SITES.items():
            models[f"site {site}"] = Breakable(train(*select(data.train, digits, len(data.train)), options.steps))
        for site, digits in SITES.items():
            samples = select(data.test, digits, len(data.test))
            with Predictor(dict(models), policy="exp4", context="site", cache_bytes=0) as predictor:
                learned = stream(predictor, models, site, samples, LABELS)
                settled = stream(predictor, models, site, samples, LABELS)
                best = max(settled.alone, key=lambda name: settled.alone[name].mean())
                models[best].broken = True
                after = stream(predictor, models, site, samples, LABELS)
                models[best].broken = False
            behind = moving(after.right) - moving(max(after.alone.values(), key=np.sum))
            back = np.nonzero(behind >= -0.02)[0]
            recoveries.append(back[0] + WINDOW if len(back) else LABELS + 1)
            margins.append(100 * (settled.right.mean() - settled.best()))
            print(
                f"seed {seed}, context {site}: exp4 {100 * learned.right.mean():.1f} % in the first {LABELS} labels, "
                f"then {100 * settled.right.mean():.1f} %; on the same requests "
                + ", ".join(f"{name} {100 * each.mean():.1f} %" for name, each in settled.alone.items())
                + f"; {best} broken: {100 * after.right[1000:].mean():.1f} % after 1000 requests, "
                + (f"back within {recoveries[-1]} requests" if len(back) else "not back"),
                flush=True,
            )
    print(
        f"exp4 less the best single model on the same requests: {min(margins):+.2f} points at least, "
        f"{np.mean(margins):+.2f} on average; back within {max(recoveries)} requests at most"
    )


def moving(right: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the accuracies over windows of requests."""
    return np.convolve(right, np.ones(WINDOW) / WINDOW, "valid")


def write_table(folder: Path, rows: int, sites: int = 2) -> None:
    """Write shards of one table, as sites that own rows at random would."""
    files = {}
    for site, keys in enumerate(torch.randperm(rows).chunk(sites)):
        values = torch.cat([keys[:, None] + torch.arange(WIDTH) / 2, torch.zeros(len(keys), WIDTH)], 1).float()
        name = shard_name("0123abcd", site, sites)
        files[name] = write_shard(folder / name, {"t": {"keys": keys, "values": values}})
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
    parser = parser_of(
        __doc__,
        data_dir=(None, "folder with MNIST's files (default: the embedded digits)"),
        seeds=(5, "trainings (default: %(default)d)"),
        steps=(300, "training steps of each model (default: %(default)d)"),
        rows=(1_000_000, "of the table (default: %(default)d)"),
    )
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)} (default: all)")
    options = parser.parse_args()
    for part in options.parts or PARTS:
        PARTS[part](options)


if __name__ == "__main__":
    main()
