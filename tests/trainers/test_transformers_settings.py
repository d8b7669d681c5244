"""Settings of the Trainer of transformers with `attach`, held against its own DDP; peft, compilation, seq2seq, trl."""

from __future__ import annotations

import importlib.util
import math
import re
from pathlib import Path
from typing import Any

import pytest
import support
import torch
from torch import nn

pytest.importorskip("transformers")

from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

import dadplug
from dadplug.transformers import attach

of_trainer = support.load(str(Path(__file__).parents[1] / "test_transformers.py"))
WINDOWS = {"gradient_accumulation_steps": 2}
SETTINGS = {
    "tokens of each process": WINDOWS | {"average_tokens_across_devices": False},
    "tokens of each process, uneven": WINDOWS | of_trainer.UNEVEN | {"average_tokens_across_devices": False},
    "label smoothing": WINDOWS | {"label_smoothing_factor": 0.1},
    "checkpointed": {"gradient_checkpointing": True},
    "checkpointed, reentrant": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "by length": {"train_sampling_strategy": "group_by_length"},
    "whole batches": {"dataloader_drop_last": True},
    "DDP's own": {"ddp_find_unused_parameters": True, "ddp_broadcast_buffers": False, "ddp_bucket_cap_mb": 1},
    "every micro-batch": {
        "accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 2, "sync_each_batch": True}}
    },
    "bf16": WINDOWS | {"bf16": True},
}


def compared(kind: str, folder: str, mode: str, settings: dict[str, Any], count: int = 26) -> float:
    return of_trainer.both(kind, folder, mode, settings, count)[0]


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(tmp_path, name):
    mode = "dsgd" if name == "bf16" else "dad"  # whose gradients are not rounded to bf16, as DDP's are
    settings = {"optim": "sgd"} | SETTINGS[name]
    count = 23 if "uneven" in name else 26
    assert max(support.sites(2).run(compared, "words", str(tmp_path), mode, settings, count)) < 1e-5


def test_factors_are_more_exact_than_gradients_in_bf16(tmp_path):
    settings = {"optim": "sgd", "bf16": True}
    assert 0 < max(support.sites(2).run(compared, "words", str(tmp_path), "dad", settings)) < 0.01


def with_adapters(folder: str) -> tuple[float, list[str]]:
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=4, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, init_lora_weights=False)
    trained = []
    for attaches in (False, True):
        torch.manual_seed(3)
        model = get_peft_model(of_trainer.build("words"), lora)
        start = of_trainer.vector(model)
        trainer = of_trainer.make("words", folder, model, optim="sgd", learning_rate=0.1, **WINDOWS)
        if attaches:
            attach(trainer, mode="dad")
        trainer.train()
        trained.append(of_trainer.vector(trainer.model))
    sent = [row.parameter for row in trainer.reduction.plan if row.bytes]
    return float((trained[0] - trained[1]).norm() / (trained[0] - start).norm()), sent


def test_adapters_of_peft(tmp_path):
    pytest.importorskip("peft")
    for difference, sent in support.sites(2).run(with_adapters, str(tmp_path)):
        assert difference < 1e-5
        assert sent
        assert all("lora" in name for name in sent)


def compiled(folder: str) -> float:
    return compared("words", folder, "dad", {"optim": "sgd", "torch_compile": True, "torch_compile_backend": "eager"})


def test_torch_compile(tmp_path):
    assert max(support.sites(2).run(compiled, str(tmp_path), timeout=400)) < 1e-4


def initial(*_: Any) -> nn.Module:
    return of_trainer.build("classes")


def built_again(folder: str) -> bool:
    trainer = of_trainer.make("classes", folder, model_init=initial)
    attach(trainer, mode="dad")
    trainer.train()
    first = of_trainer.vector(trainer.model)
    reduction = trainer.reduction
    trainer.train()  # from the first weights again
    assert trainer.reduction is not reduction
    return torch.equal(first, of_trainer.vector(trainer.model))


def test_a_model_that_is_built_for_each_training(tmp_path):
    assert all(support.sites(2).run(built_again, str(tmp_path)))


