"""A notebook open in JupyterLab in a browser: run its cells, look at its page, ask its kernel."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from playwright.sync_api import ConsoleMessage, Error, Locator, Page

from harness.kernel import Kernel
from harness.server import REPOSITORY, Lab

SCREENSHOTS = REPOSITORY / "artifacts" / "screenshots"

# Errors in the browser's console that are not ours, each with the reason. Everything else fails the test.
NOT_OURS: tuple[tuple[str, str], ...] = (
    # JupyterLab removes its splash screen by a timer, which may come after a change of the theme has removed it
    (r"^uncaught: NotFoundError: Failed to execute 'removeChild'[^\n]*\n +at http://[^\n]*/lab/jlab_core\.[^\n]*$", "splash"),
    # JupyterLab, when a notebook is closed or its kernel restarted that still owes an answer
    (r"^uncaught: Error: Canceled future for \w+ message before replies were done", "owed answers"),
    # the server, when kernels are listed while one is being started, which has no last_activity yet (only KeyErrors it lets pass)
    (r"^Failed to load resource: [^\n]* status of 500 [^\n]*\(http://[^/\n]*/api/kernels\?\d+\)$", "a kernel that starts"),
)

PATIENCE_S = 60.0  # on a slow machine it may take as long; only a test that fails waits for all of it
AROUND_PX = 200  # JupyterLab's menu, tool bar and status bar, and room around

NO_MODEL = "widget model not found"  # ipywidgets says so in the console
PANEL = "const app = window.jupyterapp; const panel = app.shell.currentWidget; const notebook = panel?.content;"


class CellError(AssertionError):
    """A cell ended with an exception; the message is its traceback."""


class Notebook:
    """A page with one notebook.

    Attributes
    ----------
    page
        Playwright's page, for locators and the keyboard.
    errors
        What the page wrote to the console as an error, and exceptions nobody caught. Checked when the test ends.
    expected
        Parts of errors that the test brings about; those are not kept.
    left
        Whether `leave` has been called: the page is not this notebook's any more.
    """

    def __init__(self, lab: Lab, page: Page, name: str) -> None:
        self.lab = lab
        self.page = page
        self.name = name
        self.errors: list[str] = []
        self.expected: list[str] = []
        self.left = False
        page.on("console", self._on_console)
        page.on("pageerror", self._on_uncaught)

    # --- the page ---

    def open(self, timeout_s: float = PATIENCE_S, *, kernel: bool = True) -> None:
        """Open it in the page's JupyterLab, or load that; wait for the cells and, if wanted, the kernel."""
        if self.page.evaluate("!!window.jupyterapp"):
            self._do("await app.commands.execute('docmanager:open', {path: arg, factory: 'Notebook'});", self.name)
        else:
            self.page.goto(self.lab.url(self.name))
        self.wait_ready(timeout_s, kernel=kernel)

    def reopen(self) -> None:
        """Save it, close it and open it again: its widgets come back from what the kernel has, as after `reload`.

        The page is not loaded anew, which takes more of the processor than all else.
        """
        self.save()
        self._close()
        self.open()

    def leave(self) -> None:
        """Close the notebook without saving it, its kernel goes on; another can be opened in the page, which is light again."""
        self._close()
        if self.page.evaluate("document.body.dataset.jpThemeLight") != "true":
            self.set_theme("light")
        self.page.mouse.move(2, 2)
        self.page.remove_listener("console", self._on_console)
        self.page.remove_listener("pageerror", self._on_uncaught)
        self.left = True

    def wait_ready(self, timeout_s: float = PATIENCE_S, *, kernel: bool = True) -> None:
        """Wait until the cells are there and, if wanted, the kernel has answered (a busy one may not)."""
        self.page.wait_for_function(
            """([name, needsKernel]) => { const panel = window.jupyterapp?.shell.currentWidget;
                const kernel = panel?.sessionContext?.session?.kernel;
                return panel?.context?.path === name && !!panel.content?.widgets?.length && panel.context.isReady
                    && (!needsKernel || kernel?.connectionStatus === 'connected'); }""",
            arg=[self.name, kernel],
            timeout=timeout_s * 1000,
        )

    def reload(self, *, kernel: bool = True, save: bool = True, timeout_s: float = PATIENCE_S) -> None:
        """Reload the page as a user would; without `save`, outputs since the last save are lost."""
        if save:
            self.save()
        self.page.reload()
        self.wait_ready(timeout_s, kernel=kernel)

    def reload_until(self, check: Callable[[], object], what: str) -> None:
        """Reload the page until `check` is true, as often as JupyterLab itself fails to get its widgets back.

        Its widget manager asks the kernel for them and has little patience: on a machine that is busy it may say that there is
        no such model. A user reloads once more, and so does this, twice at most.

        Raises
        ------
        AssertionError
            With `what`, when that has not happened in time.
        """
        for _ in range(3):
            self.reload()
            self.wait_until(lambda: check() or self._forgets(NO_MODEL, only_look=True), PATIENCE_S, what)
            if not self._forgets(NO_MODEL):
                return
            print(f"reloaded once more: {NO_MODEL}")
        raise AssertionError(f"{what}: {NO_MODEL}, three times")

    def _forgets(self, text: str, *, only_look: bool = False) -> bool:
        """Whether the page has complained of this; then the complaint is taken off."""
        others = [error for error in self.errors if text not in error]
        found = len(others) < len(self.errors)
        if not only_look:
            self.errors[:] = others
        return found

    def save(self) -> None:
        """Save the notebook with its outputs."""
        self._do("await panel.context.save();")

    def set_theme(self, theme: Literal["light", "dark"]) -> None:
        """Switch JupyterLab's theme and wait until it is drawn."""
        self._do("await app.commands.execute('apputils:change-theme', {theme: arg});", f"JupyterLab {theme.capitalize()}")
        self.page.wait_for_function(
            "light => document.body.dataset.jpThemeLight === light", arg="true" if theme == "light" else "false"
        )
        self.page.locator("#jupyterlab-splash").wait_for(state="detached")  # it hides the page while a theme is loaded slowly

    def screenshot(self, name: str, of: Locator | None = None) -> Path:
        """Keep a picture of the page, or of one element in its full height, under ``artifacts/screenshots``; its path."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        path = SCREENSHOTS / f"{re.sub(r'[^0-9A-Za-z_.-]+', '-', name)}.png"
        if of is None:
            self.page.screenshot(path=path)
            return path
        box, size = of.bounding_box(), self.page.viewport_size
        assert box is not None, "the element is not on the page"
        assert size is not None
        needed = math.ceil(box["height"]) + AROUND_PX
        if needed > size["height"]:  # JupyterLab scrolls within the page: only a taller page shows all of it
            self.page.set_viewport_size({"width": size["width"], "height": needed})
        of.scroll_into_view_if_needed()
        of.screenshot(path=path)
        self.page.set_viewport_size(size)
        return path

    def scrolls_sideways(self, index: int) -> bool:
        """Whether a cell's output is wider than the room it has."""
        return bool(
            self.output(index).evaluate(
                """area => [area, ...area.querySelectorAll('.jp-OutputArea-output, .jp-OutputArea-child')]
                    .some(node => node.scrollWidth > node.clientWidth + 1)"""
            )
        )

    # --- cells ---

    def run(self, index: int) -> None:
        """Start a cell and return at once."""
        self._do(
            """notebook.deselectAll(); notebook.activeCellIndex = arg; notebook.mode = 'command';
            const state = {done: false};
            (window.harnessRuns ??= {})[arg] = state;
            app.commands.execute('notebook:run-cell').finally(() => { state.done = true; });""",
            index,
        )

    def run_and_wait(self, index: int, timeout_s: float = PATIENCE_S) -> None:
        """Run a cell to its end.

        Raises
        ------
        CellError
            When the cell ends with an exception.
        """
        self.run(index)
        self.wait_cell(index, timeout_s)

    def wait_cell(self, index: int, timeout_s: float = PATIENCE_S) -> None:
        """Wait for the end of a cell started with `run`.

        Raises
        ------
        CellError
            When the cell ended with an exception.
        """
        self.wait_until(lambda: not self.is_running(index), timeout_s, f"cell {index} still runs")
        for output in self.outputs(index):
            if output["output_type"] == "error":
                raise CellError(_without_colours("\n".join(output["traceback"])))

    def is_running(self, index: int) -> bool:
        """Whether a cell runs or is queued."""
        return bool(
            self._do(
                """const state = window.harnessRuns?.[arg];
                return state ? !state.done : notebook.widgets[arg].model.executionState !== 'idle';""",
                index,
            )
        )

    def outputs(self, index: int) -> list[dict[str, Any]]:
        """A cell's outputs as in the notebook format."""
        outputs: list[dict[str, Any]] = self._do("return notebook.widgets[arg].model.outputs.toJSON();", index)
        return outputs

    def text(self, index: int) -> str:
        """What a cell printed, and the plain text of what it displayed."""
        parts = []
        for output in self.outputs(index):
            value = output.get("text") or output.get("data", {}).get("text/plain") or output.get("evalue", "")
            parts.append(value if isinstance(value, str) else "".join(value))
        return "".join(parts)

    def output(self, index: int) -> Locator:
        """The output area of a cell in the page."""
        return self.page.locator(".jp-Notebook .jp-Cell").nth(index).locator(".jp-Cell-outputArea")

    def set_cell(self, index: int, source: str) -> None:
        """Replace the code of a cell."""
        self._do("notebook.widgets[arg[0]].model.sharedModel.setSource(arg[1]);", [index, source])

    def cell_sources(self) -> list[str]:
        """The text of every cell, code and markdown."""
        sources: list[str] = self._do("return notebook.widgets.map(cell => cell.model.sharedModel.getSource());")
        return sources

    # --- the kernel ---

    @property
    def kernel(self) -> Kernel:
        """The Python side, which answers also while a cell runs."""
        kernel_id: str = self._do("return panel.sessionContext.session.kernel.id;")
        return Kernel(self.lab.home / "runtime", kernel_id)

    def interrupt(self) -> None:
        """JupyterLab's stop button."""
        self._do("await app.commands.execute('notebook:interrupt-kernel');")

    def restart(self) -> None:
        """Restart the kernel and wait until it answers."""
        self.kernel.forget()
        self._do("await panel.sessionContext.session.kernel.restart();")
        self.wait_ready()

    def shut_down(self) -> None:
        """End the kernel as JupyterLab's menu does."""
        self.kernel.forget()
        self._do("await panel.sessionContext.shutdown();")

    # --- waiting ---

    def wait_until(self, check: Callable[[], object], timeout_s: float = PATIENCE_S, what: str = "it did not come true") -> None:
        """Wait until `check` gives something true.

        Raises
        ------
        AssertionError
            With `what`, when that has not happened in time.
        """
        end, pause_ms = time.monotonic() + timeout_s, 20.0
        while not check():
            if time.monotonic() > end:
                raise AssertionError(f"after {timeout_s:g} s: {what}")
            self.page.wait_for_timeout(pause_ms)  # lets the page's events through, unlike a sleep
            pause_ms = min(1.4 * pause_ms, 100)

    def _close(self) -> None:
        self._do(
            """for (const one of [...app.shell.widgets('main')]) {
                if (one.context) one.context.model.dirty = false;
                one.dispose();
            }
            delete window.harnessRuns;"""
        )

    def _do(self, body: str, arg: object = None) -> Any:
        """Run JavaScript that sees app, panel, notebook and arg."""
        return self.page.evaluate(f"async arg => {{ {PANEL} {body} }}", arg)

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self._on_error(f"{message.text} ({message.location.get('url', '')})")

    def _on_uncaught(self, error: Error) -> None:
        self._on_error(f"uncaught: {error.stack or error}")

    def _on_error(self, text: str) -> None:
        if not any(re.search(pattern, text) for pattern, _ in NOT_OURS) and not any(part in text for part in self.expected):
            self.errors.append(text[:1000])


def _without_colours(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)
