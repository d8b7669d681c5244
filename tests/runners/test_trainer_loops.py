"""Lightning programs of many kinds train at two sites as in one process, or end with an error that all sites see."""

import os
import warnings

import pytest
import pytorch_lightning as pl
import support
import torch
import trainer_loops as loops
from dadplug.runners import DADStrategy

import dadplug

# A rank of at least a site's rows loses nothing, so that rankdad is as exact as its compression.
MODES = {
    "dsgd": {},
    "dad": {},
    "rankdad": {"rank": 8, "tolerance": 0.0},
    "fused": {"mode": "dad", "fused": True},
}
UNFUSED = {  # by program, part of why its gradients are formed
    "ClippedValue": "clipped by value",
    "SkippedStep": "SkippedStep.optimizer_step may read",
    "Norms": "Norms.on_after_backward may read",
    "LineSearch": "LBFGS has no fused step",
    "Adversaries": "manual optimization",
    "AdversariesTogether": "manual optimization",
    "ManualAccumulation": "manual optimization",
    "ManualClosure": "manual optimization",
}


def rank() -> int:
    return int(os.environ["RANK"])


def fit(name: str, mode: str | None) -> tuple:
    """Train a program; by Lightning alone in one process, where there is no mode."""
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    site = None if mode is None else rank()
    module = loops.PROGRAMS[name](site).double()
    strategy = (
        "auto" if mode is None else DADStrategy(**{"mode": mode, "timeout": 200, "weighting": "samples"} | MODES[mode])
    )
    current = loops.trainer(strategy, module)
    if name == "Plain":
        module.formed = []
        module.on_train_batch_end = lambda *given: module.formed.append(module.net[0].weight.grad is not None)
    current.fit(module, loops.loader(module.count, site), loops.loader(2, site, seed=1))
    return module, current


@pytest.mark.parametrize("name", loops.PROGRAMS)
@support.at_sites(2)
def test_a_program_trains_as_in_one_process(name: str) -> None:
    expected, alone = fit(name, None)
    start = loops.PROGRAMS[name](None).double()
    assert any(not torch.equal(p, q) for p, q in zip(start.parameters(), expected.parameters()))
    for mode in MODES:
        module, current = fit(name, mode)
        assert current.global_step == alone.global_step > 0, mode
        rel = 1e-6 if mode == "rankdad" else 1e-9
        for (path, value), other in zip(expected.named_parameters(), module.parameters(), strict=True):
            assert torch.allclose(other, value, rtol=rel, atol=rel), (mode, path, other, value)
        assert module.seen == pytest.approx(expected.seen, rel=10 * rel), mode
        assert float(current.callback_metrics["valid"]) == pytest.approx(float(alone.callback_metrics["valid"]), 0.2)
        assert current.strategy.reduction.first_difference() is None
        fused, formed = mode == "fused" and name not in UNFUSED, vars(module).get("formed", [])
        if name == "Plain":
            assert formed == [not fused] * len(formed), mode
        remarks = current.strategy.reduction.plan.remarks
        assert remarks[:1] == (("fused steps: yes",) if fused else remarks[:1])
        if mode == "fused" and not fused:
            assert UNFUSED[name] in remarks[0]


def fit_truncated() -> loops.Plain:
    torch.manual_seed(0)
    module = loops.Plain(rank()).double()
    current = loops.trainer(DADStrategy("rankdad", rank=2), module, num_sanity_val_steps=0)
    current.fit(module, loops.loader(module.count, rank()))
    return module


@support.at_sites(2)
def test_a_truncated_rank_gives_the_plain_loops_curve() -> None:
    """rankdad with a loss of information: the Trainer does what the plain loop does, to the bit."""
    torch.manual_seed(0)
    other = loops.Plain(rank()).double()
    reduction = dadplug.GradientReduction(other, "rankdad", rank=2)
    optimizer = other.configure_optimizers()
    for _ in range(2):
        for batch in loops.loader(other.count, rank()):
            optimizer.zero_grad()
            with reduction.samples(len(batch[0])):
                loss = other.training_step(batch, 0)
            loss.backward()
            reduction.synchronize()
            optimizer.step()
    reduction.detach()
    module = fit_truncated()
    exact, _ = fit("Plain", "dad")
    far = 0.0
    for p, q, r in zip(module.parameters(), other.parameters(), exact.parameters(), strict=True):
        assert torch.equal(p, q)
        far = max(far, float((p - r).abs().max()))
    assert far > 1e-3  # so that the comparison means something


