"""The structure of the source tree: import cycles, the direction of imports, lengths, terms.

Exceptions are listed by name or number below. A listed exception that no longer exists fails its test, so the lists
can only shrink.
"""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import architecture
import pytest

ROOT = Path(__file__).resolve().parents[2]
EVERYWHERE = (*architecture.FOLDERS, "examples", "benchmarks", "tests")

# The rooms that each room imports, besides itself: in functions and for types, too.
ROOMS = {
    "errors": "",
    "support": "errors",
    "examples": "errors",
    "hooks": "support",
    "lowrank": "hooks support",
    "exchange": "errors lowrank support",
    "privacy": "errors exchange hooks step support",
    "hub": "errors exchange support",
    "step": "errors exchange hooks lowrank options support",
    "options": "exchange privacy step support",
    "adaptive": "errors exchange hooks step support",
    "reduction": "adaptive errors exchange hooks options privacy step support",
    "ddp": "exchange hooks options reduction step support",
    "data": "errors examples support",
    "models": "examples support",
    "local_steps": "ddp errors exchange hooks lowrank options reduction step support",
    "hogwild": "errors exchange step support",
    "parameter_server": "adaptive errors exchange hogwild hooks models options step support",
    "adapm": "errors exchange hooks lowrank reduction step support",
    "serving": "adapm errors models step support",
    "tools": "data errors exchange hogwild hooks hub local_steps lowrank options parameter_server privacy reduction "
    "serving step support",
    "runners": "adapm adaptive ddp errors exchange hogwild hub local_steps options parameter_server reduction serving "
    "step support",
    "callbacks": "adaptive ddp errors privacy reduction runners step support",
    "accelerate": "ddp errors exchange hub local_steps options runners step support",
    "monai": "errors exchange hub options reduction runners step support",
    "ray": "hub options runners support",
    "transformers": "accelerate callbacks hub local_steps options runners support",
    "nnunet": "ddp errors exchange hub local_steps runners step support",
    "experiment": "callbacks data models options runners support tools",
    "dadplug": "adapm adaptive callbacks ddp errors exchange hogwild hub local_steps lowrank parameter_server privacy "
    "reduction runners serving tools",
    "__main__": "tools",
}

# Folder: number of its modules that are part of an import cycle.
MODULES_IN_CYCLES: dict[str, int] = {}
LONG_FILES: set[str] = set()
LONG_FUNCTIONS: set[str] = set()

TYPE_IGNORES = 20

# Names of concepts that have a standard term: see docs/glossary.md.
REPLACED = {
    "Pipeline": "Reducer",
    "pipeline": "reducer",
    "Stage": "BucketHandler",
    "stage": "handler",
    "find_units": "partition_parameters",
    "division": "partition",
    "FirstStep": "FirstStepReport",
    "agree": "merge_reports",
    "Share": "FactorPayload",
    "Sight": "ChainReport",
    "Looks": "collect_chain_reports",
    "breach": "chain_break",
    "take_down": "record_arrival",
    "retire": "close_plan",
    "lane": "worker_thread",
    "lanes": "worker_threads",
    "told": "report",
    "last_words": "exit_reason",
    "mended": "fixes",
    "ghost": "stub",
    "settle": "apply_sync_reply",
    "flight": "in_flight",
}
REPLACED_BUT_LEFT: set[str] = set()

FIRST_WORDS = {"What", "Who", "Where", "How", "Tells", "Says", "Notes", "Makes", "Gives"}
# Folders, as in LAYERS, with docstrings that begin with one of these words.
DOCSTRINGS_TO_REWRITE: set[str] = set()


@pytest.fixture(scope="module", autouse=True)
def _parsed_once():
    yield
    architecture.forget()


def test_no_modules_import_each_other():
    cycles = architecture.cycles(architecture.import_graph(ROOT))
    found = Counter(architecture.layer_of(module) for cycle in cycles for module in cycle)
    assert found == MODULES_IN_CYCLES, cycles


def test_rooms_import_what_the_table_allows():
    found = architecture.imports_of_rooms(architecture.import_graph(ROOT))
    assert found == {room: set(allowed.split()) for room, allowed in ROOMS.items()}


def test_each_room_states_what_may_be_changed_in_it():
    folders = {path.parent for path in (ROOT / "dadplug").glob("*/__init__.py")} | {ROOT / "hooks"}
    docstrings = {folder.name: (folder / "__init__.py").read_text().split('"""')[1] for folder in folders}
    assert not [room for room, text in docstrings.items() if "changed" not in text]


# Modules, and the rooms that importing them must not load.
WITHOUT = {
    "dadplug.hub.server.hub": ("hooks", "lowrank", "adaptive", "methods"),
    "dadplug.reduction": (
        "adaptive",
        "hub",
        "lowrank.compression",
        *(f"step.methods.{name}" for name in ("merge_memory", "powersgd", "rankdad", "topk")),
        *(f"step.reducer.{name}" for name in ("merged", "nodes", "powersgd", "topk")),
        "step.fused.steps",
    ),
}


