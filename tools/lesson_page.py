"""A lesson that was run, as one HTML page without a script: what is in the notebook, and its widgets as they were left."""

from __future__ import annotations

import html
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from nbconvert.filters import ansi2html
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from nbformat import NotebookNode
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

VIEW, STATE, PLOTLY = (
    "application/vnd.jupyter.widget-view+json", "application/vnd.jupyter.widget-state+json", "application/vnd.plotly.v1+json",
)  # fmt: skip
SHOWN = (
    "StatusLine", "ReplayStatus", "Transport", "RunControl", "AutocastControl", "ScalerControl", "LayersControl", "FormatLab",
)  # fmt: skip
"""Widgets whose controls are drawn. Charts have a picture of their own, and what else is in a dashboard waits behind a tab."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"

_STYLE = (Path(__file__).parent / "lesson_page.css").read_text(encoding="utf-8")
_WORDS: Mapping[str, Mapping[str, str]] = {
    "en": {
        "skip": "Skip to the lesson",
        "lessons": "All lessons",
        "other": "한국어",
        "before": "Previous lesson",
        "after": "Next lesson",
        "between": "Lessons",
        "notebook": "The notebook",
        "facts": "What the lesson showed when it was run from top to bottom on {machine}, with torch {torch}. Nothing here is "
        "live: run the notebook to try things, and to see the numbers of your own machine.",
        "cores": "{cores} CPU cores",
        "played": "The demo that waits for its Start was started at the end, for its picture.",
        "folded": "Code of this cell",
        "answer": "What was measured (guess first)",
        "controls": "The controls as they were left",
        "chart": "Chart",
        "of": "{y} over {x}",
    },
    "ko": {
        "skip": "강의로 건너뛰기",
        "lessons": "전체 강의",
        "other": "English",
        "before": "이전 강의",
        "after": "다음 강의",
        "between": "강의",
        "notebook": "노트북",
        "facts": "강의를 {machine}, torch {torch}에서 처음부터 끝까지 실행한 결과입니다. 이 페이지에서는 아무것도 실행되지 "
        "않습니다. 직접 해 보고 여러분 컴퓨터의 숫자를 보려면 노트북을 실행하세요.",
        "cores": "CPU 코어 {cores}개",
        "played": "시작을 기다리는 데모는 그림을 남기려고 마지막에 시작했습니다.",
        "folded": "이 셀의 코드",
        "answer": "측정 결과 (먼저 예상해 보세요)",
        "controls": "마지막 상태의 컨트롤",
        "chart": "차트",
        "of": "{x}에 따른 {y}",
    },
}
_LISTED = (
    "<main>\n<h1>The lessons, as they ran <span lang=ko>· 강의 실행 결과</span></h1>\n<div class=two>"
    "<p>Text, code and results of each lesson, to be read without a kernel. The notebooks themselves are in the folder above.</p>"
    "<p lang=ko>강의마다 설명과 코드와 실행 결과를 담았습니다. 커널 없이 읽을 수 있습니다. 노트북은 상위 폴더에 있습니다.</p>"
    "</div>\n<ol class=lessons>\n{rows}\n</ol>\n</main>"
)


class Draws(Protocol):
    """What draws for a page, see `lesson_stills.Stills`."""

    def chart(self, figure: Mapping[str, Any]) -> str: ...
    def controls(self, models: Sequence[Mapping[str, Any]]) -> list[str]: ...


def lesson_page(
    run: NotebookNode,
    language: str,
    *,
    digest: str,
    facts: Mapping[str, Any],
    stills: Draws,
    twins: Mapping[str, str],
    before: str | None,
    after: str | None,
) -> str:
    """The page.

    Parameters
    ----------
    run
        The notebook, with outputs and the state of its widgets.
    language
        Of it.
    digest
        Of its cells, kept in the page.
    facts
        What it was run on: ``system``, ``cores``, ``device``, ``torch``, ``played``.
    stills
        What draws its charts and controls.
    twins
        Language → name of the page in it.
    before, after
        Names of the pages of the lessons around it; None where there is none.
    """
    words = _WORDS[language]
    body = _Body(run, language, stills)
    cells = "\n".join(filter(None, map(body.cell, run.cells)))
    other = next(each for each in twins if each != language)
    machine = facts["device"] or f"{facts['system']}, {words['cores'].format(cores=facts['cores'])}"
    said = words["facts"].format(machine=machine, torch=facts["torch"]) + (f" {words['played']}" if facts["played"] else "")
    around = [
        f'<a rel={rel} href="{name}">{words[word]}</a>'
        for rel, word, name in (("prev", "before", before), ("next", "after", after))
        if name is not None
    ]
    notebook = "../" + twins[language].removesuffix(".html") + ".ipynb"
    return _document(
        language,
        body.title,
        f'<meta name="lesson-source" content="{digest}">\n<link rel="alternate" hreflang="{other}" href="{twins[other]}">\n',
        f'<a class=skip href="#lesson">{words["skip"]}</a>\n'
        f'<header><nav aria-label="{words["between"]}"><a href="index.html">{words["lessons"]}</a> '
        f'<a href="{twins[other]}" hreflang={other} lang={other}>{words["other"]}</a></nav></header>\n'
        f"<main id=lesson>\n{cells}\n</main>\n"
        f'<footer><nav aria-label="{words["before"]}, {words["after"]}">{" ".join(around)}</nav>\n'
        f'<p>{html.escape(said)} <a href="{notebook}">{words["notebook"]}</a></p></footer>',
        body.style(),
    )


def index_page(lessons: Sequence[Mapping[str, tuple[NotebookNode, str]]]) -> str:
    """The list of the lessons.

    Parameters
    ----------
    lessons
        For each language → notebook, and the name of its page.
    """
    entries = ["".join(_entry(made, name, language) for language, (made, name) in lesson.items()) for lesson in lessons]
    listed = _LISTED.format(rows="\n".join(f"<li>{entry}</li>" for entry in entries))
    return _document("en", "The lessons, as they ran · 강의 실행 결과", "", listed, "")


def _entry(made: NotebookNode, name: str, language: str) -> str:
    title, _, rest = made.cells[0].source.partition("\n")
    lead = rest.strip().split("\n\n")[0]
    return (
        f'<div lang={language}><h2><a href="{name}" hreflang={language}>{_in_line(title.removeprefix("# "))}</a></h2>'
        f"{_markdown(lead)}</div>"
    )


def _document(language: str, title: str, head: str, body: str, style: str) -> str:
    return (
        f'<!doctype html>\n<html lang={language}>\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<meta name="color-scheme" content="light dark">\n'
        f"<title>{html.escape(title)}</title>\n{head}<style>\n{style}{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


class _Body:
    """The cells of one notebook."""

    def __init__(self, run: NotebookNode, language: str, stills: Draws) -> None:
        self._words = _WORDS[language]
        self._stills = stills
        state = run.metadata.get("widgets", {}).get(STATE, {}).get("state", {})
        self._models: Mapping[str, Mapping[str, Any]] = {name: model["state"] for name, model in state.items()}
        self._styles: list[str] = []
        self.title = ""
        self._level = 1  # of the heading before

    def cell(self, cell: NotebookNode) -> str:
        """One cell; nothing where there is nothing to be seen."""
        if cell.cell_type == "markdown":
            found = re.match(r"# (.+)", cell.source)
            self.title = self.title or (found[1].replace("`", "") if found else "")
            self._level = next((len(marks) for marks in reversed(re.findall(r"^(#+) ", cell.source, re.M))), self._level)
            return _markdown(cell.source)
        code = f"<pre class=code tabindex=0><code>{_highlighted(cell.source)}</code></pre>"
        if cell.metadata.get("jupyter", {}).get("source_hidden"):
            code = f"<details class=folded><summary>{self._words['folded']}</summary>{code}</details>"
        outputs = "\n".join(filter(None, self._outputs(cell.outputs)))
        return code + (f"\n<div class=outputs>\n{outputs}\n</div>" if outputs else "")

    def style(self) -> str:
        """Of the widgets that are shown: what is common to all comes once."""
        whole, common = "", ""
        for style in sorted(self._styles, key=len):
            new = style.removeprefix(common) if common else style
            common = common or style
            whole += new
        return re.sub(r"/\*.*?\*/|\n\s*(?=\n)", "", whole, flags=re.S)

    def _outputs(self, outputs: Sequence[NotebookNode]) -> Iterator[str]:
        """What is shown of them; streams in pieces are one text, and what tells an answer is folded away."""
        for kind, some in itertools.groupby(outputs, _kind):
            if kind == "printed":
                yield _printed("".join(output.text for output in some))
            elif kind == "covered":
                parts = "\n".join(map(self._output, some))
                yield f"<details class=answer><summary>{self._words['answer']}</summary>\n{parts}\n</details>"
            else:
                yield from map(self._output, some)

    def _output(self, output: NotebookNode) -> str:
        if output.output_type == "error":
            return _printed("\n".join(output.traceback))
        data = output.data
        if VIEW in data:
            drawn = self._widget(data[VIEW]["model_id"])
            if drawn or "text/html" not in data:
                return drawn
        if PLOTLY in data:
            return self._chart(data[PLOTLY])
        if "text/html" in data:
            return _cleaned(data["text/html"])
        for kind in ("image/svg+xml", "image/png"):
            if kind in data:
                raise ValueError(f"an output of a lesson: got {kind}, expected a chart of Plotly, a widget, HTML or text")
        return _printed(data.get("text/plain", ""))

    def _chart(self, figure: Mapping[str, Any]) -> str:
        picture = self._stills.chart(figure)
        layout = figure.get("layout", {})
        titles = {axis: (layout.get(f"{axis}axis") or {}).get("title", {}) for axis in "xy"}
        said = {axis: title if isinstance(title, str) else title.get("text", "") for axis, title in titles.items()}
        what = self._words["of"].format(**said) if all(said.values()) else self._words["chart"]
        names = [str(trace["name"]) for trace in figure.get("data", []) if trace.get("name")]
        label = _plain(what + (f": {', '.join(dict.fromkeys(names))}" if names else ""))
        # As an image: the names of its parts would clash with those of the next one.
        return f'<figure><img src="{picture}" alt="{html.escape(label)}"></figure>'

    def _widget(self, model_id: str) -> str:
        """What is in a widget, as far as it is drawn."""
        model = self._models.get(model_id, {})
        kind = str(model.get("_anywidget_id", "")).rpartition(".")[2]
        if kind == "FigureView" and model.get("figure"):
            return self._chart(model["figure"])
        if model.get("_model_name") == "HBoxModel":
            return _progress([self._models[_reference(one)] for one in model["children"]])
        found = [one for one in self._within(model_id) if str(one.get("_anywidget_id", "")).rpartition(".")[2] in SHOWN]
        if not found:
            return ""
        for one in found:
            if one["_css"] not in self._styles:
                self._styles.append(one["_css"])
        # Their headings are of the third level, under one of the second.
        drawn = [
            re.sub(r"<h([34])", lambda one: f'{one[0]} aria-level="{self._level + int(one[1]) - 2}"', markup)
            for markup in self._stills.controls(found)
        ]
        if kind:
            return f"<div class=controls>{drawn[0]}</div>"
        return f'<section class="controls ampw-dashboard" aria-label="{self._words["controls"]}">{"".join(drawn)}</section>'

    def _within(self, model_id: str) -> Iterator[Mapping[str, Any]]:
        model = self._models.get(model_id, {})
        yield model
        for child in model.get("children", ()):
            yield from self._within(_reference(child))


def _kind(output: NotebookNode) -> str:
    if output.output_type == "stream":
        return "printed"
    return "covered" if output.get("metadata", {}).get("covered") else "shown"


def _reference(text: str) -> str:
    return text.removeprefix("IPY_MODEL_")


def _progress(parts: Sequence[Mapping[str, Any]]) -> str:
    """tqdm's bar, with the words on both sides."""
    drawn = []
    for part in parts:
        if part["_model_name"] == "FloatProgressModel":
            drawn.append(f'<progress max="{part["max"]:g}" value="{part["value"]:g}" aria-hidden=true></progress>')
        else:
            drawn.append(f"<span>{part.get('value', '')}</span>")
    return f"<div class=progress>{' '.join(drawn)}</div>"


