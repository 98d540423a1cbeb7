"""A run as one page: what is in it comes back, nothing in it runs, and how large it is."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from amp_widgets.core.history import Event, History
from amp_widgets.errors import ExportError
from amp_widgets.export import page as page_module
from amp_widgets.export.blocks import read_block, unpacked_array
from amp_widgets.export.html import export_html, run_page
from amp_widgets.export.page import Page
from amp_widgets.export.run_block import kept_rows, run_of_page

sys.path.insert(0, str(Path(__file__).parent))
from exported import HOSTILE, RunOf, long_history, odd_history

MOST_BYTES = 1_500_000


@pytest.fixture
def seed() -> int:
    made = random.randrange(2**32)
    print(f"seed {made}")
    return made


class Elements(html.parser.HTMLParser):
    """Every tag with its attributes, and the scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self._script: dict[str, str | None] | None = None
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))
        if tag == "script":
            self._script = dict(attributes)
            self.scripts.append((self._script, ""))

    def handle_data(self, data: str) -> None:
        if self._script is not None:
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)

    def handle_endtag(self, tag: str) -> None:
        self._script = None


class TestRoundTrip:
    def test_every_column_and_every_event_comes_back(self, tmp_path: Path, seed: int) -> None:
        history = odd_history(seed)
        path = export_html(RunOf(history), tmp_path / "run.html", plotly="none")
        back = run_of_page(path.read_text(encoding="utf-8"))
        theirs, ours = back.columns(), history.columns()
        assert list(theirs) == list(ours)
        for name in ours:
            assert theirs[name].tobytes() == ours[name].tobytes(), name
        assert [str(event) for event in back.events()] == [str(event) for event in history.events()]  # str: NaN is NaN

    def test_settings_facts_and_layers_are_there_too(self, seed: int) -> None:
        run = RunOf(odd_history(seed))
        block = read_block(run_page(run, plotly="none").html(), "run")
        assert block["name"] == HOSTILE
        assert block["facts"] == run.facts
        assert block["settings"]["checkpointed"] == [HOSTILE]
        assert [layer[0] for layer in block["layers"]] == ["layers.0", HOSTILE]

    def test_facts_are_written_for_people(self, seed: int) -> None:
        run = RunOf(odd_history(seed))
        run.facts = {"began": "2026-01-02T03:04:05+00:00", "cuda": None, "processors": 2}
        page = run_page(run, plotly="none").html().partition('id="run"')[0]
        assert page.count("2026-01-02 03:04:05 UTC") == 2
        assert "T03:04:05" not in page
        assert re.search(r"<td[^>]*>cuda</td>\s*<td[^>]*>–</td>", page)
        assert re.search(r"<td[^>]*>processors</td>\s*<td[^>]*>2</td>", page)

    def test_of_a_long_run_extremes_skips_and_changes_are_there(self, tmp_path: Path) -> None:
        history = long_history(skipped=[5, 70_000, 70_001])
        columns = history.columns()
        back = run_of_page(export_html(RunOf(history), tmp_path / "run.html", plotly="none").read_text(encoding="utf-8"))
        assert back.events() == history.events()
        kept = back.columns()
        assert 2000 < len(kept["step"]) < 6000
        for name in ("loss", "step_s", "peak_bytes", "allocated_bytes"):
            assert {kept[name].min(), kept[name].max()} == {columns[name].min(), columns[name].max()}
            for begin in range(300, 99_000, 700):  # a stretch is shorter than 300 steps
                near = (kept["step"] >= begin - 300) & (kept["step"] < begin + 1000)
                whole = columns[name][begin : begin + 700]
                assert kept[name][near].min() <= whole.min() <= whole.max() <= kept[name][near].max()

    def test_what_is_drawn_of_a_long_run(self) -> None:
        skipped = np.arange(3, 100_000, 7)
        history = long_history(skipped=skipped)
        figures = read_block(run_page(RunOf(history), plotly="link").html(), "figures")
        drawn = {tuple(trace["meta"].values()): trace for trace in figures[0]["figure"]["data"]}
        assert np.array_equal(unpacked_array(drawn["skipped", "marks"]["x"]), skipped)
        scale = drawn["scale", "line"]
        step, log2_scale = unpacked_array(scale["x"]), unpacked_array(scale["y"])
        ours = history.columns("scale")["scale"]
        assert np.array_equal(2.0 ** log2_scale[np.searchsorted(step, np.arange(100_000), side="right") - 1], ours)
        assert len(unpacked_array(drawn["loss", "line"]["x"])) <= 4000

    def test_a_page_that_has_no_run(self) -> None:
        with pytest.raises(ExportError, match="there is no block 'run' in this page"):
            run_of_page(Page("Empty").html())


