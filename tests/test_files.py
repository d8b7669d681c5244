"""Files of tensors are what was written, or refused by name; no code in them is run."""

import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dadplug import accelerate
from dadplug.errors import DamagedError, LoadError
from dadplug.serving import loading
from dadplug.support.files import load_tensors

STATE = {"weight": torch.linspace(-1.0, 1.0, 64), "step": 3}


class Evil:
    """Runs code when it is unpickled, were that allowed."""

    def __reduce__(self) -> Any:
        return (pytest.fail, ("code of a file was run",))


def by_lightning(path: Path) -> Any:
    pytest.importorskip("pytorch_lightning")
    from dadplug import DADStrategy

    return DADStrategy().load_checkpoint(path)


def by_catalyst(path: Path) -> Any:
    pytest.importorskip("catalyst")
    from dadplug import DistributedRunner

    transport = SimpleNamespace(gather_present=lambda digest: {0: digest}, sites=["site 0"])
    return DistributedRunner.load_shared(SimpleNamespace(_transport=transport), path)


@pytest.mark.parametrize(
    "read",
    [
        lambda path: load_tensors(path, str(path)),
        lambda path: load_tensors(path.read_bytes(), str(path)),
        lambda path: accelerate._read_memory(str(path.parent), 0),
        loading._read_plain,
        by_lightning,
        by_catalyst,
    ],
    ids=["path", "bytes", "accelerate", "serving", "lightning", "catalyst"],
)
def test_a_flipped_bit_of_a_weight_is_an_error_that_names_the_file(tmp_path, read):
    path = tmp_path / "dadplug_0.bin"
    torch.save(STATE, path)
    assert torch.equal(read(path)["weight"], STATE["weight"])
    content = bytearray(path.read_bytes())
    content[content.index(STATE["weight"].numpy().tobytes()) + 100] ^= 64
    path.write_bytes(content)
    with pytest.raises((DamagedError, LoadError), match=rf"{path} is damaged"):
        read(path)


def test_a_damaged_file_is_refused_or_read_as_it_was_written():
    from io import BytesIO

    file = BytesIO()
    torch.save(STATE, file)
    whole = file.getvalue()
    flips = [
        whole[:each] + bytes([whole[each] ^ 1 << each % 8]) + whole[each + 1 :] for each in range(0, len(whole), 3)
    ]
    for content in [*flips, *(whole[:size] for size in range(0, len(whole), 50)), bytes(len(whole))]:
        try:
            found = load_tensors(content, "the file")
        except DamagedError:
            pass
        else:
            assert torch.equal(found["weight"], STATE["weight"])
            assert found["step"] == STATE["step"]
    file = BytesIO()
    torch.save({"state": Evil()}, file)
    with pytest.raises(DamagedError, match="can run code"):
        load_tensors(file.getvalue(), "the file")


def test_a_file_whose_content_takes_more_memory_than_the_file_is_refused():
    from io import BytesIO

    file = BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", bytes(1 << 22))
    with pytest.raises(DamagedError, match=r"4194304 bytes in a file of \d{4}\)"):
        load_tensors(file.getvalue(), "the file")
