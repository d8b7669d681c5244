"""Two sites fine-tune a text encoder with transformers' Trainer, by its own DDP and by dadplug, one after the other.

    python examples/fine_tune_text.py                               both sites on this machine
    python examples/fine_tune_text.py --weights DIR                 a pretrained encoder from a folder of this machine
    python examples/fine_tune_text.py --text DIR                    other texts: their classes are DIR's folders
    sudo python benchmarks/link.py 100mbit python examples/fine_tune_text.py      two sites joined by a slow link

On two machines, as any script of transformers, by torchrun:

    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 1 --master-addr 10.0.0.1 --master-port 8998 fine_tune_text.py
    torchrun --nnodes 2 --node-rank 1 --nproc-per-node 1 --master-addr 10.0.0.1 --master-port 8998 fine_tune_text.py

The encoder learns to tell from which folder of this repository a passage comes: code of the core, tests, documentation
and so on. It is tested on passages of other files. Without --weights it is a small BERT with random weights.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import sys
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from dadplug.support.processes import launch_sites
from dadplug.transformers import attach

ROOT = Path(__file__).resolve().parent.parent
WORDS = 64  # of a passage
VOCABULARY = 4096  # words are hashed to so many numbers


@dataclass
class Text:
    """Passages with their classes.

    Attributes:
        names: name of each class.
        train: passages to train on.
        test: passages of other files.
    """

    names: list[str]
    train: list[dict[str, Any]] = field(default_factory=list)
    test: list[dict[str, Any]] = field(default_factory=list)


def number(word: str) -> int:
    """Return the number of a word, the same in all processes; 0 stands for padding."""
    return 1 + zlib.crc32(word.encode()) % (VOCABULARY - 1)


def read(folder: Path, encode: Any, passages: int) -> Text:
    """Read texts, whose classes are the folders that they are in.

    Args:
        folder: folder of the classes' folders.
        encode: function from a passage to the inputs of the model.
        passages: most passages of a class.
    """
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*/**/*")):
        name = path.relative_to(folder).parts[0]
        if path.suffix in (".py", ".md", ".txt") and not name.startswith((".", "_")) and name != "build":
            found.setdefault(name, []).append(path)
    text = Text([name for name, paths in found.items() if len(paths) > 3])
    for label, name in enumerate(text.names):
        parts: list[list[dict[str, Any]]] = [[], []]
        for place, path in enumerate(found[name]):
            words = re.findall(r"\w+|[^\w\s]", path.read_text(errors="ignore"))
            for start in range(0, len(words) - WORDS, WORDS):
                inputs = encode(words[start : start + WORDS])
                parts[place % 5 == 0].append(inputs | {"labels": label})
        for part, most in zip(parts, (passages, passages // 4), strict=True):
            random.Random(0).shuffle(part)
            del part[most:]
        text.train += parts[0]
        text.test += parts[1]
    return text


class Curve(TrainerCallback):
    """Loss over time, of all sites."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self._start = self._apart = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock at the second step: the first one compiles and plans."""
        if state.global_step == 1:
            self._start = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Take the loss, which the Trainer averages over sites."""
        if "loss" in logs and self._start:
            self.seconds.append(time.perf_counter() - self._start)
            self.losses.append(float(logs["loss"]))


def train(mode: str, text: Text, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train by one mode; every site calls it."""
    set_seed(arguments.seed)
    if arguments.weights:
        model = AutoModelForSequenceClassification.from_pretrained(arguments.weights, num_labels=len(text.names))
    else:
        sizes = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 512}
        model = BertForSequenceClassification(
            BertConfig(vocab_size=VOCABULARY, max_position_embeddings=WORDS, num_labels=len(text.names), **sizes)
        )
    curve = Curve()
    settings = TrainingArguments(
        str(Path(arguments.log_dir) / mode),
        use_cpu=not torch.cuda.is_available(),
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.batch_size,
        learning_rate=arguments.lr,
        warmup_steps=arguments.steps // 10,
        logging_steps=max(1, arguments.steps // 40),
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        log_level="error",
        ddp_find_unused_parameters=False,
        average_tokens_across_devices=False,  # each text counts alike
        seed=arguments.seed,
    )
    trainer = Trainer(
        model,
        settings,
        train_dataset=text.train,
        eval_dataset=text.test,
        callbacks=[curve],
        compute_metrics=lambda found: {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())},
    )
    trainer.pop_callback(next(each for each in trainer.callback_handler.callbacks if "Printer" in type(each).__name__))
    if mode != "ddp":
        attach(trainer, mode=mode)
    trainer.train()
    dense = sum(each.numel() * each.element_size() for each in model.parameters())
    sent = dense if mode == "ddp" else trainer.reduction.traffic.bytes_sent
    accuracy = trainer.evaluate()["eval_accuracy"]
    return {"mode": mode, "seconds": curve.seconds, "losses": curve.losses, "bytes": sent, "accuracy": accuracy}


