"""The language in which texts are shown: English, or another one for which there is a catalogue in ``locale/``.

Texts are English in the code. What is shown is said in the reader's language where it is made: `say("Step {step}", step=3)`.
What is kept, such as events, errors and files, stays English, and is put into the language when it is shown: `in_language`.

* A report, such as a plan or a comparison, is in the language where it shows itself: its `repr`, its `str` and its HTML. Its
  properties and its table for programs are English. A ``<repr of an object>`` in angle brackets is for programmers, and English.
* An error is English in its `str`, in logs and in tracebacks, where it can be searched for. The dashboard and ``%amp`` show it in
  the language; below the traceback of a cell it is said in the language, too, where the extension is loaded.
* What a user wrote, such as a note among the events, is data, and stays as it is: `reason_in_language`.
* Dashboards and views that are open follow a change of the language: `follow_language`.
"""

from __future__ import annotations

import dataclasses
import functools
import gettext
import io
import json
import locale
import os
import re
import struct
import sys
import unicodedata
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from amp_widgets.errors import LanguageError

LANGUAGES: Mapping[str, str] = {"en": "English", "ko": "한국어"}
"""Code and own name of each language there is."""
DOMAIN = "amp_widgets"
LOCALE = Path(__file__).parent / "locale"
_NO_WORDS = "const WORDS = {};"  # in words.js


