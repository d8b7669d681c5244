"""Actions of the command `nnunet`, which prepares nnU-Net for training between sites."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...support.files import write_file
from . import plain_errors

_MODULE = '''"""Trainers of dadplug, which nnU-Net finds here; `python -m dadplug nnunet uninstall` removes it."""


def __getattr__(name):
    if not name.startswith("nnUNetTrainerDadplug"):
        raise AttributeError(name)
    import dadplug.nnunet

    return getattr(dadplug.nnunet, name)
'''


def nnunet_actions(parser: Any) -> None:
    """Add the actions to the parser of the command."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def action(run: Callable[[argparse.Namespace], str], text: str) -> Any:
        added = actions.add_parser(run.__name__.strip("_"), help=text, description=f"{text[0].upper()}{text[1:]}.")
        added.set_defaults(act=run)
        return added

    action(_install, "add a file to nnU-Net's folder of trainers, in which it finds nnUNetTrainerDadplug")
    action(_uninstall, "remove that file")
    merge = action(_merge, "merge the fingerprints of all sites, which have no image, into one")
    merge.add_argument("fingerprints", nargs="+", type=Path, help="dataset_fingerprint.json of each site")
    merge.add_argument("--out", type=Path, required=True, metavar="FILE.json", help="the merged fingerprint")
    plan = action(_plan, "plan at a site from the merged fingerprint, in place of nnUNetv2_plan_experiment")
    plan.add_argument("fingerprint", type=Path, help="the merged fingerprint, the same file at all sites")
    plan.add_argument("-d", dest="dataset", type=int, required=True, metavar="ID", help="number of the data set")
    plan.add_argument("-pl", default="ExperimentPlanner", help="planner, as in nnU-Net (default: %(default)s)")
    plan.add_argument("-gpu_memory_target", type=float, metavar="GB", help="memory of a GPU, the same at all sites")
    plan.add_argument("-overwrite_plans_name", metavar="NAME", help="name of the plans (default: the planner's)")


def run_action(arguments: argparse.Namespace) -> None:
    """Carry out an action, and print what it has done."""
    with plain_errors(ValueError, ImportError, OSError):
        print(arguments.act(arguments))


def _place() -> Path:
    """Return the file that is added to nnU-Net; nnU-Net searches this folder first, and its subfolders afterwards."""
    spec = importlib.util.find_spec("nnunetv2")
    if spec is None or spec.origin is None:
        raise ImportError("nnU-Net is not installed here: pip install 'dadplug[nnunet]'")
    return Path(spec.origin).parent / "training" / "nnUNetTrainer" / "nnUNetTrainerDadplug.py"


def _install(arguments: argparse.Namespace) -> str:
    write_file(_place(), _MODULE.encode())
    return f"{_place()}: written; nnUNetv2_train finds -tr nnUNetTrainerDadplug. Repeat it after an update of nnU-Net"


def _uninstall(arguments: argparse.Namespace) -> str:
    _place().unlink(missing_ok=True)
    return f"{_place()}: removed"


def _merge(arguments: argparse.Namespace) -> str:
    from ..fingerprints import merge_files

    cases = merge_files(arguments.fingerprints, arguments.out)
    return f"{arguments.out}: {cases} cases of {len(arguments.fingerprints)} sites; copy this file to all of them"


def _plan(arguments: argparse.Namespace) -> str:
    from ..fingerprints import plan

    memory, name = arguments.gpu_memory_target, arguments.overwrite_plans_name
    plan(arguments.dataset, arguments.fingerprint, arguments.pl, memory, name)
    return f"planned from {arguments.fingerprint}; next: nnUNetv2_preprocess -d {arguments.dataset}"