class Breaks(loops.Plain):
    """Raises an error at one place at site 0."""

    def __init__(self, site, place, error):
        super().__init__(site)
        self.place, self.error = place, error

    def _at(self, place, number=0):
        if self.place == place and self.site == 0 and number == 1:
            raise self.error

    def training_step(self, batch, batch_idx):
        self._at("step", batch_idx)
        return super().training_step(batch, batch_idx)

    def on_after_backward(self):
        self._at("backward", self.global_step)

    def validation_step(self, batch, batch_idx):
        if not self.trainer.sanity_checking:
            self._at("validation", batch_idx)
        super().validation_step(batch, batch_idx)

    def configure_optimizers(self):
        self._at("set-up", 1)
        return super().configure_optimizers()

    def on_train_epoch_end(self):
        self._at("epoch end", 1)


class BreakingLoader(torch.utils.data.DataLoader):
    def __iter__(self):
        yield from list(super().__iter__())[:2]
        raise OSError("a file is gone")


def breaks(place: str, error: BaseException) -> str:
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    module = Breaks(rank(), place, error).double()
    current = loops.trainer(DADStrategy("dad", timeout=200, weighting="samples"), module)
    data = loops.loader(module.count, rank())
    if place == "loader" and rank() == 0:
        data = BreakingLoader(data.dataset, batch_size=None)
    try:
        current.fit(module, data, loops.loader(2, rank(), seed=1))
    except BaseException as caught:
        assert "forward" not in vars(module.net[0])
        return f"{type(caught).__name__}: {caught}"
    return "nothing"


PLACES = ("step", "backward", "validation", "set-up", "epoch end", "loader")


def breaks_everywhere() -> list[str]:
    """One failed fit after the other, in the same processes, and a good one at the end."""
    reported = [breaks(place, ValueError(f"broken in {place}")) for place in PLACES]
    reported.append(breaks("step", SystemExit(3)))
    module, _ = fit("Plain", "dad")
    expected, _ = fit("Plain", None)
    for p, q in zip(module.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9)
    return reported


def test_an_error_at_one_site_reaches_the_others_with_its_reason_and_a_fit_can_follow(sites):
    reasons = [f"ValueError: broken in {place}" for place in PLACES[:-1]] + ["OSError: a file is gone", "SystemExit: 3"]
    own, others = sites(2).run(breaks_everywhere)
    assert own == reasons
    for reported, reason in zip(others, reasons, strict=True):
        assert reported.startswith("SiteError: site 0 ("), reported
        assert reported.endswith(reason), reported


def resumes(folder: str) -> None:
    """Fits half, resumes from the checkpoint, tests and fits on, as one process does."""

    def run(mode: str | None) -> list[torch.Tensor]:
        warnings.filterwarnings("ignore")
        site = None if mode is None else rank()
        data = loops.loader(7, site), loops.loader(2, site, seed=1)
        path = f"{folder}/{mode}"
        torch.manual_seed(0)
        module = loops.Accumulation(site).double()

        def build(epochs: int):
            saver = pl.callbacks.ModelCheckpoint(path, filename="{epoch}", save_top_k=-1)
            strategy = (
                "auto"
                if mode is None
                else DADStrategy(**{"mode": mode, "timeout": 200, "weighting": "samples"} | MODES[mode])
            )
            return loops.trainer(strategy, module, max_epochs=epochs, callbacks=[saver], enable_checkpointing=True)

        build(2).fit(module, *data)
        module = loops.Accumulation(site).double()
        current = build(3)
        current.fit(module, *data, ckpt_path=f"{path}/epoch=1.ckpt")
        current.test(module, data[1], verbose=False)
        current.fit_loop.max_epochs = 4
        current.fit(module, *data)
        return [p.detach().clone() for p in module.parameters()]

    expected = run(None) if rank() == 0 else None
    for mode in MODES:
        trained = run(mode)
        for p, q in zip(trained, expected or trained, strict=True):
            rel = 1e-6 if mode == "rankdad" else 1e-9
            assert torch.allclose(p, q, rtol=rel, atol=rel), (mode, p, q)


def test_fit_resume_test_and_fit_again(sites, tmp_path):
    sites(2).run(resumes, str(tmp_path))
