"""The body of a cell magic: what it shows, leaves behind and raises is what the plain cell does.

``AMP_WIDGETS_KERNEL_PYTHON`` names the interpreter that runs the kernel, to try another ipykernel than this environment's.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("IPython")

from IPython.core.interactiveshell import InteractiveShell

from amp_widgets.cell import run_cell
from amp_widgets.errors import MagicError

ROOT = Path(__file__).parent.parent
KERNEL_PYTHON = os.environ.get("AMP_WIDGETS_KERNEL_PYTHON", sys.executable)
PATIENCE_S = 60.0  # only ever waited for in full by a test that fails
MAGIC = """
    import sys
    from amp_widgets.cell import run_cell
    from IPython.core.magic import register_cell_magic
    shell = get_ipython()

    @register_cell_magic
    def plainly(line, cell):
        try:
            run_cell(shell, cell)
        finally:
            shell.user_ns['ended'] = True
"""


# ---- in this process ----


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Any]:
    """A shell of its own, with the magic."""
    modules = {name: sys.modules.get(name) for name in ("__main__",)}
    hook = sys.excepthook
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    InteractiveShell.clear_instance()
    made = InteractiveShell.instance(ipython_dir=str(tmp_path), history_length=0)
    made.history_manager.enabled = False
    made.register_magic_function(lambda line, cell: run_cell(made, cell), "cell", "plainly")
    try:
        yield made
    finally:
        made.restore_sys_module_state()
        InteractiveShell.clear_instance()
        sys.modules.update({name: module for name, module in modules.items() if module is not None})
        sys.excepthook = hook
        loop.close()
        asyncio.set_event_loop(None)


def cell(body: str) -> str:
    return "%%plainly\n" + textwrap.dedent(body).strip("\n")


def test_names_land_in_the_users_namespace(shell: Any) -> None:
    result = shell.run_cell(cell("x = 3\ndef f(): return x, __name__\nf()"), store_history=True)
    assert result.success
    assert result.result == (3, "__main__")
    assert shell.user_ns["x"] == 3
    assert shell.user_ns["_"] == (3, "__main__")
    assert shell.user_ns["Out"] == {1: (3, "__main__")}


@pytest.mark.parametrize(
    ("interactivity", "body", "shown"),
    [
        ("last_expr", "1\n2", ["2"]),
        ("last_expr", "1\n2;", []),
        ("last_expr", "1\n2; # quiet", []),
        ("last_expr", "1\n';'", ["';'"]),
        ("last_expr", "x = 3", []),
        ("last_expr", "for i in range(2): i", []),
        ("last", "for i in range(2): i", ["0", "1"]),
        ("all", "1\n2\nx = 3\n4", ["1", "2", "4"]),
        ("none", "1\n2", []),
        ("last_expr_or_assign", "x = 3", ["3"]),
        ("last_expr_or_assign", "x = 3;", []),
        ("last_expr_or_assign", "x = y = 3", []),
        ("last_expr_or_assign", "x: int = 3", ["3"]),
        ("last_expr_or_assign", "x = 3\nx += 4", ["7"]),
        ("last_expr_or_assign", "a = [0]\na[0] = 3", []),
        ("last_expr_or_assign", "8", ["8"]),
        ("last_expr", "# nothing", []),
    ],
)
def test_what_is_displayed(shell: Any, monkeypatch: pytest.MonkeyPatch, interactivity: str, body: str, shown: list[str]) -> None:
    found: list[str] = []
    monkeypatch.setattr(
        type(shell.displayhook), "write_format_data", lambda hook, data, metadata=None: found.append(data["text/plain"])
    )
    shell.ast_node_interactivity = interactivity
    for source in (body, cell(body)):
        found.clear()
        assert shell.run_cell(source, store_history=True).success
        assert found == shown, source


def test_only_the_exception_comes_out_of_a_call_outside_of_a_cell(shell: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        run_cell(shell, "y = 1\n1 / 0\ny = 2")
    assert shell.user_ns["y"] == 1
    with pytest.raises(SyntaxError) as caught:
        run_cell(shell, "1\n1 +")
    assert caught.value.lineno == 3
    with pytest.raises(KeyboardInterrupt):
        run_cell(shell, "raise KeyboardInterrupt")
    with pytest.raises(SystemExit):
        run_cell(shell, "import sys; sys.exit(3)")
    shell.run_cell("1")
    assert "showtraceback" not in vars(shell)


def test_an_await_is_refused_before_anything_has_run(shell: Any) -> None:
    with pytest.raises(MagicError, match="a cell of its own without the magic"):
        run_cell(shell, "z = 1\nimport asyncio\nawait asyncio.sleep(0)")
    assert "z" not in shell.user_ns
    run_cell(shell, "async def f():\n    await asyncio.sleep(0)\nz = 1")
    assert shell.user_ns["z"] == 1


def test_statements_above_one_that_cannot_be_compiled_have_run(shell: Any) -> None:
    with pytest.raises(SyntaxError, match="return"):
        run_cell(shell, "w = 1\nreturn 3")
    assert shell.user_ns["w"] == 1


def test_the_exceptions_traceback_is_the_users_once_it_was_shown(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    result = shell.run_cell(cell("def f():\n    1 / 0\n\nf()"), store_history=True)
    lines = []
    traceback = result.error_in_exec.__traceback__
    while traceback is not None:
        lines.append((traceback.tb_frame.f_code.co_name, traceback.tb_lineno))
        traceback = traceback.tb_next
    assert lines[1:] == [("<module>", 5), ("f", 3)]
    assert lines[0][0] == "run_code"
    assert sys.last_traceback is result.error_in_exec.__traceback__
    assert _plain_text(capsys.readouterr().out).count("ZeroDivisionError: ") == 1
    assert "showtraceback" not in vars(shell)


def test_a_shell_whose_showtraceback_was_replaced_already(shell: Any) -> None:
    shown: list[Any] = []

    def theirs(*args: Any, **kwargs: Any) -> None:
        shown.append(sys.exc_info()[1])

    shell.showtraceback = theirs
    result = shell.run_cell(cell("1 / 0"))
    assert shown == [result.error_in_exec]
    assert vars(shell)["showtraceback"] is theirs


def test_an_exception_that_the_cell_catches_leaves_nothing(shell: Any) -> None:
    source = """
        try:
            get_ipython().run_cell_magic("plainly", "", "1 / 0")
        except ZeroDivisionError as error:
            kept = error
        in_force = "showtraceback" in vars(get_ipython())
    """
    assert shell.run_cell(textwrap.dedent(source)).success
    assert shell.user_ns["in_force"]
    assert "showtraceback" not in vars(shell)
    assert not [callback for callback in shell.events.callbacks["post_execute"] if "remove" in repr(callback)]


def test_lines_are_counted_in_the_notebooks_cell(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for source, line in (("%%plainly\n1 / 0", 2), ("%%plainly\n\n  \n1 / 0\n", 4), ("\n\n%%plainly\n\n1 / 0", 5)):
        shell.run_cell(source, store_history=True)
        assert f"line {line}\n" in _plain_text(capsys.readouterr().out), source
    shell.run_cell("%%plainly\n\nx = 1\nx +", store_history=True)
    assert "line 4\n" in _plain_text(capsys.readouterr().out)


def test_a_magic_within_the_magic(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    shell.run_cell("%%plainly\n%%plainly\nx = 5\n1 / 0", store_history=True)
    shown = _plain_text(capsys.readouterr().out)
    assert shell.user_ns["x"] == 5
    assert shown.count("Cell In[1]") == 1
    assert "run_cell" not in shown
    assert "showtraceback" not in vars(shell)


# ---- through a kernel ----


class Kernel:
    """A kernel and a client of it."""

    def __init__(self, directory: Path) -> None:
        from jupyter_client.kernelspec import KernelSpec
        from jupyter_client.manager import KernelManager

        class Manager(KernelManager):
            @property
            def kernel_spec(self) -> KernelSpec:
                argv = [KERNEL_PYTHON, "-Xfrozen_modules=off", "-m", "ipykernel_launcher", "-f", "{connection_file}"]
                return KernelSpec(argv=argv, display_name="under test", language="python")

        directories = {name: str(directory / name) for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR")}
        self.manager = Manager(connection_file=str(directory / "connection.json"))
        self.manager.start_kernel(
            env=os.environ | directories | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)

    def run(self, code: str) -> tuple[list[Any], dict[str, Any]]:
        """What a cell publishes, and the reply."""
        message_id = self.client.execute(code, stop_on_error=False)  # or else older kernels abort what comes soon after
        return self.published(message_id), self.reply(message_id)

    def published(self, message_id: str) -> list[Any]:
        found: list[Any] = []
        while True:
            message = self.client.get_iopub_msg(timeout=PATIENCE_S)
            if message["parent_header"].get("msg_id") != message_id:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                return found
            if kind in ("status", "execute_input"):
                continue
            if kind == "stream" and found and found[-1][0] == "stream" and found[-1][1]["name"] == content["name"]:
                found[-1][1]["text"] += content["text"]  # how a stream is cut into pieces is a matter of time
            else:
                found.append((kind, content))

    def reply(self, message_id: str) -> dict[str, Any]:
        while True:
            message = self.client.get_shell_msg(timeout=PATIENCE_S)
            if message["parent_header"].get("msg_id") == message_id:
                return dict(message["content"])

    def text(self, code: str) -> str:
        """What a cell prints that must not fail."""
        published, reply = self.run(textwrap.dedent(code))
        assert reply["status"] == "ok", reply
        return "".join(content["text"] for kind, content in published if kind == "stream")


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    pytest.importorskip("jupyter_client")
    pytest.importorskip("ipykernel")
    running = Kernel(tmp_path_factory.mktemp("kernel"))
    try:
        running.text(MAGIC)
        running.text("original = shell.showtraceback.__func__; ended = False")
        yield running
    finally:
        running.close()


def _plain_text(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def _comparable(value: Any, shift: int) -> Any:
    """Without colours, the cell's number and addresses, and with line numbers in the cell less `shift`."""
    if isinstance(value, dict):
        left_out = ("execution_count", "engine_info", "user_expressions", "payload")
        return {key: _comparable(item, shift) for key, item in value.items() if key not in left_out}
    if isinstance(value, (list, tuple)):
        return [_comparable(item, shift) for item in value]
    if not isinstance(value, str):
        return value
    text = re.sub(r"0x[0-9a-f]+", "0x", _plain_text(value))
    text = re.sub(r"([^\s\"]*ipykernel_\d+/)?\d{6,}\.py", "cell.py", text)
    text = re.sub(r"(?m)^(CPU times|Wall time): .*$", r"\1", text)
    text = re.sub(  # in the texts of syntax errors, in warnings, and where Python's own format is shown
        r"(\(cell\.py, line |statement on line |^cell\.py:|File \"cell\.py\", line )(\d+)",
        lambda match: f"{match[1]}{int(match[2]) - shift}",
        text,
    )
    parts = re.split(r"(?m)^(?= *Cell In)", text)  # a frame each; only those of the cell are shifted
    return "".join(_shifted(part, shift) for part in parts)


