"""Execute the notebooks of the tutorials from top to bottom, and write their outputs: `make notebooks`.

Each runs in an empty folder, and with the programs of this environment. An error in a cell ends it.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from traitlets.config import Config

NOTEBOOKS = sorted((Path(__file__).parent / "tutorials").glob("*.ipynb"))
FOLDERS = ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR")  # variables of Jupyter's own folders


def execute(path: Path, folder: Path) -> Any:
    """Execute a notebook.

    Args:
        path: the notebook, which is not changed.
        folder: folder that its cells run in, and that Jupyter's own files go to.

    Returns:
        The notebook with the outputs of this run.

    Raises:
        nbclient.exceptions.CellExecutionError: if a cell raises an error.
    """
    programs = str(Path(sys.executable).parent)
    if programs not in os.environ["PATH"].split(os.pathsep):  # a test has others before them
        os.environ["PATH"] = f"{programs}{os.pathsep}{os.environ['PATH']}"
    os.environ |= {"PYDEVD_DISABLE_FILE_VALIDATION": "1", "OMP_NUM_THREADS": "1"}
    os.environ |= {
        name: str(folder / "jupyter") for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR")
    }
    notebook = nbformat.read(path, as_version=4)
    sockets = {"KernelManager": {"transport": "ipc", "ip": str(folder / "kernel")}}  # no ports
    where = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, timeout=300, record_timing=False, resources=where, config=Config(sockets))
    client.execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":  # warnings name files of this machine
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


if __name__ == "__main__":
    for each in NOTEBOOKS:
        with tempfile.TemporaryDirectory() as temporary:
            nbformat.write(execute(each, Path(temporary)), each)
        print(each.name)
