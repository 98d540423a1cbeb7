"""The notebook's kernel: widget messages handled while a cell keeps it busy, and the stop button while no cell runs.

Neither is something that ipykernel offers. It handles one message at a time, so that a control moved during a cell waits for the
end of the cell, and between cells it ignores the interrupt signal. What is done about it here uses parts of ipykernel that are
not public. They are looked for, not assumed from a version, and where they are missing nothing is touched and
`CommPump.why_not` says so. Nothing of IPython, ipykernel or zmq is imported unless a kernel runs.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NamedTuple

#: The messages that are handled during a cell: those of widgets, and what a page asks for when it is loaded again.
PUMPED_MESSAGES = frozenset({"comm_open", "comm_msg", "comm_close", "comm_info_request", "kernel_info_request"})
PUMP_INTERVAL_S = 0.02
MESSAGES_PER_PUMP = 50
AFTER_THE_CELL = "Controls take effect when the cell ends; use Start, or %amp set … --at STEP"
"""What `CommPump.why_not` begins with, before the reason."""


def in_kernel() -> bool:
    """Whether this process is a Jupyter kernel. Imports nothing."""
    return _kernel() is not None


class CommPump:
    """Handles the widget messages that wait for the main shell, from inside the cell that keeps it busy.

    A training loop calls `pump` at every step boundary. Every other message (the next cell, a completion) is left in its place in
    the queue and runs after the cell as it would have. One pump a session; any number may exist.

    Parameters
    ----------
    clock
        Returns seconds that never go back.
    interval_s
        The least time between two looks at the queue, in seconds.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, interval_s: float = PUMP_INTERVAL_S) -> None:
        self._clock = clock
        self._interval_s = interval_s
        self._next_look_s = float("-inf")
        self._why_not = ""
        self._shell: _MainShell | None = None
        self._thread_id: int | None = None  # no thread: there is nothing to pump
        kernel = _kernel()
        if kernel is None:
            return
        try:
            self._shell = _main_shell_of(kernel)
            self._shell.attach()
            self._thread_id = self._shell.thread_id
        except Exception as error:  # whatever a private attribute that is not as expected may raise
            self._give_up(error)

    @property
    def available(self) -> bool:
        """Whether controls take effect during a cell."""
        return self._thread_id is not None

    @property
    def why_not(self) -> str:
        """A sentence for people when controls wait for the end of the cell; empty when they do not, and outside a kernel."""
        return self._why_not

    def pump(self) -> None:
        """Handle what waits. For any thread; does nothing but on the main shell's own, nor within `interval_s` of the last look.

        An exception in a widget's callback is logged as it always is. A ``KeyboardInterrupt`` is raised here, in the cell.
        """
        if threading.get_ident() != self._thread_id or self._clock() < self._next_look_s:
            return
        shell = self._shell
        if shell is None:  # closed on another thread this very moment
            return
        try:
            looked = shell.handle_waiting()
            self._why_not = "" if looked else f"{AFTER_THE_CELL} (the cell runs an event loop of its own)."
        except Exception as error:  # never a callback's: those are caught where they are called
            self._give_up(error)
        self._next_look_s = self._clock() + self._interval_s

    def close(self) -> None:
        """Leave the kernel as it was. `pump` does nothing from now on. May be called again."""
        shell, self._shell, self._thread_id = self._shell, None, None
        if shell is not None:
            shell.detach()

    def _give_up(self, error: Exception) -> None:
        with suppress(Exception):  # it may fail for the same reason
            self.close()
        version = getattr(sys.modules.get("ipykernel"), "__version__", None)
        kernel = "this kernel" if version is None else f"ipykernel {version}"
        self._why_not = f"{AFTER_THE_CELL} ({kernel} is not built as expected: {type(error).__name__}: {error})."


def answer_where_asked(comm: Any) -> None:
    """Have the front end decide which of the kernel's threads handles a widget's messages.

    ipykernel 7.4 takes them to the thread that last *sent* on the comm: for a widget made in a cell to the main one, where they
    wait for the end of the cell that runs. Left to the front end, JupyterLab has them handled on a thread of their own.

    Parameters
    ----------
    comm
        The widget's comm, or None.
    """
    if hasattr(comm, "_reply_subshell_for"):  # a private method; elsewhere nothing is to be done
        comm._reply_subshell_for = _as_asked


