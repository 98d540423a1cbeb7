"""The user's path, in a real JupyterLab: the quickstart, Start, and every kind of switch; both sides are asserted."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conftest import OpenNotebook


def test_look(open_notebook: OpenNotebook) -> None:
    notebook = open_notebook(["%load_ext amp_widgets", "%amp demo digits"], height=1400)
    notebook.run_and_wait(0)
    notebook.run_and_wait(1)
    notebook.page.wait_for_timeout(4000)
    notebook.screenshot("look-0-ready")
    notebook.page.get_by_role("button", name="Start", exact=True).click()
    notebook.page.wait_for_timeout(6000)
    notebook.kernel.exec("session.request(autocast='fp16', init_scale=2**40)")
    notebook.page.wait_for_timeout(8000)
    notebook.kernel.exec("session.request(checkpointed=['layers.*'])")
    notebook.page.wait_for_timeout(5000)
    notebook.screenshot("look-1-light")
    notebook.set_theme("dark")
    notebook.page.wait_for_timeout(2500)
    notebook.screenshot("look-2-dark")
    print(notebook.kernel.eval("session.status()"))
    print(notebook.kernel.eval("[str(e) for e in session.history.events()]"))
    notebook.set_theme("light")