def _shifted(frame: str, shift: int) -> str:
    if not re.match(" *Cell In", frame):
        return frame
    head, newline, context = frame.partition("\n")
    head = re.sub(r"In\[\d+\]", "In[n]", head)
    head = re.sub(r"(line |:)(\d+)", lambda match: f"{match[1]}{int(match[2]) - shift}", head)
    lines = []
    for line in context.split("\n"):
        number = re.match(r"(?=.{7}( |$))( +|-+> )(\d+)(?= |$)", line)  # right-aligned, with an arrow or not
        if number is not None and len(number[0]) == 7:
            there = int(number[3]) - shift
            if there == 0:
                continue  # the line of the magic, which is shown as an empty one
            mark = ("-" * (5 - len(str(there))) + "> ") if ">" in number[2] else " " * (7 - len(str(there)))
            line = f"{mark}{there}{line[7:]}"
        lines.append(line)
    return head + newline + "\n".join(lines)


SAME: dict[str, str] = {
    "value": "x = 3\nx + 1",
    "quiet": "x + 1;",
    "prints": "import sys\nfor i in range(3):\n    print(i)\nprint('oh', file=sys.stderr)\ni",
    "display": "from IPython.display import display, HTML\ndisplay(HTML('<b>1</b>'))\nHTML('<i>2</i>')",
    "system": "!echo from the system\nfiles = !echo a b\nfiles",
    "line magics": "%who_ls int\ny = %sx echo 3\ny",
    "help": "len?",
    "cell magic": "%%capture kept\nprint('kept')",
    "cell magic with lines": "%%writefile /dev/null\na\nb",
    "source and pickle": """
        import inspect, pickle

        def function(a):
            '''Its text.'''
            return a + 1  # commented

        class Thing:
            def method(self):
                return 2

        assert pickle.loads(pickle.dumps(function)) is function
        print(inspect.getsource(function), inspect.getsource(Thing.method))
        function.__module__, Thing.__module__, __name__, Thing.__qualname__
        """,
    "future": "from __future__ import annotations\ndef g(a: int): pass\ng.__annotations__",
    "error": "x = 1\n\n1 / 0\nx = 2",
    "error on the first line": "1 / 0",
    "error below": "def f(n):\n    if n == 0:\n        raise ValueError('<deep>')\n    f(n - 1)\n\n\nf(2)",
    "error in a loop": "for i in range(3):\n    print(i)\n    if i == 1:\n        {}[i]",
    "error far down": "\n".join(f"x{i} = {i}" for i in range(12)) + "\nx3 / x0\n" + "\n".join(f"y{i} = {i}" for i in range(5)),
    "error in a library": "import json\njson.loads('{')",
    "error while handling": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    [][1]",
    "error from another": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise RuntimeError('outer') from e",
    "error in display": "class Bad:\n    def __repr__(self):\n        1 / 0\nBad()",
    "group": "raise ExceptionGroup('two', [ValueError(1), KeyError(2)])",
    "error in a line magic": "x = 1\n%run /no/such/file.py",
    "error in a cell magic": "%%capture kept\nprint('x')\n1 / 0",
    "error in %%time": "%%time\nx = 1\nx / 0",
    "no such magic": "x = 1\n%nosuchmagic",
    "assertion": "assert x == 5, 'told'",
    "syntax": "x = 1\ny = = 2",
    "syntax on the first line": "1 +",
    "syntax open": "x = 1\nf(1,",
    "syntax at compilation": "x = 1\nreturn x",
    "syntax at run time": "x = 1\nexec('a b')",
    "syntax in eval below": "def e():\n    return eval('1 +')\n\n\ne()",
    "indentation": "if True:\nx = 1",
    "unindent": "if True:\n        x = 1\n    y = 2",
    "tab": "if True:\n        x = 1\n\ty = 2",
    "null": "x = 1\n'\\0' + 1",
    "interrupt": "x = 1\nraise KeyboardInterrupt",
    "real interrupt": "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(5)",
    "exit": "import sys\nsys.exit(3)",
    "own rendering": "class Own(Exception):\n    def _render_traceback_(self):\n        return ['of', 'its own']\nraise Own('o')",
    "refuses attributes": """
        class Refusing(Exception):
            __slots__ = ()
            def __setattr__(self, name, value):
                raise RuntimeError(name)
        raise Refusing('r')
        """,
    "stop iteration": "next(iter([]))",
    "generator exit": "raise GeneratorExit",
    "usage error": "from IPython.core.error import UsageError\nraise UsageError('used')",
    "warning": "import warnings\nwarnings.warn('careful', stacklevel=1)\nx",
    "unicode": "ß = 'ü'\nß.nö",
}  # fmt: skip


