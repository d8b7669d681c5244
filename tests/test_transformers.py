"""transformers' Trainer with `attach`, held against the Trainer's own DDP and against one process with all rows.

`tests/trainers/test_transformers_settings.py` has the settings of the Trainer that are left out here.
"""

from __future__ import annotations

import copy
import logging
import os
from typing import Any

import pytest
import support
import torch
from support import refuses
from torch import nn

support.need("transformers")

from transformers import (  # noqa: E402
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import dadplug  # noqa: E402
from dadplug.accelerate import Accelerator  # noqa: E402
from dadplug.errors import MismatchError  # noqa: E402
from dadplug.step.model_sync.samples import batches_before, takes_part  # noqa: E402
from dadplug.transformers import attach  # noqa: E402

NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
UNDROPPED = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
OF_TRAINER = ("callbacks", "eval_dataset", "compute_metrics", "optimizers", "compute_loss_func", "model_init")
UNEVEN = {
    "accelerator_config": {"even_batches": False}
}  # 23 texts: four batches of three for each site, and one of two


def texts(count: int = 26, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Return texts of different lengths, with their classes."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 13, (count,), generator=generator).tolist()
    words = [torch.randint(1, 40, (length,), generator=generator) for length in lengths]
    return [{"input_ids": each, "labels": each.sum() % 2} for each in words]


def pad(batch: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Collate texts for a classifier."""
    words = nn.utils.rnn.pad_sequence([each["input_ids"] for each in batch], batch_first=True)
    labels = torch.stack([each["labels"] for each in batch])
    return {"input_ids": words, "attention_mask": (words > 0).long(), "labels": labels}


def pad_words(batch: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Collate texts for a language model, whose loss leaves out the padding."""
    collated = pad(batch)
    return collated | {"labels": collated["input_ids"].masked_fill(collated["input_ids"] == 0, -100)}


def loss_of(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """Return a loss of each word; that of transformers rounds to single precision."""
    logits = outputs["logits"].transpose(1, 2)
    return nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum") / num_items_in_batch


def build(kind: str, *_: Any) -> nn.Module:
    """Return a small model, always the same."""
    torch.manual_seed(5)
    if kind == "words":
        sizes = {"n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
        return GPT2LMHeadModel(GPT2Config(vocab_size=40, **sizes, **NO_DROPOUT))
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForSequenceClassification(BertConfig(vocab_size=40, max_position_embeddings=16, **sizes, **UNDROPPED))


def make(
    kind: str, folder: Any, model: nn.Module | None = None, data: Any = None, trainer: type = Trainer, **settings: Any
) -> Trainer:
    """Return a trainer of a small model."""
    if "RANK" in os.environ:
        os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])
    given = {name: settings.pop(name) for name in OF_TRAINER if name in settings}
    usual = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    usual |= {"per_device_train_batch_size": 3, "num_train_epochs": 1, "learning_rate": 1e-2, "max_grad_norm": 0}
    args = TrainingArguments(str(folder), **(usual | settings))
    collate = pad_words if kind == "words" else pad
    model = None if "model_init" in given else build(kind) if model is None else model
    return trainer(model, args, data_collator=collate, train_dataset=texts() if data is None else data, **given)


def vector(model: nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().reshape(-1).double() for each in model.parameters()])


def both(kind: str, folder: str, mode: str, settings: dict[str, Any], count: int = 26) -> tuple[float, int]:
    """Train by the Trainer's own DDP and by dadplug; return how far their weights differ, in parts of the change."""
    start = vector(build(kind))
    trained = []
    for attaches in (False, True):
        trainer = make(kind, folder, data=texts(count), **copy.deepcopy(settings))  # which the Trainer changes
        if attaches:
            attach(trainer, mode=mode)
        trainer.train()
        trained.append(vector(trainer.model))
        wrapped = getattr(trainer.model_wrapped, "_orig_mod", trainer.model_wrapped)  # where torch.compile is outermost
        assert isinstance(wrapped, nn.parallel.DistributedDataParallel)
        assert isinstance(wrapped, dadplug.DistributedDataParallel) == attaches
    theirs, own = trained
    return float((own - theirs).norm() / (theirs - start).norm()), trainer.state.global_step


@pytest.mark.parametrize(
    ("kind", "mode", "settings", "count"),
    [
        ("words", "dad", {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1}, 26),  # the last step has one batch
        ("words", "dsgd", {"optim": "adamw_torch"}, 26),
        ("words", "dad", UNEVEN, 23),
        ("classes", "dsgd", UNEVEN | {"gradient_accumulation_steps": 2}, 23),
    ],
)
def test_the_weights_are_those_of_the_trainers_own_ddp(tmp_path, kind, mode, settings, count):
    found = support.sites(2).run(both, kind, str(tmp_path), mode, {"optim": "sgd"} | settings, count)
    for difference, steps in found:
        assert difference < 1e-5
        assert steps > 1


DOUBLE = {"optim": "sgd", "compute_loss_func": loss_of, "lr_scheduler_type": "constant"}


def launched_and_alone(folder: str) -> float:
    start = vector(build("words"))
    trainer = make("words", folder, build("words").double(), texts(24), **DOUBLE)
    attach(trainer, mode="dad")
    trainer.train()
    for name in LAUNCHER:
        os.environ.pop(name, None)
    alone = make("words", folder, build("words").double(), texts(24), gradient_accumulation_steps=2, **DOUBLE)
    alone.train()
    assert alone.state.global_step == trainer.state.global_step == 4
    own, theirs = vector(trainer.model), vector(alone.model)
    return float((own - theirs).norm() / (theirs - start).norm())


def test_the_weights_are_those_of_one_process_with_all_rows(tmp_path):
    assert max(support.sites(2).run(launched_and_alone, str(tmp_path))) < 1e-10


# Sites without a launcher, with data of their own.


LOCAL = {"mode": "localsgd", "every": 1, "overlap": False}  # with SGD, the mean of local steps is that of gradients


def own_data(folder: str, options: dict[str, Any]) -> list[torch.Tensor]:
    rank = torch.distributed.get_rank()
    for name in LAUNCHER:
        os.environ.pop(name, None)
    data, settings = texts((14, 7)[rank], seed=rank), DOUBLE | {"train_sampling_strategy": "sequential"}
    settings |= {"gradient_accumulation_steps": 2, "num_train_epochs": 2}
    trainer = make("words", f"{folder}/{rank}", build("words").double(), data, **settings)
    attach(trainer, weighting="samples", **options)
    trainer.train()
    assert trainer.state.global_step == 6
    trainer.save_model()
    assert os.path.exists(f"{folder}/{rank}/model.safetensors")  # each site has files of its own
    return [each.detach() for each in trainer.model.parameters()]


def trained_on_all(epochs: int = 2, accumulation: int = 2) -> list[torch.Tensor]:
    """Train in one process on the rows of the two sites, of which the second skips some steps."""
    model = build("words").double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    batches = [[pad_words(data[i : i + 3]) for i in range(0, len(data), 3)] for data in (texts(14, 0), texts(7, 1))]
    steps = max(map(len, batches))
    for first in [*range(0, steps, accumulation)] * epochs:
        taken = [
            own[batches_before(step, len(own), steps)]
            for step in range(first, min(first + accumulation, steps))
            for own in batches
            if takes_part(step, len(own), steps)
        ]
        tokens = sum((batch["labels"] != -100).sum() for batch in taken)
        optimizer.zero_grad()
        for batch in taken:
            inputs = {name: value for name, value in batch.items() if name != "labels"}
            loss_of(model(**inputs), batch["labels"], tokens).backward()
        optimizer.step()
    return [each.detach() for each in model.parameters()]


@pytest.mark.parametrize("options", [{"mode": "dad"}, LOCAL])
def test_sites_with_data_of_their_own_count_by_their_tokens(tmp_path, options):
    reference = trained_on_all()
    for parameters in support.sites(2).run(own_data, str(tmp_path), options):
        for own, theirs in zip(parameters, reference, strict=True):
            torch.testing.assert_close(own, theirs, rtol=1e-10, atol=1e-12)


def same_data(folder: str, split: Any) -> tuple[int, set[int], str | None]:
    rank = torch.distributed.get_rank()
    for name in LAUNCHER:
        os.environ.pop(name, None)
    trainer = make("classes", f"{folder}/{rank}", data=texts(27), seed=3)
    seen: set[int] = set()
    collate = trainer.data_collator

    def look(batch: list[Any]) -> Any:
        seen.update(places[tuple(each["input_ids"].tolist())] for each in batch)
        return collate(batch)

    places = {tuple(each["input_ids"].tolist()): place for place, each in enumerate(trainer.train_dataset)}
    trainer.data_collator = look
    attach(trainer, mode="dad", split_data=split)
    trainer.train()
    return trainer.state.global_step, seen, trainer.reduction.first_difference()


def test_data_that_all_sites_have_are_split(tmp_path):
    (steps, one, differs), (_, other, _) = support.sites(2).run(same_data, str(tmp_path), "auto")
    assert steps == 5
    assert differs is None
    assert one | other == set(range(27))
    assert not one & other
    (steps, one, _), (_, other, _) = support.sites(2).run(same_data, str(tmp_path), False)
    assert steps == 9
    assert one == other == set(range(27))


# Checkpoints, evaluation, logs


class Stop(TrainerCallback):
    """Stop of training after a step, as a job that ends."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop, once the checkpoint has been written."""
        control.should_training_stop |= state.global_step == self.step


def resumed(folder: str, own: bool, options: dict[str, Any]) -> list[float]:
    if own:
        rank = torch.distributed.get_rank()
        folder = f"{folder}/{rank}"
        for name in LAUNCHER:
            os.environ.pop(name, None)
    trained = []
    for callbacks, checkpoint in ([], None), ([Stop(4)], None), ([], f"{folder}/checkpoint-4"):
        settings = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 2, "callbacks": callbacks}
        trainer = make("classes", folder, **settings)
        attach(trainer, **options)
        trainer.train(resume_from_checkpoint=checkpoint)
        trained.append(vector(trainer.model))
        assert trainer._wrapper.steps == trainer.state.global_step
    whole, stopped, resumed = trained
    return [float((whole - stopped).norm()), float((whole - resumed).abs().max())]


RANKDAD = {"mode": "rankdad", "rank": 1, "wire": "int8"}


@pytest.mark.parametrize(
    ("own", "options"),
    [
        (False, RANKDAD),
        (True, RANKDAD),
        (True, {"mode": "localsgd", "every": 3, "rank": 1, "wire": "int8"}),
        (False, RANKDAD | {"private": "classifier.*"}),
    ],
)
def test_training_resumes_to_the_bit(tmp_path, own, options):
    for missing, difference in support.sites(2).run(resumed, str(tmp_path), own, options):
        assert missing > 0.01
        assert difference == 0.0


def without_state(folder: str) -> None:
    rank = torch.distributed.get_rank()
    settings = {"save_strategy": "steps", "save_steps": 2, "callbacks": [Stop(2)]}
    trainer = make("classes", folder, **settings)
    attach(trainer, mode="rankdad")
    trainer.train()
    if rank == 1:
        os.remove(f"{folder}/checkpoint-2/dadplug_1.bin")  # as where one site more goes on
    trainer = make("classes", folder, **settings | {"callbacks": [Stop(4)]})
    attach(trainer, mode="rankdad")
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    assert trainer.reduction.step == 4
    assert trainer.reduction.first_difference() is None


def test_a_site_without_a_state_resumes_at_the_step_of_the_others(tmp_path):
    support.sites(2).run(without_state, str(tmp_path))


def accuracy(found: Any) -> dict[str, float]:
    return {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean()), "rows": len(found.label_ids)}


