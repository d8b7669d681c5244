"""The README and the documentation: links, options, public names, and code blocks, which run as they are written."""

import importlib
import inspect
import re
from pathlib import Path

import forkserver
import pytest
import running_hub
import support

import dadplug
from dadplug.options import Options
from dadplug.step.methods import method_names

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    *(page for page in sorted(DOCS.rglob("*.md")) if "_build" not in page.parts),
]
REFERENCE = sorted((DOCS / "reference").glob("*.md"))

# What a reader's script has before the snippet begins.
PREPARED = """
import dadplug
if torch.distributed.is_initialized():
    dadplug.connect = lambda *place, **options: None  # the addresses of the pages are examples
from torch.utils.data import DataLoader, TensorDataset
model = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer, criterion = torch.optim.Adam(model.parameters()), nn.CrossEntropyLoss()
data = TensorDataset(torch.randn(70, 1, 28, 28), torch.randint(0, 10, (70,)))
loader = DataLoader(data, batch_size=16)
loaders = {"train": loader, "valid": loader}
"""
MODULE = """
import os
import pytorch_lightning as pl
os.environ.setdefault("MASTER_PORT", "PORT")
class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = model
    def training_step(self, batch, batch_idx):
        return criterion(self.net(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())
module = Module()
"""
GUIDES = sorted((DOCS / "guides").glob("*.md"))


def snippets(page: Path) -> list[str]:
    """Return the code blocks of a page; of a diff, the script that it leads to."""
    found = []
    for kind, code in re.findall(r"```(python|diff)\n(.*?)```", page.read_text(), re.S):
        if kind == "diff":
            code = "".join(line[1:] for line in code.splitlines(keepends=True) if not line.startswith("-"))
        found.append(code)
    return found


def prepared(code: str) -> str:
    """Return a block with what comes before it, for a program of which each site runs a copy; a race is short."""
    code = code.replace("seconds=60", "seconds=0.5")
    if "pytorch_lightning" not in code:
        return PREPARED + code
    return PREPARED + MODULE.replace("PORT", str(support.free_port())) + code


def run(commands: list[list[str]], folder: Path, code: str) -> None:
    """Run programs side by side; fail with the errors of the first that fails."""
    for package in ("catalyst", "pytorch_lightning", "monai", "ignite"):
        if package in code:
            pytest.importorskip(package)
    preload = [name for name in forkserver.TRAINERS if name in code]
    for each in support.run_programs(commands, timeout=200, folder=folder, preload=preload):
        assert each.status == 0, each.errors


def headings(page: Path) -> list[str]:
    """Return the anchors of a page's headings, as forges and the documentation site make them."""
    lines = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return [re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if not target.startswith("https://"):
            path, _, anchor = target.partition("#")
            linked = (page.parent / path).resolve() if path else page
            assert linked.exists(), target
            if anchor:
                assert anchor in headings(linked), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page):
    folders = "dadplug|hooks|runners|callbacks|tests|benchmarks|examples|docs"
    named = re.findall(rf"(?<![\w/.-])((?:{folders})/[\w/.-]*[\w/])", page.read_text())
    left = {
        "docs/two-machines.md",
        "docs/methods/name.md",
        "docs/_build/html",
    }  # a former name, one to write, an output
    assert [path for path in named if not (ROOT / path).exists() and path not in left] == []


def test_every_option_and_every_mode_has_its_place():
    pages = "".join(page.read_text() for page in (DOCS / "methods").iterdir())
    assert [name for name in Options.names() if f"| `{name}` |" not in pages and name != "mode"] == []
    assert [mode for mode in method_names() if not (DOCS / "methods" / f"{mode}.md").exists()] == []
    readme = (ROOT / "README.md").read_text()
    assert [mode for mode in method_names() if f"`{mode}`" not in readme and f'mode="{mode}"' not in readme] == []


def linked_pages(page: Path) -> set[Path]:
    """Return the pages that a page links to."""
    targets = (target.partition("#")[0] for target in re.findall(r"\]\(([^)]+)\)", page.read_text()))
    return {(page.parent / target).resolve() for target in targets if target.endswith((".md", ".ipynb"))}


def test_what_readers_ask_for_is_two_clicks_from_the_readme():
    near = linked_pages(ROOT / "README.md")
    reached = near | {each for page in near if page.suffix == ".md" for each in linked_pages(page)}
    pages = [page for folder in ("guides", "methods", "tutorials") for page in (DOCS / folder).iterdir()]
    pages += [DOCS / f"{name}.md" for name in ("install", "gpu", "memory", "faq", "performance", "scaling", "glossary")]
    assert [page for page in pages if page not in reached] == []


def test_words_are_spelled_as_usual():
    codespell = pytest.importorskip("codespell_lib")
    assert codespell.main("--ignore-words-list", "Bu", *map(str, PAGES), str(ROOT / "SECURITY.md")) == 0


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 90


RUN = (ROOT / "README.md", DOCS / "methods" / "adapm.md", *GUIDES)
# Those of Ray start workers themselves: tests/trainers/test_ray.py runs them.
SNIPPETS = [(page, number) for page in RUN for number, code in enumerate(snippets(page)) if "ray.train" not in code]


