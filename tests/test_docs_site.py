"""The documentation as a site: every page is in its menu, its links lead to pages, and it loads nothing."""

import re
from pathlib import Path

import pytest

from scripts.docs_site import ROOT, build, copied_pages

MENU = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
ELSEWHERE = re.compile(
    r"""<(?:script|img|iframe)[^>]+src="https?:|<link[^>]+rel="stylesheet"[^>]+href="https?:|@import"""
)


def test_every_document_is_in_the_menu():
    pages = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} - {"docs/SKILL.md"}  # that is for agents
    assert pages <= set(re.findall(r"docs/\w+\.md", MENU))


def test_a_link_to_a_file_that_is_no_page_becomes_its_name(tmp_path):
    texts = {path.relative_to(tmp_path).as_posix(): path.read_text(encoding="utf-8") for path in copied_pages(tmp_path)}
    assert "[What was measured](results/README.md)" in texts["README.md"]
    assert [name for name, text in texts.items() if re.search(r"\]\([^):#]+\.(?:py|yaml|json|ipynb)\)", text)] == []


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path, capfd):
    pytest.importorskip("material", reason="the extra docs is not installed")
    build(tmp_path)
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
    pages = list(Path(tmp_path, "site").rglob("*.html"))
    assert len(pages) > 20
    assert [page for page in pages if ELSEWHERE.search(page.read_text(encoding="utf-8"))] == []