class TestSize:
    @pytest.mark.parametrize("skipped", [[7, 60_000], slice(10_000, None)], ids=["few", "all since"])
    def test_of_a_run_of_100_000_steps(self, tmp_path: Path, skipped: object) -> None:
        path = export_html(RunOf(long_history(skipped=skipped)), tmp_path / "run.html", plotly="link")
        print(f"{path.stat().st_size / 1000:.0f} kB")
        assert path.stat().st_size < MOST_BYTES

    def test_the_page_says_what_was_left_out(self) -> None:
        text = re.sub("<[^>]*>", "", run_page(RunOf(long_history()), plotly="none").html())
        assert "Lines are drawn by 4,000 of 100,000 points at most" in text
        assert re.search(r"the columns of [\d,]+ of 100,000 steps and every event", text)
        history = History(capacity=1000)
        history.extend({"step": range(5000), "loss": np.ones(5000)})
        text = re.sub("<[^>]*>", "", run_page(RunOf(history), plotly="none").html())
        assert "5,000 steps were trained" in text

    def test_rows_that_are_kept_of_columns_without_a_number(self) -> None:
        nothing = np.full(50_000, np.nan)
        names = ("loss", "scale", "step_s", "allocated_bytes", "peak_bytes", "reserved_bytes")
        rows = kept_rows({"step": np.arange(50_000)} | dict.fromkeys(names, nothing))
        assert rows.tolist() == [0, 49_999]


class TestNothingRuns:
    @pytest.mark.parametrize("plotly", ["inline", "link", "none"])
    def test_only_scripts_of_ours_by_their_hashes(self, seed: int, plotly: page_module.Plotly) -> None:
        page = run_page(RunOf(odd_history(seed)), plotly=plotly).html()
        elements = Elements(page)
        [policy] = [known["content"] for tag, known in elements.found if "http-equiv" in known]
        assert policy is not None
        rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
        assert (rules["default-src"], rules["base-uri"], rules["form-action"]) == ("'none'",) * 3
        running = [(known, text) for known, text in elements.scripts if known.get("type") != "application/json"]
        allowed = rules["script-src"].split()
        for known, text in running:
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            assert known.get("src") in allowed or f"'sha256-{digest}'" in allowed
        assert len(running) == len([one for one in allowed if one != "'none'"]) == (0 if plotly == "none" else 2)
        outside = [known.get("src") for tag, known in elements.found if (known.get("src") or "").startswith("http")]
        assert outside == ([f"https://cdn.plot.ly/plotly-{page_module._plotly_version()}.min.js"] if plotly == "link" else [])

    def test_hostile_names_are_text(self, seed: int) -> None:
        elements = Elements(run_page(RunOf(odd_history(seed)), plotly="link").html())
        assert {tag for tag, _ in elements.found} <= {
            "html", "head", "meta", "title", "style", "body", "main", "header", "h1", "h2", "div", "button", "p", "ul", "li",
            "dl", "dt", "dd", "figure", "img", "table", "thead", "tbody", "tr", "th", "td", "details", "summary", "script",
        }  # fmt: skip
        assert all((known["src"] or "").startswith("data:image/svg+xml;base64,") for tag, known in elements.found if tag == "img")
        assert not [name for _, known in elements.found for name in known if name.startswith("on")]
        for tag, known in elements.found:
            if tag == "img":
                svg = base64.b64decode((known["src"] or "").partition(",")[2]).decode()
                assert "<script" not in svg
                assert "<img" not in svg

    def test_a_name_that_is_not_known(self) -> None:
        with pytest.raises(ExportError, match="plotly: got 'cdn', expected one of 'inline', 'link', 'none'"):
            Page("x", plotly="cdn")  # type: ignore[arg-type]

    def test_a_library_that_would_end_the_element_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "'</Script>'")
        with pytest.raises(ExportError, match="cannot be put into a page"):
            run_page(RunOf(odd_history(0))).html()


class TestWhatIsInIt:
    def test_without_a_step_it_says_so(self) -> None:
        text = re.sub("<[^>]*>", "", run_page(RunOf(History()), plotly="none").html())
        assert "No training step was recorded." in text
        assert "Nothing was changed, and no step was skipped." in text

    def test_a_row_an_event_and_many_in_one(self) -> None:
        few = re.findall("<td>(?:skipped|scale changed|note)</td>", run_page(RunOf(odd_history(1)), plotly="none").html())
        assert len(few) == 9 + 1
        history = long_history(1000, skipped=slice(100, 500))
        history.record(Event(step=300, kind="note", reason="half", time_s=0.0))
        page = run_page(RunOf(history), plotly="none").html()
        assert re.findall(r"<td>([\d,]+ skipped)</td>", page) == ["201 skipped", "199 skipped"]

    def test_a_table_of_very_many_layers_is_cut_and_says_so(self) -> None:
        run = RunOf(odd_history(0))
        run.layers = run.layers * 1000
        page = run_page(run, plotly="none").html()
        assert "2,000 layers" in page
        assert "The first 1,000 of them." in page
        assert page.count("<td>layers.0</td>") == 500


def test_all_of_it_without_torch_and_what_a_notebook_needs(tmp_path: Path) -> None:
    code = f"""
import sys
for name in ("torch", "anywidget", "tsdownsample", "IPython", "ipywidgets", "pandas", "kaleido"):
    sys.modules[name] = None
sys.path.insert(0, {str(Path(__file__).parent)!r})
from exported import RunOf, long_history
from amp_widgets.export.exports import Exports
class Exported(RunOf, Exports):
    pass
run = Exported(long_history(20_000, skipped=[5]))
print(run.export_html({str(tmp_path / "run.html")!r}, title="mine").name)
try:
    run.export_csv({str(tmp_path / "run.csv")!r})
except ImportError as error:
    print(error)
"""
    root = str(Path(__file__).parent.parent.parent)
    said = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    assert said.stdout.splitlines()[0] == "run.html"
    assert "install pandas with: pip install 'amp-widgets[pandas]'" in said.stdout
    assert "<h1>mine</h1>" in (tmp_path / "run.html").read_text(encoding="utf-8")
