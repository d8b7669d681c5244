"""What other sites recover of a batch, by method: the figures of the pages of the methods.

    python benchmarks/audit_methods.py                                       digits and text, which the package contains
    python benchmarks/audit_methods.py --data photos --photos train.zip      photos of the dogs-vs-cats challenge
    python benchmarks/audit_methods.py --data digits --mnist data/mnist      MNIST in place of scikit-learn's digits
    python benchmarks/audit_methods.py --only hospitals                      the recommended setting for two hospitals
    python benchmarks/audit_methods.py --data volumes,patches --only ranks   chests in three dimensions, by rank

Each line is an audit (`dadplug.audit`) of one batch with a model at its first values, which shows most:

| data | model | batch |
| --- | --- | --- |
| digits | 784-512-10 with ReLU | 16 |
| photos | vision transformer for 64 x 64 pixels, patches of 8 | 4 |
| volumes | segmentation of 16 x 16 x 16 voxels by convolutions of 8, 16 and 1 channels | 2 |
| patches | the same by a linear layer on patches of 8 x 8 x 8 voxels | 2 |
| text | the repository's pages, 24 words each; encoder of 2 layers of width 192 | 4 |

"recovered" is the share of samples that some attack has recovered; "rebuilt" that of the best attack that needs no
candidate, and "by" its name. "similarity" is that of the best attack on the data, its mean over samples: correlation
beyond the mean of the batch, for text token accuracy. Labels, words and membership (AUC, chance is 0.5) are similar.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from command import parser_of
from torch import Tensor, nn

import dadplug
from dadplug.data import load_dataset
from dadplug.models import build_model

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY, WORDS = 2000, 24


class Task(NamedTuple):
    """A batch, and the model that it is audited with."""

    model: nn.Module
    inputs: Any
    targets: Tensor


class Encoder(nn.Module):
    """Transformer encoder with learned positions, and a classification of the mean of its outputs."""

    def __init__(self, width: int = 192, layers: int = 2, classes: int = 2) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(WORDS, width)
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.last = nn.Linear(width, classes)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Compute logits of shape (batch, classes)."""
        places = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        vectors = self.norm(self.words(input_ids) + self.positions(places))
        for block in self.blocks:
            vectors = block(vectors)
        logits: Tensor = self.last(vectors.mean(1))
        return logits


