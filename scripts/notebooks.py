"""Run the notebooks of docs/ and store their outputs: `python -m scripts.notebooks`.

Needs the [notebook] extra, and Chromium for the pictures of plots that have changed.

The cells run as plain Python in this process, in order, with the outputs that a Jupyter kernel stores for them. A plot
is stored as plotly's JSON and, for readers whose viewer draws no plotly, as a picture.
"""

import ast
import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"
PLOTLY, PICTURE = "application/vnd.plotly.v1+json", "image/png"
WIDTH, HEIGHT = 720, 400  # of a picture, in pixels
SECONDS, TRIES = 60, 3  # for Chromium to draw one; on a busy machine its clock may run out before the picture is there
# 16 steps of each colour instead of 256, which is what a plot has: two thirds of the bytes.
PAGE = """<script>{library}</script><div id="plot"></div><script>
Plotly.newPlot("plot", {figure})
  .then(plot => Plotly.toImage(plot, {{format: "png", width: {width}, height: {height}}}))
  .then(url => {{ const drawn = new Image(); drawn.src = url; return drawn.decode().then(() => drawn) }})
  .then(drawn => {{
    const canvas = document.createElement("canvas"), context = canvas.getContext("2d")
    canvas.width = {width}; canvas.height = {height}; context.drawImage(drawn, 0, 0)
    const pixels = context.getImageData(0, 0, {width}, {height})
    pixels.data.forEach((value, at) => {{ pixels.data[at] = 17 * Math.round(value / 17) }})
    context.putImageData(pixels, 0, 0)
    document.body.innerHTML = "<pre>" + canvas.toDataURL() + "</pre>" }})</script>"""

Bundle = dict[str, Any]  # an output by its MIME type


def outputs_of(notebook: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Run the code cells of a notebook in order; return the outputs of each."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [_run("".join(cell["source"]), count, namespace) for count, cell in enumerate(code, start=1)]


def _run(source: str, count: int, namespace: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a cell; return what it printed and the value of its last expression."""
    tree = ast.parse(source)
    last = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "<cell>", "exec"), namespace)
        value = eval(compile(last, "<cell>", "eval"), namespace) if last else None
    text = printed.getvalue()
    stream = [{"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)}] if text else []
    if value is None:
        return stream
    return [
        *stream,
        {"output_type": "execute_result", "execution_count": count, "metadata": {}, "data": bundle_of(value)},
    ]


def bundle_of(value: Any) -> Bundle:
    """Return a value as a notebook stores it: plotly's JSON of a plot; else as HTML and as text."""
    if type(value).__module__.startswith("plotly."):
        title = value.layout.title.text
        return {PLOTLY: json.loads(value.to_json()), "text/plain": [f"A plot: {title}"]}
    text = {"text/plain": repr(value).splitlines(keepends=True)}
    return (
        {"text/html": value._repr_html_().splitlines(keepends=True), **text} if hasattr(value, "_repr_html_") else text
    )


def with_outputs(notebook: dict[str, Any]) -> dict[str, Any]:
    """Return the notebook with the outputs that its cells have now."""
    outputs, cells = iter(outputs_of(notebook)), []
    for cell in notebook["cells"]:
        found = {"outputs": next(outputs)} if cell["cell_type"] == "code" else {}
        cells.append({**cell, **found})
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    for count, cell in enumerate(code, start=1):
        cell["execution_count"] = count
    return {**notebook, "cells": cells}


def without_pictures(outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return outputs without pictures, which are drawn from plotly's JSON beside them."""
    return [
        {**output, "data": {kind: data for kind, data in output["data"].items() if kind != PICTURE}}
        if "data" in output
        else output
        for output in outputs
    ]


def add_pictures(notebook: dict[str, Any], before: dict[str, Any]) -> None:
    """Add a picture to every plot: that of the same plot before, or a new one."""
    drawn = {json.dumps(data[PLOTLY]): data[PICTURE] for data in _bundles(before) if PICTURE in data}
    for data in _bundles(notebook):
        if PLOTLY in data:
            data[PICTURE] = drawn.get(json.dumps(data[PLOTLY])) or picture(data[PLOTLY])


def _bundles(notebook: dict[str, Any]) -> list[Bundle]:
    return [
        output["data"]
        for cell in notebook["cells"]
        for output in cell.get("outputs", [])
        if PLOTLY in output.get("data", {})
    ]


def picture(figure: Bundle) -> str:
    """Return a plot as PNG in base 64, drawn by Chromium."""
    from plotly.offline import get_plotlyjs

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("A plot has changed, and Chromium, which draws its picture, is not installed.")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "plot.html")
        page.write_text(
            PAGE.format(library=get_plotlyjs(), figure=json.dumps(figure), width=WIDTH, height=HEIGHT), encoding="utf-8"
        )
        flags = ("--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=30000", "--dump-dom")
        for _ in range(TRIES):
            drawn = subprocess.run([chromium, *flags, page.as_uri()], capture_output=True, text=True, timeout=SECONDS)
            if found := re.search(r"<pre>data:image/png;base64,([^<]+)</pre>", drawn.stdout):
                return found[1]
    raise RuntimeError(f"Chromium drew no picture of {figure['layout']['title']['text']}: {drawn.stderr[-500:]}")


def main() -> None:
    os.environ["PLAN_CACHE"] = tempfile.mkdtemp()  # no measurements of this machine
    for path in sorted(DOCS.glob("*.ipynb")):
        before = json.loads(path.read_text(encoding="utf-8"))
        after = with_outputs(before)
        add_pictures(after, before)
        path.write_text(json.dumps(after, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{path.name}: {path.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main()
