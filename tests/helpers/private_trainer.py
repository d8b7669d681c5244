"""A site of `elastic_lightning`, `elastic_catalyst`, `elastic_transformers` or `returning_steps` with a private head.

Run as ``private_trainer.py CASE``: the case is that of the program, with its name and the option ``private``. The
weight of the head, and what the optimizer keeps of it, get the sentinel after each step. How often that is sent is in
the file "found".
"""

import importlib
import json
import sys
from functools import partial
from pathlib import Path

import elastic_data
import returning_steps
import torch
from private_site import SENTINEL, Traffic
from torch.optim.optimizer import register_optimizer_step_post_hook

HEADS = ((3, 16), (2, 16), (3, 12))  # shapes
MANY = 24


def main(trainer: str, private: list[str], **fields: object) -> None:
    plain = trainer == "elastic_transformers"  # in single precision
    traffic = Traffic(double=not plain)

    @torch.no_grad()
    def plant(optimizer: torch.optim.Optimizer, *_: object) -> None:
        every = [each for group in optimizer.param_groups for each in group["params"] if each.shape in HEADS]
        head = every[-1]  # BERT's table of types has its shape, too
        state = optimizer.state[head].values()
        for tensor in [head, *(value for value in state if torch.is_tensor(value) and value.shape == head.shape)]:
            tensor.view(-1)[:MANY] = SENTINEL
        (Path(str(fields["folder"])) / "found").write_text(f"{traffic.found} {traffic.sent}")

    register_optimizer_step_post_hook(plant)
    case = returning_steps.Case if "returning" in trainer else elastic_data.SiteCase
    options = case.options
    case.options = lambda case: options(case) | {"private": tuple(private)}
    module = importlib.import_module(trainer)
    if plain:
        module.attach = partial(module.attach, private=tuple(private))
    module.run(module.Case(**fields))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(**json.loads(sys.argv[1]))