@pytest.mark.parametrize("module", WITHOUT)
def test_importing_a_room_does_not_load_others(module):
    code = f"import sys, {module}; print(*(name for name in sys.modules if name.startswith('dadplug.')))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert module in loaded
    assert not [name for name in loaded if name.startswith(tuple(f"dadplug.{room}" for room in WITHOUT[module]))]


TRAINERS = {"catalyst", "accelerate", "lightning", "pytorch_lightning", "transformers", "nnunetv2"}
# Modules of the core's folder that are for one trainer each, which they import.
FOR_TRAINERS = {"accelerate.py", "nnunet.py"}


def first_names(modules: set[str]) -> set[str]:
    return {module.split(".")[0] for module in modules}


def test_hooks_know_neither_trainers_nor_networks():
    for path in architecture.python_files(ROOT, ["hooks"]):
        found = architecture.other_imports(path)
        assert not first_names(found) & {*TRAINERS, architecture.PACKAGE}, path
        assert "torch.distributed" not in path.read_text(), path


def test_the_core_imports_trainers_only_when_they_run():
    files = architecture.python_files(ROOT, ["dadplug"])
    for path in (path for path in files if path.relative_to(ROOT / "dadplug").as_posix() not in FOR_TRAINERS):
        assert not first_names(architecture.other_imports(path, local=False)) & TRAINERS, path


def test_files_are_short():
    assert set(architecture.long_files(ROOT, EVERYWHERE, limit=800)) == LONG_FILES


def test_functions_are_short_or_explained():
    assert set(architecture.long_functions(ROOT, EVERYWHERE, limit=60)) == LONG_FUNCTIONS


def test_few_types_are_ignored():
    files = architecture.python_files(ROOT, architecture.FOLDERS)
    assert sum(path.read_text().count("# type: ignore") for path in files) <= TYPE_IGNORES


def test_replaced_names_do_not_come_back():
    names = architecture.identifiers(ROOT)
    found = {word for word in REPLACED for name in names if name == word or (word == "Stage" and name.endswith(word))}
    assert found == REPLACED_BUT_LEFT, {word: REPLACED[word] for word in found ^ REPLACED_BUT_LEFT}


def test_docstrings_begin_with_a_noun_phrase_or_an_imperative():
    wrong = {place: text.split("\n")[0] for place, text in architecture.docstrings(ROOT) if starts_wrongly(text)}
    found = {architecture.layer_of(architecture.module_name(Path(place.split(":")[0]))) for place in wrong}
    assert found == DOCSTRINGS_TO_REWRITE, wrong


def starts_wrongly(docstring: str) -> bool:
    return docstring.split()[0].rstrip(",.:") in FIRST_WORDS


# The checks themselves, on small trees.


@pytest.fixture
def tree(tmp_path):
    """Return a function that writes modules, given by path, and returns the root of the tree."""

    def write(files: dict[str, str]) -> Path:
        files = {f"{folder}/__init__.py": "" for folder in architecture.FOLDERS} | files
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


FINE = {
    "dadplug/exchange/__init__.py": "from .wire import encode\n",
    "dadplug/exchange/wire.py": "import torch\n",
    "dadplug/reduction.py": "from .exchange import encode\nfrom .exchange import wire\nfrom .hooks import linear\n",
    "hooks/linear.py": "from . import form\n",
    "hooks/form.py": "",
    "runners/strategy.py": "from dadplug.reduction import GradientReduction\nimport dadplug.hooks.linear\n",
}


@pytest.mark.parametrize(
    "importing",
    [
        "from . import encode",
        "import dadplug.exchange",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..exchange import encode",
        "def later():\n    from dadplug.exchange import encode",
    ],
)
def test_a_cycle_is_found(tree, importing):
    graph = architecture.import_graph(tree(FINE | {"dadplug/exchange/wire.py": importing}))
    assert architecture.cycles(graph) == [["dadplug.exchange", "dadplug.exchange.wire"]]


def test_long_files_and_functions_are_found(tree):
    body = "    pass\n" * 6
    text = f"def f():\n{body}\n# Long: one loop, with registers\n@decorated\ndef g():\n{body}\ndef h():\n    pass\n"
    root = tree({"hooks/long.py": text})
    assert architecture.long_functions(root, ["hooks"], limit=6) == ["hooks/long.py:f"]
    assert architecture.long_functions(root, ["hooks"], limit=7) == []
    assert architecture.long_files(root, ["hooks"], limit=19) == ["hooks/long.py"]
    assert architecture.long_files(root, ["hooks"], limit=20) == []
