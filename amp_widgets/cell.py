"""The body of a cell magic, run as IPython runs a cell."""

from __future__ import annotations

import ast
import sys
from types import CodeType, TracebackType
from typing import Any

from amp_widgets.errors import MagicError

_ABSENT: Any = object()


def cell_id(shell: Any) -> str:
    """What the front end calls the cell that is running; empty where it does not say."""
    parent: dict[str, Any] = getattr(shell, "get_parent", dict)() or {}
    return str(parent.get("metadata", {}).get("cellId", ""))


def run_cell(shell: Any, source: str) -> None:
    """Run `source`, the body of a cell magic, as `shell` would have run it as a cell of its own.

    IPython's syntax works, the last expression is displayed as the shell is set to, names land in the user's namespace, functions
    have their source and can be pickled. Line numbers are those of the whole cell, whose first line is the magic.

    Whatever the code raises comes out of this function, so that the cell fails and the cells that wait behind it are aborted. The
    traceback that IPython then shows is that of the cell without the magic: neither this package nor IPython is in it. For this,
    the shell's ``showtraceback`` is replaced from the moment of the error until it is shown, or until the cell has ended.

    Parameters
    ----------
    shell
        IPython's shell.
    source
        The body, as the magic got it.

    Raises
    ------
    MagicError
        When the body awaits outside of a function: a magic is called, and cannot be awaited. Nothing of it was run.
    BaseException
        Whatever the code raises, ``SyntaxError`` included.
    """
    try:
        _run(shell, source)
    except BaseException as error:
        _ShownAsOfTheCell.arrange(shell, error)
        raise


def _run(shell: Any, source: str) -> None:
    transformed = shell.transform_cell(source)
    if shell.should_run_async(source, transformed_cell=transformed):
        raise MagicError(
            "the cell has an 'await' outside of a function, expected code that runs without: a cell magic cannot wait for it. "
            "Put what has to be awaited into a cell of its own without the magic, and keep its result in a name"
        )
    result = getattr(shell.displayhook, "exec_result", None)  # of the cell that is running
    whole = _whole_cell(result, source)
    lines_before = 1 if whole is None else whole[: len(whole) - len(source)].count("\n")
    lines_before += _blank_lines_at_start(source)  # IPython takes them away
    code = "\n" * lines_before + transformed
    count = getattr(result, "execution_count", None)
    # by the text of the whole cell: that is how a notebook's debugger finds its breakpoints
    name = shell.compile.cache(code, shell.execution_count if count is None else count, raw_code=whole or source)
    with shell.builtin_trap, shell.display_trap:
        nodes = shell.transform_ast(shell.compile.ast_parse(code, filename=name)).body
        quiet = shell.displayhook.semicolon_at_end_of_expression(transformed)
        for node, displayed in _with_display(nodes, "none" if quiet else shell.ast_node_interactivity):
            # one by one, as IPython does: what is above a statement that cannot be compiled has run
            if displayed:
                compiled = shell.compile(ast.Interactive([node]), name, "single")
            else:
                compiled = shell.compile(ast.Module([node], []), name, "exec")
            _run_code(shell, compiled)


def _run_code(shell: Any, code: CodeType) -> None:
    __tracebackhide__ = "__ipython_bottom__"  # for what shows tracebacks in a way of its own, like a debugger
    exec(code, shell.user_global_ns, shell.user_ns)


def _whole_cell(result: Any, source: str) -> str | None:
    """The text of the cell with the magic's line, ending as `source` does; None when another cell's is all that is known."""
    raw = getattr(getattr(result, "info", None), "raw_cell", None)
    if not isinstance(raw, str):
        return None
    if source.endswith("\n") and not raw.endswith("\n"):
        raw += "\n"  # as IPython does
    return raw if raw.endswith(source) else None


def _blank_lines_at_start(source: str) -> int:
    lines = source.splitlines()
    for number, line in enumerate(lines):
        if line.strip():
            return number
    return 0


def _with_display(nodes: list[ast.stmt], interactivity: str) -> list[tuple[ast.stmt, bool]]:
    """Every statement, and whether its value is displayed, by the rules of ``ast_node_interactivity``."""
    if not nodes:
        return []
    last = nodes[-1]
    if interactivity == "last_expr_or_assign":
        target = None
        if isinstance(last, ast.Assign) and len(last.targets) == 1:
            target = last.targets[0]
        elif isinstance(last, (ast.AugAssign, ast.AnnAssign)):
            target = last.target
        if isinstance(target, ast.Name):
            last = ast.fix_missing_locations(ast.Expr(ast.Name(target.id, ast.Load())))
            nodes = [*nodes, last]
        interactivity = "last_expr"
    if interactivity == "last_expr":
        interactivity = "last" if isinstance(last, ast.Expr) else "none"
    return [(node, interactivity == "all" or (interactivity == "last" and node is last)) for node in nodes]


class _ShownAsOfTheCell:
    """Stands in for the shell's ``showtraceback`` until one exception was shown, or the cell has ended.

    Only then are all frames known that the exception passes through on its way out, and only then can they be taken away. An
    attribute of the exception cannot do this: IPython shows syntax errors and groups of exceptions without asking the exception.
    """

    def __init__(self, shell: Any, error: BaseException) -> None:
        self._shell = shell
        self._error: BaseException | None = error
        self._before: Any = vars(shell).get("showtraceback", _ABSENT)
        self._show = shell.showtraceback
        own: TracebackType | None = error.__traceback__
        while own is not None and own.tb_frame.f_code is not _run_code.__code__:
            own = own.tb_next
        self._ran = own is not None
        self._users_traceback = own.tb_next if own is not None else None

    @classmethod
    def arrange(cls, shell: Any, error: BaseException) -> None:
        """See to it that `error`, which is about to leave `run_cell`, is shown with the user's frames only."""
        present = vars(shell).get("showtraceback")
        if isinstance(present, cls):
            if present._error is error:  # of a magic within a magic; the inner one knows the user's frames
                return
            present.remove()
        shown = cls(shell, error)
        shell.events.register("post_execute", shown.remove)
        shell.showtraceback = shown

    def remove(self) -> None:
        """Put the shell's own back."""
        if self._error is None:
            return
        self._error = self._users_traceback = None
        self._shell.events.unregister("post_execute", self.remove)
        if vars(self._shell).get("showtraceback") is not self:
            return
        if self._before is _ABSENT:
            del self._shell.showtraceback
        else:
            self._shell.showtraceback = self._before

    def __call__(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        error = self._error
        if error is not None and error is (sys.exc_info() if exc_tuple is None else exc_tuple)[1]:
            shower = error.__traceback__  # the frame in which the shell has caught it, which IPython leaves out by itself
            traceback = self._users_traceback
            if shower is not None:
                traceback = TracebackType(traceback, shower.tb_frame, shower.tb_lasti, shower.tb_lineno)
            error.with_traceback(traceback)
            if exc_tuple is not None:
                exc_tuple = (exc_tuple[0], error, traceback)
            if not self._ran:
                kwargs.pop("running_compiled_code", None)  # IPython shows no frames for what could not be compiled
            self.remove()
        self._show(exc_tuple, *args, **kwargs)
