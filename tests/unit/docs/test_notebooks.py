"""Each notebook of docs/start/notebooks runs in a kernel, without a network, and shows what it promises."""

from __future__ import annotations

import base64
import io
import os
import re
import sys
from pathlib import Path
from typing import Any

import jupytext
import pytest
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell
from PIL import Image

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "docs/start/notebooks"
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.py"))
PROMISES = {  # words of the output; labels of the axes, which no test reads in a picture
    "first_run.py": (
        [
            "step 100/100  loss ",
            "step 100/100  val_loss ",
            "bytes  metrics.jsonl",
            "bytes  report.html",
            "<iframe srcdoc=",
        ],
        ["step", "loss (nats per token)"],
    ),
    "is_bf16_safe.py": (
        [
            "## Formats: 82,817 parameters",
            "| fp8    | up ",
            "bf16: safe",
            "fp8: safe",
            "advice: precision=",
            "- more than 20",
        ],
        [],  # drawn by dtrain probe
    ),
    "own_loop.py": (
        [
            "59 of 60 steps applied",
            "reason:     overflow\n",
            "local gradient of '3.weight'[133:134] not finite (1 Inf) on rank 0, micro-batch 0",
            "element:    133 = 2 x 64 + 5",
            "loss scale: 4096 in the step, 2048 in the next",
            "3.weight      256 elements, 0 changed",
        ],
        ["loss (nats per sample)", "loss scale (factor)", "step"],
    ),
    "lora.py": (
        ["16.9k of them trained", "step 60/60  val_loss ", "adapter_model.safetensors", "with the adapters 0."],
        ["step", "loss (nats per byte)"],
    ),
}
OFFLINE = """
import sys


def _refuse(event, args):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
        raise OSError(f"the notebook needs a network: {event} {args}")


sys.addaudithook(_refuse)
"""


class ThisInterpreter(AsyncKernelManager):
    """Starts a kernel of this interpreter, whatever kernels are installed, and reaches it without a port."""

    def __init__(self, **options: Any) -> None:
        super().__init__(transport="ipc", ip=f"{os.environ['JUPYTER_RUNTIME_DIR']}/kernel", **options)

    @property
    def kernel_spec(self) -> KernelSpec:
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=command, display_name="Python 3", language="python")


def run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the notebook with its outputs; it runs in ``folder``/here, which must stay empty."""
    here, temporary = folder / "here", folder / "tmp"
    for path in (here, temporary):
        path.mkdir()
    for variable, value in {
        "TMPDIR": temporary,
        "IPYTHONDIR": folder / "ipython",
        "JUPYTER_RUNTIME_DIR": folder,
        "OMP_NUM_THREADS": 1,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }.items():
        monkeypatch.setenv(variable, str(value))
    notebook = jupytext.read(FOLDER / name)
    notebook.cells.insert(0, new_code_cell(OFFLINE))
    client = NotebookClient(
        notebook, timeout=300, kernel_manager_class=ThisInterpreter, resources={"metadata": {"path": str(here)}}
    )
    client.execute()
    assert [*here.iterdir()] == [], "it writes to a temporary folder only"
    return notebook


def texts(output: Any) -> list[str]:
    if output.output_type == "stream":
        return [output.text]
    return [text for kind, text in output.data.items() if kind.startswith("text/")]


@pytest.mark.processes
@pytest.mark.parametrize(
    "name", [name if name == "own_loop.py" else pytest.param(name, marks=pytest.mark.exhaustive) for name in NOTEBOOKS]
)
def test_a_notebook_shows_what_it_promises(name: str, tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path_factory.mktemp("nb")  # the path of a socket is short
    outputs = [output for cell in run(name, folder, monkeypatch).cells for output in cell.get("outputs", ())]
    assert "error" not in {output.output_type for output in outputs}
    text = "".join(part for output in outputs for part in texts(output))
    words, labels = PROMISES[name]
    assert not [word for word in words if word not in text], text
    assert not set("\x1b\r\b") & set(text), "a cell shows them as they are, or loses lines"
    (picture,) = [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    with Image.open(io.BytesIO(base64.b64decode(picture))) as image:
        assert image.width >= 600
        assert len(image.convert("RGB").getcolors(1 << 24) or ()) > 20
    source = (FOLDER / name).read_text(encoding="utf-8")
    assert re.findall(r'set_[xy]label\("(.*)"\)', source) == labels


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_stored_as_text_that_python_runs(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    notebook = jupytext.reads(text, fmt="py:percent")
    assert notebook.metadata["kernelspec"]["name"] == "python3"
    assert notebook.cells[0].source.startswith("# ")
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not [cell for cell in code if cell.outputs]
    assert not [line for cell in code for line in cell.source.splitlines() if line.startswith(("%", "!"))]
    version = re.compile(r"jupytext_version: .*")
    assert version.sub("", jupytext.writes(notebook, fmt="py:percent")) == version.sub("", text)


def test_each_notebook_is_listed_and_none_is_stored_with_output() -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| \[(\w+\.py)\]\(\1\) \|", page, re.MULTILINE)) == NOTEBOOKS == sorted(PROMISES)
    assert sorted(path.name for path in FOLDER.iterdir() if path.name != "__pycache__") == sorted(
        ["README.md", *NOTEBOOKS]
    )