def collate(batch: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    padded = of_trainer.pad_words(batch)
    return {"input_ids": padded["input_ids"], "attention_mask": padded["attention_mask"], "labels": padded["labels"]}


def translated(folder: str) -> tuple[float, float]:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    settings = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "optim": "sgd"}
    trained, losses = [], []
    for attaches in (False, True):
        torch.manual_seed(1)
        model = T5ForConditionalGeneration(T5Config(vocab_size=40, decoder_start_token_id=0, **sizes))
        start = of_trainer.vector(model)
        args = Seq2SeqTrainingArguments(
            folder, num_train_epochs=1, per_device_train_batch_size=3, predict_with_generate=True, **settings
        )
        data = of_trainer.texts()
        trainer = Seq2SeqTrainer(model, args, data_collator=collate, train_dataset=data, eval_dataset=data[:6])
        if attaches:
            attach(trainer, mode="dad")
        trainer.train()
        trained.append(of_trainer.vector(trainer.model))
        losses.append(trainer.evaluate(max_length=6)["eval_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    return float((trained[0] - trained[1]).norm() / (trained[0] - start).norm()), losses[1]


def test_seq2seq_trainer(tmp_path):
    for difference, loss in support.sites(2).run(translated, str(tmp_path)):
        assert difference < 1e-5
        assert math.isfinite(loss)


def instructed(folder: str) -> tuple[float, bool]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    data = Dataset.from_list([{"input_ids": each["input_ids"].tolist()} for each in of_trainer.texts()])
    settings = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "optim": "sgd"}
    trained = []
    for attaches in (False, True):
        model = of_trainer.build("words")
        start = of_trainer.vector(model)
        args = SFTConfig(
            folder, num_train_epochs=1, per_device_train_batch_size=3, bf16=False, max_length=16, pad_token="<pad>",
            gradient_checkpointing=False, logging_steps=1, dataset_kwargs={"skip_prepare_dataset": True}, **settings,
        )  # fmt: skip
        trainer = SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer())
        if attaches:
            attach(trainer, mode="dad")
        trainer.train()
        trained.append(of_trainer.vector(trainer.model))
    logged = any("traffic/mb" in log for log in trainer.state.log_history)
    assert isinstance(trainer.model_wrapped, dadplug.DistributedDataParallel)
    return float((trained[0] - trained[1]).norm() / (trained[0] - start).norm()), logged


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1} | {f"w{place}": place for place in range(2, 40)}
    built = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=built, pad_token="<pad>", eos_token="<eos>")


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs trl")
def test_the_trainer_of_trl(tmp_path):
    for difference, logged in support.sites(2).run(instructed, str(tmp_path)):
        assert difference < 1e-5
        assert logged


# The example that fine-tunes a text encoder with transformers' Trainer, as a user runs it

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "fine_tune_text.py"


def test_it_compares_ddp_with_dadplug(tmp_path):
    pytest.importorskip("matplotlib")
    for name, word in (("fruit", "apple"), ("tools", "hammer")):
        for number in range(6):
            folder = tmp_path / "text" / name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number}.txt").write_text(f"the {word} number {number} lies here " * 80)
    flags = [
        "--text",
        str(tmp_path / "text"),
        "--steps",
        "20",
        "--batch-size",
        "8",
        "--log-dir",
        str(tmp_path / "logs"),
    ]
    (only,) = support.run_programs([[str(EXAMPLE), *flags]], timeout=400, preload=["transformers.trainer"])
    assert only.status == 0, only.errors
    rows = {
        row[0]: row for row in (line.split() for line in only.output.splitlines()) if row[:1] in (["ddp"], ["rankdad"])
    }
    assert {*rows} == {"ddp", "rankdad"}
    for row in rows.values():
        assert float(row[2]) == 1.0  # accuracy
    assert float(rows["ddp"][3]) > 4 * float(rows["rankdad"][3])  # MB a step
    assert re.search(r"passages of 2 folders, two sites", only.output)
    assert (tmp_path / "logs" / "loss.png").read_bytes().startswith(b"\x89PNG")
