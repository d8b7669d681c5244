"""Error texts of the hub, its kits and the set-up of connections say what to do, or the troubleshooting guide does."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "guides" / "troubleshooting.md"
MODULES = (
    *sorted((ROOT / "dadplug" / "hub").rglob("*.py")),
    *(ROOT / "dadplug" / "exchange" / f"{name}.py" for name in ("rendezvous", "handshake")),
)
GAP = "…"
VERBS = (
    "ask|call|check|choose|connect|copy|exchange|give|leave|make|move|pass|raise|renew|restore|send|sign|start|take|"
    "upgrade|use"
)
# Words of messages that say what to do, or what is required: these need no entry.
INSTRUCTION = re.compile(
    r"\b(must|should|has to|have to|needs?|needed|may not|cannot be used|requires|pip install|chmod|own kit|made by)\b|"
    rf"got {GAP}|valid ones|allowed:|starts its own|`renew` makes|use `|[:;,.] (or )?({VERBS})\b",
    re.IGNORECASE,
)
# Files whose other messages have one row in common: of the protocol of the hub, and of sealed messages.
IN_COMMON = tuple(
    f"dadplug/hub/{name}.py"
    for name in ("wire/messages", "wire/streams", "secure/epochs", "secure/key_agreement", "secure/sealing")
)
# Files whose messages `python -m dadplug check` shows with advice.
CHECKED = tuple(f"dadplug/hub/{name}.py" for name in ("secure/tls", "pki/proxies", "pki/kits"))
SHORTEST = 8  # letters that a message needs besides its gaps: others are those of an error that caused them


def template(node: ast.expr | None) -> str:
    """Return a text in which each value that is put in is a gap; empty if it is no text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(each.value if isinstance(each, ast.Constant) else GAP for each in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (template(node.left) or GAP) + (template(node.right) or GAP)
    return ""


def raised(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the texts of errors that functions raise, with their lines; of a name, what it is assigned before."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        texts: dict[str, list[str]] = {}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign):
                values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
                targets = node.targets[0].elts if isinstance(node.targets[0], ast.Tuple) else node.targets
                for target, value in zip(targets, values):
                    if isinstance(target, ast.Name):
                        texts.setdefault(target.id, []).append(template(value))
        for node in ast.walk(function):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                if isinstance(node.exc.func, ast.Name) and node.exc.func.id == "_FailedError":
                    continue  # it has advice of its own
                for argument in node.exc.args:
                    named = texts.get(argument.id, []) if isinstance(argument, ast.Name) else [template(argument)]
                    yield from ((node.lineno, text) for text in named if text)


def messages() -> list[tuple[str, str]]:
    """Return all error texts with the places where they are raised."""
    found = []
    for path in MODULES:
        place = path.relative_to(ROOT)
        found += [(text, f"{place}:{line}") for line, text in raised(ast.parse(path.read_text()))]
    return [each for each in found if len(re.sub(rf"[{GAP}\W]", "", each[0])) >= SHORTEST]


def entries() -> dict[str, list[str]]:
    """Return the messages of the guide, each with the cells after it."""
    found = {}
    for line in PAGE.read_text().splitlines():
        if line.startswith("| `"):
            first, *others = (cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("| ")))
            for message in re.findall(r"`([^`]+)`", first.replace("``", "`")):
                found[message] = others
    return found


def covers(entry: str, text: str) -> bool:
    """Return whether a text contains an entry, whose gaps stand for anything."""
    parts = (re.escape(part.strip()) for part in entry.split(GAP) if part.strip())
    return re.search(".*".join(parts), text.replace("`", "'"), re.S) is not None


@pytest.fixture(scope="module")
def guide():
    return entries()


def test_each_error_text_says_what_to_do_or_has_an_entry(guide):
    left = [
        (text, place)
        for text, place in messages()
        if not INSTRUCTION.search(text) and not place.startswith(IN_COMMON + CHECKED)
    ]
    missing = [f"{place}: {text}" for text, place in left if not any(covers(each, text) for each in guide)]
    assert not missing, "write entries in docs/guides/troubleshooting.md for:\n" + "\n".join(missing)


def test_each_entry_is_an_error_text_and_says_what_to_do(guide):
    assert len(guide) > 80
    texts = [text for text, _ in messages()]
    source = "\n".join(path.read_text() for path in MODULES)
    unknown = [
        each for each in guide if not any(covers(each, text) for text in texts) and each.strip(f"{GAP} ") not in source
    ]
    assert unknown == []
    assert [each for each, others in guide.items() if len(others) != 1 or not all(others)] == []


def test_the_collector_finds_texts():
    code = 'def f(x):\n    text = f"a {x} lot of"\n    raise E(text)\n\ndef g():\n    raise E(1, "so" + f"me {x}")\n'
    assert [text for _, text in raised(ast.parse(code))] == [f"a {GAP} lot of", f"some {GAP}"]
    assert covers("lot", "a … lot of")
    assert covers("a … of", "a … lot of")
    assert not covers("lots", "a … lot of")
