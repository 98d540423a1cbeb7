"""A page of one's own: headings, tables and figures in one HTML file that needs neither a kernel nor a network."""

from __future__ import annotations

import base64
import hashlib
import html
import os
import pathlib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from amp_widgets.charts.look import Theme
from amp_widgets.charts.page_scripts import page_script
from amp_widgets.charts.two_themes import two_themes
from amp_widgets.errors import ExportError
from amp_widgets.export.blocks import block, with_small_arrays
from amp_widgets.export.new_file import check_free, write_whole
from amp_widgets.language import in_language, language, marked, page_script_in_language, say

if TYPE_CHECKING:
    import plotly.graph_objects as go

Plotly = Literal["inline", "link", "none"]
"""Where the page has plotly.js from: it is in it (4.8 MB); from Plotly's server, which the page is then allowed to ask for this
one file; or nowhere, and the page has pictures only."""
_HERE = pathlib.Path(__file__).parent


class Page:
    """Parts one below the other; texts are texts, and never HTML.

    Parameters
    ----------
    title
        Of the page.
    plotly
        See `Plotly`.

    Raises
    ------
    ExportError
        When `plotly` is none of these.

    Notes
    -----
    A Content-Security-Policy in the page lets no script run but its own, by its hash, and no network be used but for the link to
    plotly.js where that was chosen. The page follows the reader's light or dark scheme, has a switch for it, and prints in light.
    """

    def __init__(self, title: str, *, plotly: Plotly = "inline") -> None:
        if plotly not in get_args(Plotly):
            raise ExportError(f"plotly: got {plotly!r}, expected one of {', '.join(map(repr, get_args(Plotly)))}")
        self._title = title
        self._plotly = plotly
        self._parts: list[str] = []
        self._figures: list[dict[str, Any]] = []
        self._blocks: list[str] = []

    def heading(self, text: str) -> None:
        """Of a section."""
        self._parts.append(f"<h2>{_said(text)}</h2>")

    def paragraph(self, text: str, *, note: bool = False) -> None:
        """A paragraph, small as a `note`."""
        self._parts.append(f"<p{' class=note' if note else ''}>{_said(text)}</p>")

    def bullets(self, lines: Iterable[str]) -> None:
        """A list."""
        self._parts.append(f"<ul>{''.join(f'<li>{_said(line)}</li>' for line in lines)}</ul>")

    def terms(self, terms: Mapping[str, str]) -> None:
        """Short facts, side by side: what → how much."""
        found = "".join(f"<div><dt>{_said(name)}</dt><dd>{escaped(value)}</dd></div>" for name, value in terms.items())
        self._parts.append(f"<dl>{found}</dl>")

    def table(
        self, columns: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Collection[int] = (), folded: str | None = None
    ) -> None:
        """A table; `numbers` are the columns that are aligned right. With `folded` it is behind that word until it is opened."""
        side = [" class=number" if i in numbers else "" for i in range(len(columns))]
        head = "".join(f"<th scope=col{kind}>{_said(name)}</th>" for name, kind in zip(columns, side, strict=True))
        cells = ("".join(f"<td{kind}>{_cell(cell)}</td>" for cell, kind in zip(row, side, strict=True)) for row in rows)
        body = "".join(f"<tr>{row}</tr>\n" for row in cells)
        found = f"<div class=table><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>"
        if folded is not None:
            found = f"<details><summary>{_said(folded)}</summary>{found}</details>"
        self._parts.append(found)

    def figure(self, draw: Callable[[Theme], go.Figure], *, label: str, still: str = "", along: str = "") -> None:
        """A chart.

        Parameters
        ----------
        draw
            Theme → figure, see `amp_widgets.charts.two_themes`.
        label
            The same in words.
        still
            An SVG document, for where no script runs.
        along
            A name of what is along its axis: where one is zoomed, all with the same name are.
        """
        label = in_language(label)
        picture = base64.b64encode(still.encode()).decode()
        image = f'<img class=still src="data:image/svg+xml;base64,{picture}" alt="{escaped(label)}">' if still else ""
        if self._plotly == "none":
            self._parts.append(f"<figure>{image or escaped(label)}</figure>")
            return
        self._figures.append({"figure": with_small_arrays(two_themes(draw)), "label": label, "along": along})
        place = f'<div class=chart data-figure="{len(self._figures) - 1}"></div>'
        self._parts.append(f"<figure>{place}{image or f'<p class=still>{escaped(label)}</p>'}</figure>")

    def data(self, name: str, value: Any) -> None:
        """JSON for programs, by its name: `amp_widgets.export.blocks.read_block` reads it."""
        self._blocks.append(block(name, value))

    def html(self) -> str:
        """The whole page."""
        scripts, policy = self._scripts()
        style = (_HERE.parent / "charts" / "live.css").read_text(encoding="utf-8") + _text("page.css")
        return (
            f"<!doctype html>\n<html lang={language()}>\n<head>\n<meta charset=utf-8>\n"
            f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">\n'
            f'<meta name=viewport content="width=device-width, initial-scale=1">\n<meta name=color-scheme content="light dark">\n'
            f"<title>{escaped(self._title)}</title>\n<style>{style}</style>\n</head>\n<body>\n<main>\n"
            f"<header><h1>{escaped(self._title)}</h1>{_switch() if scripts else ''}</header>\n"
            + "\n".join(self._parts)
            + "\n</main>\n"
            + "\n".join([*self._blocks, *scripts])
            + "\n</body>\n</html>\n"
        )

    def write(self, path: str | os.PathLike[str], *, overwrite: bool = False, what: str = "export_html") -> pathlib.Path:
        """Write it to a file, whole or not at all.

        Raises
        ------
        ExportError
            When there is a file already and it may not be replaced, or it cannot be written.
        """
        check_free(pathlib.Path(path).absolute(), overwrite=overwrite, what=what)
        content = self.html()
        return write_whole(
            path, lambda made: made.write_text(content, encoding="utf-8", newline="\n"), overwrite=overwrite, what=what
        )

    def _scripts(self) -> tuple[list[str], str]:
        """The elements, and the policy that allows them."""
        allowed: list[str] = []
        elements: list[str] = []
        if self._figures:
            words = page_script_in_language(page_script("figure_view"))
            script = f"const VERSION = {_plotly_version()!r};\n{words}{_text('page.js')}"
            elements.append(block("figures", self._figures))
            library = _plotly_script()
            if self._plotly == "inline":
                elements.append(f"<script>{library}</script>")
                allowed.append(f"'{_hash(library)}'")
            else:
                url = f"https://cdn.plot.ly/plotly-{_plotly_version()}.min.js"
                elements.append(f'<script src="{url}" integrity="{_hash(library)}" crossorigin=anonymous></script>')
                allowed.append(url)
            elements.append(f"<script type=module>{script}</script>")
            allowed.append(f"'{_hash(script)}'")
        return elements, _POLICY.format(scripts=" ".join(allowed) or "'none'")


