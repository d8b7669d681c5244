"""One site of the tests of elastic training: trains, and leaves or is idle in steps that it is told.

Run as ``elastic_site.py CASE``, where the case is JSON, see `Case`. Writes a line of JSON for each step.
"""

import contextlib
import hashlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from json_lines import LineLog, packed
from support import until
from torch import nn

import dadplug
from dadplug.exchange.factor_buckets import FactorBucket
from dadplug.exchange.owned_buckets import ContributionBucket
from dadplug.hub.secure.epochs import LinkSealing
from dadplug.hub.site import connection, inbox
from dadplug.hub.site.donation import ANNOUNCED, PART_BYTES
from dadplug.hub.site.elastic import ElasticRounds
from dadplug.hub.site.link import HubLink
from dadplug.hub.site.rounds import RoundClient
from dadplug.hub.wire.messages import Kind, SendState
from dadplug.hub.wire.streams import KeptFrames
from dadplug.options import _MANY as MANY
from dadplug.step.methods.base import GradientPath
from dadplug.step.planning import choice, planner
from dadplug.step.planning.merging import LinkCosts
from dadplug.step.reducer.handler import StepHeader
from dadplug.step.units import base as units

LIE = 4
HELD_UP = 8.0  # longer than the 5 s after which the hub asks another site


@dataclass(frozen=True)
class Case:
    """One process of a site.

    Attributes:
        kit: folder of its kit.
        folder: folder for what it writes.
        mode: the method.
        steps: number of steps of the run.
        min_sites: option of the reduction.
        site_timeout: option of the reduction.
        leave: step in which the process ends; -1 for never.
        how: "before" the forward pass, "sent" after backward, "header" before the end of the step's first round, "late"
            before that of its second round, "donates" when it is asked for its state, "sends" with a part of it on the
            way, "stops" in the same place, where the process is stopped; "restores" when it has received one, where it
            writes the file "restored", and goes on once there is one "goes on";
            "set-up" after it has connected, where it writes the file "restored", and goes on once there is one "goes
            on", or is killed where `leave` is 0;
            "hesitates" when it is asked for its state: it does not end, but is held up for `HELD_UP` seconds;
            "welcomes late": it does not end, but is held up for a second when another one joins, which lacks its key.
        idle: steps in which the site calls `idle`.
        aside: steps in which the compressor is put aside, so that an idle site sends nothing of its error memory.
        cold: steps before which the compressor is reset.
        pause: seconds between steps.
        talks: whether sites exchange objects between backward and the end of each step; they try to use what needs all
            sites before.
        meets: whether sites exchange objects after the last step.
        stop: file that contains the least number of steps, once it exists; empty for none.
        late: option of the reduction.
        late_steps: steps in which the site waits until another one is ahead, if they are late ones; all after them if
            the last one is negative.
        late_in: where it waits: "forward" before it, "backward" in its middle, "further" two seconds at the end of a
            further round.
        other: folder of the other site.
        catches_up: whether the site calls `idle` in the steps that the others have ended already.
        bucket_mb: option of the reduction.
        wire: option of the reduction.
        link: costs of the link that mode "auto" is to plan by, in place of measured ones.
        timeout: option of the reduction.
        hub_timeout: option of the reduction.
        gives_up: seconds after which a hub is given up by default, where all sites have to stay.
        wraps: whether the model is wrapped as by torch's DistributedDataParallel.
        privacy: settings of differential privacy; the lines have gradient, parameters and the ledger then.
        resumes: file with the states of the site, which it begins with if it exists; empty for none.
        keeps: bytes of frames that the site keeps for another hub, where steps may go on for ever; 0 for the default.
        saves: step after which the site writes that file, and ends.
        lies: from step `LIE` on, integers of its step header that the site replaces, by place.
        harm: from step `LIE` on, the change of the site's first payload: one of `HARM`, or "samples" or "rows" for
            wrong numbers in the head of a payload of factors, "weight", "unsent" or "nan" for what owners get; empty
            for none.
        merge: option of the reduction.
        exact: whether the model is in double precision, with layers that are large enough to be compressed; the lines
            have gradients then.
        rank: option of the reduction then; the default leaves nothing out.
        few: number of sites up to which all gradients that are summed are sent in int8, with all defaults; 0 for none.
        by_byte: seconds that a byte takes where the rank is chosen, and sites wait for them; 0 for no choice, since the
            measured time of a step may differ.
        reviews: whether the rank is reviewed in every step.
        begins: `start_sites` and `start_after` of the connection; empty for all sites.
        shows: whether the lines have the parameters.
        reports: loss that the site reports at the end; None for no report.
        ballast: bytes by which the state that a site needs to join is larger.
        clip_sites: option of the reduction.
        loud: factor of the site's loss from step `LIE` on.
        processes: number of processes of the site, each of which has a part of its batches.
        process: number of this one.
        port: port at which they meet.
        leaver: process that leaves; -1 for all of them.
    """

    kit: str
    folder: str
    mode: str = "dsgd"
    steps: int = 1 << 30
    min_sites: int | None = 1
    site_timeout: float = 10.0
    leave: int = -1
    how: str = "before"
    idle: list[int] = field(default_factory=list)
    aside: list[int] = field(default_factory=list)
    cold: list[int] = field(default_factory=list)
    pause: float = 0.0
    talks: bool = False
    meets: bool = False
    stop: str = ""
    late: str = "wait"
    late_steps: list[int] = field(default_factory=list)
    late_in: str = "forward"
    other: str = ""
    catches_up: bool = False
    bucket_mb: float | None = None
    wire: str = "fp32"
    link: list[float] = field(default_factory=list)
    timeout: float = 200
    hub_timeout: float | None = None
    gives_up: float = 30.0
    wraps: bool = False
    privacy: str = ""
    resumes: str = ""
    keeps: int = 0
    saves: int = -1
    lies: dict[str, int] = field(default_factory=dict)
    harm: str = ""
    merge: str = "all"
    exact: bool = False
    rank: int | str = 18
    few: int = 0
    by_byte: float = 0.0
    reviews: bool = False
    begins: list[float] = field(default_factory=list)
    shows: bool = False
    reports: float | None = None
    ballast: int = 0
    clip_sites: float | None = None
    loud: float = 1.0
    processes: int = 1
    process: int = 0
    port: int = 0
    leaver: int = 0


