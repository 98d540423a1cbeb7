"""The texts of the package as a catalogue, and what they are in other languages: extracts, merges and compiles.

``python tools/messages.py`` renews ``amp_widgets.pot``, and the ``.po`` and ``.mo`` of each language, from the sources: what is
new is there without a translation, what is gone is removed, and what was translated stays. ``--check`` only says what differs.

A text is

* an argument of `say`, `say_number`, `marked` or `marked_all`, in Python and in JavaScript;
* a text of a prepared situation, an argument of ``Scenario``;
* a sentence that a lower part makes: an error, the reason of an event, a note, a verdict. Those stay English where they are made
  and kept, and are recognized when they are shown, so each is a template here: what an f-string fills in becomes a placeholder.
"""

from __future__ import annotations

import ast
import datetime
import functools
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from babel.messages.catalog import Catalog
from babel.messages.extract import extract
from babel.messages.mofile import write_mo
from babel.messages.pofile import read_po, write_po

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "amp_widgets"
LOCALE = PACKAGE / "locale"
DOMAIN = "amp_widgets"

TEMPLATES_IN = (
    "core/**/*.py", "analysis/*.py", "recording/*.py", "runner.py", "background_run.py", "on_demand.py", "session.py",
    "session_state.py", "session_analyses.py", "cell_steps.py", "run_recording.py", "runs_comparison.py", "forks.py",
    "snapshots.py", "kernel.py", "capture/*.py", "captured_cell.py",
    "run_sinks.py", "export/sink*.py", "export/html.py",
    "demos/measures.py", "demos/prepared_scenario.py",
)  # fmt: skip
"""Where the sentences are made that are shown without being made for it."""
ERRORS_IN = ("*.py", "demos/*.py", "export/*.py", "charts/*.py", "widgets/*.py")
"""Where else the errors are shown; all else in there is said for it."""
ONLY_ERRORS_IN = ("core/formats.py",)
"""And of those first ones, where nothing else is."""
NOT_SHOWN = (
    "core/class_exchange.py",
    "recording/schema.py",
    "analysis/progress_bar.py",
    "analysis/autocast_lists.py",
)
NO_DATE = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
"""In place of the day of making, so that the same sources make the same files."""
SCENARIO_TEXTS = ("title", "situation", "watch", "question", "unit", "choices", "why", "more", "on_cpu")
MARKS = ("say", "marked", "marked_all", "say_number")
_SILENT_CALLS = (
    "compile", "fullmatch", "match", "search", "sub", "removeprefix", "removesuffix", "startswith", "endswith", "split",
    "partition", "rpartition", "execute", "executescript", "getattr", "hasattr", "import_module", "say", "marked", "say_number",
    "marked_all", "in_language", "warn", "Literal", "TypeVar", "strftime", "replace",
)  # fmt: skip

_SENTENCE = re.compile(r"[A-Za-z]{2,}[,:;]? +[A-Za-z]{2,}|[A-Za-z]{2,}:? \{|\} [A-Za-z]{2,}")
_NO_SENTENCE = re.compile(r"^\s*<|^\n|^\{\{|^(SELECT|CREATE|INSERT|PRAGMA|UPDATE|DELETE) ")

Message = str | tuple[str, str]


@functools.cache
def messages() -> dict[Message, set[str]]:
    """Each text, or the two forms of one that depends on a number, and the files that have it."""
    found: dict[Message, set[str]] = {}

    def add(message: Message, path: Path) -> None:
        found.setdefault(message, set()).add(path.relative_to(ROOT).as_posix())

    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for message in _marked(tree):
            add(message, path)
    for path in sorted(PACKAGE.rglob("*.js")):
        for _, text, _, _ in extract("javascript", io.BytesIO(path.read_bytes()), keywords={"say": None}):
            if text:
                add(text, path)
    for message, path in sentences():
        add(message, path)
    return found


def sentences() -> Iterator[tuple[str, Path]]:
    """The templates of what the lower parts say, and the files that have them."""
    whole = {path for pattern in TEMPLATES_IN for path in PACKAGE.glob(pattern)}
    whole -= {PACKAGE / name for name in ONLY_ERRORS_IN}
    for path in sorted(whole.union(path for pattern in (*ERRORS_IN, *ONLY_ERRORS_IN) for path in PACKAGE.glob(pattern))):
        if path.relative_to(PACKAGE).as_posix() not in NOT_SHOWN:
            for text in _templates(ast.parse(path.read_text(encoding="utf-8")), only_errors=path not in whole):
                yield text, path