@pytest.mark.parametrize(("page", "number"), SNIPPETS, ids=lambda item: getattr(item, "stem", item))
def test_blocks_of_guides_run_at_two_sites(page, number, tmp_path):
    code = snippets(page)[number]
    if "devices=2" in code:  # Lightning starts the sites
        program = tmp_path / "train.py"
        program.write_text("import torch\nfrom torch import nn\n" + prepared(code))
        run([[str(program)]], tmp_path, code)
    elif "kit=" in code:  # the folder of the site's kit is the program's argument
        program = tmp_path / "train.py"
        program.write_text("import torch\nfrom torch import nn\n" + prepared(code))
        with running_hub.running_hub(tmp_path / "kits") as hub:
            run([[str(program), str(hub.kits / name)] for name in "ab"], tmp_path, code)
    elif "attach(" in code:  # a Trainer of transformers needs a launcher
        program = tmp_path / "train.py"
        program.write_text(code)
        launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(support.free_port())]
        run([[*launch, str(program)]], tmp_path, code)
    else:
        run(support.site_scripts(prepared(code), tmp_path), tmp_path, code)


@pytest.mark.parametrize("page", sorted((DOCS / "tutorials").glob("*.md")), ids=lambda page: page.stem)
def test_tutorials_run_at_two_sites_from_their_first_block_to_their_last(page, tmp_path):
    code = "\n".join(snippets(page))
    run(support.site_scripts(code, tmp_path), tmp_path, code)


@pytest.mark.parametrize("page", [page for page in REFERENCE if snippets(page)], ids=lambda page: page.stem)
def test_examples_of_the_reference_run(page, tmp_path):
    code = "\n".join(snippets(page))
    program = tmp_path / "examples.py"
    program.write_text(code)
    run([[str(program)]], tmp_path, code)


def test_a_script_changes_in_few_lines():
    diffs = [re.findall(r"```diff\n(.*?)```", page.read_text(), re.S) for page in GUIDES]
    assert sum(map(len, diffs)) >= 4
    for diff in (diff for found in diffs for diff in found):
        assert sum(line.startswith("+") and "import" not in line for line in diff.splitlines()) <= 3


# The public names, and where to find the object that a name stands for without the trainer that it plugs into.
MODULES = ("dadplug", "dadplug.adapm", "dadplug.lowrank", "dadplug.hooks", "dadplug.runners", "dadplug.callbacks")
STANDS_FOR = {
    "DADStrategy": "dadplug.runners.pytorch_lightning.DADStrategy",
    "AdaPMStrategy": "dadplug.runners.pytorch_lightning.AdaPMStrategy",
    "LocalSGDStrategy": "dadplug.runners.pytorch_lightning.LocalSGDStrategy",
    "LocalSGDRunner": "dadplug.runners.catalyst.LocalSGDRunner",
    "ParameterServerRunner": "dadplug.runners.catalyst.ParameterServerRunner",
    "ParameterServerStrategy": "dadplug.runners.pytorch_lightning.ParameterServerStrategy",
    "HogwildStrategy": "dadplug.runners.pytorch_lightning.HogwildStrategy",
    "HogwildRunner": "dadplug.runners.catalyst.HogwildRunner",
    "DistributedRunner": "dadplug.runners.catalyst.DistributedRunner",
    "AdaPMRunner": "dadplug.runners.catalyst.AdaPMRunner",
}
ALSO = (
    "dadplug.hogwild.DealtLoader",
    "dadplug.hogwild.Progress",
    "dadplug.hogwild.chart_losses",
    "dadplug.hogwild.log_elapsed_time",
    "dadplug.hogwild.train_model",
    "dadplug.local_steps.LocalOptions",
    "dadplug.parameter_server.Outcome",
    "dadplug.parameter_server.ServerOptions",
    "dadplug.parameter_server.launch_ps_and_workers",
    "dadplug.options.Options",
    "dadplug.serving.Exp4",
    "dadplug.serving.Model",
    "dadplug.serving.Prediction",
    "dadplug.serving.Predictor",
    "dadplug.serving.ServingOptions",
    "dadplug.planning.plan.Plan",
    "dadplug.planning.plan.PlanRow",
    "dadplug.exchange.Traffic",
    "dadplug.methods.Quality",
    "dadplug.data.load_dataset",
    "dadplug.data.site_indices",
    "dadplug.models.build_model",
)


# Programs get these from calls; they do not construct them.
RETURNED = {"CapturedLayer", "Compressed", "DealtLoader", "Outcome", "Progress", "Sample", "Table"}


def public_names() -> list[str]:
    """Return the public names with the module that offers each; modules among them are left out."""
    names = [f"{module}.{name}" for module in MODULES for name in importlib.import_module(module).__all__]
    modules = ("dadplug.adapm", "dadplug.errors", "dadplug.hogwild", "dadplug.lowrank", "dadplug.serving")
    return [name for name in dict.fromkeys([*names, *ALSO]) if name not in modules]


