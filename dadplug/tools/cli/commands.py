"""The commands of `python -m dadplug`.

A command is a function of the parsed arguments that carries it out and returns the exit status, or raises one of
`ERRORS`; `command` registers it with its arguments. Modules that a command needs load when it runs, so that kits are
made without torch.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any

from ...errors import KitError, SiteError
from ...hub.pki.files import CERTIFICATE, REVOKED, VARIABLE, first_line, read_file
from ...hub.pki.project import AUTHORITY, HUB, Project, split_address
from ...support.refusals import refuse
from ...support.registry import import_named
from ...support.signature import named_value
from . import Declaration, add_kit_argument, argument, group, place_of, plain_errors, with_reason
from .nnunet import nnunet_actions, run_action

ERRORS = (KitError, SiteError, ImportError, OSError)  # errors that a user can fix: no traceback


class Exit(IntEnum):
    """Exit statuses of the commands."""

    DONE = 0
    FAILED = 1
    """An error that the message explains, or a failed item of `check`."""
    USAGE = 2
    """Wrong arguments, or none."""
    ENDS_SOON = 3
    """A certificate ends within the days of ``check --fail-before``."""
    SITES_MISSING = 4
    """A site of the roster is not connected, or training waits, for ``status --fail-missing``."""
    INTERRUPTED = 130
    """Ctrl-C, as shells number it."""


Run = Callable[[argparse.Namespace], int | None]
"""Function of the parsed arguments that returns the exit status; None where it is done."""


PROGRAM = "dadplug" if Path(sys.argv[0]).stem == "dadplug" else "python -m dadplug"
PARSER = argparse.ArgumentParser(prog=PROGRAM, description="Distributed training between sites.")
PARSER.add_argument(
    "--version", action="version", version=f"dadplug {sys.modules[__name__.partition('.')[0]].__version__}"
)
COMMANDS = PARSER.add_subparsers(required=True, metavar="COMMAND")


def command(text: str, *arguments: Declaration) -> Callable[[Run], Run]:
    """Register a function as the command of its name, with its arguments; a decorator."""

    def decorate(run: Run) -> Run:
        parser = COMMANDS.add_parser(run.__name__, help=text, description=f"{text[0].upper()}{text[1:]}.")
        parser.set_defaults(run=run)
        for declare in arguments:
            declare(parser)
        return run

    return decorate


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: the command and its arguments; None for those of this process.

    Returns:
        An `Exit` status.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    if not given:
        PARSER.print_help(sys.stderr)
        return Exit.USAGE
    further: list[str] = []
    if given[0] == service.__name__ and "--" in given:  # argparse would look for arguments of its own after it
        place = given.index("--")
        given, further = given[:place], given[place + 1 :]
    parsed = PARSER.parse_args(given)
    parsed.further = further
    try:
        return parsed.run(parsed) or Exit.DONE
    except ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return Exit.FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return Exit.INTERRUPTED


# Types of arguments


def seconds(text: str) -> float:
    """Parse a duration above 0: ``50ms``, ``0.05s`` or ``0.05``.

    Raises:
        ArgumentTypeError: if it is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)(ms|s)?", text.strip())
    if found is None or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no duration such as 50ms or 0.05")
    return float(found[1]) * (1e-3 if found[2] == "ms" else 1.0)


def _bytes(text: str) -> int:
    """Return the bytes of a number of megabytes, such as 64 or 0.5."""
    if not re.fullmatch(r"\d{1,9}(\.\d*)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of megabytes such as 64 or 0.5")
    return int(float(text) * 2**20)