def evaluated(folder: str, mode: str | None) -> tuple[list[Any], list[float]]:
    settings = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    settings |= {"load_best_model_at_end": True, "callbacks": [EarlyStoppingCallback(2)], "num_train_epochs": 4}
    settings |= {"optim": "sgd", "learning_rate": 0.5, "eval_dataset": texts(11, 1), "compute_metrics": accuracy}
    trainer = make("classes", f"{folder}/{mode}", per_device_eval_batch_size=3, **settings)
    if mode:
        attach(trainer, mode=mode)
        trainer.evaluate()  # after which accelerate takes the model for prepared
        trainer.predict(texts(5, 2))
    trainer.train()
    if mode:
        assert isinstance(trainer.model_wrapped, dadplug.DistributedDataParallel)
    logs = [log for log in trainer.state.log_history if "eval_loss" in log and log["step"]]
    final = trainer.evaluate()
    return [[log["step"], log["eval_loss"], log["eval_accuracy"], log["eval_rows"]] for log in logs], [
        final["eval_loss"],
        trainer.state.best_metric,
    ]


def test_metrics_early_stopping_and_the_best_model_are_those_of_the_trainer(tmp_path):
    (theirs, *_), (own, *_) = (support.sites(2).run(evaluated, str(tmp_path), mode) for mode in (None, "dad"))
    assert len(theirs[0]) < 20  # it has stopped early
    for log, other in zip(own[0], theirs[0], strict=True):
        assert log == pytest.approx(other, rel=1e-4)
    assert own[1] == pytest.approx(theirs[1], rel=1e-4)
    assert own[1][0] == pytest.approx(own[1][1], rel=1e-6)