def table(runs: list[dict[str, Any]], steps: int) -> str:
    """Return runs as a table."""
    lines = [("mode", "loss", "accuracy", "MB a step", "ms a step")]
    for run in runs:
        milliseconds = 1e3 * run["seconds"][-1] / (steps - 1)
        lines.append(
            (
                run["mode"],
                f"{run['losses'][-1]:.3f}",
                f"{run['accuracy']:.3f}",
                f"{run['bytes'] / 1e6:.3f}",
                f"{milliseconds:.1f}",
            )
        )
    return "\n".join("  ".join(f"{cell:>9}" for cell in line) for line in lines)


def picture(runs: list[dict[str, Any]], path: Path, title: str) -> None:
    """Plot the loss against time and against steps, as a PNG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    by_time, by_step = figure.subplots(1, 2, sharey=True)
    for run in runs:
        by_time.plot(run["seconds"], run["losses"], label=run["mode"])
        by_step.plot(run["losses"], label=run["mode"])
    by_time.set(xlabel="seconds", ylabel="training loss, mean over sites")
    by_step.set(xlabel="log entry")
    for axes in (by_time, by_step):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", help="folder of a pretrained encoder with its tokenizer")
    parser.add_argument("--text", type=Path, default=ROOT, help="folder of the classes' folders (default: repository)")
    parser.add_argument("--modes", default="ddp,rankdad", help="modes, one after the other (default: ddp,rankdad)")
    parser.add_argument("--steps", type=int, default=400, help="steps of each mode (default: 400)")
    parser.add_argument("--passages", type=int, default=2000, help="most passages of a class (default: 2000)")
    parser.add_argument("--batch-size", type=int, default=16, help="passages in a batch of one site (default: 16)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of AdamW (default: 1e-3)")
    parser.add_argument("--seed", type=int, default=0, help="seed (default: 0)")
    parser.add_argument("--log-dir", default="logs/fine_tune_text", help="folder of results")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    arguments = parse(argv)
    if "RANK" not in os.environ:
        return launch_sites([__file__, *argv], num_sites=2)
    if arguments.weights:
        tokenizer = AutoTokenizer.from_pretrained(arguments.weights)
        text = read(
            arguments.text,
            lambda words: dict(tokenizer(" ".join(words), truncation=True, padding="max_length", max_length=WORDS)),
            arguments.passages,
        )
    else:
        text = read(arguments.text, lambda words: {"input_ids": [number(word) for word in words]}, arguments.passages)
    runs = []
    for mode in arguments.modes.split(","):
        if os.environ["RANK"] == "0":
            print(f"{mode}: {arguments.steps} steps", flush=True)
        runs.append(train(mode, text, arguments))
    if os.environ["RANK"] == "0":
        title = f"{len(text.train)} passages of {len(text.names)} folders, two sites"
        folder = Path(arguments.log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        picture(runs, folder / "loss.png", title)
        print(f"{title}\n\n{table(runs, arguments.steps)}\n\npicture: {folder / 'loss.png'}")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
