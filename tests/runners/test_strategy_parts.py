"""Parts of the strategies in this process: reasons against fused steps, clipping, files of several sites, options."""

import argparse
import dataclasses
import inspect
import io
import threading
import typing
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from dadplug.runners._lightning.strategy import SiteStrategy
from dadplug.runners.patches import SharedPatch
from dadplug.runners.pytorch_lightning import DADStrategy
from torch import nn

from dadplug import GradientReduction
from dadplug.errors import MismatchError
from dadplug.options import Options
from dadplug.step.fused.steps import fused_remarks
from dadplug.tools.cli import add_option_arguments, options_of


def lightning_class(name: str, *hooks: str) -> type:
    made = type(name, (), dict.fromkeys(hooks, lambda self: None))
    made.__module__ = "lightning.pytorch.core"
    return made


HOOKS = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
Module = lightning_class("LightningModule", *HOOKS, "configure_gradient_clipping", "optimizer_step")
Callback = lightning_class("Callback", *HOOKS)


def reason(module=None, precision=None, callbacks=(), *, manual=False, may_leave=False, **trainer) -> str:
    module = module or type("Net", (Module,), {})()
    module.automatic_optimization = not manual
    settings = {"gradient_clip_val": None, "gradient_clip_algorithm": None} | trainer
    strategy = SimpleNamespace(
        lightning_module=module,
        precision_plugin=precision or SimpleNamespace(),
        _trainer=SimpleNamespace(callbacks=list(callbacks), **settings),
        _elastic=object() if may_leave else None,
    )
    return SiteStrategy._reason_against_fusing(strategy)


def test_what_needs_gradients_has_a_reason():
    assert reason() == reason(callbacks=[type("Mine", (Callback,), {})()]) == ""
    assert reason(gradient_clip_val=1.0) == reason(gradient_clip_val=1.0, gradient_clip_algorithm="norm") == ""
    assert "by value" in reason(gradient_clip_val=1.0, gradient_clip_algorithm="GradClipAlgorithmType.VALUE")
    assert "GradScaler" in reason(precision=SimpleNamespace(scaler=object()))
    assert reason(precision=SimpleNamespace(scaler=None)) == ""  # bf16-mixed
    assert "manual" in reason(manual=True)
    assert "min_sites" in reason(may_leave=True)
    for hook in (*HOOKS, "configure_gradient_clipping", "optimizer_step"):
        assert f"Net.{hook}" in reason(type("Net", (Module,), {hook: lambda self: None})())
    for hook in HOOKS:
        assert f"Mine.{hook}" in reason(callbacks=[type("Mine", (Callback,), {hook: lambda self: None})()])
    stock = lightning_class("GradientMonitor", "on_before_optimizer_step")
    assert "GradientMonitor" in reason(callbacks=[stock()])


def test_the_plan_names_the_weights_whose_gradients_are_formed():
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False))
    weights = list(model.parameters())
    assert fused_remarks(model, [torch.optim.SGD(weights, lr=0.1)]) == ("fused steps: yes",)
    assert fused_remarks(model, [torch.optim.RMSprop(weights)]) == ("fused steps: no, RMSprop has no fused step",)
    mixed = [torch.optim.SGD(weights[:1], lr=0.1), torch.optim.RMSprop(weights[1:])]
    assert fused_remarks(model, mixed) == ("fused steps: yes", "  1.weight: no, RMSprop has no fused step")


def test_a_patch_looks_for_its_module_only_when_it_is_opened():
    """While a program ends, nothing can be imported any more."""
    owner, finds = SimpleNamespace(value=1), []
    patch = SharedPatch(lambda: finds.append(1) or owner, "value", lambda original: original + 1)
    with patch, patch:
        assert owner.value == 2
    assert (owner.value, len(finds)) == (1, 1)


def test_clipping_is_restored():
    calls = []

    class Precision:
        def clip_grad_by_norm(self, optimizer, clip_val):
            calls.append(("plain", clip_val))

        def main_params(self, optimizer):
            return [1, 2]

    strategy = SiteStrategy.__new__(SiteStrategy)
    strategy.precision_plugin = precision = Precision()
    strategy._exchange = SimpleNamespace(holds=True, clip_held=lambda *given: calls.append(given))
    strategy.options = SimpleNamespace()
    strategy._run = ExitStack()

    def steps():
        with strategy._run:
            strategy._replace_clipping()
            precision.clip_grad_by_norm(None, 0.5)
            strategy._exchange.holds = False
            precision.clip_grad_by_norm(None, 0.25)
            raise KeyError

    with pytest.raises(KeyError):
        steps()
    precision.clip_grad_by_norm(None, 0.1)
    assert calls == [([1, 2], 0.5), ("plain", 0.25), ("plain", 0.1)]


SECONDS = 60.0


class Halves:
    """Writer of checkpoints that waits when half of a file is written.

    Attributes:
        waits: set while it waits.
        goes_on: set to let it go on.
    """

    def __init__(self) -> None:
        self.waits, self.goes_on = threading.Event(), threading.Event()

    def save_checkpoint(self, checkpoint, path, storage_options=None) -> None:
        content = io.BytesIO()
        torch.save(checkpoint, content)
        half = content.tell() // 2
        with open(path, "wb", buffering=0) as file:
            file.write(content.getbuffer()[:half])
            self.waits.set()
            assert self.goes_on.wait(SECONDS)
            file.write(content.getbuffer()[half:])