class Tracker(TrainerCallback):
    """Record of what a tracker would get."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Keep the values."""
        self.logs.append(dict(logs))


def logged(folder: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, float]]:
    from dadplug.callbacks.transformers import RankMonitor

    tracker = Tracker()
    trainer = make("classes", folder, callbacks=[tracker, RankMonitor()], logging_steps=2)
    attach(trainer, mode="rankdad", rank=2)
    trainer.train()
    wanted = {"traffic/mb": trainer.reduction.traffic.bytes_sent / 1e6}
    trainer.train()  # once more, in the same wrapper
    assert trainer.reduction.step == 2 * trainer.state.global_step
    assert trainer.reduction.first_difference() is None
    return tracker.logs, trainer.state.log_history, wanted


def test_traffic_and_ranks_go_where_the_trainers_logs_go(tmp_path):
    for logs, history, wanted in support.sites(2).run(logged, str(tmp_path)):
        trained = [log for log in logs if "loss" in log]
        assert len(trained) == 4
        for log in trained[1:]:
            assert log["traffic/mb"] == pytest.approx(wanted["traffic/mb"], rel=0.3)
            assert 0 < log["residual/mean"] < 1
            assert 0 < log["rank/mean"] <= 2
            assert 0 < log["rank/bert.encoder.layer.0.output.dense"] <= 2
        assert history[-2]["traffic/mb"] == trained[-1]["traffic/mb"]


