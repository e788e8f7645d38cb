"""The exported page and the form of `plan serve`, driven in headless Chromium.

Needs Debian's `chromium` and playwright (its Python package only, no browser of its own):
`pip install playwright && pytest tests/test_page_in_browser.py`. With PLAN_SCREENSHOTS=DIR the screenshots are kept.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct, field

from planner.commands.exit_codes import EXIT_NOTHING_FITS, EXIT_PLANNED
from planner.commands.main import run

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
test_serve = pytest.importorskip("test_serve", reason="the extra serve is not installed")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
FITS = "--model Qwen2.5-7B --gpus 2xA100-40G --method grpo"
TOO_LARGE = "--model Llama-3.1-70B --gpus 2xRTX-4090 --method sft --max-length 8192"

# Texts whose contrast with what is behind them is below WCAG's 4.5 : 1, of every element that is shown.
FAINT_TEXTS = """() => {
  const channels = colour => colour.match(/[\\d.]+/g).map(Number);
  const mixed = (share, top, below) => top.slice(0, 3).map((value, i) => value * share + below[i] * (1 - share));
  const over = (top, below) => mixed(top[3] ?? 1, top, below);
  const light = rgb => rgb.map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = element => {
    if (!element) return matchMedia("(prefers-color-scheme: dark)").matches ? [0, 0, 0] : [255, 255, 255];
    const own = channels(getComputedStyle(element).backgroundColor);
    return over(own, own[3] === undefined ? own : behind(element.parentElement));
  };
  const faint = [];
  for (const element of document.querySelectorAll("body *")) {
    const text = [...element.childNodes].filter(n => n.nodeType === 3).map(n => n.data.trim()).join("");
    if (!text || !element.checkVisibility() || element.matches("script, option")) continue;
    const below = behind(element), colour = over(channels(getComputedStyle(element).color), below);
    const [low, high] = [light(colour), light(below)].sort((a, b) => a - b);
    if ((high + 0.05) / (low + 0.05) < 4.5) faint.push(text.slice(0, 40));
  }
  return faint;
}"""
# Tables that are wider than the window and do not scroll by keyboard; texts below 12 pixels; pixels to scroll sideways.
CUT_TABLES = """() => [...document.querySelectorAll("table")].filter(table =>
  !table.closest(".scroll[tabindex]") && table.getBoundingClientRect().right > innerWidth
).map(table => table.innerText.slice(0, 40))"""
SMALL_TEXTS = """() => [...document.querySelectorAll("body *")].filter(element =>
  element.checkVisibility() && element.innerText && parseFloat(getComputedStyle(element).fontSize) < 12
).map(element => element.innerText.slice(0, 40))"""
# Chromium's remark about a page that was sent with the status of a wrong job.
REFUSED = "Failed to load resource: the server responded with a status of 422 (Unprocessable Entity)"
SIDEWAYS = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"


class Tab(Struct, frozen=True, kw_only=True):
    """A browser's tab, and what it asked for and complained of."""

    page: Any
    name: str
    screenshots: Path
    complaints: list[str] = field(default_factory=list)
    requested: list[str] = field(default_factory=list)

    def look(self, what: str) -> None:
        """Check what a reader sees, and keep a screenshot."""
        self.page.screenshot(path=self.screenshots / f"{what}-{self.name}.png", full_page=True)
        assert self.page.evaluate(SIDEWAYS) <= 0
        assert self.page.evaluate(FAINT_TEXTS) == []
        assert self.page.evaluate(CUT_TABLES) == []
        assert self.page.evaluate(SMALL_TEXTS) == []
        assert [line for line in self.complaints if line != REFUSED] == []


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(params=[(360, "light"), (360, "dark"), (1280, "light"), (1280, "dark")], ids=lambda each: f"{each}")
def tab(request, browser, tmp_path) -> Iterator[Tab]:
    width, scheme = request.param
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    context.set_default_timeout(20_000)
    screenshots = Path(os.environ.get("PLAN_SCREENSHOTS", tmp_path))
    found = Tab(page=context.new_page(), name=f"{width}-{scheme}", screenshots=screenshots)
    found.page.on("console", lambda line: found.complaints.append(line.text) if line.type != "log" else None)
    found.page.on("pageerror", lambda error: found.complaints.append(str(error)))
    found.page.on("request", lambda each: found.requested.append(each.url))
    yield found
    context.close()


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    pages = {"fits": folder / "fits.html", "too-large": folder / "too-large.html"}
    assert run([*FITS.split(), "--quiet", "--html", str(pages["fits"])]) == EXIT_PLANNED
    assert run([*TOO_LARGE.split(), "--quiet", "--html", str(pages["too-large"])]) == EXIT_NOTHING_FITS
    return pages


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Any]:
    found = test_serve.started(tmp_path_factory.mktemp("server"))
    yield found
    found.process.terminate()
    found.process.communicate(timeout=20)


