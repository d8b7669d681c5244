"""Audit of what a site sends: capture of a step, attacks on it, and the cheapest option that stops them."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ...local_steps import LocalOptions
from ...options import Options
from ...privacy import DifferentialPrivacy
from ...support.progress import ProgressBar
from ...support.refusals import refuse
from .attacks import ATTACKS, Attack, Budget, Result
from .capture import LOCAL, Batch, LayerView, Observation, capture, tensors_of
from .report import Remedy, Report, Untried, share_recovered

OBSERVERS = ("site", "hub")
_OTHERS = 4  # layers that are not fed by data on which an attack is tried
_REMEDY_SHARE = 0.35  # of the time
_RANKS = (8, 4, 2, 1)  # that are tried
_SOLVED = 0.99  # share of the samples from which no slow attack is needed


# Long: most of it describes the arguments.
def audit(
    model: nn.Module,
    criterion: Callable[[Any, Any], Tensor],
    inputs: Any,
    targets: Any,
    mode: str = "rankdad",
    *,
    observer: str = "site",
    sealed: bool = False,
    fused: bool = False,
    attacks: Sequence[str] | None = None,
    remedies: bool = True,
    seconds: float = 240.0,
    progress: bool | None = None,
    seed: int = 0,
    **options: Any,
) -> Report:
    """Make what a site would send of a batch, and attack it as another site or the hub could.

    The model is copied, and takes one real step between twins of this site: a single process sees what the other sites
    see. No network is used, and the model, the batch and torch's generators stay as they are.

    Args:
        model: the model, as trained so far. A model at its first values shows most.
        criterion: function of the model's output and the targets, which returns the loss.
        inputs: a batch of one site: a tensor, or a tuple, list or mapping of tensors, with samples first.
        targets: its targets.
        mode: a mode of `dadplug.GradientReduction`, or ``"localsgd"`` for the deltas of `dadplug.LocalSGD`, for whose
            ``every`` steps the batch is divided.
        observer: who attacks: ``"site"``, another site, or ``"hub"``.
        sealed: whether sites encrypt for each other, as with ``sealed = true`` in a project file; then a hub sees sizes
            and times alone.
        fused: whether the step is taken by ``reduction.apply(optimizer)``.
        attacks: names of attacks; None for all.
        remedies: whether to look for an option that stops the attacks.
        seconds: time limit, about.
        progress: whether to show the progress on standard error; None: in a terminal.
        seed: seed of the attacks and of dropout.
        options: options of the reduction, such as ``rank``, ``wire``, ``share_inputs`` and ``privacy``; with
            ``mode="localsgd"`` those of the local steps, and ``lr``, the learning rate of the site's SGD.

    Returns:
        The report. ``report.recovered`` is the share of the batch's samples that attacks have recovered.

    Raises:
        ValueError: if an option or its value is not valid, or inputs and targets do not fit.

    Example:
        >>> report = dadplug.audit(model, criterion, inputs, targets, mode="dad")
        >>> print(report)
        >>> report.picture("audit.png")
    """
    chosen = _checked(observer, seconds, attacks)
    if options.get("privacy") is None:
        options.pop("privacy", None)
    _check_batch(model, criterion, inputs, targets)
    _check_options(mode, options)
    batch = Batch(copy.deepcopy(model), criterion, inputs, targets)
    if len(batch) != len(batch.data):
        raise ValueError(f"all inputs must have one row a sample, got {len(batch)} and {len(batch.data)} rows")
    shown = sys.stderr.isatty() if progress is None else progress
    start, bar = time.monotonic(), ProgressBar(seconds, shown=shown)
    bar.show("one step between twins")
    seen = capture(batch, mode, fused=fused, seed=seed, **options)
    unreadable = observer == "hub" and sealed
    budget = Budget(seconds * (1 - _REMEDY_SHARE if remedies else 1) - (time.monotonic() - start))
    results, untried = ([], []) if unreadable else run_attacks(seen, chosen, budget, bar)
    report = Report(
        mode=mode,
        options=dict(options),
        observer=observer,
        sealed=sealed,
        seen=seen,
        results=results,
        untried=untried,
        seconds=time.monotonic() - start,
    )
    if remedies and report.recovered > 0:
        report.remedy, report.tried = _find_remedy(report, chosen, Budget(seconds - report.seconds), bar, fused, seed)
    report.seconds = time.monotonic() - start
    bar.close()
    return report


def run_attacks(
    seen: Observation, chosen: Sequence[Attack], budget: Budget, bar: ProgressBar, *, quick: bool = False
) -> tuple[list[Result], list[Untried]]:
    """Run attacks on what has been seen.

    Args:
        seen: the observation.
        chosen: the attacks.
        budget: time limit.
        bar: the progress.
        quick: whether to run those alone that recover data in little time.

    Returns:
        The results, and what was not tried, with the reasons.
    """
    results: list[Result] = []
    untried: list[Untried] = []
    for attack in chosen:
        if quick and (attack.slow or attack.name in ("membership", "labels")):
            continue
        for view in [None] if attack.whole else seen.layers:
            name = "" if view is None else view.name
            reason = (
                attack.applies(seen, view) or _needless(attack, results) or ("" if budget.left else "no time was left")
            )
            if view is not None and not reason and _is_extra(attack, view, results):
                reason = "as other layers, of which some were attacked"
            if reason:
                untried.append(Untried(attack.name, name, reason))
                continue
            begin, own = time.monotonic(), budget.part(attack.share)
            try:
                with bar.span(bar.elapsed, own.left, f"{attack.name} {name}"):
                    result = attack.run(seen, view, own)
            except (RuntimeError, ValueError, NotImplementedError) as error:
                untried.append(Untried(attack.name, name, f"it failed: {type(error).__name__}: {error}"))
                continue
            results.append(replace(result, seconds=time.monotonic() - begin))
    return results, untried


def _needless(attack: Attack, results: Sequence[Result]) -> str:
    """Return why an attack on data is not needed any more."""
    if attack.name not in ("inversion", "activations", "components"):
        return ""
    solved = max((result.recovered for result in results if result.target == "data"), default=0.0)
    exact = solved >= _SOLVED and any(
        result.target == "data" and result.attack != "span" and result.recovered >= _SOLVED for result in results
    )
    return "the data were recovered already" if exact else ""


def _is_extra(attack: Attack, view: LayerView, results: Sequence[Result]) -> bool:
    """Return whether a layer whose input is not data is one more than an audit attacks."""
    same = [result for result in results if result.attack == attack.name and result.target == "activations"]
    return not view.fed_by_data and len(same) >= _OTHERS


def _find_remedy(
    report: Report, chosen: Sequence[Attack], budget: Budget, bar: ProgressBar, fused: bool, seed: int
) -> tuple[Remedy | None, list[Remedy]]:
    """Try options that may stop the attacks; return the cheapest that does, and all that were tried."""
    if report.observer == "hub" and not report.sealed:
        return Remedy({"sealed": True}, 0, 0.0, report.bytes_sent), []
    tried: list[Remedy] = []
    batch = report.seen.batch
    longest, begin = 0.0, time.monotonic()
    for remedy in _candidates(report.mode, report.options, len(batch)):
        if budget.left < longest:
            break
        bar.show(f"trying {remedy}")
        changed = {"mode": report.mode, **report.options, **remedy.options}
        if changed["mode"] != report.mode:
            changed = {name: value for name, value in changed.items() if name in ("mode", "rank", "privacy", "wire")}
        try:
            seen = capture(batch, fused=fused, seed=seed, **changed)
        except ValueError:  # options that do not go together
            continue
        results, _ = run_attacks(seen, chosen, budget.part(0.3), bar, quick=True)
        most = max((each.similarity for each in results if each.target in ("data", "words")), default=0.0)
        tried.append(replace(remedy, recovered=share_recovered(results), similarity=most, bytes_sent=seen.bytes_sent))
        if tried[-1].stops:
            return tried[-1], tried
        longest, begin = max(longest, time.monotonic() - begin), time.monotonic()
    return None, tried


def _candidates(mode: str, options: Mapping[str, Any], rows: int) -> Iterator[Remedy]:
    """Yield the changes that are tried, those that cost least first.

    Args:
        mode: the mode.
        options: its options.
        rows: samples of the batch.
    """
    rank = options.get("rank")
    present = rank if isinstance(rank, int) else rows
    if mode in ("dad", "edad", "rankdad", "auto") and options.get("share_inputs", True):
        yield Remedy({"share_inputs": False}, 0)
    # A local step's deltas are compressed in the same way.
    name = mode if mode in (LOCAL, "powersgd") else "rankdad"
    for smaller in _RANKS:
        if mode not in ("rankdad", "powersgd") or smaller < present:
            yield Remedy({"mode": name, "rank": smaller} if name != mode else {"rank": smaller}, 1)
    if mode != LOCAL and options.get("privacy") is None:
        privacy = DifferentialPrivacy(noise_multiplier=1.0, expected_batch=rows)
        yield Remedy({"mode": "rankdad", "rank": 8, "privacy": privacy}, 2)


def _checked(observer: str, seconds: float, attacks: Sequence[str] | None) -> list[Attack]:
    refuse(
        (observer not in OBSERVERS, f"observer must be one of {', '.join(OBSERVERS)}, got {observer!r}"),
        (
            isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0,
            f"seconds must be a positive number, got {seconds!r}",
        ),
        (isinstance(attacks, str), f"attacks must be a sequence of names, such as ('span',), got {attacks!r}"),
    )
    return list(ATTACKS.values()) if attacks is None else [ATTACKS[name] for name in attacks]


def _check_batch(model: nn.Module, criterion: object, inputs: Any, targets: Any) -> None:
    refuse(
        (not isinstance(model, nn.Module), f"model must be a torch.nn.Module, got {type(model).__name__}"),
        (not callable(criterion), f"criterion must be a function of outputs and targets, got {criterion!r}"),
    )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("no parameter of the model is trained: nothing would be sent")
    tensors = tensors_of(inputs)
    if not tensors or any(not each.dim() for each in tensors):
        raise ValueError("inputs must be a tensor, or a tuple, list or mapping of tensors, with samples first")
    if not len(tensors[0]):
        raise ValueError("inputs have no samples")
    if any(len(each) != len(tensors[0]) for each in tensors_of(targets)):
        raise ValueError(f"inputs have {len(tensors[0])} samples, targets {len(tensors_of(targets)[0])}")
    if any(each.is_floating_point() and not bool(each.isfinite().all()) for each in tensors):
        raise ValueError("inputs hold NaN or Inf")


def _check_options(mode: str, options: dict[str, Any]) -> None:
    """Raise ValueError before anything is computed if an option is not valid."""
    if mode == LOCAL:
        own = {name: value for name, value in options.items() if name != "lr"}
        LocalOptions.create(**own)
        lr = options.get("lr", 0.1)
        if not isinstance(lr, (int, float)) or not lr > 0:
            raise ValueError(f"lr must be a positive number, got {lr!r}")
        return
    Options.create(mode=mode, **options)