def _printed(text: str) -> str:
    lines = [line.rpartition("\r")[2] for line in text.replace("\r\n", "\n").split("\n")]  # a line that was written over
    joined = "\n".join(lines).strip("\n")
    return f"<pre class=printed tabindex=0>{ansi2html(joined)}</pre>" if joined.strip() else ""


def _cleaned(markup: str) -> str:
    """Without what is for a notebook's page only."""
    markup = re.sub(r"<style>.*?</style>", "", markup, flags=re.S)
    markup = re.sub(r"\bampw-still-\w+", "still", markup)
    # items that are in no list, as in a report; those of a list stay as they are
    markup = re.sub(
        r"(<[uo]l\b.*?</[uo]l>)|((?:<li\b.*?</li>\s*)+)", lambda one: one[1] or f"<ul>{one[2]}</ul>", markup, flags=re.S
    )
    markup = markup.replace("<table", "<div class=wide tabindex=0><table").replace("</table>", "</table></div>")
    return f"<div class=html>{markup}</div>"


def _markdown(source: str) -> str:
    renderer = IPythonRenderer(escape=False, exclude_anchor_links=True)
    text: str = MarkdownWithMath(renderer=renderer).render(source)
    text = text.replace("<table>", "<div class=wide tabindex=0><table>").replace("</table>", "</table></div>")
    return re.sub(r'href="([^"#:]+)"', lambda found: f'href="{_page_of(found[1])}"', text)


def _in_line(source: str) -> str:
    """A title, in which there may be code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(source))


def _page_of(target: str) -> str:
    """A link of a notebook, from its page: to the page of another lesson, or to a file, which is a folder further off."""
    return re.sub(r"\.ipynb$", ".html", target) if re.fullmatch(r"\d\d_[\w.]+\.ipynb", target) else f"../{target}"


def _highlighted(source: str) -> str:
    text: str = highlight(source, get_lexer_by_name("ipython3"), HtmlFormatter(nowrap=True))
    return _NO_COLOUR.sub(r"\1", text).rstrip()


def _plain(text: str) -> str:
    """What Plotly takes for markup is not read out."""
    return html.unescape(re.sub(r"<[^>]*>", " ", text)).strip()


_NO_COLOUR = re.compile(r'<span class="(?!(?:k|kn|kc|ow|n[bdfc]|s[12aei]?|m[if]|c1)")\w+">([^<]*)</span>')
"""Of Pygments' classes those for which the page has no colour."""
