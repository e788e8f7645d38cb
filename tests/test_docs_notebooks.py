"""The notebooks of docs/: their cells run in order, and the outputs that they show are those of today."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("plotly", reason="the extras notebook and test have plotly")

from scripts import notebooks

NOTEBOOKS = sorted(notebooks.DOCS.glob("*.ipynb"))
LARGEST_BYTES = 300_000  # a repository keeps every version of them


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_cells_run_in_order_and_give_the_outputs_that_are_stored(path: Path) -> None:
    notebook = read(path)
    given = notebooks.outputs_of(notebook)
    for cell, outputs in zip(code_cells(notebook), given, strict=True):
        assert notebooks.without_pictures(cell["outputs"]) == outputs, "run: make golden"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_plot_has_a_picture_and_the_file_stays_small(path: Path) -> None:
    bundles = [output["data"] for cell in code_cells(read(path)) for output in cell["outputs"] if "data" in output]
    plots = [data for data in bundles if notebooks.PLOTLY in data]
    assert plots and all(notebooks.PICTURE in data for data in plots)
    assert path.stat().st_size < LARGEST_BYTES


@pytest.mark.nightly
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")  # of Jupyter's own packages
def test_a_kernel_gives_the_same_outputs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat", reason="the extra notebook has nbformat")
    nbclient = pytest.importorskip("nbclient", reason="pip install nbclient ipykernel")
    pytest.importorskip("ipykernel", reason="the extra notebook has ipykernel")
    monkeypatch.setenv("PLOTLY_RENDERER", "plotly_mimetype")
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    nbclient.NotebookClient(notebook, timeout=120).execute()
    for cell, stored in zip(code_cells(notebook), code_cells(read(path)), strict=True):
        assert [shown(output) for output in cell["outputs"]] == [shown(output) for output in stored["outputs"]]


def shown(output: dict[str, Any]) -> Any:
    """What a reader sees of an output: the traces of a plot, HTML, or text."""
    data = output.get("data", {})
    if notebooks.PLOTLY in data:
        return data[notebooks.PLOTLY]["data"]
    return "".join(data.get("text/html") or output.get("text") or data["text/plain"])
