"""One site of the tests of transformers' Trainer over a hub, where sites leave and return.

Run as ``elastic_transformers.py CASE``, where the case is JSON, see `Case`. Writes a line of JSON for each step, and
its results at the end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from elastic_data import SiteCase, digest
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from dadplug.transformers import attach


@dataclass(frozen=True)
class Case(SiteCase):
    """One process of a site, killed at the beginning of step `leave`, unless a file says that it was already.

    Attributes:
        seed: seed of the model and of the order of the data.
        pause: seconds after each step.
    """

    mode: str = "rankdad"
    epochs: int = 8
    seed: int = 0
    pause: float = 0.0


def texts(slot: int, count: int) -> list[dict[str, torch.Tensor]]:
    """Return texts whose class is whether the first word is among the lower ones."""
    generator = torch.Generator().manual_seed(slot)
    words = torch.randint(0, 40, (count, 8), generator=generator)
    return [{"input_ids": each, "labels": (each[0] < 20).long()} for each in words]


class Steps(TrainerCallback):
    """Record of each step; kills the process."""

    def __init__(self, case: Case, trainer: Trainer) -> None:
        self.case, self.trainer = case, trainer
        self.file = (Path(case.folder) / "log.jsonl").open("a", buffering=1)

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self.before = getattr(self.trainer.reduction, "agreements", 0)
        if state.global_step == self.case.leave:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs) -> None:
        line = {"step": state.global_step, "present": self.trainer.reduction.present_sites, "digest": digest(model)}
        line |= {"lr": optimizer.param_groups[0]["lr"], "epoch": state.epoch, "reduction": self.trainer._wrapper.steps}
        line |= {"agreements": getattr(self.trainer.reduction, "agreements", 0), "before": self.before}
        self.file.write(json.dumps(line) + "\n")
        time.sleep(self.case.pause)


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForSequenceClassification(BertConfig(vocab_size=40, max_position_embeddings=8, **sizes))


def run(case: Case) -> None:
    folder = Path(case.folder)
    slot = "abcd".index(folder.name)
    args = TrainingArguments(
        str(folder / "checkpoints"),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        num_train_epochs=case.epochs,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        seed=case.seed,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=5,
        save_strategy="steps",
        save_steps=5,
        save_total_limit=2,
        load_best_model_at_end=True,
        save_only_model=True,
    )
    trainer = Trainer(
        net(case.seed),
        args,
        train_dataset=texts(slot, 40 + 8 * slot),
        eval_dataset=texts(100 + slot, 20 + 4 * slot),
        callbacks=[EarlyStoppingCallback(50)],
    )
    local = {"every": 3, "overlap": False} if case.mode == "localsgd" else {}
    attach(trainer, case.mode, kit=case.kit, min_sites=case.min_sites, timeout=200, **local, **case.terms)
    trainer.add_callback(Steps(case, trainer))
    trainer.train()
    evaluations = {log["step"]: log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log}
    result = {"digest": digest(trainer.model), "step": trainer.state.global_step, "evaluations": evaluations}
    last = [log for log in trainer.state.log_history if "eval_loss" in log][-1]
    result["by_site"] = {name: value for name, value in last.items() if name.startswith("eval_loss/")}
    result |= {"logs": trainer.state.log_history[:2], "best": trainer.state.best_metric}
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(Case(**json.loads(sys.argv[1])))