def on_interrupt(callback: Callable[[], None]) -> Callable[[], None]:
    """Have the kernel's stop button call `callback` while no cell runs.

    A cell that runs is interrupted as ever, with ``KeyboardInterrupt``, and `callback` is not called: a cell that waits for a
    background run has to stop that run itself. An interrupt that meets a widget's callback does both. ``interrupt_request``
    messages (a kernelspec with ``interrupt_mode`` "message") end as the same signal in ipykernel, so they are covered.

    Parameters
    ----------
    callback
        Called on the kernel's event loop, in the main thread. It should set a flag and return.

    Returns
    -------
    Callable
        Uninstalls. When no callback is left, the handler of the signal is the old one again (unless someone put in another
        meanwhile). Both directions are for any thread; from others than the main one they take effect when the main thread
        is between cells. Outside a kernel nothing is installed: there the interrupt already reaches the main thread.
    """
    kernel = _kernel()
    if kernel is None:
        return lambda: None
    try:
        interrupts = _interrupts_of(kernel)
    except AttributeError:  # a kernel of another make: its stop button does what it always did
        return lambda: None
    return interrupts.add(callback)


def when_shown(call: Callable[[], None]) -> bool:
    """Call it when the cell that is running is over and its error was shown; False, and no call, where none is running.

    For what takes the variables away from the frames of an error, which IPython reads to show it.
    """
    shell = _running_shell()
    if shell is None:
        return False

    def once(result: object) -> None:
        shell.events.unregister("post_run_cell", once)
        call()

    shell.events.register("post_run_cell", once)
    return True


def _as_asked(data: object, default: Any) -> Any:
    return default


_Frames = Sequence[Any]  # of zmq.Frame: one message, as it comes off the socket

_shells: dict[int, _MainShell] = {}  # by id of the kernel; a process has one, but for embedded ones
_interrupts: dict[int, _Interrupts] = {}


def _running_shell() -> Any:
    """IPython's shell, if it is running a cell on this thread."""
    running = sys.modules.get("IPython.core.interactiveshell")
    if running is None:
        return None
    code = running.InteractiveShell.run_code.__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            return frame.f_locals.get("self")
        frame = frame.f_back
    return None


