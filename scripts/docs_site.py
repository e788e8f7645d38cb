"""Build the documentation as a site from README.md, docs/ and results/: `python -m scripts.docs_site [FOLDER]`.

The files are copied in the layout of the repository, so that the links among them stay as they are. A link to a file
that is no page, such as a module, becomes its name. Needs the extra `docs`; it loads nothing from elsewhere.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/*.md", "results/*.md")
PICTURES = ("docs/*.svg", "docs/*.png")
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#:\s]+)\)")  # to a file; a link with a scheme or an anchor stays


def copied_pages(folder: Path) -> Iterator[Path]:
    """Copy the pages and pictures to a folder; yield the paths there."""
    shutil.rmtree(folder, ignore_errors=True)
    pages = {path for pattern in PAGES for path in ROOT.glob(pattern)}
    pictures = {path for pattern in PICTURES for path in ROOT.glob(pattern)}
    for path in sorted(pages | pictures):
        there = folder / path.relative_to(ROOT)
        there.parent.mkdir(parents=True, exist_ok=True)
        if path in pages:
            there.write_text(_with_links_to(pages, path), encoding="utf-8")
        else:
            shutil.copyfile(path, there)
        yield there


def _with_links_to(pages: set[Path], path: Path) -> str:
    """Return the text of a page in which only links to pages are left."""

    def link(found: re.Match[str]) -> str:
        text, target = found.groups()
        return found[0] if (path.parent / target).resolve() in pages else text

    return LINK.sub(link, path.read_text(encoding="utf-8"))


def build(folder: Path) -> None:
    """Build the site in `folder/site`; a warning of mkdocs is an error."""
    list(copied_pages(folder / "docs"))
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    written = folder / "mkdocs.yml"
    written.write_text(config.replace("build/docs", "docs").replace("build/site", "site"), encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--config-file", str(written)]
    # The theme prints on every run which program will follow mkdocs; the variable turns that off.
    subprocess.run(command, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=True)


if __name__ == "__main__":
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build")