@pytest.mark.parametrize("body", SAME.values(), ids=SAME)
def test_the_same_as_the_plain_cell(kernel: Kernel, body: str) -> None:
    body = textwrap.dedent(body).strip("\n")
    shift = 0 if body.startswith("%%capture") else 1  # it runs its body as a cell, which is counted by itself
    plain, plain_reply = kernel.run(body)
    kernel.text("sys.modules['IPython.core.interactiveshell'].__dict__.pop('__warningregistry__', None)")  # warn once more
    magic, magic_reply = kernel.run("%%plainly\n" + body)
    assert _comparable(magic, shift) == _comparable(plain, 0)
    if "traceback" not in plain_reply or plain:  # a cell that shows nothing replies with the traceback of the one before
        assert _comparable(magic_reply, shift) == _comparable(plain_reply, 0)
    left = "print(shell.showtraceback.__func__ is original, 'showtraceback' in vars(shell), ended); ended = False"
    assert kernel.text(left) == "True False True\n"


@pytest.mark.parametrize("mode", ["Plain", "Verbose", "Minimal", "Context"])
def test_the_same_in_every_mode_of_tracebacks(kernel: Kernel, mode: str) -> None:
    kernel.text(f"%xmode {mode}")
    try:
        for name in ("error below", "error while handling", "syntax", "syntax at run time"):
            plain, _ = kernel.run(SAME[name])
            magic, _ = kernel.run("%%plainly\n" + SAME[name])
            assert _comparable(magic, 1) == _comparable(plain, 0), name
    finally:
        kernel.text("%xmode Context")