def documented_as(name: str) -> str:
    """Return the path by which the reference documents a public name."""
    short = name.rpartition(".")[2]
    if name.startswith("dadplug.callbacks."):
        return f"dadplug.callbacks.monitors.{short.removesuffix('Callback')}"
    return STANDS_FOR.get(short, name)


@pytest.mark.parametrize("name", [name for name in public_names() if name != "dadplug.lowrank.sparse"])
def test_every_public_name_has_an_entry_and_an_example(name):
    path, short = documented_as(name), name.rpartition(".")[2]
    directive = re.compile(rf"^\.\. auto(class|function|exception|data):: {re.escape(path)}$", re.M)
    (page,) = (page for page in REFERENCE if directive.search(page.read_text()))
    examples = "\n".join(snippets(page))
    shown_as = {"Plan": r"reduction\.plan\b", "PlanRow": r"in reduction\.plan\b", "Traffic": r"reduction\.traffic\b"}
    shown_as |= {"Quality": r"reduction\.quality\b"}
    assert re.search(shown_as.get(short, rf"\b{short}\b"), examples), f"no example of {short} in {page}"


def resolve(path: str) -> object:
    """Import what a dotted path names."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("name", public_names())
def test_every_argument_of_a_public_name_is_described(name):
    path = documented_as(name)
    for package, part in (("catalyst", "Runner"), ("pytorch_lightning", "Strategy")):
        if part in path:
            pytest.importorskip(package)
    target = resolve(path)
    text = inspect.getdoc(target) or ""
    assert text, f"{name} has no description"
    if inspect.isclass(target):  # __init__ describes the options, and a base class what it takes over
        own = [each for each in target.__mro__ if each.__module__.startswith("dadplug")]
        text = "\n".join(inspect.getdoc(each) or "" for base in own for each in (base, base.__init__))
    if not callable(target) or name.rpartition(".")[2] in RETURNED or dataclass_like(target):
        return
    missing = [argument for argument in arguments_of(target) if not re.search(rf"^\s+\**{argument}: ", text, re.M)]
    assert missing == []
    constructor = target.__init__ if inspect.isclass(target) else target
    raises = "raise ValueError" in inspect.getsource(constructor) if hasattr(constructor, "__code__") else False
    assert not raises or "Raises:" in text


def members_of(page: Path) -> list[tuple[str, str]]:
    """Return the methods that a page of the reference documents, with their classes."""
    found = []
    for path, options in re.findall(r"^\.\. autoclass:: (\S+)\n((?:   .*\n)*)", page.read_text(), re.M):
        (listed,) = re.findall(r":members:([\w, \n]*)$", options.rstrip() + "\n", re.M) or [None]
        if listed is not None:
            left_out = re.findall(r":exclude-members: (.*)", options)
            names = re.findall(r"\w+", listed) or [name for name in vars(resolve(path)) if not name.startswith("_")]
            found += [(path, name) for name in names if name not in left_out]
    return found


@pytest.mark.parametrize("page", REFERENCE, ids=lambda page: page.stem)
def test_every_argument_of_a_documented_method_is_described(page):
    pytest.importorskip("catalyst")
    missing = []
    for path, name in members_of(page):
        member = getattr(resolve(path), name)
        if not (inspect.isfunction(member) or inspect.ismethod(member)):
            continue
        text = inspect.getdoc(member) or ""
        assert text, f"{path}.{name} has no description"
        if "with the same arguments" not in text:
            missing += [
                f"{path}.{name}: {argument}"
                for argument in arguments_of(member)
                if not re.search(rf"^\s+\**{argument}: ", text, re.M)
            ]
    assert missing == []


def dataclass_like(target: object) -> bool:
    """Return whether a class describes its fields as attributes, or has no arguments of its own."""
    return (
        hasattr(target, "__dataclass_fields__")
        or getattr(target, "_is_protocol", False)
        or (inspect.isclass(target) and issubclass(target, BaseException))
    )


def arguments_of(target: object) -> list[str]:
    """Return the names of the arguments that a description has to explain."""
    if inspect.isclass(target) and target.__init__ is object.__init__:
        return []
    passed_on = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(target.__init__ if inspect.isclass(target) else target).parameters
    return [name for name, each in parameters.items() if name != "self" and each.kind not in passed_on]


def test_the_version_is_that_of_the_changelog_and_of_the_citation():
    versions = re.findall(r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert versions[0] == dadplug.__version__
    assert f"\nversion: {dadplug.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_site_builds_without_warnings(tmp_path):
    pytest.importorskip("sphinx")
    command = ["-m", "sphinx", "-n", "-W", "--keep-going", "-q", "-b", "html", str(DOCS), str(tmp_path)]
    (build,) = support.run_programs([command], timeout=280, preload=forkserver.TRAINERS)
    assert build.status == 0, build.errors
    for page in ("index.html", "reference/reduction.html", "reference/adapm.html"):
        assert (tmp_path / page).exists()
    text = (tmp_path / "reference" / "reduction.html").read_text()
    assert 'id="dadplug.GradientReduction.synchronize"' in text
    assert (tmp_path / "_images" / "comparison.png").exists()
