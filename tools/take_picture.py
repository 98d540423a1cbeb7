"""Take the picture of the README: ``python tools/take_picture.py``.

A real JupyterLab in a real Chromium, as the tests in ``tests/browser`` have it: the text demo is trained, its switches are
flipped on the way, and what the dashboard shows then is written to ``docs/dashboard.png``.
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "browser"))

from conftest import BROWSERS, FLAGS  # noqa: E402  # tests/browser is no package
from harness.notebook import Notebook  # noqa: E402
from harness.server import Lab  # noqa: E402

PLACE = ROOT / "docs" / "dashboard.png"
MOST_BYTES = 250_000
COLOURS = 128
WIDTH_PX, HEIGHT_PX = 1240, 2600
CELL = """
import torch
import amp_widgets as aw
torch.set_num_threads(1)
session = aw.demo("text", display=False)
session.schedule(at_step=6, autocast="fp16", init_scale=2**24)
session.schedule(at_step=16, autocast="bf16")
session.schedule(at_step=22, autocast="fp32")
session.schedule(at_step=26, checkpointed=["layers.*"])
session.dashboard()
"""
LAST_STEP = 32
PATIENCE_S = 240


def take(path: Path = PLACE) -> int:
    """Take it; the size of the file, in bytes."""
    chromium = next(filter(None, map(shutil.which, BROWSERS)), None)
    if chromium is None:
        sys.exit(f"needs Chromium: none of {', '.join(BROWSERS)} is on the PATH")
    with tempfile.TemporaryDirectory() as home, sync_playwright() as playwright:
        lab = Lab(Path(home))
        lab.start()
        try:
            browser = playwright.chromium.launch(executable_path=chromium, headless=True, args=FLAGS)
            notebook = Notebook(lab, browser.new_page(), lab.write_notebook([CELL]))
            notebook.page.set_viewport_size({"width": WIDTH_PX, "height": HEIGHT_PX})
            picture = _play(notebook)
            browser.close()
        finally:
            lab.stop()
    path.parent.mkdir(exist_ok=True)
    with Image.open(io.BytesIO(picture)) as image:
        image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    return path.stat().st_size


def _play(notebook: Notebook) -> bytes:
    """Train until the last change has been profiled; what is on the page from the status line down to the mountain."""
    notebook.open()
    notebook.run_and_wait(0)
    area = notebook.output(0)
    area.locator(".js-plotly-plot").first.wait_for()
    area.get_by_role("button", name="Start", exact=True).click()

    def step() -> Any:
        return notebook.kernel.eval("session.status().step")

    notebook.wait_until(lambda: int(step()) >= LAST_STEP, PATIENCE_S, "the run has not come to its last step")
    area.get_by_role("button", name="Pause", exact=True).click()
    notebook.wait_until(lambda: notebook.kernel.eval("session.run_state") == "paused", PATIENCE_S, "it does not pause")
    before = area.get_by_label("Before", exact=True)
    texts = before.locator("option").all_inner_texts()
    before.select_option(index=next(index for index, text in enumerate(texts) if text.startswith("fp32 (")))
    notebook.page.wait_for_timeout(2000)  # the charts draw what has come
    whole = area.locator(".ampw-dashboard").bounding_box()
    plot = area.locator(".js-plotly-plot").nth(1).bounding_box()
    assert whole is not None
    assert plot is not None
    clip = {"x": whole["x"], "y": whole["y"], "width": whole["width"], "height": plot["y"] + plot["height"] - whole["y"]}
    return notebook.page.screenshot(clip=clip)  # type: ignore[arg-type]  # a FloatRect by its names


if __name__ == "__main__":
    size = take()
    print(f"{PLACE}: {size:,} bytes")
    sys.exit(size > MOST_BYTES)