class Catalogue:
    """English texts and what they are in another language.

    Parameters
    ----------
    messages
        English → translated; where that depends on a number, the key is ``(one, which form)``.
    form
        A number → which form it takes.
    plurals
        English in the plural → in the singular, of the texts that depend on a number.
    """

    def __init__(
        self, messages: Mapping[Any, str], form: Any = lambda count: 0, plurals: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._messages = messages
        self._form = form
        self._plurals = plurals
        self._known: dict[tuple[str, bool], _Told | None] = {}
        self._cuts: dict[str, tuple[str, str, _Told | None]] = {}

    def text(self, english: str) -> str:
        """A text translated, without its values; as it is where there is no translation."""
        return self._messages.get(english) or english

    def number(self, one: str, many: str, count: int) -> str:
        """The same for a text that depends on a number."""
        return self._messages.get((one, self._form(count))) or (one if count == 1 else many)

    def sentences(self, english: str) -> str | None:
        """What is made of texts of the catalogue, their values in them, translated; None where it is of none of them.

        That is one text, or several with something between them, whichever leaves less of it as it was.
        """
        told = self._told(english, words=_LIST_OF_NAMES.fullmatch(english) is not None)
        return None if told is None or not _says_enough(told, english) else told.text

    def _told(self, english: str, *, words: bool = False) -> _Told | None:
        key = english, words
        if key not in self._known:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            whole, parts = self._whole(english), self._parts(english, words)
            self._known[key] = self._better(parts, whole) if re.search(r"\n|\. ", english) else self._better(whole, parts)
        return self._known[key]

    def _whole(self, english: str) -> _Told | None:
        """One text of the catalogue: of the few that fit with most text of their own, the one that says most with its values."""
        known = self._sayings.get(english)
        if known:
            return _Told.literally(known, _letters(english))
        best, fitting = None, 0
        for template in self._templates:
            found = template.pattern.fullmatch(english) if template.longest in english else None
            if found is not None:
                texts = found.groupdict()
                for name, after in template.neighbours:
                    if not texts[after]:
                        texts[name], texts[after], _ = self._cut(texts[name])
                values = {
                    name: (self._object(text) if name in template.got else None)
                    or self._value(text, words=name in template.words, named=name == template.of_what)
                    for name, text in texts.items()
                }
                text = template.translated.format(**{name: value.text for name, value in values.items()})
                best = self._better(best, _Told.together([_Told.literally("", template.letters), *values.values()]).named(text))
                fitting += 1
                if fitting == MOST_FITTING:
                    break
        return best

    def _parts(self, english: str, words: bool) -> _Told | None:
        """Several of them, or one with a full stop that is not of it."""
        best = None
        if english.endswith(".") and not english.endswith(".."):
            one = self._told(english[:-1], words=words)
            best = None if one is None else one._replace(text=one.text + ".")
        for between in ("\n", ". ", "; ", ", ", ": ", " + ", " · "):
            parts = english.split(between)
            if len(parts) > 1:
                stop = "." if between == ". " else ""
                may_be_words = words or between in ("\n", ". ")
                told = [
                    self._part(part, stop if place < len(parts) - 1 else "", words=may_be_words)
                    for place, part in enumerate(parts)
                ]
                joint = " " if between == ". " else between
                best = self._better(best, _Told.together(told).named(joint.join(one.text for one in told)))
        return best

    def _part(self, part: str, stop: str, *, words: bool) -> _Told:
        """A part translated, if it can be, with the full stop that it was cut off from. A single word may be a name."""
        if not words and _NAME.fullmatch(part):
            return _Told(part + stop, 0)
        alone, with_stop = self._told(part, words=words), self._told(part + stop) if stop else None
        ended = None if alone is None else alone._replace(text=alone.text + stop)
        return self._better(ended, with_stop) or _Told(part + stop, 0)

    def _value(self, text: str, *, words: bool = False, named: bool = False) -> _Told:
        """What stands for a placeholder, or for several in a row, may be made of texts of the catalogue, too.

        A single word is taken for a name, such as a layer's or what has to be typed, and several with commas for names, unless
        the placeholder says that they are `words`. It is a name for sure where it is `named` by the text.
        """
        if not re.search(r"[A-Za-z]{2}", text):
            return _Told(text, 0)
        if not words and _NAME.fullmatch(text):
            return _Told(text, 0, names=_letters(_NAMES.sub("", text)) if named else 0)
        if not words and _LIST_OF_NAMES.fullmatch(text):
            listed = re.sub("|".join(_BETWEEN_NAMES), lambda joint: self.text(joint[0]), text)
            return _Told(listed, 0, names=_letters(_NAMES.sub("", text)))
        inner = text.strip()
        if inner != text and text not in self._sayings:
            begin, told = text.index(inner), self._value(inner, words=words)
            around = told._replace(text=text[:begin] + told.text + text[begin + len(inner) :])
            return self._better(around, self._whole(text)) or around
        words = words and _LIST_OF_WORDS.fullmatch(text) is not None
        best = self._better(self._cut(text)[2], self._told(text, words=words))
        return best if best is not None and _says_enough(best, text) else _Told(text, 0)

    def _object(self, text: str) -> _Told | None:
        """An object that is described by its class, such as ``a str``, where something else was expected."""
        found = _OBJECT.fullmatch(text)
        if found is None or text in self._sayings:
            return None
        told = self.text(_OBJECT_OF).format(name=found["name"])
        return _Told.literally(told, _letters(found["article"]))._replace(names=_letters(found["name"]))

    def _cut(self, text: str) -> tuple[str, str, _Told | None]:
        """A text cut where a text of the catalogue begins that goes to its end, such as ``; did you mean 'fp16'?``; and what
        both parts are in the language. Of cuts that say as much the last counts: what follows is not a part of what is before."""
        if text in self._cuts:
            return self._cuts[text]
        if len(self._cuts) >= MOST_KNOWN:
            self._cuts.clear()
        cuts = {at for place in _MAY_BEGIN.finditer(text) for at in (place.start(), place.start() + (place[0][0] == " ")) if at}
        found: tuple[str, str, _Told | None] = text, "", None
        for at in sorted(cuts):
            after = None if _NAME.fullmatch(text[at:]) else self._whole(text[at:])
            if after is not None and after.letters >= LEAST_LETTERS:
                before = self._value(text[:at])
                told = _Told.together([before, after]).named(before.text + after.text)
                with_joint = text[at - 1] != " "
                if found[2] is None or told.says > found[2].says or (with_joint and told.says == found[2].says):
                    found = text[:at], text[at:], told
        self._cuts[text] = found
        return found

    @staticmethod
    def _better(one: _Told | None, other: _Told | None) -> _Told | None:
        """Of two the one that says more of it; the first where both say as much, and neither where they say nothing."""
        best = one if other is None or (one is not None and one.says >= other.says) else other
        return best if best is not None and best.letters else None

    @functools.cached_property
    def _sayings(self) -> Mapping[str, str]:
        """The texts that may be a sentence or a part of one; also without what joins them to the part before."""
        texts = {english: text for english, text in self._messages.items() if isinstance(english, str)}
        texts |= {key[0]: text for key, text in self._messages.items() if isinstance(key, tuple)}
        texts |= {many: self._messages[one, self._form(2)] for many, one in self._plurals.items()}
        for english, text in [*texts.items()]:
            joint = _JOINT.match(english)
            if joint is not None and text.startswith(joint[0]):
                texts.setdefault(english[joint.end() :], text[joint.end() :])
        return texts

    @functools.cached_property
    def _templates(self) -> list[_Template]:
        """Of each text with placeholders, the one with most text of its own first."""
        found = [_Template.of(english, translated) for english, translated in self._sayings.items() if "{" in english]
        return sorted((one for one in found if one.letters), key=lambda one: (-one.characters, one.translated))


class _Told(NamedTuple):
    """A translation, and what of the English is in it: letters of texts of the catalogue; the sum of the squares of how many each
    of these texts has, which is more where they are few and long; and letters of names."""

    text: str
    letters: int
    squares: int = 0
    names: int = 0

    @staticmethod
    def literally(text: str, letters: int) -> _Told:
        """Of one text of the catalogue."""
        return _Told(text, letters, letters**2)

    @staticmethod
    def together(parts: Sequence[_Told]) -> _Told:
        """Of several, without a translation."""
        return _Told("", *(sum(one[place] for one in parts) for place in (1, 2, 3)))  # type: ignore[misc]

    def named(self, text: str) -> _Told:
        """With this translation."""
        return self._replace(text=text)

    @property
    def says(self) -> tuple[int, int]:
        """How much of it: many letters, and where these are as many, in long texts."""
        return self.letters, self.squares


@dataclasses.dataclass(frozen=True)
class _Template:
    """A text with placeholders, to be recognized: its longest piece; which placeholders may be words, which is the name of what
    the text is of, before a colon, and which are what was got; and which follow each other so that a text has to be cut between
    them."""

    longest: str
    expression: str
    words: frozenset[str]
    of_what: str
    got: frozenset[str]
    neighbours: tuple[tuple[str, str], ...]
    letters: int
    characters: int
    translated: str

    @staticmethod
    def of(english: str, translated: str) -> _Template:
        english, translated = _with_rows_as_one(english, translated)
        pieces = _PLACEHOLDER.split(english)  # literal, name, literal, name, ..., literal
        literals, names = [piece.replace("{{", "{").replace("}}", "}") for piece in pieces[::2]], pieces[1::2]
        pairs = tuple(
            (one, other)
            for one, other, between in zip(names, names[1:], literals[1:], strict=False)
            if not between and one not in _SHAPES
        )
        of = names[0] if names and not literals[0] and literals[1].startswith(": ") else ""
        words = frozenset(
            name
            for name, before, after in zip(names, literals, literals[1:], strict=False)
            if _WORDS.intersection(name.split(_ROW)) and not _TYPED.search(before) and name != of
        )
        got = frozenset(name for name, before in zip(names, literals, strict=False) if before.endswith("got "))
        whole = "".join(literals)
        letters = _letters(whole)
        expression = _expression(literals, names, only_figures=letters < LEAST_LETTERS)
        return _Template(max(literals, key=len), expression, words, of, got, pairs, letters, len(whole), translated)

    @functools.cached_property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(self.expression, re.DOTALL)


def _with_rows_as_one(english: str, translated: str) -> tuple[str, str]:
    """Placeholders that follow each other in both texts, as ``{where}{against}`` in English and in Korean, as a single one: where
    one ends and the next begins cannot be seen, and need not be known."""
    for row in _PLACEHOLDERS_IN_A_ROW.findall(english):
        if row in translated:
            one = "{" + _ROW.join(_PLACEHOLDER.findall(row)) + "}"
            english, translated = english.replace(row, one), translated.replace(row, one)
    return english, translated


def _says_enough(told: _Told, english: str) -> bool:
    """Whether so much of it is of the catalogue that it is no sentence of somebody else's with a few of the same words."""
    return told.letters >= ENOUGH * (_letters(_NAMES.sub("", english)) - told.names)


def _letters(text: str) -> int:
    return len(re.findall(r"[A-Za-z]", text))


def _expression(literals: list[str], names: list[str], *, only_figures: bool) -> str:
    """A pattern for a text; of several placeholders in a row the first gets all, where it has no shape that tells its end."""
    expression = re.escape(literals[0])
    seen: set[str] = set()
    for place, (name, before, after) in enumerate(zip(names, literals, literals[1:], strict=False)):
        in_row = not after and place < len(names) - 1
        if name in seen:
            expression += f"(?P={name})"
        elif name in _ALWAYS or ((in_row or only_figures) and name in _SHAPES):
            expression += f"(?P<{name}>{_SHAPES[name]})"
        elif only_figures:
            expression += f"(?P<{name}>{_FIGURES})"
        else:
            some = "+" if not expression and after[:1] in " ,;:" else "*"  # with nothing before it, it is not nothing
            expression += f"(?P<{name}>.{some}{'' if not after and before else '?'})"
        seen.add(name)
        expression += re.escape(after)
    return expression


ENOUGH = 0.5
"""Part of the letters of a sentence, names in quotes and code not counted, that is to be of the catalogue."""
_NAMES = re.compile(r"'[^']*'|\"[^\"]*\"|\b[\w/]*[./_(][\w/.(]*|\b\w*\d\w*")
LEAST_LETTERS = 3
"""A text with fewer letters of its own, such as ``{shown} of {count}``, is recognized with figures only, or what has a shape."""
MOST_FITTING = 8
"""So many texts that a sentence may be are looked into."""
MOST_KNOWN = 4096
"""So many sentences are remembered with what they are in the language; events come with ever new numbers."""
_WORDS = frozenset(
    (
        "phase", "state", "kind", "kinds", "what", "place", "LAYERS", "value", "why", "reason", "cause", "because", "worst",
    )
)  # fmt: skip
"""Placeholders that may stand for single words of ours; in others a word is a name, and so are several with commas."""
_TYPED = re.compile(r"\b(?:got|expected|one of|mean|such as|a bit of|these were:)(?: an?| the)? ?$|\w\.$")
"""What stands before something that was typed, or has to be: that is never a word of ours."""
_NAME = re.compile(r"[\w-]+")
_LIST_OF_NAMES = re.compile(r"[^\s,]+(?:(?:, | and | or )[^\s,]+)+")
_LIST_OF_WORDS = re.compile(r"[^\s,;:]+(?: [^\s,;:]+)?(?:, [^\s,;:]+(?: [^\s,;:]+)?)*")  # each of one or two
_FIGURES = r"\d[\d,.]*"
_NUMBER = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?"
_SIZE = rf"{_NUMBER} [kMGT]?B"
_SHAPES = {
    "count": _NUMBER,
    "count2": _NUMBER,
    "step": _NUMBER,
    "at_step": _NUMBER,
    "last_step": _NUMBER,
    "fixed": _SIZE,
    "requested_bytes": _SIZE,
    "scale": r"[\d.^e+-]+",
    "layer": r"\([^)]*\)|[^\s,;:]+",
    "nonfinite": rf"(?:[<>] )?{_NUMBER}(?: %)?",
    "given": r"'[^']*'|\"[^\"]*\"",
}
"""What placeholders look like that another one may follow, so that it is seen where it begins, or that stand in a short text."""
_ALWAYS = ("count", "count2", "fixed", "layer", "nonfinite")
"""And those that look like it elsewhere, too."""
_MAY_BEGIN = re.compile(r"[,;:] |\(| (?:in|with|on|of|for|and|from|at)\b ?| (?=\()")
_JOINT = re.compile(r"[,;:] | ")
_PLACEHOLDER = re.compile(r"(?<!\{)\{([A-Za-z_0-9]+)\}(?!\})")
_PLACEHOLDERS_IN_A_ROW = re.compile(r"(?<!\{)(?:\{[A-Za-z_0-9]+\}){2,}(?!\})")
_ROW = "_AND_"
"""Between the names of placeholders in a row."""


def language() -> str:
    """Code of the language in force: what `set_language` said, or else what the environment wants, or else English.

    That is ``AMP_WIDGETS_LANG``, or the notebook's name (``name.ko.ipynb``), in Voilà too, or the locale.
    """
    wished = _chosen or wished_language()
    return wished if wished in LANGUAGES else "en"


def set_language(code: str | None) -> None:
    """Let what is shown from now on be in this language; None: what the environment wants.

    Parameters
    ----------
    code
        ``"ko"``, in capitals or not, or the language's own name, ``"한국어"``.

    Raises
    ------
    LanguageError
        When there is no such language.
    """
    global _chosen
    chosen = None if code is None else _code_of(code)
    if code is not None and chosen is None:
        known = ", ".join(f"{known} ({name})" for known, name in LANGUAGES.items())
        raise LanguageError(f"language: got {code!r}, expected one of {known}")
    before = language()
    _chosen = chosen
    if language() != before:
        for follower in [*_followers]:
            call = follower()
            if call is None:
                _followers.remove(follower)
            else:
                call()


def _code_of(typed: object) -> str | None:
    """The code of a language that is meant by its code or its name."""
    meant = unicodedata.normalize("NFC", str(typed)).strip().casefold()  # pasted Hangul may be in parts
    return next((code for code, name in LANGUAGES.items() if meant in (code, name.casefold())), None)


def follow_language(method: Callable[[], object]) -> None:
    """Have a method of an object called after each change of the language, as long as there is the object."""
    _followers.append(weakref.WeakMethod(method))


def wished_language() -> str:
    """What the environment wants, whether there is such a catalogue or not."""
    if _chosen:
        return _chosen
    asked = os.environ.get("AMP_WIDGETS_LANG", "")
    named = os.path.basename(_notebook()).removesuffix(".ipynb").rpartition(".")[2]
    # A locale that is not installed, as in many containers, is still what is wished.
    wanted = filter(None, map(os.environ.get, ("LC_ALL", "LC_MESSAGES", "LANG")))
    return (asked or (named if named in LANGUAGES else "") or locale.getlocale()[0] or next(wanted, "en"))[:2].lower()


def _notebook() -> str:
    """The notebook's path, as far as the front end says: Jupyter as the session's name, Voilà as the page's address."""
    asked = os.environ.get("JPY_SESSION_NAME", "")
    if asked or not os.environ.get("SERVER_SOFTWARE", "").startswith("voila/"):
        return asked
    address = os.environ.get("SCRIPT_NAME", "")
    return address if address.endswith(".ipynb") else _notebook_of_the_command()


@functools.cache
def _notebook_of_the_command() -> str:
    """What ``voila name.ipynb`` was called with: the address of its only page is ``/``. The kernel is a child of the server."""
    psutil: Any = sys.modules.get("psutil")  # which ipykernel has imported
    if psutil is None:
        return ""
    try:
        words: list[str] = psutil.Process(os.getppid()).cmdline()
    except (OSError, psutil.Error):
        return ""
    return next((word for word in words if word.endswith(".ipynb")), "")


def say(text: str, /, **values: object) -> str:
    """A text of the code in the language in force, with its named placeholders filled in.

    >>> say("Step {step} of {steps}", step=3, steps=20)
    'Step 3 of 20'
    """
    catalogue = _catalogue(language())
    told = text if catalogue is None else catalogue.text(text)
    return told.format(**values) if values else told


def say_number(one: str, many: str, count: int, /, **values: object) -> str:
    """The same where the text depends on a number; it is there as ``{count}``, with commas.

    >>> say_number("{count} step", "{count} steps", 1), say_number("{count} step", "{count} steps", 1200)
    ('1 step', '1,200 steps')
    """
    catalogue = _catalogue(language())
    told = (one if count == 1 else many) if catalogue is None else catalogue.number(one, many, count)
    return told.format(**{"count": f"{count:,}", **values})


def marked(text: str) -> str:
    """The text as it is. It marks a constant for the catalogue; `say` is called with it when it is shown."""
    return text


def marked_all(*texts: str) -> tuple[str, ...]:
    """Several texts as they are, each `marked`, such as the headings of a table."""
    return texts


def in_language(sentence: str) -> str:
    """A finished English sentence, such as that of an event or an error, in the language in force.

    It is compared with the texts of the catalogue, whose placeholders match anything; the one with the most text of its own
    counts. What stands for a placeholder is looked up in turn. Where nothing matches it stays English.
    """
    catalogue = _catalogue(language())
    if catalogue is None or not sentence or isinstance(sentence, Said):
        return sentence
    told = catalogue.sentences(sentence)
    return sentence if told is None else told


class Said(str):
    """A text that is in the language already, or that somebody else wrote: `in_language` leaves it as it is."""


class Sentence(str):
    """An English sentence that a report gives to programs, and people: printed it is in the language in force; what compares it,
    looks into it or keeps it has it in English."""

    __slots__ = ()

    def __str__(self) -> str:
        return in_language(super().__str__())

    def __repr__(self) -> str:
        return repr(str(self))

    def __format__(self, how: str) -> str:
        return format(str(self), how)


class _Reasoned(Protocol):
    """What is read of an event; an ``amp_widgets.core.history.Event`` is one."""

    @property
    def kind(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def detail(self) -> Mapping[str, Any]: ...


def reason_in_language(event: _Reasoned) -> str:
    """The reason of an event in the language in force; a note that a user wrote is data, and stays as it is."""
    of_user = event.kind == "note" and event.detail.get("source") == "user"
    return event.reason if of_user else in_language(event.reason)


def words_script() -> str:
    """What stands before each script for a page: `say` in JavaScript."""
    return (Path(__file__).parent / "words.js").read_text(encoding="utf-8")


def page_script_in_language(script: str) -> str:
    """A script for a page with the words that it says in the language in force: `say("…")` in JavaScript."""
    catalogue = _catalogue(language())
    if catalogue is None:
        return script
    said = (json.loads(f'"{text}"') for text in _SAID_IN_SCRIPT.findall(script))
    words = {text: told for text in said if (told := catalogue.text(text)) != text}
    return script.replace(_NO_WORDS, f"const WORDS = {json.dumps(words, ensure_ascii=False)};", 1)


_OBJECT_OF = marked("an {name}")
_OBJECT = re.compile(r"(?P<article>an?) (?P<name>[A-Za-z_]\w*)")
_BETWEEN_NAMES = marked_all(" and ", " or ")
_SAID_IN_SCRIPT = re.compile(r'\bsay\(\s*"((?:[^"\\]|\\.)*)"')
_chosen: str | None = None
_followers: list[weakref.WeakMethod[Callable[[], object]]] = []
_catalogues: dict[str, Catalogue | None] = {"en": None}


def _catalogue(code: str) -> Catalogue | None:
    if code not in _catalogues:
        _catalogues[code] = _read(code)
    return _catalogues[code]


def _read(code: str) -> Catalogue:
    class Messages(gettext.GNUTranslations):
        _catalog: dict[Any, str]  # what gettext itself keeps

        def catalogue(self, plurals: Mapping[str, str]) -> Catalogue:
            messages = {key: text for key, text in self._catalog.items() if key}
            return Catalogue(messages, getattr(self, "plural"), plurals)  # noqa: B009

    path = gettext.find(DOMAIN, LOCALE, [code])
    if path is None:
        return Catalogue({})
    content = Path(path).read_bytes()
    return Messages(io.BytesIO(content)).catalogue(_plurals(content))


def _plurals(content: bytes) -> dict[str, str]:
    """English in the plural → in the singular, which ``gettext`` does not keep, of a catalogue as tools/messages.py compiles it.

    The file's header has how many texts there are, and where a table begins with the length and the place of each; the two forms
    of one are apart by a zero byte: https://www.gnu.org/software/gettext/manual/html_node/MO-Files.html
    """
    count, table = struct.unpack_from("<II", content, 8)
    texts = (struct.unpack_from("<II", content, table + 8 * place) for place in range(count))
    forms = (content[start : start + length].decode("utf-8").split("\0") for length, start in texts)
    return {many: one for one, *others in forms for many in others}
