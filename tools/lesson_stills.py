"""Pictures of charts and of controls for pages without scripts, drawn in a browser that is never seen."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import plotly
from playwright.sync_api import sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
WIDTH_PX, HEIGHT_PX = 860, 320
MOST_BYTES = 40_000
"""Of a chart as SVG: with hundreds of points it has hundreds of elements."""
_HERE = Path(__file__).parent
_PLOTLY = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
_SAFE = " =:;/?@!$()*+,'{}|[]^`~"
"""Left as they are in an address of data; quoted are what ends the attribute or the address, and what HTML reads."""
_PAGE = '<!doctype html><meta charset="utf-8"><body class="jp-Notebook"></body>'


class Stills:
    """One browser for many pictures; a context manager."""

    def __enter__(self) -> Self:
        chromium = next(filter(None, map(shutil.which, BROWSERS)), None)
        if chromium is None:
            raise SystemExit(f"the pages need a browser: got none of {', '.join(BROWSERS)} on the PATH; install chromium")
        self._playwright = sync_playwright().start()
        self._browser = self._playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        self._page = self._browser.new_page(viewport={"width": 1000, "height": 2600})
        self._page.set_content(_PAGE)
        self._page.add_script_tag(path=_PLOTLY)
        self._page.add_script_tag(path=_HERE / "lesson_stills.js")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._browser.close()
        self._playwright.stop()

    def chart(self, figure: Mapping[str, Any]) -> str:
        """A Plotly figure as the address of a picture that holds all of it: SVG, or pixels where that is much smaller.

        Parameters
        ----------
        figure
            As JSON.
        """
        size = {"width": WIDTH_PX, "height": figure.get("layout", {}).get("height", HEIGHT_PX)}
        svg: str = self._page.evaluate("([figure, size]) => chart(figure, 'svg', size)", [figure, size])
        # A hundredth of a pixel is enough; Plotly writes up to sixteen digits.
        svg = re.sub(r"\d+\.\d{2,}", lambda found: f"{float(found[0]):.2f}".rstrip("0").rstrip("."), svg)
        address = "data:image/svg+xml," + quote(svg, safe=_SAFE)
        if len(address) <= MOST_BYTES:
            return address
        pixels: str = self._page.evaluate("([figure, size]) => chart(figure, 'webp', size)", [figure, {**size, "scale": 1.5}])
        return pixels

    def controls(self, models: Sequence[Mapping[str, Any]]) -> list[str]:
        """Widgets as they look in these states, as HTML in which nothing can be changed.

        Parameters
        ----------
        models
            The state of each, as a notebook keeps it; with the code of the page in it.
        """
        drawn: list[str] = self._page.evaluate("(models) => controls(models)", list(models))
        return drawn