class Block(nn.Module):
    """Attention by linear layers of its own, as in the models of transformers, and a feed-forward network."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, vectors: Tensor) -> Tensor:
        """Return vectors of the same shape, (batch, positions, width)."""
        parts = (
            each(vectors).unflatten(2, (self.heads, -1)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        attended = nn.functional.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)
        vectors = self.first(vectors + self.out(attended))
        out: Tensor = self.second(vectors + self.down(nn.functional.gelu(self.up(vectors))))
        return out


def digits(arguments: argparse.Namespace) -> Task:
    """Return 16 digits."""
    data = load_dataset("mnist", arguments.mnist).train if arguments.mnist else load_dataset("digits").train
    torch.manual_seed(arguments.seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10))
    return Task(model, *_drawn(data, arguments.rows or 16, arguments.seed))


def photos(arguments: argparse.Namespace) -> Task:
    """Return 4 photos of 64 x 64 pixels."""
    if arguments.photos is None:
        sys.exit("photos need --photos, the file train.zip of the dogs-vs-cats challenge")
    data = load_dataset("dogsvscats", arguments.photos).resized(64).train
    torch.manual_seed(arguments.seed)
    return Task(build_model("vit-small"), *_drawn(data, arguments.rows or 4, arguments.seed))


class Chest(nn.Module):
    """Convolutions in three dimensions that segment nodules, down to half the size and back."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Conv3d(1, width, 3, padding=1)
        self.down = nn.Conv3d(width, 2 * width, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose3d(2 * width, width, 2, stride=2)
        self.last = nn.Conv3d(2 * width, 2, 1)

    def forward(self, volumes: Tensor) -> Tensor:
        """Compute logits of shape (batch, 2, depth, height, width)."""
        first = nn.functional.leaky_relu(self.first(volumes))
        up = self.up(nn.functional.leaky_relu(self.down(first)))
        logits: Tensor = self.last(torch.cat([first, up], 1))
        return logits


class Patches(nn.Module):
    """Segmentation by a linear layer on patches of 8 x 8 x 8 voxels, as the first layer of UNETR has them."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(512, width), nn.Linear(width, 2 * 512)

    def forward(self, volumes: Tensor) -> Tensor:
        """Compute logits of shape (batch, 2, depth, height, width)."""
        blocks = volumes[:, 0].unflatten(3, (2, 8)).unflatten(2, (2, 8)).unflatten(1, (2, 8))  # (n, 2, 8, 2, 8, 2, 8)
        rows = blocks.permute(0, 1, 3, 5, 2, 4, 6).reshape(len(volumes), 8, 512)
        found = self.last(nn.functional.gelu(self.first(rows))).reshape(-1, 2, 2, 2, 2, 8, 8, 8)
        logits: Tensor = found.permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(-1, 2, 16, 16, 16)
        return logits


def chest(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return a volume like a chest: body, two dark lungs, a spine and nodules in the lungs; and the nodules' mask."""
    axis = torch.linspace(-1, 1, size)
    z, y, x = torch.meshgrid(axis, axis, axis, indexing="ij")
    shift = 0.1 * torch.randn(3, generator=generator)
    volume = 0.6 * ((x / 0.9) ** 2 + ((y - shift[0]) / 0.7) ** 2 < 1).float()
    lungs = torch.zeros_like(volume)
    for side in (-1, 1):
        lung = ((x - 0.42 * side) / 0.32) ** 2 + ((y - shift[1]) / 0.45) ** 2 + (z / 0.85) ** 2 < 1
        lungs[lung] = 1.0
    volume[lungs > 0] = 0.1
    volume[(x**2 + (y - 0.5) ** 2) < 0.02] = 1.0
    mask = torch.zeros_like(volume)
    for place in lungs.nonzero()[torch.randint(int(lungs.sum()), (3,), generator=generator)]:
        center = axis[place]
        mask[((z - center[0]) ** 2 + (y - center[1]) ** 2 + (x - center[2]) ** 2) < 0.02] = 1.0
    volume[mask > 0] = 0.8
    return (volume + 0.02 * torch.randn(volume.shape, generator=generator))[None], mask


def volumes(arguments: argparse.Namespace) -> Task:
    """Return synthetic chests, to be segmented."""
    generator = torch.Generator().manual_seed(arguments.seed)
    pairs = [chest(16, generator) for _ in range(arguments.rows or 2)]
    torch.manual_seed(arguments.seed)
    return Task(Chest(), torch.stack([one for one, _ in pairs]), torch.stack([mask.long() for _, mask in pairs]))


def patches(arguments: argparse.Namespace) -> Task:
    """Return synthetic chests, to be segmented from patches."""
    return volumes(arguments)._replace(model=Patches())


def text(arguments: argparse.Namespace) -> Task:
    """Return 4 passages: of documentation, or of code."""
    passages = []
    for label, pattern in enumerate(("docs/**/*.md", "dadplug/**/*.py")):
        for path in sorted(ROOT.glob(pattern)):
            words = re.findall(r"\w+|[^\w\s]", path.read_text())
            numbers = [1 + zlib.crc32(word.encode()) % (VOCABULARY - 1) for word in words[100 : 100 + WORDS]]
            if len(numbers) == WORDS:
                passages.append((torch.tensor(numbers), label))
    torch.manual_seed(arguments.seed)
    inputs, targets = _drawn(passages, arguments.rows or 4, arguments.seed)
    return Task(Encoder(), {"input_ids": inputs}, targets)


def _drawn(data: Any, count: int, seed: int) -> tuple[Tensor, Tensor]:
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))[:count].tolist()
    pairs = [data[index] for index in order]
    return torch.stack([inputs for inputs, _ in pairs]), torch.tensor([int(label) for _, label in pairs])


TASKS: dict[str, Callable[[argparse.Namespace], Task]] = {
    "digits": digits,
    "photos": photos,
    "text": text,
    "volumes": volumes,
    "patches": patches,
}


