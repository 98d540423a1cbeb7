"""A real JupyterLab and a real Chromium for the tests in this directory.

Where they cannot run, the tests are skipped with the reason; with CI=true they fail.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

    from harness.notebook import Notebook
    from harness.server import Lab

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# No GPU, no sandbox (root), and no word to any host of its own accord.
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
WIDTH_PX, HEIGHT_PX = 1280, 1000
PATIENCE_MS = 60_000  # as harness.notebook.PATIENCE_S

failed_key = pytest.StashKey[bool]()


class OpenNotebook(Protocol):
    """Opens a notebook in a page of its own."""

    def __call__(
        self,
        cells: Sequence[str] = (),
        *,
        path: Path | None = None,
        name: str | None = None,
        height: int = 1000,
        kernel: bool = True,
        fresh: bool = False,
    ) -> Notebook:
        """Open code `cells`, a copy of the notebook at `path`, or one by its `name`; wait for its `kernel` or not.

        The page is new where `fresh`, and then no test after this one gets it.
        """


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory, in_ci: bool) -> Iterator[Lab]:
    """One JupyterLab server for all tests."""
    _need(in_ci)
    from harness.server import Lab

    server = Lab(tmp_path_factory.mktemp("lab"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def browser(in_ci: bool) -> Iterator[Browser]:
    """One Chromium for all tests."""
    executable = _need(in_ci)
    from playwright.sync_api import Error, sync_playwright

    with sync_playwright() as playwright:
        try:
            started = playwright.chromium.launch(executable_path=executable, headless=True, args=FLAGS)
        except Error as error:
            _cannot(f"{executable} does not start: {error}", in_ci)
        yield started
        started.close()


class Pages:
    """Pages of one browser; those that are given back have JupyterLab loaded, and no notebook open.

    Loading JupyterLab and the first chart takes more of the processor than most tests do.
    """

    def __init__(self, context: BrowserContext) -> None:
        self._context = context  # with a cache of its own, each page would even compile JupyterLab anew
        self._free: list[Page] = []

    def take(self, *, fresh: bool = False) -> Page:
        """One that was given back, or a new one."""
        return self._free.pop() if self._free and not fresh else self._context.new_page()

    def give_back(self, notebook: Notebook) -> None:
        """Close the notebook, and keep its page for another unless a dialog is left in it."""
        notebook.leave()
        if notebook.page.locator(".jp-Dialog").count():
            notebook.page.close()
        else:
            self._free.append(notebook.page)


@pytest.fixture(scope="session")
def pages(browser: Browser) -> Pages:
    """The pages of all tests."""
    context = browser.new_context()
    context.set_default_timeout(PATIENCE_MS)
    return Pages(context)


@pytest.fixture
def open_notebook(lab: Lab, pages: Pages, request: pytest.FixtureRequest) -> Iterator[OpenNotebook]:
    """Opens notebooks in pages 1280 pixels wide, each alone in its page; afterwards the browser's console must show no error."""
    from harness.notebook import Notebook

    lab.forget_theme()
    opened: list[Notebook] = []
    not_again: list[Notebook] = []

    def open_one(
        cells: Sequence[str] = (),
        *,
        path: Path | None = None,
        name: str | None = None,
        height: int = HEIGHT_PX,
        kernel: bool = True,
        fresh: bool = False,
    ) -> Notebook:
        if name is None:
            name = lab.copy_notebook(path) if path is not None else lab.write_notebook(cells)
        notebook = Notebook(lab, pages.take(fresh=fresh), name)
        notebook.page.set_viewport_size({"width": WIDTH_PX, "height": height})
        opened.append(notebook)
        if fresh:
            not_again.append(notebook)
        notebook.open(kernel=kernel)
        return notebook

    yield open_one

    failed = request.node.stash.get(failed_key, False)
    for number, notebook in enumerate(opened):
        if notebook.left:
            continue
        if failed and not notebook.page.is_closed():
            name = f"failed-{request.node.name}-{number}"
            print(f"picture: {notebook.screenshot(name)}\nconsole: {notebook.errors}")
        if failed or notebook.errors or notebook in not_again:
            notebook.page.close()
        elif not notebook.page.is_closed():
            pages.give_back(notebook)
    for name in {notebook.name for notebook in opened}:
        lab.end_kernels(name)
    if failed:
        print(f"end of the server's log:\n{lab.log()}")
    else:
        errors = [error for notebook in opened for error in notebook.errors]
        assert not errors, "errors in the browser's console:\n" + "\n".join(errors)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[failed_key] = True
    return report


def _need(in_ci: bool) -> str:
    """The path of Chromium; skips or fails when it or a package is missing."""
    missing = [name for name in ("playwright", "jupyterlab", "ipywidgets") if importlib.util.find_spec(name) is None]
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if missing:
        _cannot(f"needs {', '.join(missing)}: pip install -e '.[lab,dev]'", in_ci)
    if executable is None:
        _cannot(f"needs Chromium (none of {', '.join(BROWSERS)} is on the PATH)", in_ci)
    return executable


def _cannot(reason: str, in_ci: bool) -> NoReturn:
    if in_ci:
        pytest.fail(f"the browser tests cannot run, and with CI=true that is a failure: {reason}")
    pytest.skip(reason)