def _kernel() -> Any:
    """The kernel of this process (an ``ipykernel.kernelbase.Kernel``), or None."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return None if get_ipython is None else getattr(get_ipython(), "kernel", None)


def _main_shell_of(kernel: Any) -> _MainShell:
    if id(kernel) not in _shells:
        _shells[id(kernel)] = _MainShell(kernel)
    return _shells[id(kernel)]


def _interrupts_of(kernel: Any) -> _Interrupts:
    return _interrupts.setdefault(id(kernel), _Interrupts(kernel))


class _Message(NamedTuple):
    frames: _Frames
    identity: Any  # the client's, for the reply
    fields: dict[str, Any]  # header, content, buffers, ...: as the kernel's handlers expect it


class _MainShell:
    """The queue of messages for the kernel's main shell: what is in the socket, and what the event loop has read from it already.

    The event loop reads one or more messages ahead of the one that it handles. So a widget message that was sent behind a cell
    may be off the socket when the cell begins; its control would be dead for the whole cell, because a page sends a control's
    next change only when the last one was handled. While attached, widget messages that the loop reads are noted down, so that
    they can be handled during the cell, in the order in which they were sent; when the kernel comes to one of those it declines.

    ``Any`` is the type of all that is ipykernel's: it has no stubs for it, and half of it is private.
    """

    def __init__(self, kernel: Any) -> None:
        import zmq

        channel_thread = getattr(kernel, "shell_channel_thread", None)
        if channel_thread is not None:  # since ipykernel 7 a thread reads the channel and hands on to each shell
            manager = channel_thread.manager
            self._stream: Any = manager.get_shell_channel_to_subshell_pair(None).to_stream
            self._reply_to: Any = manager.get_subshell_to_shell_channel_socket(None)
            # 7.0 does not name the thread: there it is always the main one
            self.thread_id: int = getattr(channel_thread, "parent_thread", threading.main_thread()).ident or 0
        else:
            self._stream = self._reply_to = kernel.shell_stream
            self.thread_id = threading.main_thread().ident or 0
        if self._stream.io_loop is not kernel.io_loop:
            raise RuntimeError("its shell channel is read by another event loop than the one that runs cells")
        self._kernel = kernel
        self._loop = kernel.io_loop.asyncio_loop
        self._kernel_receive: Any = self._stream._recv_callback  # there is no public way to learn it
        self._kernel_should_handle: Any = kernel.should_handle
        for name in ("_parent_ident", "_publish_status", "get_parent", "set_parent", "session"):
            getattr(kernel, name)
        if not callable(self._kernel_receive) or not PUMPED_MESSAGES.issubset(kernel.shell_handlers):
            raise RuntimeError("its shell channel has no handlers for widget messages")
        self._events_option, self._readable, self._writable = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.POLLOUT)
        self._process_id = os.getpid()
        self._users = 0
        self._handling = False
        self._read_ahead: dict[str, _Message] = {}  # by message id, in order
        self._handled: set[str] = set()  # ids of read-ahead messages to which the kernel will come yet
        self._taken: deque[_Message] = deque()
        self._tasks: set[asyncio.Future[Any]] = set()  # the event loop itself would let them be collected
        self._restore_should_handle: Callable[[], None] | None = None

    def attach(self) -> None:
        self._users += 1
        self._on_its_thread(self._settle)

    def detach(self) -> None:
        self._users -= 1
        self._on_its_thread(self._settle)

    def handle_waiting(self) -> bool:
        """Handle the widget messages in the queue, about `MESSAGES_PER_PUMP` at most. Whether that is possible in this cell."""
        if self._handling or os.getpid() != self._process_id:  # a callback that pumps; a forked child, which shares the socket
            return True
        try:
            if asyncio.get_running_loop() is not self._loop:
                return False  # nothing could be handed on to the kernel's loop in order
        except RuntimeError:
            return False
        # Looking resets the edge that wakes the loop, so nothing may come between this and taking what is there.
        if not self._stream.socket.getsockopt(self._events_option) & self._readable and not self._read_ahead:
            return True
        with _InterruptHold() as hold:  # an interrupt anywhere else would lose the message in hand
            identity, parent = self._kernel._parent_ident["shell"], self._kernel.get_parent("shell")
            self._handling = True
            try:
                _flush_output()
                self._take()
                for message in [*self._read_ahead.values(), *self._taken]:
                    if hold.interrupted:
                        break
                    self._handle(message, hold)
            finally:
                while self._taken:  # interrupted: for the next pump, or else the kernel
                    message = self._taken.popleft()
                    self._note(message)
                    self._hand_on(message.frames)
                self._handling = False
                self._kernel.set_parent(identity, parent, channel="shell")
                if parent:  # the status that was sent last is "idle"; the cell is not
                    self._kernel._publish_status("busy", "shell")
        return True

    def _take(self) -> None:
        """Take messages off the socket: those of widgets to handle now, the others on to the kernel, in order."""
        import zmq

        for _ in range(MESSAGES_PER_PUMP):
            try:
                frames = self._stream.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            message = self._widget_message(frames)
            if message is None:
                self._hand_on(frames)
            else:
                self._taken.append(message)
        self._stream.on_recv(self._stream._recv_callback, copy=False)  # has the loop look for what is left

    def _hand_on(self, frames: _Frames) -> None:
        # At once, not by way of a callback of the loop: that would come a turn after the messages that the loop itself reads.
        result = self._kernel_receive(frames)
        if inspect.isawaitable(result):
            task = asyncio.ensure_future(result)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _handle(self, message: _Message, hold: _InterruptHold) -> None:
        """What the kernel does for one message, without its lock and its signal handlers."""
        kernel, header = self._kernel, message.fields["header"]
        try:
            kernel.set_parent(message.identity, message.fields, channel="shell")
            kernel._publish_status("busy", "shell")
            if self._read_ahead.pop(header["msg_id"], None) is not None:
                self._handled.add(header["msg_id"])
            else:
                self._taken.popleft()
            try:
                with _without_cell_events(kernel.shell):
                    handler = kernel.shell_handlers[header["msg_type"]]
                    result = hold.released(handler, self._reply_to, message.identity, message.fields)
                    if inspect.iscoroutine(result):
                        _run_to_end(result)
            except Exception:
                kernel.log.error("Exception in message handler:", exc_info=True)
        finally:
            _flush_output()
            kernel._publish_status("idle", "shell")  # until then the page holds back what the control sends next
            if hasattr(self._reply_to, "flush"):  # a stream, which else sends when the loop is free
                self._reply_to.flush(self._writable)

    def _widget_message(self, frames: _Frames) -> _Message | None:
        """The message, if it is one to pump. Others (ipykernel's signals to itself, broken ones) are the kernel's business."""
        session = self._kernel.session
        try:
            identity, rest = session.feed_identities(frames, copy=False)
            fields = session.deserialize(rest, content=False, copy=False)  # with its content it could not be read a second time
            if fields["header"]["msg_type"] not in PUMPED_MESSAGES:
                return None
            fields["content"] = session.unpack(fields["content"])
        except Exception:
            return None
        return _Message(frames, identity, fields)

    def _on_its_thread(self, function: Callable[[], None]) -> None:
        if threading.get_ident() == self.thread_id:
            function()
        else:
            self._kernel.io_loop.add_callback(function)

    def _settle(self) -> None:
        """Put what notes down the messages in place, or out."""
        ours = self._stream._recv_callback == self._receive
        if self._users and not ours:
            self._kernel_receive = self._stream._recv_callback
            self._stream.on_recv(self._receive, copy=False)
        elif not self._users and ours:
            self._stream.on_recv(self._kernel_receive, copy=False)
            self._read_ahead.clear()
        if self._users and self._restore_should_handle is None:
            self._restore_should_handle = _override(self._kernel, "should_handle", self._should_handle)
        elif not self._users and not self._handled and self._restore_should_handle is not None:
            self._restore_should_handle()
            self._restore_should_handle = None

    def _receive(self, frames: _Frames) -> Any:
        """Stands in for the kernel's callback of its stream."""
        message = self._widget_message(frames)
        if message is not None:
            self._note(message)
        return self._kernel_receive(frames)

    def _note(self, message: _Message) -> None:
        if self._restore_should_handle is not None:  # else nothing would keep the kernel from handling it again
            self._read_ahead[message.fields["header"]["msg_id"]] = message

    def _should_handle(self, stream: Any, message: Any, identity: Any) -> Any:
        """Stands in for the kernel's method, which exists to decline messages, and which every shell calls on its own thread."""
        message_id = message["header"]["msg_id"]
        self._read_ahead.pop(message_id, None)
        if message_id in self._handled:
            self._handled.discard(message_id)
            self._settle()
            return False
        return self._kernel_should_handle(stream, message, identity)


class _Interrupts:
    """The interrupt signal while no cell runs, passed on to those who asked for it.

    ipykernel puts a handler that raises ``KeyboardInterrupt`` in place before each message and the one of before back after it;
    meanwhile that is kept in ``kernel.saved_sigint_handler``. So to come in from inside a message, that attribute is the place.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._process_id = os.getpid()
        self._loop = kernel.io_loop.asyncio_loop
        self._callbacks: dict[object, Callable[[], None]] = {}
        self._handler = self._on_signal  # kept, because a bound method is a new object each time
        self._kernel_hook: Any = kernel.pre_handler_hook
        self._restore_hook: Callable[[], None] | None = None  # not None: installed
        self._previous: Any = None

    def add(self, callback: Callable[[], None]) -> Callable[[], None]:
        key = object()
        self._callbacks[key] = callback
        self._settle_on_main_thread()

        def uninstall() -> None:
            if self._callbacks.pop(key, None) is not None:
                self._settle_on_main_thread()

        return uninstall

    def _settle_on_main_thread(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._settle()
        else:  # only the main thread may set signal handlers
            self._kernel.io_loop.add_callback(self._settle)

    def _settle(self) -> None:
        """Put the handler in place, or the old one back."""
        wanted, installed = bool(self._callbacks), self._restore_hook is not None
        if wanted == installed or threading.current_thread() is not threading.main_thread():
            return
        kernel, current = self._kernel, signal.getsignal(signal.SIGINT)
        in_message = current != getattr(kernel, "saved_sigint_handler", current)
        before: Any = kernel.saved_sigint_handler if in_message else current
        after: Any
        if self._restore_hook is None:
            self._previous, after = before, self._handler
            self._restore_hook = _override(kernel, "pre_handler_hook", self._before_message)
        else:
            after = self._previous if before is self._handler else before
            self._restore_hook()
            self._restore_hook = None
        if not in_message:
            signal.signal(signal.SIGINT, after)
        kernel.saved_sigint_handler = after

    def _before_message(self) -> None:
        """Stands in for the kernel's hook: an interrupt during a widget's callback is not lost on the run."""
        self._kernel_hook()
        header = self._kernel.get_parent("shell").get("header", {})
        if header.get("msg_type") != "execute_request":
            signal.signal(signal.SIGINT, self._on_signal_in_callback)

    def _on_signal(self, number: int, frame: Any) -> None:
        self._notify()
        if callable(self._previous):
            self._previous(number, frame)

    def _on_signal_in_callback(self, number: int, frame: Any) -> None:
        self._notify()
        signal.default_int_handler(number, frame)

    def _notify(self) -> None:
        if os.getpid() != self._process_id:  # a forked worker of a data loader, which gets the signal too
            return
        for callback in list(self._callbacks.values()):  # by way of the loop: a signal may find any lock taken
            self._loop.call_soon_threadsafe(callback)  # tornado's own add_callback would not wake the loop on this thread


def _override(kernel: Any, name: str, method: Callable[..., Any]) -> Callable[[], None]:
    """Have this one kernel use `method`. Returns what undoes it, unless someone else came after."""
    before = vars(kernel).get(name)
    setattr(kernel, name, method)

    def restore() -> None:
        if vars(kernel).get(name) != method:
            return
        if before is None:
            delattr(kernel, name)  # the class has it
        else:
            setattr(kernel, name, before)

    return restore


class _InterruptHold:
    """Lets an interrupt wait for the end of the block, but for one that meets a call which `released` makes."""

    def __enter__(self) -> _InterruptHold:
        self._held: tuple[int, Any] | None = None
        self._released = False
        self._previous: Any = None  # stays None where the handler is none of Python's, or this thread gets no signals
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.getsignal(signal.SIGINT)
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            if self._held is not None and callable(self._previous):
                self._previous(*self._held)

    @property
    def interrupted(self) -> bool:
        return self._held is not None

    def released(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function that an interrupt may end."""
        self._released = True
        try:
            return function(*arguments)
        finally:
            self._released = False

    def _on_signal(self, number: int, frame: Any) -> None:
        if self._released and callable(self._previous):
            self._released = False  # one is enough to end it; what is done then must not be interrupted
            self._previous(number, frame)
        else:
            self._held = number, frame


@contextmanager
def _without_cell_events(shell: Any) -> Iterator[None]:
    """Keep comms from announcing a message as if it were a cell, which they do whatever runs.

    Within a cell, "post_execute" would show and close the figures that the cell still draws on.
    """
    callbacks = shell.events.callbacks
    kept = {name: callbacks[name] for name in ("pre_execute", "post_execute")}
    callbacks.update({name: [] for name in kept})
    try:
        yield
    finally:
        for name, functions in kept.items():
            functions.extend(callbacks[name])  # registered meanwhile, as by a first import of pyplot
            callbacks[name] = functions


def _run_to_end(coroutine: Any) -> None:
    """Run a handler that is a coroutine in form only."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    coroutine.close()
    raise RuntimeError(f"{coroutine.__qualname__} waits for something, which it cannot do during a cell")


def _flush_output() -> None:
    """Send what was printed, while it still counts as output of the message that printed it."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # whatever the user put there
            stream.flush()