def shape(text: str) -> tuple[int | None, ...]:
    """Parse a shape such as ``1,28,28`` or ``?,4``.

    Raises:
        ArgumentTypeError: if it is none.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part == "?" or part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no shape such as 1,28,28")
    return tuple(None if part == "?" else int(part) for part in parts)


def named(text: str) -> tuple[str, str]:
    """Return the name and the path of a model that is given as NAME=PATH or PATH."""
    name, separator, path = text.partition("=")
    return (name, path) if separator and name and "/" not in name else (Path(text).stem, text)


def output_file(suffix: str, is_drawn: bool = False) -> Callable[[str], Path]:
    """Return a function of a command-line argument, the path of a file that is written at the end of a long run.

    Args:
        suffix: suffix of the file.
        is_drawn: whether it has a picture.

    Raises:
        ArgumentTypeError: in the function, if no such file could be written there.
    """

    def check(text: str) -> Path:
        path = Path(text)
        refuse(
            (path.suffix.lower() != suffix, f"{text!r} should end in {suffix}"),
            (
                not path.parent.is_dir() or not os.access(path.parent, os.W_OK),
                f"there is no folder {str(path.parent)!r} that may be written to",
            ),
            (
                is_drawn and importlib.util.find_spec("matplotlib") is None,
                "a picture needs matplotlib: pip install 'dadplug[examples]'",
            ),
            error=argparse.ArgumentTypeError,
        )
        return path

    return check


PICTURE = output_file(".png", is_drawn=True)
PAGE = output_file(".html")


def _days(text: str) -> int:
    """Return the number of days of a text such as 14d."""
    if not (number := text.removesuffix("d")).isdecimal():
        raise argparse.ArgumentTypeError(f"must be a number of days, such as 14d, got {text!r}")
    return int(number)


def _count(text: str) -> int:
    """Return the number of threads that a command line names."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1")
    return int(text)


# Kits

OUT = argument("--out", type=Path, default=Path("kits"), help="folder of the kits (default: kits)")
NAME = argument("name", help="name of the site, or hub")


@command(
    "make a certificate authority, and kits for the hub and the sites of a project",
    argument("project", type=Path, help="project file: name, hub, sites, and further entries"),
    OUT,
)
def provision(arguments: argparse.Namespace) -> None:
    """Make the kits of a project, and print what is to be done with them."""
    from ...hub.pki.provision import provision

    project = Project.load(arguments.project)
    made = provision(project, arguments.out)
    print(f"{arguments.out / AUTHORITY}: the authority of {project.roster.project}; its key stays on this machine")
    for name in made:
        purpose = f"of the hub at {project.roster.hub}" if name == HUB else f"of slot {project.roster.slot(name)}"
        print(f"{arguments.out / name}: the kit {purpose}; holds a secret key, copy it by a secure way")
    for name in project.own_keys:
        print(f"{name}: makes its key itself, with `python -m dadplug request {name} --project ...`")


@command(
    "make a key at a site, and a request for its certificate",
    argument("name", help="name of this site as in the project file, or hub"),
    argument("--project", required=True, help="name of the project"),
    argument("--kit", type=Path, help="folder of the kit: a new one, or a kit to renew with a new key (default: NAME)"),
)
def request(arguments: argparse.Namespace) -> None:
    """Make a key at a site and a request for its certificate, and print what to do with the request."""
    from ...hub.pki.provision import request

    path, fingerprint = request(arguments.kit or Path(arguments.name), arguments.name, arguments.project)
    print(f"{path}: send this file to the operator of the project, and nothing else of the folder")
    print(f"fingerprint of the key, for the operator to compare: {fingerprint}")


@command(
    "sign the request of a site",
    argument("name", help="the site that has sent the request, or hub"),
    argument("request", type=Path, help="the request"),
    OUT,
    argument("--days", type=int, default=Project.days, help=f"validity (default: {Project.days} days)"),
    argument("--again", action="store_true", help="the site has a valid certificate, and renews it"),
)
def sign(arguments: argparse.Namespace) -> None:
    """Make a kit for a site that has made its key itself, and print what to send back."""
    from ...hub.pki.provision import sign

    pem = read_file(arguments.request)
    folder, fingerprint = sign(arguments.out, arguments.name, pem, arguments.days, again=arguments.again)
    print(f"fingerprint of the key: {fingerprint}")
    print("If the site does not confirm the fingerprint, revoke the certificate.")
    what = f"{folder / CERTIFICATE}" if arguments.again else f"the files of {folder}"
    print(f"Send {what} back, to be copied into the folder of the key. Nothing of it is secret.")