class Ballast:
    """State of some bytes, besides those of the model and its optimizer."""

    def __init__(self, nbytes: int) -> None:
        self._content = torch.zeros(nbytes, dtype=torch.uint8)

    def state_dict(self) -> dict[str, Any]:
        return {"content": self._content}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["content"].shape == self._content.shape


def make_model(exact: bool = False) -> nn.Module:
    torch.manual_seed(1)
    if exact:  # several layers that are large enough to be compressed
        hidden = [nn.Sequential(nn.Linear(size, size - 4), nn.Tanh()) for size in (64, 60, 56, 52)]
        return nn.Sequential(nn.Linear(12, 64), nn.ReLU(), *hidden, nn.LayerNorm(48), nn.Linear(48, 5)).double()
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 24), nn.LayerNorm(24), nn.ReLU(), nn.Linear(24, 5))


def batch(slot: int, step: int, exact: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batch of a site in a step; sizes differ between sites, and change."""
    generator = torch.Generator().manual_seed(1000 * slot + step)
    rows = 3 + slot + step % 2 if exact else 6 + 3 * slot + (5 if step % 4 == 3 else 0)
    return torch.randn(rows, 12, generator=generator), torch.randint(5, (rows,), generator=generator)


def last_step(case: Case, step: int) -> int:
    """Return the number of steps, as far as it is known.

    The site that sees the file first decides for all of them: no other is more than one step ahead of it.

    Args:
        case: the case.
        step: the next step.
    """
    stop = Path(case.stop)
    if not case.stop or not stop.exists() or not (least := stop.read_text()):
        return case.steps
    agreed = Path(f"{case.stop}.agreed")
    proposal = Path(f"{case.stop}.{os.getpid()}")
    if not agreed.exists():
        proposal.write_text(str(max(int(least), step + 3)))
        with contextlib.suppress(FileExistsError):
            os.link(proposal, agreed)
    return int(agreed.read_text())


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hesitate() -> None:
    """Let the process be held up when it is asked for its state."""
    answer = ElasticRounds._answer
    ElasticRounds._answer = lambda rounds: time.sleep(HELD_UP) or answer(rounds)


def die_inside(case: Case, current: Callable[[], int]) -> None:
    """Let the process end in an exchange of the step in which it leaves.

    Args:
        case: the case.
        current: returns the number of the step.
    """
    close_round = ElasticRounds.close

    def closing(rounds: ElasticRounds, admits: bool = False, idle: bool = False) -> None:
        if current() == case.leave and case.how == ("header" if admits else "late"):
            die()
        close_round(rounds, admits, idle)

    if case.how in ("header", "late"):
        ElasticRounds.close = closing
    elif case.how == "hesitates":
        hesitate()
    elif case.how == "donates":
        ElasticRounds._answer = lambda rounds: die()
    elif case.how in ("sends", "stops"):
        RoundClient._send_state = partialmethod(send_half, how=case.how)
    elif case.how == "restores":
        ElasticRounds.take_part = partialmethod(restore_slowly, Path(case.folder), ElasticRounds.take_part)


def welcome_late() -> None:
    """Let a second pass before this site sends its key to one that joins."""
    join = LinkSealing.join

    def joined(sealing: LinkSealing, slot: int, step: int) -> Any:
        time.sleep(1.0)
        return join(sealing, slot, step)

    LinkSealing.join = joined


def wait_for_file(folder: Path) -> None:
    """Write the file "restored", and wait for another one."""
    (folder / "restored").touch()
    until((folder / "goes on").exists, timeout=300.0)


def restore_slowly(rounds: ElasticRounds, folder: Path, take_part: Callable[[ElasticRounds], bool]) -> bool:
    """Wait for a file before this site confirms that it has a state."""
    wait_for_file(folder)
    return take_part(rounds)


def send_half(rounds: RoundClient, request: SendState, step: int, content: bytes, how: str) -> None:
    """Send the first half of this site's state, and let the process be killed or stopped."""
    announced = ANNOUNCED.pack(len(content), step, rounds.history.after(step))
    for exchange, part in enumerate((announced, content[: min(PART_BYTES, len(content) // 2)])):
        rounds._link.send(exchange, memoryview(part), Kind.STATE, request.number, request.joiner)
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL if how == "sends" else signal.SIGSTOP)


def lie(case: Case, current: Callable[[], int]) -> None:
    """Let the site send other step headers than it has; `current` returns the number of the step."""
    pack = StepHeader.pack

    def packed(header: StepHeader) -> list[int]:
        integers = pack(header)
        for place, value in case.lies.items() if current() >= LIE else ():
            integers[int(place)] = value
        return integers

    StepHeader.pack = packed


HARM: dict[str, Callable[[bytes], list[bytes]]] = {
    "short": lambda content: [content[:-8]],
    "long": lambda content: [content + bytes(8)],
    "twice": lambda content: [content, content],
    "missing": lambda content: [],
    "apart": lambda content: [],
    "besides": lambda content: [content],
}
_FIRST = 1  # number of the first gather of a plan in its channel


def harm(case: Case, current: Callable[[], int]) -> None:
    """Let the site send other payloads than it has; `current` returns the number of the step."""
    send, launch = HubLink.send, FactorBucket.launch

    def launched(bucket: FactorBucket, samples: int) -> None:
        if current() >= LIE and case.harm == "rows":
            bucket._rows[0] = 1000
        launch(bucket, -1 if current() >= LIE and case.harm == "samples" else samples)

    if case.harm in ("weight", "unsent", "nan"):
        harm_owners(case, current)
        return
    if case.harm not in HARM:
        FactorBucket.launch = launched
        return

    def sent(link: HubLink, exchange: int, content: memoryview, kind: Kind = Kind.PAYLOAD, **rest: Any) -> None:
        harms = current() >= LIE and kind is Kind.PAYLOAD and exchange % (1 << inbox.CHANNEL_BITS) == _FIRST
        if harms and case.harm in ("apart", "besides"):  # each site gets a message of its own
            for slot in {*range(link.world_size)} - {link.rank}:
                send(link, exchange, memoryview(bytes(content[:-1]) + bytes([slot])), kind, to=slot + 1)
        for each in HARM[case.harm](bytes(content)) if harms else [content]:
            send(link, exchange, memoryview(each), kind, **rest)

    HubLink.send = sent


def harm_owners(case: Case, current: Callable[[], int]) -> None:
    """Let the site state a weight to owners that it does not have, or send them NaN or nothing."""
    send, launch = HubLink.send, ContributionBucket.launch

    def sent(link: HubLink, exchange: int, content: memoryview, *args: Any, to: int = 0, **rest: Any) -> None:
        if not to or current() < LIE or case.harm != "unsent":
            send(link, exchange, content, *args, to=to, **rest)

    def launched(bucket: ContributionBucket, samples: int) -> None:
        for part in bucket._own.values() if current() >= LIE and case.harm == "nan" else ():
            part.left.fill_(torch.nan)
        launch(bucket, samples * (1000 if current() >= LIE and case.harm == "weight" else 1))

    HubLink.send, ContributionBucket.launch = sent, launched


def await_other(case: Case, step: int) -> None:
    """Wait until another site is two steps ahead, or has ended."""
    log = LineLog(Path(case.other) / "log.jsonl")
    while log.last_number("step") < min(step + 1, last_step(case, step) - 1):
        time.sleep(0.005)


def be_late(case: Case, model: nn.Module, current: Callable[[], int]) -> None:
    """Let a site be late.

    Args:
        case: the case.
        model: the model.
        current: returns the number of the step.
    """
    close_round = ElasticRounds.close

    def applies() -> bool:
        last = max(case.late_steps, default=-1)
        return current() in case.late_steps or (-1 in case.late_steps and current() > last)

    def wait(*_: object) -> None:
        if applies():
            await_other(case, current())

    def closing(rounds: ElasticRounds, admits: bool = False, idle: bool = False) -> None:
        if applies() and not admits:
            time.sleep(2.0)
        close_round(rounds, admits, idle)

    if case.late_in == "forward":
        model.register_forward_pre_hook(wait)
    elif case.late_in == "backward":
        model[2].register_forward_hook(lambda module, inputs, output: output.register_hook(wait) and None)
    else:
        ElasticRounds.close = closing


def plan_by(case: Case) -> None:
    """Let the plan, and the choice of the rank, find links of the case and the waiting that follows from the rank."""
    review = choice.RankChoice.review
    if case.link:
        planner.measure_link = lambda rounds: LinkCosts(*case.link)
    if case.reviews:
        choice._FIRST, choice._EVERY = 0, 1
    if not case.by_byte:
        choice._WAIT = math.inf
        return

    def reviewed(chosen: choice.RankChoice, step: int) -> None:
        wait = case.by_byte * 400 * chosen._present
        chosen._times.extend([(0.03 + wait, wait)] * choice._WINDOW)
        review(chosen, step)

    choice.RankChoice.review = reviewed
    choice.RankChoice._measure = lambda *_, **__: case.by_byte


def refuses_what_needs_all_sites() -> None:
    """Check that what resumes with all sites is refused, before anything is sent."""
    statistics = dadplug.Accumulator()
    loader = dadplug.ElasticDataLoader(torch.utils.data.TensorDataset(torch.zeros(8, 1)), 2)
    for use in (
        lambda: next(iter(dadplug.remaining_epochs_until(1))),
        lambda: next(iter(loader)),
        lambda: statistics.synchronized().__enter__(),
    ):
        with pytest.raises(ValueError, match="need all sites until the end: leave min_sites out"):
            use()


def restore(case: Case, parts: dict[str, Any]) -> None:
    """Load the states of the site, if there is a file of them and no other site has given its own."""
    if case.resumes and Path(case.resumes).exists() and not parts["reduction"].step:
        states: dict[str, Any] = torch.load(case.resumes, weights_only=False)
        for name, part in parts.items():
            part.load_state_dict(states[name])


def build(case: Case, model: nn.Module, state: dict[str, Any]) -> tuple[nn.Module, dadplug.GradientReduction]:
    """Return what is called in training, and the reduction."""
    options = {
        "min_sites": case.min_sites,
        "late": case.late,
        "bucket_mb": case.bucket_mb,
        "wire": case.wire,
        "site_timeout": case.site_timeout,
        "state": state,
        "timeout": case.timeout,
        "hub_timeout": case.hub_timeout,
        "merge": case.merge,
        "clip_sites": case.clip_sites,
        "privacy": dadplug.DifferentialPrivacy.parse(case.privacy) if case.privacy else None,
    }
    if case.exact:
        options |= {"rank": case.rank, "tolerance": 0.0}
    if case.few:
        units._FEW_SITES, MANY[GradientPath.ALLREDUCE] = case.few, 1
        options |= {"wire": "auto"}
    if not case.wraps:
        reduction = dadplug.GradientReduction(model, case.mode, **{"weighting": "samples"} | options)
        assert (
            not (case.exact and case.mode == "rankdad")
            or sum(row.path == "lowrank" and len(row.shape) == 2 for row in reduction.plan) >= 4
        )
        return model, reduction
    wrapper = dadplug.DistributedDataParallel(model, case.mode, **{"weighting": "samples"} | options)
    return wrapper, wrapper.reduction


def line_of(case: Case, model: nn.Module, reduction: dadplug.GradientReduction) -> dict[str, Any]:
    """Return what is logged of the step that has just ended."""
    values = torch.cat([each.detach().reshape(-1) for each in model.parameters()])
    step = reduction.step - 1  # that of the others, where this site has joined again
    digest = hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16]
    line = {"step": step, "present": reduction.present_sites, "digest": digest, "time": time.monotonic()}
    line["extent"] = reduction._planner._reducer.extent
    if case.shows or case.privacy or case.clip_sites:
        line["parameters"] = packed(values)
    if case.by_byte:
        line["rank"] = reduction.max_rank
    if case.exact:
        line["bytes"] = sum(row.bytes for row in reduction.plan), reduction.traffic.bytes_sent
        line["measured"] = reduction._planner._link is not None
    if case.privacy or case.exact:
        line["gradient"] = packed(torch.cat([each.grad.reshape(-1) for each in model.parameters()]))
    if case.privacy:
        line["spent"] = reduction.state_dict()["privacy"]["entries"]
    return line


def connect(case: Case) -> None:
    if case.processes > 1:  # as torchrun sets them
        place = {"LOCAL_RANK": case.process, "RANK": case.process, "MASTER_PORT": case.port}
        place |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), case.processes)
        os.environ.update({name: str(value) for name, value in place.items()})
    connection.HUB_TIMEOUT = case.gives_up
    if case.keeps:
        inbox.KeptFrames = partial(KeptFrames, case.keeps)
    if case.how == "welcomes late":
        welcome_late()
    dadplug.connect(kit=case.kit, timeout=200, **dict(zip(("start_sites", "start_after"), case.begins)))
    if case.how == "set-up":
        wait_for_file(Path(case.folder))
        if not case.leave:
            die()


def train(case: Case) -> None:
    connect(case)
    plan_by(case)
    model = make_model(case.exact)
    if case.how == "restores":
        die_inside(case, lambda: 0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    ballast = {"ballast": Ballast(case.ballast)} if case.ballast else {}
    called, reduction = build(case, model, {"optimizer": optimizer, **ballast})
    if case.late_steps:
        be_late(case, model, lambda: reduction.step)
    if case.talks and case.min_sites is not None:
        refuses_what_needs_all_sites()
    die_inside(case, lambda: reduction.step)
    lie(case, lambda: reduction.step)
    if case.harm:
        harm(case, lambda: reduction.step)
    cold = reduction.state_dict()
    parts = {"model": model, "optimizer": optimizer, "reduction": reduction}
    restore(case, parts)
    criterion, rank = nn.CrossEntropyLoss(), reduction.site_rank
    with (Path(case.folder) / f"log{case.process or ''}.jsonl").open("a", buffering=1) as log:
        while (step := reduction.step) < last_step(case, reduction.step):
            if step in case.cold:
                reduction.load_state_dict(cold | {"step": step})
            if step == case.leave and case.how == "before":
                die()
            optimizer.zero_grad()
            idle = step in case.idle or (case.catches_up and reduction.behind)
            if not idle:
                inputs, targets = (each[case.process :: case.processes] for each in batch(rank, step, case.exact))
                loss = criterion(called(inputs.to(model[0].weight.dtype)), targets)
                (loss * (case.loud if step >= LIE else 1.0)).backward()
            if step == case.leave and case.how == "sent":
                time.sleep(0.2)
                die()
            if case.talks:  # ends a round in which payloads have been sent
                assert reduction.gather_objects(rank)[rank] == rank
            kept = reduction.state_dict() if step in case.aside else {}
            if kept:
                reduction.load_state_dict(cold | {"step": step})
            if idle:
                reduction.idle()
            elif not case.wraps:
                reduction.synchronize()
            if kept:
                reduction.load_state_dict(kept | {"step": reduction.step})
            optimizer.step()
            log.write(json.dumps(line_of(case, model, reduction)) + "\n")
            if reduction.step == case.saves:
                torch.save({name: part.state_dict() for name, part in parts.items()}, case.resumes)
                return
            time.sleep(case.pause)
        if case.reports is not None:
            reduction.report(case.reports)
        if case.meets:
            found = reduction.gather_objects(rank)
            expected = [each if each in reduction.present_sites else None for each in range(len(found))]
            assert found == expected, (found, expected)


if __name__ == "__main__":
    torch.set_num_threads(1)
    own = Case(**json.loads(sys.argv[1]))
    train(own if own.leaver in (-1, own.process) else replace(own, leave=-1))