def placeholders(text: str) -> set[str]:
    """Names of the placeholders of a text."""
    return set(re.findall(r"(?<!\{)\{(\w+)\}(?!\})", text))


def _marked(tree: ast.Module) -> Iterator[Message]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        if node.func.id in MARKS:
            texts = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            if node.func.id == "say_number" and len(texts) == 2:
                yield texts[0], texts[1]
            elif node.func.id == "marked_all":
                yield from filter(None, texts)
            elif texts:
                yield texts[0]
        elif node.func.id == "Scenario":
            for keyword in node.keywords:
                if keyword.arg in SCENARIO_TEXTS:
                    values = keyword.value.values if isinstance(keyword.value, ast.Dict) else [keyword.value]
                    yield from (one.value for one in values if isinstance(one, ast.Constant) and re.search("[a-z]", one.value))


def _templates(tree: ast.Module, *, only_errors: bool) -> Iterator[str]:
    above: dict[ast.AST, ast.AST] = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if not isinstance(node, (ast.JoinedStr, ast.Constant)):
            continue
        texts = [text for text in _variants(node) if _SENTENCE.search(text) and not _NO_SENTENCE.search(text)]
        if texts and _is_said(node, above, only_errors):
            yield from texts


def _is_said(node: ast.AST, above: dict[ast.AST, ast.AST], only_errors: bool) -> bool:
    raised = False
    child = node
    while (parent := above.get(child)) is not None:
        match parent:
            case ast.Assert():
                return False
            case ast.Expr() | ast.JoinedStr() if child is node:  # a docstring, or a piece of an f-string
                return False
            case ast.FormattedValue() if parent.format_spec is child:
                return False
            case ast.Subscript() if parent.slice is child:
                return False
            case ast.AnnAssign() if parent.annotation is child:
                return False
            case ast.Dict() if child in parent.keys:
                return False
            case ast.Compare():
                return False
            case ast.arguments() | ast.arg():
                return False
            case ast.FunctionDef() if parent.name == "__repr__" or child is parent.returns:
                return False
            case ast.Call():
                name = parent.func.attr if isinstance(parent.func, ast.Attribute) else getattr(parent.func, "id", "")
                if child is not parent.func and name in _SILENT_CALLS:
                    return False
            case ast.keyword() if parent.arg == "help":
                return False
            case ast.Raise():
                raised = True
            case _:
                pass
        child = parent
    return raised or not only_errors


def _variants(node: ast.JoinedStr | ast.Constant) -> list[str]:
    """A constant as it is, an f-string with a placeholder for each value; braces that are meant are doubled.

    What only makes a plural, as in ``f"{count} layer{'s' * (count != 1)}"``, makes two texts and no placeholder.
    """
    if isinstance(node, ast.Constant):
        if not isinstance(node.value, str):
            return []
        return [node.value if re.search(r"\{\w+\}", node.value) else node.value.replace("{", "{{").replace("}", "}}")]
    texts = [""]
    names: dict[str, str] = {}
    for part in node.values:
        if isinstance(part, ast.Constant):
            pieces = [str(part.value).replace("{", "{{").replace("}", "}}")]
        elif isinstance(part, ast.FormattedValue):
            pieces = _endings(part.value) or ["{" + _name(part.value, ast.unparse(part), names) + "}"]
        else:
            pieces = []
        texts = [text + piece for text in texts for piece in pieces]
    return texts


def _endings(value: ast.expr) -> list[str]:
    """What a piece of a word can be, where it is only that."""
    match value:
        case ast.BinOp(left=ast.Constant(value=str(ending)), op=ast.Mult()) if len(ending) <= 2:
            return ["", ending]
        case ast.IfExp(body=ast.Constant(value=str(one)), orelse=ast.Constant(value=str(other))) if len(one + other) <= 4:
            return [one, other]
        case _:
            return []


def _name(value: ast.expr, whole: str, names: dict[str, str]) -> str:
    """A name for a placeholder, from what is filled in; the same for the same."""
    base = _word(value)
    name, number = base, 2
    while names.get(name, whole) != whole:
        name, number = f"{base}{number}", number + 1
    names[name] = whole
    return name


