"""The pages in ``notebooks/results``: of every lesson in both languages, of what it is now, and in need of nothing else."""

from __future__ import annotations

import ast
import html
import itertools
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

import export_lessons
import lesson_page
from build_lessons import SUFFIXES, notebook, sources

MOST_BYTES_IN_ALL = 4_000_000
EACH = [(source, language) for source in sources() for language in SUFFIXES]
each_page = pytest.mark.parametrize(("source", "language"), EACH, ids=[f"{source.stem}-{language}" for source, language in EACH])


class Elements(HTMLParser):
    """The elements of a page with their attributes, and its text; what is in none of `HIDDEN`."""

    HIDDEN = ("style", "script", "title")

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self._hidden = 0
        self.feed(markup)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {name: value or "" for name, value in attrs}))
        self._hidden += tag in self.HIDDEN

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in self.HIDDEN

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.text += data


def page_of(source: Path, language: str) -> str:
    return export_lessons.result_path(source, language).read_text(encoding="utf-8")


def squeezed(text: str) -> str:
    return " ".join(text.split())


@each_page
def test_it_is_of_what_the_lesson_is_now(source: Path, language: str) -> None:
    now = export_lessons.digest(notebook(source, language))
    assert export_lessons.digest_in(export_lessons.result_path(source, language)) == now, "the lesson has changed: make results"


def test_there_is_no_other_page_and_they_are_small() -> None:
    there = set(export_lessons.RESULTS.iterdir())
    assert there == {export_lessons.INDEX, *(export_lessons.result_path(source, language) for source, language in EACH)}
    sizes = [path.stat().st_size for path in there]
    assert max(sizes) <= export_lessons.MOST_BYTES
    assert sum(sizes) <= MOST_BYTES_IN_ALL


def test_the_list_has_all_of_them() -> None:
    index = export_lessons.INDEX.read_text(encoding="utf-8")
    assert index == export_lessons.index_text(), "a title has changed: make results"
    links = [attributes["href"] for tag, attributes in Elements(index).found if tag == "a"]
    assert links == [export_lessons.result_path(source, language).name for source, language in EACH]


@pytest.mark.parametrize("path", sorted(export_lessons.RESULTS.glob("*.html")), ids=lambda path: path.stem)
def test_nothing_is_fetched_and_links_lead_somewhere(path: Path) -> None:
    markup = path.read_text(encoding="utf-8")
    found = Elements(markup).found
    assert [tag for tag, _ in found if tag in ("script", "iframe", "object", "embed", "video", "audio", "base")] == []
    assert [attributes["src"][:40] for _, attributes in found if not attributes.get("src", "data:").startswith("data:")] == []
    assert all(not re.search(r"url\(|@import", style) for style in re.findall(r"<style>(.*?)</style>", markup, re.S))
    assert all(not name.startswith("on") for _, attributes in found for name in attributes)
    policies = [attributes["content"] for _, attributes in found if attributes.get("http-equiv") == "Content-Security-Policy"]
    assert policies == [lesson_page.POLICY]
    for tag, attributes in found:
        target = attributes.get("href", "")
        if target.startswith("#"):
            assert target[1:] in [its.get("id") for _, its in found]
        elif target and not re.match(r"https://", target):
            assert (path.parent / target).exists(), target
        assert tag != "link" or attributes["rel"] == "alternate"


@pytest.mark.parametrize("path", sorted(export_lessons.RESULTS.glob("*.html")), ids=lambda path: path.stem)
def test_nothing_of_the_machine_is_in_it(path: Path) -> None:
    assert re.findall(r"/(?:home|root|work|Users|tmp|private)/\S*", path.read_text(encoding="utf-8")) == []


@each_page
def test_a_page_has_an_order_for_those_who_listen(source: Path, language: str) -> None:
    found = Elements(page_of(source, language)).found
    assert [attributes.get("lang") for tag, attributes in found if tag == "html"] == [language]
    levels = [int(attributes.get("aria-level", tag[1])) for tag, attributes in found if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels)), levels
    assert [tag for tag, _ in found if tag in ("header", "main", "footer")] == ["header", "main", "footer"]
    assert all(attributes.get("alt") for tag, attributes in found if tag == "img")
    names = [attributes["id"] for _, attributes in found if "id" in attributes]
    assert len(set(names)) == len(names)
    for tag, attributes in found:
        if tag in ("input", "select", "button"):  # of the controls: nobody listens to them
            assert "disabled" in attributes


@each_page
def test_text_code_figures_and_answers_are_in(source: Path, language: str) -> None:
    markup = page_of(source, language)
    page = Elements(markup)
    text = squeezed(page.text)
    made = notebook(source, language)
    figures = 0
    for cell in made.cells:
        if cell.cell_type == "code":
            assert squeezed(cell.source) in text
            figures += len(re.findall(r"aw\.figure_view\(|\.dashboard\(\)$|^%amp demo|^%%amp|aw\.demo\(", cell.source, re.M))
        else:
            words = re.sub(r"^\|[-|: ]+$", "", cell.source, flags=re.M)  # below the head of a table
            words = re.sub(r"[`*]|\]\([^)]*\)|[\[|]|^#+ |^ *(?:-|\d+\.) ", "", words, flags=re.M)
            for line in filter(None, map(squeezed, words.splitlines())):
                assert line in re.sub(r"[|*]", "", text), line
        for asked in texts_in(cell, language):
            assert squeezed(asked) in text
    assert figures <= len([tag for tag, _ in page.found if tag == "img"])
    reveals = sum(".reveal(" in cell.source for cell in made.cells if cell.cell_type == "code")
    assert len(re.findall(r"<div class=html><details>", markup)) >= reveals