# What does not go


def refused(folder: str, name: str) -> str:
    trainer = make("classes", folder, **({"fp16": False} if name else {}))
    if name == "twice":
        attach(trainer, mode="dad")
    if name == "trained":
        trainer.train()
    if name == "weighting":
        with pytest.raises(ValueError, match="average_tokens_across_devices=False") as error:
            attach(trainer, mode="dad", weighting="samples")
        return str(error.value)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        attach(trainer, mode="dad", **({"min_sites": 1} if name == "min_sites" else {}))
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("twice", "call attach() once"),
        ("trained", "before trainer.train()"),
        ("min_sites", "without a launcher"),
        ("weighting", "weight losses a second time"),
    ],
)
def test_what_is_refused_at_sites(tmp_path, name, message):
    for found in support.sites(2).run(refused, str(tmp_path), name):
        assert message in found


def differing(folder: str) -> str:
    trainer = make("classes", folder, data=texts(26), **UNEVEN)  # nine batches
    attach(trainer, mode="dad")
    with pytest.raises(MismatchError) as error:
        trainer.train()
    return str(error.value)


def test_sites_with_different_numbers_of_batches_get_an_error_before_the_first_step(tmp_path):
    for found in support.sites(2).run(differing, str(tmp_path)):
        assert "5 and 4" in found
        assert "even_batches" in found


