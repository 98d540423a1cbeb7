"""The examples of the README and of docs/ run, from top to bottom; what these pages lead to is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from torch import nn

import amp_widgets
from amp_widgets.demos import DEMOS, digits
from amp_widgets.demos.scenarios import SCENARIOS
from amp_widgets.session import AmpSession

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = (README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
WITH_EXAMPLES = [page for page in PAGES if "\n```python\n" in page.read_text(encoding="utf-8")]
LARGEST_PICTURE_BYTES = 250_000


class SmallNet(nn.Module):
    """In the place of the README's network, which is slower: layers of the same names."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.head = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = images.flatten(1)
        for layer in self.layers:
            x = layer(x).relu()
        logits: torch.Tensor = self.head(x)
        return logits


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    pytest.importorskip("sklearn", reason="the examples train on scikit-learn's digits")
    monkeypatch.setattr(digits, "DigitsNet", SmallNet)
    monkeypatch.chdir(tmp_path)
    made = InteractiveShell.instance()
    made.reset(new_session=False)
    yield made
    for value in list(made.user_ns.values()):
        if isinstance(value, AmpSession):
            value.close()
    if "amp_widgets" in made.extension_manager.loaded:
        made.run_line_magic("unload_ext", "amp_widgets")
    InteractiveShell.clear_instance()


def blocks_of(page: Path, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=lambda page: page.stem)
def test_the_examples_run(page: Path, shell: Any) -> None:
    shell.run_line_magic("load_ext", "amp_widgets")
    blocks = blocks_of(page)
    if page != README:  # they go on from there
        blocks.insert(0, next(block for block in blocks_of(README) if "DigitsNet" in block))
    for block in blocks:
        shell.run_cell(block).raise_error()


@pytest.mark.parametrize("way", range(3))
def test_each_way_in_runs_by_itself(way: int, shell: Any) -> None:
    section = README.read_text(encoding="utf-8").partition("## Three ways in")[2].partition("\n## ")[0]
    ways = re.split(r"^\*\*[AY]", section, flags=re.MULTILINE)  # "A demo", "A model of your own", "Your loop"
    assert len(ways) == 4
    blocks = re.findall(r"^```python\n(.*?)^```$", ways[1 + way], re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        shell.run_cell(block).raise_error()


def test_there_are_examples_of_the_three_ways_in() -> None:
    text = "\n".join(blocks_of(README))
    for way in ("%amp demo digits", "aw.AmpSession(model, optimizer)", "%%amp\n"):
        assert way in text
    assert {page.stem for page in WITH_EXAMPLES} >= {"README", "loops", "memory", "numbers", "runs", "classroom"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_leads_to_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if not target.startswith(("http:", "https:")):
            name, _, anchor = target.partition("#")
            path = page.parent / name if name else page
            assert path.is_file(), target
            if anchor:
                headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
                assert anchor in [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings], target
    for folder in re.findall(r"^([\w./]+/)(?= {2,})", text, re.MULTILINE):
        assert (ROOT / folder).is_dir(), folder
    for dotted in re.findall(r"`(amp_widgets(?:\.\w+)+)`", text):
        assert (ROOT / dotted.replace(".", "/")).is_dir() or ROOT.joinpath(f"{dotted.replace('.', '/')}.py").is_file(), dotted


def test_the_pages_name_all_demos_situations_settings_and_lessons() -> None:
    classroom = (ROOT / "docs" / "classroom.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([\w-]+)` \|", classroom, re.MULTILINE) == list(SCENARIOS)
    lessons = [path.stem.replace("_", " ") for path in sorted((ROOT / "lessons").glob("[0-9]*.md"))]
    assert re.findall(r"^### (\d\d .+?) ·", classroom, re.MULTILINE) == lessons
    text = README.read_text(encoding="utf-8")
    for name in (*DEMOS, *amp_widgets.Settings.__dataclass_fields__):
        assert f"`{name}`" in text, name


def test_the_layers_are_those_that_are_held() -> None:
    """Those of test_layering.py, from the roof to the ground; but for the package's own names, and rooms that are not there."""
    tree = ast.parse((ROOT / "tests" / "test_layering.py").read_text(encoding="utf-8"))
    assigned = {ast.unparse(node.target): node.value for node in tree.body if isinstance(node, ast.AnnAssign) and node.value}
    order = [[part for part in parts if _is_part(part)] for parts in ast.literal_eval(assigned["ORDER"])]
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    block = next(block for block in re.findall(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL) if block.startswith("magics"))
    shown = [re.split(r"  +", line)[0].split(", ") for line in block.splitlines()]
    assert [sorted(parts) for parts in reversed(shown)] == [sorted(parts) for parts in order if parts]


def _is_part(name: str) -> bool:
    return (ROOT / "amp_widgets" / name).is_dir() or (name != "__init__" and (ROOT / "amp_widgets" / f"{name}.py").is_file())


def test_the_picture_is_small() -> None:
    pictures = [path for path in (ROOT / "docs").iterdir() if path.suffix != ".md"]
    assert [path.name for path in pictures] == ["dashboard.png"]
    assert pictures[0].stat().st_size <= LARGEST_PICTURE_BYTES