@command(
    "renew the certificate of the hub or one site",
    NAME,
    OUT,
    argument("--days", type=int, help="validity (default: that of the certificate before)"),
    argument("--new-key", action="store_true", help="make a new key, too; the kit is secret again"),
    argument(
        "--hub-name", action="append", default=[], help="further host name or address of the hub; can be repeated"
    ),
)
def renew(arguments: argparse.Namespace) -> None:
    """Renew the certificate of one kit, and print what to send."""
    from ...hub.pki.provision import renew

    folder = renew(arguments.out, arguments.name, arguments.days, tuple(arguments.hub_name), with_key=arguments.new_key)
    if arguments.new_key:
        print(f"{folder}: renewed with a new key; holds a secret key, copy it by a secure way")
    else:
        print(f"{folder / CERTIFICATE}: renewed; replace the file of this name in the kit that is in use")


@command(
    "revoke the certificates of the hub or one site",
    NAME,
    OUT,
    argument(
        "--serial",
        type=with_reason(partial(int, base=16)),
        help="serial number of one certificate (default: all of the name)",
    ),
)
def revoke(arguments: argparse.Namespace) -> None:
    """Revoke certificates, and print where the list of revoked ones has to go."""
    from ...hub.pki.provision import revoke

    revoked = revoke(arguments.out, arguments.name, arguments.serial)
    for serial in revoked:
        print(f"revoked the certificate {serial:x} of {arguments.name}")
    if not revoked:
        print(f"the certificates of {arguments.name} were revoked already")
    path, where = arguments.out / AUTHORITY / REVOKED, "all sites" if arguments.name == HUB else "the hub"
    print(f"Copy {path} into the kit of {where}. Until then the certificate is accepted there.")


@command(
    "give the key of a kit or an authority a passphrase, change or remove it",
    argument("kit", type=Path, help="folder of the kit or the authority"),
    argument("--file", type=Path, help="file with the new passphrase in its first line (default: type it)"),
    argument("--remove", action="store_true", help="remove the passphrase"),
)
def passphrase(arguments: argparse.Namespace) -> None:
    """Encrypt a key with another passphrase; the present one is found as at all times."""
    import getpass

    from ...hub.pki.provision import protect

    if arguments.remove:
        new = None
    elif arguments.file is not None:
        new = first_line(arguments.file)
    else:
        try:
            new, again = (getpass.getpass(text).encode() for text in ("new passphrase: ", "the same again: "))
        except EOFError:
            raise KitError("there is no terminal to type the passphrase in: give --file, or --remove") from None
        if not new or again != new:
            raise KitError("the passphrases differ, or are empty: nothing has changed")
    path = protect(arguments.kit, new)
    if new is None:
        print(f"{path}: has no passphrase any more")
    else:
        print(f"{path}: has the new passphrase; programs find it by {VARIABLE}, or ask for it in a terminal")


@command(
    "check the kit of this site, and the way to the hub",
    argument("kit", type=Path, help="folder of the site's kit"),
    argument("--address", metavar="HOST:PORT", help="address of the hub (default: that of the kit)"),
    argument(
        "--fail-before",
        type=_days,
        metavar="DAYS",
        help=f"exit with status {Exit.ENDS_SOON:d} if a certificate ends within this time, such as 14d",
    ),
    argument("--timeout", type=seconds, default=5.0, help="seconds for each step (default: %(default)g)"),
)
def check(arguments: argparse.Namespace) -> int:
    """Print the findings as they are made; return an `Exit` status."""
    from ...hub.check import check_kit

    address = None if arguments.address is None else split_address(arguments.address, "--address")
    failed = 0
    ends: list[str] = []
    for finding in check_kit(arguments.kit, address, arguments.timeout):
        print(f"{finding.item:<12} {finding.state:<7} {finding.text}", flush=True)
        if finding.advice:
            print(f"{'':<20} {finding.advice}", flush=True)
        failed += finding.state == "failed"
        if finding.days is not None and arguments.fail_before is not None and finding.days < arguments.fail_before:
            ends.append(f"{finding.item} ({finding.days} days)")
    print("failed" if failed else "ok: this site can take part")
    if ends:
        print(f"these end within {arguments.fail_before} days: {', '.join(ends)}")
    return Exit.FAILED if failed else Exit.ENDS_SOON if ends else Exit.DONE


# Servers


