"""The options of the reduction: the same names, types and defaults wherever they can be given."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import typing

import pytest

from dadplug import GradientReduction
from dadplug.cli import add_option_arguments, options_of
from dadplug.options import Options

OPTIONS = {option.name: option for option in dataclasses.fields(Options)}
TYPES = typing.get_type_hints(Options)


def constructor(name: str):
    if name in ("DistributedRunner", "AdaPMRunner"):
        pytest.importorskip("catalyst")
        from dadplug import runners
    else:
        pytest.importorskip("pytorch_lightning")
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


def test_the_command_line_has_every_option_with_its_default():
    assert by_command_line() == {name: option.default for name, option in OPTIONS.items()}


def test_what_is_not_given_is_the_default_in_the_objects_too(monkeypatch):
    import torch

    defaults = Options()
    assert GradientReduction(torch.nn.Linear(2, 2)).options == defaults
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