def escaped(text: str) -> str:
    """For HTML, also within quotes; what no page can show is replaced."""
    return html.escape(re.sub("[^\t\n\r\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text))


def _said(text: str) -> str:
    """A text in the language in force, for HTML."""
    return escaped(in_language(text))


def _cell(text: str) -> str:
    """Of a table: a single word may be the name of a layer."""
    return _said(text) if " " in text else escaped(text)


# Words of a page that are in no sentence.
_WORDS = (
    marked("steps"), marked("last loss"), marked("skipped steps"), marked("highest peak"), marked("median step"),
    marked("changes"), marked("Notes"), marked("Training"), marked("Gradients"), marked("Events"), marked("Layers"),
    marked("Environment"), marked("setting"), marked("at the end"), marked("at the beginning"), marked("step"), marked("after"),
    marked("what"), marked("reason"), marked("layer"), marked("type"), marked("parameters"), marked("which"),
    marked("scale changed"), marked("skipped, scale changed"), marked("scale_changed"),
)  # fmt: skip
_POLICY = (
    "default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)


def _switch() -> str:
    """Buttons for the colours of the page; its script shows them."""
    names = {"auto": say("auto"), "light": say("light"), "dark": say("dark"), "high-contrast": say("high contrast")}
    buttons = "".join(f'<button type=button data-theme="{theme}">{escaped(name)}</button>' for theme, name in names.items())
    return f'<div class=themes role=group aria-label="{escaped(say("colours"))}" hidden>{buttons}</div>'


def _text(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


def _plotly_script() -> str:
    from plotly.offline import get_plotlyjs

    script = str(get_plotlyjs())
    if re.search(r"</script|<!--", script, re.IGNORECASE):  # it would end the element; no version so far has it
        raise ExportError("plotly: this version of plotly.js cannot be put into a page; plotly='link' or 'none' goes without")
    return script


def _plotly_version() -> str:
    from plotly.offline import get_plotlyjs_version

    return str(get_plotlyjs_version())