@command(
    "run the hub, which all sites connect to, until it gets SIGTERM",
    argument("kit", type=Path, help="folder of the hub's kit, such as kits/hub"),
    argument(
        "--listen",
        metavar="HOST:PORT",
        help="address of this machine to listen at, such as 0.0.0.0:8470 (default: the address that sites connect to)",
    ),
    argument("--status", type=Path, metavar="FILE", help="file for the status, as JSON, twice a second"),
    argument("--journal", type=Path, metavar="FILE", help="file to append to: which sites join, leave, are refused"),
    argument("--log-format", choices=("text", "json"), default="text", help="form of these lines (default: text)"),
    argument(
        "--log-level",
        choices=("info", "warning", "error"),
        default="info",
        help="least level of these lines (default: info)",
    ),
    argument(
        "--metrics",
        metavar="HOST:PORT",
        help="address to serve metrics for Prometheus at, such as 127.0.0.1:9464, with /metrics and /healthz",
    ),
    argument(
        "--site-timeout",
        type=float,
        default=10.0,
        metavar="S",
        help="seconds of silence after which a site is given up (default: 10)",
    ),
    argument(
        "--grace",
        type=float,
        default=5.0,
        metavar="S",
        help="seconds for which a site may connect again after its connection was lost (default: 5)",
    ),
    argument(
        "--encrypt-local",
        action="store_true",
        help="encrypt messages to sites in the hub's machine, too, which do not leave its kernel",
    ),
    argument(
        "--rate-limit",
        type=float,
        metavar="MBIT",
        help="megabits per second that are sent to each site at most (default: no limit)",
    ),
    argument(
        "--memory",
        type=int,
        default=1024,
        metavar="MIB",
        help="memory for the messages of one parameter server, of which there may be 8 (default: 1024)",
    ),
)
def hub(arguments: argparse.Namespace) -> None:
    """Run the hub until SIGTERM or SIGINT."""
    from ...hub.pki.kits import Kit
    from ...hub.server.hub import Hub
    from ...hub.server.status import Outputs
    from ...parameter_server.service import SequencerHost
    from ...support.processes import handling

    refuse(
        (arguments.grace <= 0, f"grace={arguments.grace}: it has to be positive"),
        (arguments.memory < 1, f"memory={arguments.memory}: it has to be positive"),
        error=KitError,
    )
    kit = Kit.load(arguments.kit)
    listen = split_address(arguments.listen, "--listen") if arguments.listen else None
    metrics = split_address(arguments.metrics, "--metrics") if arguments.metrics else None
    outputs = Outputs(arguments.journal, arguments.status, metrics, arguments.log_format, arguments.log_level)
    try:
        service = SequencerHost(list(kit.roster.sites), arguments.memory << 20)
        hub = Hub(
            kit, arguments.site_timeout, listen=listen, journal=outputs.journal, grace=arguments.grace,
            encrypt_local=arguments.encrypt_local, rate_limit=arguments.rate_limit, report=outputs.report,
            service=service,
        )  # fmt: skip

        def stop(number: int, frame: Any) -> None:
            hub.stop(f"it has received {signal.Signals(number).name}", may_return=number == signal.SIGTERM)

        with handling(stop, signal.SIGTERM, signal.SIGINT):
            hub.run()
    except KitError:
        raise
    except ValueError as error:
        raise KitError(str(error)) from error
    finally:
        outputs.close()


@command(
    "show the status of the hub, as a site",
    argument("kit", type=Path, help="folder of the site's kit, such as kits/a"),
    argument("--address", metavar="HOST:PORT", help="address of the hub (default: that of the kit)"),
    argument("--json", action="store_true", help="print JSON in place of a table"),
    argument(
        "--fail-missing",
        action="store_true",
        help=f"exit with status {Exit.SITES_MISSING:d} if a site is not connected, or training waits",
    ),
    argument("--timeout", type=seconds, default=5.0, help="seconds for each step (default: %(default)g)"),
)
def status(arguments: argparse.Namespace) -> int:
    """Print the hub's status."""
    from ...hub.check import ask_status
    from ...hub.server.status import table

    address = None if arguments.address is None else split_address(arguments.address, "--address")
    found = ask_status(arguments.kit, address, arguments.timeout)
    print(json.dumps(found, indent=2) if arguments.json else "\n".join(table(found)))
    absent = any(site["state"] in ("absent", "disconnected") for site in found["sites"])
    missing = arguments.fail_missing and (absent or found["waiting"])
    return Exit.SITES_MISSING if missing else Exit.DONE


