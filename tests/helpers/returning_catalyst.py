"""One site of the tests of Catalyst with a parameter server; see `returning_steps`."""

import json
import sys

import torch
from catalyst import dl
from catalyst.core.callback import Callback
from dadplug.runners import ParameterServerRunner
from returning_steps import EPOCHS, Case, Steps, digest, net, samples
from torch import nn
from torch.utils.data import DataLoader


class Record(Callback):
    """Record of the steps and the validations of this process."""

    def __init__(self, case: Case) -> None:
        super().__init__(order=1000)
        self.case = case

    def on_experiment_start(self, runner) -> None:
        self.steps = Steps(self.case, lambda: runner.epoch_step - 1)

    def on_batch_start(self, runner) -> None:
        if runner.is_train_loader:
            self.steps.begin(runner.batch["features"], batch=runner.micro_step)

    def on_epoch_end(self, runner) -> None:
        server, valid = runner.reduction, runner.epoch_metrics["valid"]
        line = {"validation": runner.epoch_step - 1, "version": server.version, "digest": digest(runner.model, server)}
        line |= {"lr": runner.optimizer.param_groups[0]["lr"]}
        line |= {"metrics": {name: valid[name] for name in ("loss", "accuracy01", "sites")}}
        self.case.write(**line, present=server.present_sites)


def run(case: Case) -> None:
    case.connect()
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    first = 0 if case.deal == "shared" else 5 * case.rank
    valid = DataLoader(samples(first, first + 30), 6)
    runner = ParameterServerRunner(**case.options(), split_data="auto" if case.deal == "shared" else False)
    runner.train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9),
        loaders={"train": case.loader(), "valid": valid},
        callbacks=[
            dl.AccuracyCallback(input_key="logits", target_key="targets", topk=(1,)),
            dl.CheckpointCallback(f"{case.folder}/checkpoints", "valid", "loss", minimize=True, mode="runner"),
            Record(case),
        ],
        num_epochs=EPOCHS,
        cpu=True,
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(Case(**json.loads(sys.argv[1])))
