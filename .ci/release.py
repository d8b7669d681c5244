"""Prepare a release, or check that a tag is one: the version stands in one place, and two files have to agree with it.

python .ci/release.py 0.3.0             write the version, its date, and the heading of the changelog
python .ci/release.py --check v0.3.0    exit with an error unless all files are of this version
"""

import datetime
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSION = ROOT / "dadplug" / "__init__.py"
CHANGELOG = ROOT / "CHANGELOG.md"
CITATION = ROOT / "CITATION.cff"


def replace(path: Path, pattern: str, text: str) -> None:
    """Replace the one line that matches."""
    found, count = re.subn(pattern, text, path.read_text(), flags=re.M)
    if count != 1:
        sys.exit(f"{path.name}: {count} lines match {pattern!r}, instead of one")
    path.write_text(found)


def prepare(version: str, date: str) -> None:
    """Write the version, and turn what is unreleased into its section."""
    replace(VERSION, r'^__version__ = ".*"$', f'__version__ = "{version}"')
    replace(CHANGELOG, r"^## \[Unreleased\]$", f"## [Unreleased]\n\n## [{version}] - {date}")
    replace(CITATION, r"^version: .*$", f"version: {version}")
    replace(CITATION, r"^date-released: .*$", f"date-released: {date}")


def check(version: str) -> None:
    """Exit with an error that names the file which is not of this version."""
    expected = {
        VERSION: f'\n__version__ = "{version}"\n',
        CHANGELOG: f"\n## [{version}] - ",
        CITATION: f"\nversion: {version}\n",
    }
    wrong = [path.name for path, text in expected.items() if text not in path.read_text()]
    if wrong:
        sys.exit(f"not of version {version}: {', '.join(wrong)}; run python .ci/release.py {version} first")


if __name__ == "__main__":
    *check_only, name = sys.argv[1:] or [""]
    number = name.removeprefix("v")
    if not re.fullmatch(r"\d+\.\d+\.\d+", number) or check_only not in ([], ["--check"]):
        sys.exit(__doc__)
    if check_only:
        check(number)
    else:
        prepare(number, datetime.date.today().isoformat())