@command(
    "write a unit of systemd that runs the hub with further arguments, or the program of a site, which both follow --",
    argument("kit", type=Path, help="folder of the kit of the hub or a site, at its final place"),
    argument("--out", type=Path, default=Path(), metavar="FOLDER", help="folder of the unit (default: this one)"),
    argument("--user", default="", help="user that it runs as (default: one that exists while it runs)"),
    argument("--passphrase-file", type=Path, metavar="FILE", help="file with the passphrase of the kit's key"),
    argument("--devices", action="store_true", help="allow devices, such as GPUs"),
)
def service(arguments: argparse.Namespace) -> None:
    """Write a unit of systemd, and print how it is installed."""
    from ...hub.pki.kits import Kit
    from ...hub.service import Service
    from ...support.files import PUBLIC, write_file

    made = Service(
        Kit.load(arguments.kit), arguments.further, arguments.user, arguments.passphrase_file, arguments.devices
    )
    path = arguments.out / f"{made.name}.service"
    write_file(path, made.text().encode(), PUBLIC)
    print(f"{path}: written. As root:")
    print("\n".join(f"    {step}" for step in made.steps(path)))


@command(
    "serve models over HTTP until SIGTERM",
    argument(
        "models",
        nargs="+",
        metavar="[NAME=]PATH",
        help="a checkpoint, a state dict, a .pt2 or .onnx file, or a folder of shards; its name (default: the file's)",
    ),
    argument("--builder", metavar="FILE.py:NAME", help="class or function that returns the model"),
    argument("--slo", type=seconds, default=0.05, help="latency goal, such as 50ms or 0.05 (default: 50ms)"),
    argument("--deadline", type=seconds, help="time limit of a request (default: 20 times the goal, at least 10s)"),
    argument("--policy", default="fixed", help="fixed, exp3 or exp4 (default: %(default)s)"),
    argument("--context", metavar="FIELD", help="name of the field with a request's context, such as site"),
    argument("--task", default="classification", help="classification or regression (default: %(default)s)"),
    argument("--scale", type=float, default=1.0, help="error with the largest loss, for regression"),
    argument("--input-shape", type=shape, metavar="N,N", help="shape of one input; ? for a size that varies"),
    argument("--dtype", help="dtype of the inputs"),
    argument(
        "--cache-mb", type=_bytes, default="64", dest="cache_bytes", help="size of the cache (default: %(default)s)"
    ),
    argument("--state", type=Path, metavar="FILE", help="file that keeps the policy's weights"),
    argument("--threads", type=int, default=1, help="threads of each model (default: %(default)d)"),
    argument("--port", type=int, default=8000, help="port (default: %(default)d)"),
    argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)"),
)
def serve(arguments: argparse.Namespace) -> None:
    """Serve models until SIGTERM."""
    from ...serving import Model

    # The servers are above this folder, which therefore loads them by name.
    serving = importlib.import_module("dadplug.runners.serving")
    with plain_errors(ValueError):
        models: dict[str, Any] = {}
        for given in arguments.models:
            name, path = named(given)
            if name in models:
                raise ValueError(f"two models have the name {name!r}")
            models[name] = Model(path, builder=arguments.builder)
            models[name].description()  # a wrong path is an error before anything has started
        server = serving.serve(
            models,
            slo=arguments.slo,
            deadline=arguments.deadline,
            policy=arguments.policy,
            context=arguments.context,
            task=arguments.task,
            scale=arguments.scale,
            input_shape=arguments.input_shape,
            dtype=arguments.dtype,
            cache_bytes=arguments.cache_bytes,
            state=arguments.state,
            threads=arguments.threads,
        )
        text = f"serving {', '.join(models)} on http://{arguments.host}:{arguments.port}/predict"
        server.run(arguments.port, arguments.host, ready=lambda: print(text, flush=True), ends_process=True)


# Measurements

BETWEEN_SITES = group(
    "between sites: the same command at each, as in dadplug.experiment",
    argument("--rank", type=int, help="number of this site, from 0"),
    argument("--num-nodes", type=int, help="number of sites"),
    argument("--dist-url", help="rendezvous, tcp://HOST:PORT, an address of site 0"),
    add_kit_argument,
)