def texts_in(cell: NotebookNode, language: str) -> Iterator[str]:
    """What a question asks, and why its answer is so."""
    if not {"ask"} & {*cell.metadata.get("tags", ())}:
        return
    for node in ast.walk(ast.parse(cell.source)):
        if isinstance(node, ast.Dict) and [key.value for key in node.keys if isinstance(key, ast.Constant)] == ["en", "ko"]:
            said: dict[str, str] = ast.literal_eval(node)
            yield said[language]


@each_page
def test_lists_have_their_items_beside_each_other(source: Path, language: str) -> None:
    assert not re.search(r"<(?:ul|/li)>\s*<ul>", page_of(source, language))


class NoStills:
    """In place of a browser."""

    def chart(self, figure: Any) -> str:
        return f"data:image/png;base64,{len(figure['data'])}"

    def controls(self, models: Any) -> list[str]:
        return [f"<div>{model['_anywidget_id']}</div>" for model in models]


def written(*cells: NotebookNode, models: dict[str, Any] | None = None) -> str:
    made = new_notebook(cells=list(cells))
    made.metadata["widgets"] = {lesson_page.STATE: {"state": {name: {"state": one} for name, one in (models or {}).items()}}}
    facts = {"system": "Linux", "cores": 2, "device": "", "torch": "2.9", "played": 0}
    return lesson_page.lesson_page(
        nbformat.from_dict(made), "en", digest="d", facts=facts, stills=NoStills(), twins={"en": "a.html", "ko": "a.ko.html"},
        before=None, after="b.html",
    )  # fmt: skip


def test_what_tells_an_answer_is_folded() -> None:
    covered = new_output("display_data", data={"text/plain": "88 %"}, metadata={"covered": True})
    page = written(new_markdown_cell("# T"), new_code_cell("x", outputs=[covered, new_output("stream", text="open")]))
    assert re.search(r"<details class=answer><summary>[^<]*</summary>\n<pre [^>]*>88 %</pre>\n</details>\n<pre [^>]*>open", page)


def test_what_was_printed_is_text_and_as_a_terminal_leaves_it() -> None:
    outputs = [new_output("stream", text="one\n10 %\r<b>"), new_output("stream", name="stderr", text=" & 20 %\n")]
    page = written(new_markdown_cell("# T"), new_code_cell("x", outputs=outputs))
    assert html.unescape(Elements(page).text).count("one\n<b> & 20 %") == 1


def test_items_of_a_report_become_a_list_and_those_of_a_list_stay() -> None:
    report = "<div>a<li>1</li><li>2</li></div><ul><li>x</li><li>y</li><li>z</li></ul>"
    outputs = [new_output("display_data", data={"text/html": report, "text/plain": ""})]
    page = written(new_markdown_cell("# T"), new_code_cell("x", outputs=outputs))
    assert "<div>a<ul><li>1</li><li>2</li></ul></div><ul><li>x</li><li>y</li><li>z</li></ul>" in page


def test_a_widget_a_chart_and_a_bar_are_drawn() -> None:
    view = {lesson_page.VIEW: {"model_id": "box"}, "text/plain": "not shown here"}
    bar = {lesson_page.VIEW: {"model_id": "bar"}, "text/plain": "0 %"}
    chart = {lesson_page.PLOTLY: {"data": [{"name": 'a "b" & c'}], "layout": {}}}
    models = {
        "box": {"children": ["IPY_MODEL_line", "IPY_MODEL_chart"]},
        "line": {"_anywidget_id": "x.StatusLine", "_css": ".line {}"},
        "chart": {"_anywidget_id": "x.TrainingChart", "_css": ".chart {}"},
        "bar": {"_model_name": "HBoxModel", "children": ["IPY_MODEL_value"]},
        "value": {"_model_name": "FloatProgressModel", "max": 8.0, "value": 8.0},
    }
    outputs = [new_output("display_data", data=data) for data in (view, bar, chart)]
    page = written(new_markdown_cell("# T"), new_code_cell("x", outputs=outputs), models=models)
    assert "<div>x.StatusLine</div></section>" in page
    assert ".line {}" in page
    assert "TrainingChart" not in page
    assert "not shown here" not in page
    assert '<progress max="8" value="8"' in page
    images = [attributes for tag, attributes in Elements(page).found if tag == "img"]
    assert [image["alt"] for image in images] == ['Chart: a "b" & c']
    assert images[0]["src"] == "data:image/png;base64,1"


def test_links_between_notebooks_become_links_between_pages() -> None:
    page = written(new_markdown_cell("# T\n\n[one](02_two.ko.ipynb), [other](../docs/loops.md), [far](https://example.org/a)"))
    links = [attributes["href"] for tag, attributes in Elements(page).found if tag == "a"]
    assert links[-5:-2] == ["02_two.ko.html", "../../docs/loops.md", "https://example.org/a"]