def test_the_number_of_the_cell(kernel: Kernel) -> None:
    [(_, content)], reply = kernel.run("%%plainly\n1 / 0")
    assert f"Cell In[{reply['execution_count']}], line 2" in _plain_text("\n".join(content["traceback"]))
    [(_, content)], reply = kernel.run("%%plainly\n5")
    assert content["execution_count"] == reply["execution_count"]


def test_cells_that_wait_behind_an_error_are_aborted(kernel: Kernel) -> None:
    failing = kernel.client.execute("%%plainly\nimport time\ntime.sleep(0.3)\n1 / 0")
    waiting = kernel.client.execute("1")
    assert kernel.reply(failing)["status"] == "error"
    assert kernel.reply(waiting)["status"] == "aborted"
    while kernel.run("1")[1]["status"] == "aborted":
        pass


def test_the_traceback_magic_and_the_debugger_afterwards(kernel: Kernel) -> None:
    body = "def f(inner):\n    inner / 0\n\nf(1234)"
    shown = []
    for source in (body, "%%plainly\n" + body):
        kernel.run(source)
        shown.append(kernel.run("%tb")[0])
    assert _comparable(shown[1], 1) == _comparable(shown[0], 0)
    message_id = kernel.client.execute("%debug", allow_stdin=True)
    for command in ("p inner + 1", "up", "p 'at', __name__", "up", "q"):
        assert kernel.client.get_stdin_msg(timeout=PATIENCE_S)["msg_type"] == "input_request"
        kernel.client.input(command)
    text = "".join(content["text"] for kind, content in kernel.published(message_id) if kind == "stream")
    kernel.reply(message_id)
    assert "1235" in text
    assert "('at', '__main__')" in text
    assert "amp_widgets" not in text