TASK = (
    argument(
        "build",
        metavar="BUILD",
        help="FILE.py:NAME or MODULE:NAME of a function that returns (model, optimizer, criterion)",
    ),
    argument(
        "dataset",
        metavar="DATASET",
        help="the same of a data set, or of a function that returns one; or the name of a data set of `dadplug.data`, "
        "such as digits",
    ),
    argument("--data-dir", help="folder of the files of a data set that is given by its name"),
)


def _dataset(arguments: argparse.Namespace) -> Any:
    """Return the data set of the arguments `TASK`."""
    from ...data import DATASETS, load_dataset

    if arguments.dataset in DATASETS:
        return load_dataset(arguments.dataset, arguments.data_dir).train
    if arguments.data_dir is not None:
        raise ValueError(f"--data-dir is for a data set of {', '.join(DATASETS)}: leave it out")
    if ":" not in arguments.dataset:
        names = ", ".join(DATASETS)
        raise ValueError(f"{arguments.dataset!r} is no FILE.py:NAME or MODULE:NAME, nor a data set's name: {names}")
    dataset = import_named(arguments.dataset)
    found = dataset() if callable(dataset) and not hasattr(dataset, "__getitem__") else dataset
    if isinstance(found, tuple) or not hasattr(found, "__getitem__") or not hasattr(found, "__len__"):
        kind = type(found).__name__
        raise TypeError(f"{arguments.dataset}: {kind} is no data set, which has a length and numbered samples")
    return found


@command(
    "train a model in several ways, and say which is fastest",
    *TASK,
    argument("--seconds", type=float, default=60.0, help="training time of a way (default: %(default)g)"),
    argument("--batch-size", type=int, default=32, help="samples a process (default: %(default)d)"),
    argument("--processes", type=int, help="processes of this machine (default: one a core, at most 4)"),
    argument(
        "--link",
        metavar="RATE,ROUND_TRIP",
        help="link between processes of this machine, such as 20mbit,60ms, on Linux as root (default: loopback)",
    ),
    argument("--ways", help="names of ways, separated by commas (default: all that apply)"),
    argument(
        "--picture",
        type=PICTURE,
        metavar="FILE.png",
        help="plot the loss against seconds and megabytes",
    ),
    argument("--html", type=PAGE, metavar="FILE.html", help="write table and pictures as one HTML file"),
    BETWEEN_SITES,
)
def compare(arguments: argparse.Namespace) -> int:
    """Compare ways of training for a model and its data."""
    from ..comparison import compare

    with plain_errors(ValueError, TypeError):
        build = import_named(arguments.build)
        dataset = _dataset(arguments)
        flags = {arguments.rank is None, arguments.num_nodes is None, arguments.dist_url is None}
        launched = arguments.kit or "RANK" in os.environ
        if not launched and len(flags) > 1:
            raise ValueError("between sites give --rank, --num-nodes and --dist-url, all three")
        if launched or False in flags:
            place_of(arguments).connect(timeout=60.0)
        result = compare(
            build,
            dataset,
            arguments.seconds,
            ways=arguments.ways.split(",") if arguments.ways else None,
            batch_size=arguments.batch_size,
            processes=arguments.processes,
            link=arguments.link,
        )
    print(result.table())
    if arguments.picture:
        result.picture(arguments.picture)
        print(f"picture: {arguments.picture}")
    if arguments.html:
        result.html(arguments.html)
        print(f"report: {arguments.html}")
    return 0 if result.finalists else 1