class TestExportedPage:
    @pytest.mark.parametrize("which", ["fits", "too-large"])
    def test_a_page_is_read_on_a_phone_and_a_screen_and_asks_for_nothing_else(self, tab, exported, which):
        address = exported[which].as_uri()
        tab.page.goto(address)
        assert tab.page.get_by_role("heading", level=1).count() == 1
        tab.look(f"page-{which}")
        tab.page.evaluate("() => document.querySelectorAll('details').forEach(each => { each.open = true; })")
        tab.look(f"page-{which}-open")
        assert tab.requested == [address]

    def test_every_launch_file_has_a_button_with_a_name_that_copies_it(self, tab, exported):
        tab.page.goto(exported["fits"].as_uri())
        files = tab.page.locator("details.file")
        assert files.count() >= 3
        for index in range(files.count()):
            name = files.nth(index).locator("summary").inner_text()
            files.nth(index).locator("summary").click()
            button = tab.page.get_by_role("button", name=f"Copy {name}", exact=True)
            button.click()
            sync_api.expect(button).to_have_text("Copied")
            text = files.nth(index).locator("pre").inner_text()
            assert tab.page.evaluate("() => navigator.clipboard.readText()") == text

    def test_a_candidate_of_the_plot_is_reached_by_keyboard_and_named(self, tab, exported):
        tab.page.goto(exported["fits"].as_uri())
        points = tab.page.get_by_role("group", name="Candidates by need and speed").get_by_role("link")
        assert points.count() >= 2
        points.nth(1).focus()
        sync_api.expect(points.nth(1).locator("span")).to_be_visible()
        assert tab.page.evaluate(SIDEWAYS) <= 0
        points.nth(1).press("Enter")
        assert tab.page.url.endswith("#way-2")


class TestForm:
    def test_a_form_that_is_filled_in_is_answered_with_the_plan(self, tab, server):
        origin = f"http://127.0.0.1:{server.port}/"
        tab.page.goto(origin)
        tab.look("form")
        for label, text in (
            ("Model", "Qwen2.5-0.5B"),
            ("GPUs", "1xRTX-3090"),
            ("Tokens of a row", "2048"),
        ):
            tab.page.get_by_label(label).fill(text)
        tab.page.get_by_text("More: rank").click()
        tab.look("form-more")
        tab.page.get_by_label("Other settings").fill("lora_r=32")
        tab.page.get_by_label("Method").select_option("dpo")
        tab.page.get_by_label("Tuning").select_option("lora")
        tab.page.get_by_role("button", name="Plan", exact=True).click()
        sync_api.expect(tab.page.get_by_role("heading", level=1)).to_contain_text("dpo")
        tab.look("answer")
        assert tab.page.get_by_text("lora_r 32", exact=True).count() == 1
        assert tab.page.get_by_label("GPUs").input_value() == "1xRTX-3090"
        assert all(url.startswith(origin) for url in tab.requested)

    def test_an_answer_is_saved_and_its_command_and_link_are_copied(self, tab, server):
        origin = f"http://127.0.0.1:{server.port}/"
        tab.page.goto(origin)
        tab.page.get_by_role("link", name="Qwen2.5-7B with GRPO").click()
        for name, saved in (("Download the files (zip)", "Qwen2.5-7B-grpo.zip"), ("JSON", "Qwen2.5-7B-grpo.json")):
            with tab.page.expect_download() as download:
                tab.page.get_by_role("link", name=name, exact=True).click()
            assert download.value.suggested_filename == saved
            assert Path(download.value.path()).stat().st_size > 1000
        clipboard = "() => navigator.clipboard.readText()"
        tab.page.get_by_role("button", name="Copy the command", exact=True).click()
        sync_api.expect(tab.page.get_by_role("button", name="Copied", exact=True)).to_be_visible()
        assert tab.page.evaluate(clipboard) == "plan --model Qwen2.5-7B --gpus 2xA100-40G --method grpo"
        tab.page.get_by_role("button", name="Copy the link", exact=True).click()
        tab.page.wait_for_function(
            "text => navigator.clipboard.readText().then(found => found === text)", arg=tab.page.url
        )
        assert tab.page.url.startswith(f"{origin}?model=Qwen2.5-7B")

    @pytest.mark.parametrize("example", ["Llama-3.1-70B on two", "Llama-3.1-8B: one L4"])
    def test_an_example_is_read_on_a_phone_and_a_screen(self, tab, server, example):
        tab.page.goto(f"http://127.0.0.1:{server.port}/")
        tab.page.get_by_role("link", name=example).click()
        sync_api.expect(tab.page.get_by_role("heading", level=1)).to_be_visible()
        tab.look(f"example-{example.partition(' ')[0]}")

    def test_an_error_is_one_line_above_the_form_that_keeps_its_fields(self, tab, server):
        tab.page.goto(f"http://127.0.0.1:{server.port}/")
        tab.page.get_by_label("Model").fill("Qwen2.5-7C")
        tab.page.get_by_label("GPUs").fill("1xRTX-3090")
        tab.page.get_by_role("button", name="Plan", exact=True).click()
        alert = tab.page.get_by_role("alert")
        sync_api.expect(alert).to_contain_text("Unknown model 'Qwen2.5-7C'. Did you mean")
        assert "\n" not in alert.inner_text().strip()
        assert tab.page.get_by_label("GPUs").input_value() == "1xRTX-3090"
        tab.look("error")