def test_an_await_is_refused_in_one_sentence(kernel: Kernel) -> None:
    [(_, content)], reply = kernel.run("%%plainly\nimport asyncio\nawait asyncio.sleep(0)")
    assert reply["status"] == "error"
    assert content["ename"] == "MagicError"
    shown = _plain_text("\n".join(content["traceback"]))
    assert "without the magic" in shown
    assert "File" not in shown
    assert "Cell In" not in shown


def test_nothing_is_stored_but_what_the_cell_made(kernel: Kernel) -> None:
    names = kernel.text("before = set(globals())")
    kernel.text("%%plainly\nnew_name = 1")
    names = kernel.text("print(sorted(name for name in set(globals()) - before if not name.startswith('_')))")
    assert names == "['before', 'new_name']\n"


@pytest.mark.parametrize("interactivity", ["all", "last_expr_or_assign"])
def test_the_shells_own_choice_of_what_is_displayed(kernel: Kernel, interactivity: str) -> None:
    kernel.text(f"shell.ast_node_interactivity = {interactivity!r}")
    try:
        for body in ("1\n2\nz = 3", "z = 3;", "z = 4\nz += 1"):
            assert _comparable(kernel.run("%%plainly\n" + body)[0], 1) == _comparable(kernel.run(body)[0], 0)
    finally:
        kernel.text("shell.ast_node_interactivity = 'last_expr'")


DIES_IN_BACKWARD = """
import weakref, torch
from torch import nn
from amp_widgets.session import AmpSession

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 4))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
x, y = torch.randn(512, 64), torch.randint(4, (512,))
made = []
net[1].register_forward_hook(lambda module, args, output: made.append(weakref.ref(output)))
session = AmpSession(net, optimizer)

def loop():
    for _ in range(2):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        globals().update(loss=loss)
        loss.backward()
        optimizer.step()
"""


def test_what_a_plain_loop_that_ran_out_of_memory_held_is_free_once_its_cell_has_ended(shell: Any, capsys: Any) -> None:
    assert shell.run_cell(DIES_IN_BACKWARD).success
    assert shell.run_cell("session.profile_next_step()\nloop()").success
    shell.run_cell(
        "profile = session.profiles[-1]\n"
        "forward = max(phase.stop for phase in profile.phases if phase.name in ('forward', 'loss'))\n"
        "session.memory_budget = int(profile.total_bytes[:forward].max()) + 1000\n"
        "made.clear()"
    )
    failed = shell.run_cell("loop()")
    assert isinstance(failed.error_in_exec, torch.OutOfMemoryError)
    assert "failed resolving arguments" not in capsys.readouterr().out
    assert shell.user_ns["loss"].item() > 0
    assert [reference() for reference in shell.user_ns["made"]] == [None]
    assert shell.user_ns["session"].step_in_progress is False
    assert not [one for one in shell.events.callbacks["post_run_cell"] if "once" in repr(one)]
    shell.run_cell("session.memory_budget = None")
    assert shell.run_cell("loop()").success
    shell.run_cell("session.close()")