class Leaves(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if os.environ["RANK"] == "1":
            os._exit(3)


def logs_beside_a_lost_site(folder: str) -> None:
    trainer = make("classes", folder, callbacks=[Leaves()], logging_strategy="steps", logging_steps=1)
    attach(trainer, mode="dad")
    trainer.train()


def gathers_beside_a_lost_site(folder: str) -> None:
    accelerator = Accelerator(cpu=True, mode="dad")
    accelerator.prepare(nn.Linear(2, 2))
    if os.environ["RANK"] == "1":
        os._exit(3)
    accelerator.gather(torch.ones(1))


@pytest.mark.parametrize("function", [logs_beside_a_lost_site, gathers_beside_a_lost_site])
def test_a_site_that_is_lost_is_named_where_the_library_gathers_itself(tmp_path, function):
    with support.Sites(2) as group:
        group.start(function, str(tmp_path))
        first, _ = group.outcomes()
    assert first.kind == "failed"
    assert "SiteError: site 1 (" in first.value.splitlines()[-1]


def change(trainer: Trainer, path: str, value: Any) -> None:
    *owners, name = path.split(".")
    for owner in owners:
        trainer = getattr(trainer, owner)
    setattr(trainer, name, value)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("is_deepspeed_enabled", True, "leave deepspeed= out"),
        ("is_fsdp_enabled", True, "leave fsdp= out"),
        ("is_model_parallel", True, "without device_map="),
        ("is_distributed_loading_by_transformers", True, "without device_map= and distributed_config="),
        ("model._tp_size", 2, "tp_size=2.*leave parallelism_config="),
        ("args._n_gpu", 2, "CUDA_VISIBLE_DEVICES=0"),
        ("accelerator.dataloader_config.split_batches", True, "split_batches.*per_device_train_batch_size"),
        ("args.auto_find_batch_size", True, "give per_device_train_batch_size"),
        ("args.optim", "lomo", "'adamw_torch'"),
        ("is_in_train", True, "before trainer.train"),
        ("optimizer", torch.optim.SGD([nn.Parameter(torch.zeros(2))], 0.1), "none of the model's parameters"),
    ],
)
def test_what_does_not_go_with_dadplug_is_refused(tmp_path, path, value, message):
    trainer = make("classes", tmp_path)
    kind = type(trainer)
    change(trainer, path, value)
    with pytest.raises(ValueError, match=message):
        attach(trainer, mode="dad")
    assert type(trainer) is kind


def test_a_model_that_is_wrapped_is_refused(tmp_path):
    trainer = make("classes", tmp_path)
    trainer.model_wrapped = nn.DataParallel(trainer.model)
    with pytest.raises(ValueError, match="give the Trainer the model itself"):
        attach(trainer, mode="dad")


def test_what_is_no_trainer_and_what_is_no_option_are_refused(tmp_path):
    with pytest.raises(TypeError, match=r"takes a Trainer of transformers.*got Linear"):
        attach(nn.Linear(2, 2))
    trainer = make("classes", tmp_path)
    refuses(
        (lambda: attach(trainer, mode="rankdad", rnak=4), "did you mean 'rank'"),
        (lambda: attach(trainer, split_data="never"), "unknown split_data 'never'"),
        (lambda: attach(trainer, min_sites=1), "min_sites needs a hub"),
    )


def test_processes_whose_trainers_work_alone_are_refused(tmp_path, monkeypatch):
    trainer = make("classes", tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="use_cpu=True"):
        attach(trainer)


def test_without_other_sites_it_trains_alone_and_says_so(tmp_path, caplog):
    trained = []
    for attaches in (False, True):
        trainer = make("classes", tmp_path)
        if attaches:
            with caplog.at_level(logging.WARNING, "dadplug"):
                attach(trainer)
        trainer.train()
        trained.append(vector(trainer.model))
    assert torch.equal(*trained)
    told = [record.getMessage() for record in caplog.records if record.name == "dadplug.transformers"]
    assert ["trains alone" in message for message in told] == [True]
