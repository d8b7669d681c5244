"""Download of files with checksums."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from ..errors import DataError

_CHUNK = 1 << 16
_TIMEOUT = 30  # seconds without a response


def download(urls: Sequence[str], path: Path, md5: str) -> None:
    """Download a file from the first of several addresses that provides it with the right checksum.

    A progress bar is shown if standard error is a terminal. The file gets its name only when it is complete.

    Args:
        urls: addresses of the file.
        path: path of the downloaded file.
        md5: MD5 checksum of the file.

    Raises:
        DataError: if no address provides it.
    """
    problems = []
    path.parent.mkdir(parents=True, exist_ok=True)
    for url in urls:
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                found = _fetch(url, file, path.name)
            if found == md5:
                os.replace(partial, path)
                return
            problems.append(f"{url}: the checksum is {found}, it should be {md5}")
        except (urllib.error.URLError, OSError) as error:
            problems.append(f"{url}: {getattr(error, 'reason', error)}")
        finally:
            Path(partial).unlink(missing_ok=True)
    raise DataError(
        f"{path.name} could not be downloaded:\n  "
        + "\n  ".join(problems)
        + f"\nWithout a connection, put the file into "
        f"{path.parent} by hand, or use a data set that is embedded (digits)."
    )


def _fetch(url: str, file: IO[bytes], name: str) -> str:
    from tqdm import tqdm

    digest = hashlib.md5(usedforsecurity=False)
    with urllib.request.urlopen(url, timeout=_TIMEOUT) as response:
        size = int(response.headers.get("Content-Length", 0)) or None
        with tqdm(total=size, unit="B", unit_scale=True, desc=name, disable=not sys.stderr.isatty()) as bar:
            while chunk := response.read(_CHUNK):
                file.write(chunk)
                digest.update(chunk)
                bar.update(len(chunk))
    return digest.hexdigest()