def settings(rows: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the mode and the options of each line.

    Args:
        rows: samples of the batch.
    """
    yield "dsgd", {}
    yield "dad", {}
    yield "dad", {"wire": "int8"}
    yield "dad", {"share_inputs": False}
    yield "edad", {}
    yield "rankdad", {}
    yield "rankdad", {"rank": rows}
    yield "rankdad", {"rank": max(1, rows // 2)}
    yield "rankdad", {"rank": max(1, rows // 4)}
    yield "rankdad", {"rank": 1}
    yield "powersgd", {"rank": 4}
    yield "topk", {}
    yield "localsgd", {"every": 1}
    yield "localsgd", {"every": 4}
    yield "localsgd", {"every": 4, "rank": 1, "wire": "int8"}
    yield from private_settings(rows)


def private_settings(rows: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield settings with differential privacy."""
    for noise in (0.5, 1.0):
        for mode, options in (("dsgd", {}), ("rankdad", {"rank": 8})):
            yield mode, options | {"privacy": private(noise, rows)}


def private(noise: float, rows: int) -> dadplug.DifferentialPrivacy:
    """Return a setting of differential privacy."""
    return dadplug.DifferentialPrivacy(noise_multiplier=noise, expected_batch=rows)


def line(report: dadplug.tools.auditing.Report) -> dict[str, Any]:
    """Return the figures of a report."""

    def most(target: str) -> float | None:
        values = [result.similarity for result in report.results if result.target == target]
        return max(values) if values else None

    data = [result for result in report.results if result.target == "data"]
    best = max(data, key=lambda each: (each.recovered, each.attack != "span", each.similarity), default=None)
    rebuilt = max((each for each in data if each.attack != "span"), key=lambda each: each.recovered, default=None)
    return {
        "recovered": report.recovered,
        "similarity": most("data"),
        "rebuilt": rebuilt and rebuilt.recovered,
        "by": rebuilt.attack if rebuilt is not None and rebuilt.recovered else None,
        "best": best and best.attack,
        "psnr": best and best.psnr,
        "labels": most("labels"),
        "words": most("words"),
        "membership": most("membership"),
        "bytes": report.bytes_sent,
        "seconds": report.seconds,
    }


def named(mode: str, options: dict[str, Any]) -> str:
    """Return mode and options as a table has them."""
    shown = {name: value for name, value in options.items() if name != "privacy"}
    words = [f"{name}={value}" for name, value in shown.items()]
    if "privacy" in options:
        words.append(f"privacy, noise {options['privacy'].noise_multiplier:g}")
    return f"`{mode}`" + (f", {', '.join(words)}" if words else "")


def cell(value: float | None, form: str = ".2f") -> str:
    """Return a number of a table; a dash where there is none."""
    return "–" if value is None else format(value, form)


def main() -> int:
    parser = parser_of(
        __doc__,
        data=("digits,text", "digits, photos, text, volumes, patches, separated by commas"),
        mnist=(None, "folder of MNIST's files"),
        photos=(None, "train.zip of the dogs-vs-cats challenge"),
        rows={"type": int, "help": "samples of a batch"},
        modes=(None, "modes, separated by commas (default: all)"),
        only={
            "choices": SELECTIONS,
            "help": "settings for two hospitals, private ones, or the ranks of rankdad",
        },
        attacks=(None, "names of attacks, separated by commas (default: all)"),
        seconds=(30.0, "time limit of an audit"),
        seed=0,
        json={"type": Path, "help": "file for all figures"},
        picture={"type": Path, "help": "folder for a picture of each audit"},
    )
    arguments = parser.parse_args()
    found = []
    for name in arguments.data.split(","):
        task = TASKS[name](arguments)
        rows = len(task.targets)
        print(f"\n{name}, {rows} samples\n")
        print("| mode | recovered | rebuilt | by | similarity | labels | words | membership | bytes |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
        chosen = SELECTIONS[arguments.only](rows) if arguments.only else settings(rows)
        for number, (mode, options) in enumerate(chosen):
            if arguments.modes and mode not in arguments.modes.split(","):
                continue
            how = {"seconds": arguments.seconds, "remedies": False, "seed": arguments.seed} | options
            how["attacks"] = arguments.attacks and arguments.attacks.split(",")
            try:
                report = dadplug.audit(task.model, nn.CrossEntropyLoss(), task.inputs, task.targets, mode, **how)
            except ValueError as error:  # edad needs chains of layers
                print(f"| {named(mode, options)} | does not apply | {str(error).partition(':')[0]} |", flush=True)
                continue
            figures = line(report)
            found.append({"data": name, "setting": named(mode, options), **figures})
            print(
                f"| {named(mode, options)} | {figures['recovered']:.0%} | {cell(figures['rebuilt'], '.0%')} | "
                f"{figures['by'] or '–'} | {cell(figures['similarity'])} | {cell(figures['labels'])} | "
                f"{cell(figures['words'])} | {cell(figures['membership'])} | {figures['bytes']:,} |",
                flush=True,
            )
            if arguments.picture:
                report.picture(arguments.picture / f"{name}-{number}-{mode}.png")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    return 0


def ranks(rows: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the whole gradient, the ranks of rankdad, and a private setting."""
    yield "dsgd", {}
    for rank in (8, 4, 2, 1):
        yield "rankdad", {"rank": rank, "wire": "int8"}
    yield "rankdad", {"rank": 8, "privacy": private(1.0, rows)}


def recommended(rows: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the recommended settings for two hospitals, and what they are compared with."""
    yield "dad", {}
    yield "rankdad", {}
    yield "rankdad", {"rank": max(1, rows // 8)}
    yield "rankdad", {"rank": 8, "privacy": private(1.0, rows)}


SELECTIONS = {"hospitals": recommended, "private": private_settings, "ranks": ranks}

if __name__ == "__main__":
    sys.exit(main())