def _word(value: ast.expr) -> str:
    match value:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.strip("_") or "value"
        case ast.Call(func=ast.Name(id="len")):
            return "count"
        case ast.Call(func=ast.Attribute(attr="join"), args=[one]) | ast.Call(args=[one, *_]):
            return _word(one)
        case ast.Call(func=function):
            return _word(function)
        case ast.Subscript(value=one) | ast.Starred(value=one) | ast.UnaryOp(operand=one) | ast.IfExp(body=one):
            return _word(one)
        case ast.BinOp(left=left, right=right):
            return next((word for word in (_word(left), _word(right)) if word != "value"), "value")
        case ast.GeneratorExp(generators=[one, *_]) | ast.ListComp(generators=[one, *_]):
            return _word(one.iter)
        case _:
            return "value"


# ---- the catalogue's files -------------------------------------------------------------------------------------------


def template() -> Catalog:
    """The texts, without translations."""
    catalogue = Catalog(domain=DOMAIN, project=DOMAIN, fuzzy=False, charset="utf-8", creation_date=NO_DATE)
    for message, files in sorted(messages().items(), key=lambda item: item[0] if isinstance(item[0], str) else item[0][0]):
        catalogue.add(message, locations=[(file, None) for file in sorted(files)])
    return catalogue


def renewed(code: str) -> Catalog:
    """The texts with the translations that the catalogue of a language has already."""
    path = _po(code)
    before = read_po(io.BytesIO(path.read_bytes()), locale=code, domain=DOMAIN) if path.exists() else Catalog()
    catalogue = Catalog(
        locale=code, domain=DOMAIN, project=DOMAIN, fuzzy=False, charset="utf-8", creation_date=NO_DATE, revision_date=NO_DATE
    )
    for message in template():
        if message.id:
            key = message.id[0] if isinstance(message.id, tuple) else message.id
            known = before.get(key)
            text = known.string if known is not None else ""
            if isinstance(message.id, tuple):
                text = text if isinstance(text, tuple) else (text,)
            elif isinstance(text, tuple):
                text = text[0]
            catalogue.add(message.id, text, locations=message.locations)
    return catalogue


def files() -> dict[Path, bytes]:
    """What the sources make of the catalogue's files."""
    made = {LOCALE / f"{DOMAIN}.pot": _written(template())}
    for code in languages():
        catalogue = renewed(code)
        made[_po(code)] = _written(catalogue)
        compiled = io.BytesIO()
        write_mo(compiled, catalogue)
        made[_po(code).with_suffix(".mo")] = compiled.getvalue()
    return made


def languages() -> list[str]:
    """Codes of the languages there are catalogues of."""
    return sorted(path.parent.parent.name for path in LOCALE.glob(f"*/LC_MESSAGES/{DOMAIN}.po"))


def _po(code: str) -> Path:
    return LOCALE / code / "LC_MESSAGES" / f"{DOMAIN}.po"


def _written(catalogue: Catalog) -> bytes:
    # no dates, so that the same sources make the same files
    headers = [(name, value) for name, value in catalogue.mime_headers if not name.startswith(("POT-Creation", "PO-Revision"))]
    kept = ("Project-Id-Version", "Language", "MIME-Version", "Content-Type", "Content-Transfer-Encoding", "Plural-Forms")
    headers = [(name, value) for name, value in headers if name in kept]
    text = io.BytesIO()
    write_po(text, catalogue, width=0, omit_header=True)
    head = "".join(f'"{name}: {value}\\n"\n' for name, value in headers)
    return f'msgid ""\nmsgstr ""\n{head}\n'.encode() + text.getvalue()


def main(arguments: list[str]) -> int:
    """Renew the files, or with ``--check`` say which are not what the sources make."""
    wrong = [path for path, content in files().items() if not path.exists() or path.read_bytes() != content]
    if "--check" in arguments:
        for path in wrong:
            print(f"{path.relative_to(ROOT)} is not what the sources make: python tools/messages.py")
        return 1 if wrong else 0
    for path, content in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    for code in languages():
        missing = [message.id for message in renewed(code) if message.id and not _translated(message.string)]
        print(f"{code}: {len(renewed(code))} texts, {len(missing)} without a translation")
    return 0


def _translated(text: str | tuple[str, ...]) -> bool:
    return all(text) if isinstance(text, tuple) else bool(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