def site(rank: int, monkeypatch) -> tuple[DADStrategy, Halves]:
    """Return the strategy of a site where sites may leave, and its writer."""
    strategy, writer = DADStrategy(mode="dsgd"), Halves()
    strategy._elastic = SimpleNamespace()
    monkeypatch.setattr(strategy, "cluster_environment", SimpleNamespace(global_rank=lambda: rank))
    monkeypatch.setattr(strategy.checkpoint_io, "save_checkpoint", writer.save_checkpoint)
    return strategy, writer


def test_a_file_that_two_sites_write_at_the_same_time_is_always_whole(tmp_path, monkeypatch):
    path = tmp_path / "last.ckpt"

    def found() -> set[float]:
        return set(torch.load(path)["values"].tolist())

    torch.save({"values": torch.zeros(10)}, path)
    pairs = [site(rank, monkeypatch) for rank in range(2)]
    writing = []
    with ThreadPoolExecutor(2) as pool:
        try:
            for number, (strategy, writer) in enumerate(pairs, 1):  # files of different lengths
                checkpoint = {"values": torch.full((1000 * number,), float(number))}
                writing.append(pool.submit(strategy.save_checkpoint, checkpoint, path))
                assert writer.waits.wait(SECONDS)
                assert found() == {0.0}
            for number, (_, writer) in enumerate(pairs, 1):
                writer.goes_on.set()
                writing[number - 1].result()
                assert found() == {float(number)}
        finally:
            for _, writer in pairs:
                writer.goes_on.set()
    assert [each.name for each in tmp_path.iterdir()] == ["last.ckpt"]


# The options of the reduction: the same names, types and defaults wherever they can be given


OPTIONS = {option.name: option for option in dataclasses.fields(Options)}
TYPES = typing.get_type_hints(Options)


def test_no_site_names_a_folder_on_another_machine():
    named = "ftp://host/folder"
    transport = SimpleNamespace(gather_objects=lambda item: [named, item], sites=["site 0 (a)", "site 1 (b)"])
    site = SimpleNamespace(_begin_collective=str, _interrupted=False, _elastic_transport=None, global_rank=1)
    site._transport = transport
    assert SiteStrategy.broadcast(site, "s3://bucket") == named
    with pytest.raises(MismatchError, match=r"site 0 \(a\) names 'ftp://host/folder'"):
        SiteStrategy.broadcast(site, "checkpoints")


def constructor(name: str):
    if name in ("DistributedRunner", "AdaPMRunner"):
        from dadplug import runners
    else:
        from dadplug.runners import pytorch_lightning as runners
    return getattr(runners, name)


def by_command_line() -> dict[str, object]:
    parser = argparse.ArgumentParser()
    add_option_arguments(parser)
    return options_of(parser.parse_args([]))


@pytest.mark.parametrize("name", ["DADStrategy", "AdaPMStrategy", "DistributedRunner", "AdaPMRunner"])
def test_a_constructor_names_every_option_with_its_type_and_default(name):
    parameters = inspect.signature(constructor(name)).parameters
    for option in OPTIONS.values():
        assert parameters[option.name].annotation == TYPES[option.name]
        if option.name == "mode" and name.startswith("AdaPM"):
            assert parameters["mode"].default == "dsgd"  # of what is left beside the tables
        else:
            assert parameters[option.name].default == option.default
    assert not any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    strategy = inspect.signature(constructor("DADStrategy")).parameters.items() if name == "AdaPMStrategy" else ()
    assert [other for other, each in strategy if other != "mode" and parameters.get(other) != each] == []


def test_the_command_line_has_every_option_with_its_default():
    assert by_command_line() == {name: option.default for name, option in OPTIONS.items()}


def test_what_is_not_given_is_the_default_in_the_objects_too(monkeypatch):
    import torch

    defaults = Options()
    alone = GradientReduction(torch.nn.Linear(2, 2)).options
    assert replace(alone, merge="auto") == defaults  # which one site, and two, settle as "all"
    assert constructor("DADStrategy")().options == defaults
    assert constructor("DistributedRunner")().options == defaults
    others = dataclasses.replace(defaults, mode="dsgd")
    assert constructor("AdaPMStrategy")().options == others
    assert constructor("AdaPMRunner")().options == others


@pytest.mark.parametrize("name", ["DADStrategy", "AdaPMStrategy", "DistributedRunner", "AdaPMRunner"])
def test_what_is_given_arrives(name):
    given = constructor(name)(mode="powersgd", rank=3, wire="bf16", bucket_mb=1.5, share_inputs=False)
    assert given.options == Options(mode="powersgd", rank=3, wire="bf16", bucket_mb=1.5, share_inputs=False)


@pytest.mark.parametrize("name", ["DADStrategy", "AdaPMStrategy"])
def test_options_are_described_where_command_lines_look_for_it(name):
    described = constructor(name).__init__.__doc__
    for name in OPTIONS.keys() - {"mode"}:
        assert f"    {name}: {OPTIONS[name].metadata['help']}." in described


@pytest.mark.parametrize("name", ["AdaPMStrategy", "AdaPMRunner"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lokahead": 3}, r"unknown option 'lokahead' \(did you mean 'lookahead'\?\); valid options are mode, intent"),
        ({"mode": "rnkdad"}, "unknown mode 'rnkdad'"),
        ({"intent": "none"}, "intent must be 'auto', a function"),
        ({"lookahead": 0}, "lookahead must be at least 1"),
        ({"technique": "some"}, "unknown technique 'some'; valid ones are 'all'"),
        ({"reduce": "max"}, "unknown reduce 'max'; valid ones are 'mean', 'sum'"),
    ],
)
def test_wrong_options_of_managed_embeddings_are_named(name, options, message):
    with pytest.raises(ValueError, match=message):
        constructor(name)(**options)
