"""The pages of the lessons in a real browser: nothing is fetched, nothing is complained about, and all of it can be seen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import pytest

from harness.server import REPOSITORY

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.browser

RESULTS = REPOSITORY / "notebooks" / "results"


@pytest.mark.parametrize(
    ("name", "scheme", "width_px"),
    [("04_underflow.html", "light", 940), ("01_quickstart.ko.html", "dark", 390), ("index.html", "dark", 940)],
)
def test_a_page_reads_alone(browser: Browser, name: str, scheme: Literal["dark", "light"], width_px: int) -> None:
    page = browser.new_page(viewport={"width": width_px, "height": 2600}, color_scheme=scheme)
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url) if not request.url.startswith("data:") else None)
    address = (RESULTS / name).as_uri()
    try:
        page.goto(address)
        assert said == []
        assert asked == [address]
        assert page.evaluate("document.documentElement.scrollWidth") <= width_px  # what is wider scrolls on its own
        pictures = page.locator("img").evaluate_all("all => all.map((image) => image.complete && image.naturalWidth > 0)")
        assert all(pictures)
        assert bool(pictures) == (name != "index.html")
        light, dark = page.evaluate("[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]")
        brightness = [sum(map(int, colour[4:-1].split(","))) / 765 for colour in (light, dark)]
        assert abs(brightness[0] - brightness[1]) > 0.6
        assert (brightness[1] < 0.5) == (scheme == "dark")
        kept = REPOSITORY / "artifacts" / "screenshots"
        kept.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=kept / f"results-{name.removesuffix('.html')}-{scheme}.png")
        if name != "index.html":
            page.locator("header a").last.click()  # the other language
            page.wait_for_url(lambda url: url != address)
            assert page.locator("html").get_attribute("lang") != ("ko" if ".ko." in name else "en")
    finally:
        page.close()