@command(
    "attack what a site would send, and say what is recovered of its data",
    *TASK,
    argument("--mode", default="rankdad", help="a mode, or localsgd (default: %(default)s)"),
    argument(
        "--option",
        type=with_reason(named_value),
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="option of the mode, such as rank=8, wire=int8, share_inputs=False or every=4; can be repeated",
    ),
    argument("--noise-multiplier", type=float, help="differential privacy with this noise"),
    argument("--max-grad-norm", type=float, default=1.0, help="its clipping norm (default: %(default)g)"),
    argument("--sample-rate", type=float, default=0.01, help="its sample rate (default: %(default)g)"),
    argument("--batch-size", type=int, default=16, help="samples of the batch (default: %(default)d)"),
    argument("--observer", default="site", help="who attacks: site or hub (default: %(default)s)"),
    argument(
        "--sealed", action="store_true", help="sites encrypt for each other, so that the hub cannot read payloads"
    ),
    argument("--seconds", type=float, default=240.0, help="time limit, about (default: %(default)g)"),
    argument(
        "--picture",
        type=PICTURE,
        metavar="FILE.png",
        help="draw originals beside reconstructions",
    ),
    argument(
        "--html", type=output_file(".html", is_drawn=True), metavar="FILE.html", help="write the report as one page"
    ),
    argument("--json", type=output_file(".json"), metavar="FILE.json", help="write the report as JSON"),
    argument(
        "--fail-above",
        type=float,
        metavar="SHARE",
        help="exit with status 1 if more of the samples are recovered, or the time was over before an attack",
    ),
)
def audit(arguments: argparse.Namespace) -> int:
    """Audit what a site would send of a batch."""
    import torch
    from torch.utils.data import default_collate

    from ...privacy import DifferentialPrivacy
    from ..auditing import audit
    from ..comparison.trial import built

    with plain_errors(ValueError, TypeError):
        model, _, criterion = built(import_named(arguments.build))
        dataset, count = _dataset(arguments), arguments.batch_size
        if not 0 < count <= len(dataset):
            raise ValueError(f"batch-size must lie in 1 to {len(dataset)}, the size of the data set, got {count}")
        order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0))[:count]
        *inputs, targets = default_collate([dataset[index] for index in order.tolist()])
        options = dict(arguments.option)
        if own := [name for name in options if name in inspect.signature(audit).parameters]:
            raise ValueError(f"--option {own[0]}= is no option of a mode: see the flags of this command")
        if arguments.noise_multiplier is not None:
            options["privacy"] = DifferentialPrivacy(
                noise_multiplier=arguments.noise_multiplier,
                max_grad_norm=arguments.max_grad_norm,
                sample_rate=arguments.sample_rate,
                expected_batch=count,
            )
        report = audit(
            model,
            criterion,
            inputs[0] if len(inputs) == 1 else tuple(inputs),
            targets,
            arguments.mode,
            observer=arguments.observer,
            sealed=arguments.sealed,
            seconds=arguments.seconds,
            **options,
        )
    print(report)
    for path, write in (
        (arguments.picture, report.picture),
        (arguments.html, report.html),
        (arguments.json, report.json),
    ):
        if path:
            write(path)
            print(f"written: {path}")
    passes = arguments.fail_above is None or (report.recovered <= arguments.fail_above and not report.out_of_time)
    return Exit.DONE if passes else Exit.FAILED


@command("prepare nnU-Net for training between sites", nnunet_actions)
def nnunet(arguments: argparse.Namespace) -> None:
    """Print the folder of the trainers, merge fingerprints, or plan."""
    run_action(arguments)


@command(
    "measure which constants are fastest on this machine, and keep them",
    argument(
        "--model",
        metavar="PATH",
        help="a checkpoint, a state dict or another file that `serve` takes (default: the layers of MNISTNet)",
    ),
    argument("--builder", metavar="FILE.py:NAME", help="class or function that returns the model"),
    argument("--input-shape", type=shape, metavar="N,N", help="shape of one input of the model, for serving"),
    argument("--batch-size", type=int, default=16, help="rows of a step (default: %(default)d)"),
    argument("--seconds", type=float, default=60.0, help="time limit, about (default: %(default)g)"),
    argument("--busy", action="store_true", help="measure and store on a busy machine, too"),
    argument(
        "--threads", type=_count, help="threads, as training or serving will have (default: as torch starts with)"
    ),
)
def tune(arguments: argparse.Namespace) -> None:
    """Tune constants, and print what was tried and won."""
    if arguments.threads:  # before torch is loaded
        os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    import torch

    from ..tuning import tune

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    with plain_errors(ValueError):
        result = tune(
            arguments.model,
            arguments.seconds,
            builder=arguments.builder,
            input_shape=arguments.input_shape,
            rows=arguments.batch_size,
            busy=arguments.busy,
        )
    print(result.table())
