"""The radar of releases: which jobs it runs, what moved, and which citations are of other code."""

from pathlib import Path

import pytest

from scripts import releases
from scripts.citations import definitions
from scripts.emulated_grid import load_rows
from scripts.releases import Release, changed_citations, chosen, features, job_of, moved, page

OLD = '''
LIMIT = 4
class Trainer:
    """What it does."""
    rate = 1
    def step(self):
        """Its step."""
        return 1  # one
'''
ROW = {"outcome": "fits", "allocated": {"load": 100, "loss": 200}, "reserved": 300, "needed": 250, "requested": 0}


def written(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True)
    path = folder / "trainer.py"
    path.write_text(text, encoding="utf-8")
    return path


def test_docstrings_and_comments_are_no_other_code(tmp_path: Path) -> None:
    old = written(tmp_path / "old", OLD)
    new = written(tmp_path / "new", OLD.replace("Its step.", "The step.").replace("  # one", ""))
    assert definitions(old, "Trainer.step") == definitions(new, "Trainer.step") == ["def step(self):\n    return 1"]
    assert definitions(old, "step") == definitions(new, "step")


def test_citations_whose_code_is_another_one_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "old" / "toy" / "trl", OLD)
    written(tmp_path / "new" / "toy" / "trl", OLD.replace("return 1", "return 2").replace("LIMIT", "MOST"))
    monkeypatch.setattr(releases, "package", lambda environment, library: environment / library)
    cited = [("", "toy", "1.0", "trl/trainer.py", name) for name in ("Trainer.step", "Trainer.rate", "LIMIT", "absent")]
    monkeypatch.setattr(releases, "cited", lambda: cited)
    found = [*changed_citations("toy", tmp_path / "old", tmp_path / "new")]
    assert [(symbol, what) for _, symbol, what in found] == [
        ("LIMIT", "the name is gone"),
        ("Trainer.step", "other code"),
    ]


def test_figures_that_both_rows_have_are_compared() -> None:
    after = ROW | {"allocated": {"load": 100, "loss": 190}, "reserved": 301, "requested": 5}
    assert moved(ROW, after) == {"loss": -10, "reserved": 1}
    assert moved(ROW, ROW | {"outcome": "crashed"}) == {"fits -> crashed": 0}


def test_the_chosen_jobs_have_each_feature_of_the_grid() -> None:
    rows = [row for row in load_rows() if row["outcome"] == "fits"]
    found = chosen(40)
    every = frozenset[str]().union(*map(features, rows))
    recorded = {job_of(row).key: row for row in rows}
    assert frozenset[str]().union(*(features(recorded[job.key]) for job in found)) == every
    assert len(found) < 40


def test_the_page_has_the_release_that_ran_beside_the_newest() -> None:
    torch = Release(library="torch", pinned="2.13.0", newest="2.15.0", taken="2.14.1")
    assert torch.is_new
    text = page([torch], ["3 jobs"], [])
    assert "| torch | 2.13.0 | 2.15.0 | 2.14.1 |" in text
