"""``%%amp`` cells in a real kernel: the tutorials' own loops, what a cell says and shows, and what it leaves behind."""

from __future__ import annotations

import ast
import time
from collections.abc import Iterator
from typing import Any

import pytest

jupyter_client = pytest.importorskip("jupyter_client")

TIMEOUT_S = 90

SETUP = """
import warnings
warnings.simplefilter("ignore", FutureWarning)
%load_ext amp_widgets
import hashlib
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
from torch.optim import optimizer as _optimizer
from torch.nn.modules import module as _module
torch.set_num_threads(1)
torch.manual_seed(1)
train_dataset = TensorDataset(torch.randn(32, 12), torch.randint(0, 4, (32,)))

def digest(*modules):
    tensors = [t for m in modules for t in m.state_dict().values()]
    return hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in tensors)).hexdigest()

def patchable():
    region, scaler = torch.amp.autocast_mode.autocast, torch.amp.GradScaler
    owners = {"region": region, "scaler": scaler, "autograd": torch.autograd, "tensor": torch.Tensor, "module": nn.Module,
              "cuda": torch.cuda, "torch": torch, "cuda_region": torch.cuda.amp.autocast,
              "cuda_scaler": torch.cuda.amp.GradScaler}
    found = {(name, key): id(value) for name, owner in owners.items() for key, value in vars(owner).items()
             if callable(value) and not isinstance(value, type)}
    hooks = [d for m in (_module, _optimizer) for k, d in vars(m).items() if k.startswith("_global_") and hasattr(d, "items")]
    return found, [dict(hook) for hook in hooks], torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()
torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # torch completes itself with the first one
"""

# The classic tutorial of mixed precision, as people paste it.
MIXED = """
from torch.cuda.amp import autocast, GradScaler

class SimpleModel(nn.Module):
    def __init__(self):
        super(SimpleModel, self).__init__()
        self.fc1 = nn.Linear(12, 16)
        self.fc2 = nn.Linear(16, 4)

    def forward(self, x):
        x = torch.relu(self.fc1(x))
        return self.fc2(x)

torch.manual_seed(0)
model = SimpleModel().cuda()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
scaler = GradScaler()
train_loader = DataLoader(train_dataset, batch_size=8)

for epoch in range(2):
    for inputs, labels in train_loader:
        inputs, labels = inputs.cuda(), labels.cuda()
        optimizer.zero_grad()
        with autocast():
            outputs = model(inputs)
            loss = criterion(outputs, labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    print(f"Epoch {epoch}, Loss: {loss.item():.4f}")
"""

# The second one: activation checkpointing by hand in the model, with and without mixed precision.
CHECKPOINTED = """
import torch.utils.checkpoint as checkpoint
from torch.cuda.amp import autocast, GradScaler

class CheckpointedModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Dropout(0.1))
        self.layer2 = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        self.layer3 = nn.Linear(16, 4)

    def forward(self, x):
        x = checkpoint.checkpoint(self.layer1, x)
        x = checkpoint.checkpoint(self.layer2, x)
        x = self.layer3(x)
        return x

torch.manual_seed(0)
warnings.simplefilter("ignore", UserWarning)
model = CheckpointedModel().to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = GradScaler()
criterion = nn.CrossEntropyLoss()

def train(epochs):
    for epoch in range(epochs):
        for data, target in DataLoader(train_dataset, batch_size=8):
            data, target = data.to("cuda").requires_grad_(), target.to("cuda")
            optimizer.zero_grad()
            with autocast():
                output = model(data)
                loss = criterion(output, target)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

train(2)
"""

BY_HAND = (
    ("from torch.cuda.amp import autocast, GradScaler\n", "from functools import partial\n"
     "autocast = partial(torch.autocast, 'cpu', torch.float16)\nGradScaler = partial(torch.amp.GradScaler, 'cpu')\n"),
    (".cuda()", ""),
    ('.to("cuda")', ""),
)  # fmt: skip


class Cell:
    """What a cell that was run has said."""

    def __init__(self) -> None:
        self.printed = ""
        self.outputs: list[tuple[str, dict[str, Any], Any]] = []  # kind of message, data, display id
        self.error: dict[str, Any] | None = None
        self.status = ""
        self.result = ""

    @property
    def shown(self) -> str:
        """All that is displayed at the end, in its order on the page, as text and HTML."""
        places: dict[Any, dict[str, Any]] = {}
        for kind, data, display_id in self.outputs:
            if kind != "update_display_data" or display_id in places:
                places[display_id or len(places)] = data
        return "\n".join(f"{data.get('text/plain', '')}{data.get('text/html', '')}" for data in places.values())


class Kernel:
    """A kernel of its own."""

    def __init__(self) -> None:
        self.manager, self.client = jupyter_client.manager.start_new_kernel(kernel_name="python3")

    def send(self, code: str) -> str:
        return str(self.client.execute(code))

    def wait(self, message_id: str) -> Cell:
        cell = Cell()
        while True:
            message = self.client.get_iopub_msg(timeout=TIMEOUT_S)
            if message["parent_header"].get("msg_id") != message_id:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                cell.printed += content["text"]
            elif kind in ("display_data", "update_display_data"):
                cell.outputs.append((kind, content["data"], content.get("transient", {}).get("display_id")))
            elif kind == "execute_result":
                cell.result = content["data"]["text/plain"]
            elif kind == "error":
                cell.error = content
            elif kind == "status" and content["execution_state"] == "idle":
                break
        while True:
            reply = self.client.get_shell_msg(timeout=TIMEOUT_S)
            if reply["parent_header"].get("msg_id") == message_id:
                cell.status = reply["content"]["status"]
                return cell

    def run(self, code: str) -> Cell:
        return self.wait(self.send(code))

    def value(self, expression: str) -> Any:
        cell = self.run(expression)
        assert cell.error is None, cell.error
        return ast.literal_eval(cell.result)

    def interrupt_when(self, code: str, seen: str) -> Cell:
        """Run a cell, and interrupt it when it has printed `seen`."""
        message_id = self.send(code)
        while True:
            message = self.client.get_iopub_msg(timeout=TIMEOUT_S)
            if message["msg_type"] == "stream" and seen in message["content"]["text"]:
                break
        self.manager.interrupt_kernel()
        return self.wait(message_id)


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    made = Kernel()
    setup = made.run(SETUP)
    assert setup.error is None, setup.error
    yield made
    made.client.stop_channels()
    made.manager.shutdown_kernel(now=True)


@pytest.mark.parametrize("code", [MIXED, CHECKPOINTED], ids=["mixed precision", "checkpointing"])
def test_the_tutorials_run_verbatim(kernel: Kernel, code: str) -> None:
    by_hand = code
    for cuda, cpu in BY_HAND:
        by_hand = by_hand.replace(cuda, cpu)
    expected = kernel.run(by_hand)
    assert expected.error is None, expected.error
    digest, scale = kernel.value("digest(model), scaler.state_dict()")

    before = kernel.run("before = patchable()")
    cell = kernel.run("%%amp --cpu" + code)
    assert (before.error, cell.error, cell.status) == (None, None, "ok")
    assert cell.printed == expected.printed
    assert "dashboard" in cell.shown
    assert kernel.value("digest(model), scaler.state_dict()") == (digest, scale)
    assert kernel.value("patchable() == before, type(scaler).__module__, session.closed, session.settings.autocast") == (
        True, "torch.cuda.amp.grad_scaler", True, "fp16",
    )  # fmt: skip
    columns = kernel.value("{k: v.tolist() for k, v in session.history.columns('step', 'scale', 'loss').items()}")
    assert columns["step"] == list(range(8))
    assert columns["scale"] == [2.0**16] * 8
    if code is MIXED:
        assert columns["loss"][-1] == kernel.value("loss.item()")
    assert kernel.value("session.history.events()") == []


def test_without_the_flag_it_fails_as_ever(kernel: Kernel) -> None:
    plain, cell = kernel.run(MIXED), kernel.run("%%amp" + MIXED)
    assert plain.error is not None
    assert cell.error is not None
    assert cell.status == "error"
    assert (cell.error["ename"], cell.error["evalue"]) == (plain.error["ename"], plain.error["evalue"])
    assert "amp_widgets" not in "\n".join(cell.error["traceback"])
    assert "the cell ended before it had trained a model" in cell.shown


LOOP = """
net = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step, (x, y) in enumerate(DataLoader(train_dataset, batch_size=4)):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
"""


def test_changes_scripted_in_the_cell(kernel: Kernel) -> None:
    cell = kernel.run(f"%%amp\n%amp set autocast=bf16 --at 2\n%amp set checkpointed=* --at=4\n%amp set autocast=fp32{LOOP}")
    assert cell.error is None, cell.error
    assert "requested: autocast=bf16; in force from step 2" in cell.printed
    events = kernel.value("[(e.step, e.kind, e.reason, e.detail['source']) for e in session.history.events()]")
    assert events == [
        (1, "applied", "autocast fp32", "magic"),
        (2, "applied", "autocast bf16", "magic"),
        (4, "applied", "3 layers checkpointed", "magic"),
    ]
    assert kernel.value("type(net[0]).__name__, type(net[0]) is nn.Linear") == ("Linear", True)


def test_a_script_that_cannot_be_met_is_said(kernel: Kernel) -> None:
    cell = kernel.run(f"%%amp\n%amp set autocast=bf16 --at 0{LOOP}")
    assert cell.error is not None
    assert "at_step: got 0, expected at least 1" in cell.error["evalue"]
    cell = kernel.run(f"%%amp\n%amp set autocast=half --at 2{LOOP}")
    assert cell.error is not None
    assert "did you mean 'fp16'" in cell.error["evalue"]
    cell = kernel.run(f"%%amp\n%amp set checkpointed=layers.* --at 2{LOOP}")
    assert cell.error is None
    assert "requested: checkpointed=layers.*; in force from step 2\n" in cell.printed
    assert "%amp set: refused: checkpointed: no layer matches 'layers.*'" in cell.printed
    assert kernel.value("[(e.kind, 'no layer matches' in e.reason) for e in session.history.events()]") == [("rejected", True)]


def test_what_is_refused_is_said_in_the_language(kernel: Kernel) -> None:
    kernel.run("%amp lang ko")
    try:
        cell = kernel.run(f"%%amp\n%amp set checkpointed=zzz\n%amp record /nowhere/r.db{LOOP}")
        refused = "checkpointed: 'zzz'에 맞는 레이어가 없습니다; 이 모델의 레이어는 3개입니다. 예: '0', '1', '2'"
        assert f"%amp set: 거부됨: {refused}" in cell.printed
        refused = "record: /nowhere/r.db: 그런 파일이나 폴더가 없습니다; 있고 쓸 수 있는 폴더를 고르세요"
        assert f"%amp record: 거부됨: {refused}" in cell.printed
        assert "refused" not in cell.printed
        none = kernel.run(f"%%amp --model nets{LOOP}")
        assert "이름이 &#x27;nets&#x27;인 모델은 학습되지 않았습니다. 학습된 것: net." in none.shown
    finally:
        kernel.run("%amp lang en")


def test_a_cell_that_tells_an_answer_is_covered_until_there_is_a_guess(kernel: Kernel) -> None:
    kernel.run("import amp_widgets as aw\nskips = aw.ask('How many?')")
    code = f"%%amp --cover skips{LOOP}print('told')\n'told as well'"
    cell = kernel.run(code)
    assert cell.error is None, cell.error
    assert "told" not in cell.printed + cell.result + cell.shown
    assert "dashboard was here" not in cell.shown
    assert "Give a guess above" in cell.shown
    guessed = kernel.run("skips.guess(1)")
    assert "told" in guessed.shown or "told" in str(guessed.outputs)
    assert "dashboard was here" in str(guessed.outputs)
    assert "told as well" in str(guessed.outputs)

    live = kernel.run(code)  # there is a guess now
    assert "told" in live.printed
    assert "dashboard was here" in live.shown
    wrong = kernel.run(f"%%amp --cover loader\nran = True{LOOP}")
    assert wrong.error is not None
    assert "expected the name of a question" in wrong.error["evalue"]
    assert kernel.value("'ran' in globals()") is False


@pytest.mark.parametrize("line", ["--gpu", "--model", "net", "--cpu=1", "--model a b"])
def test_lines_that_are_not_understood(kernel: Kernel, line: str) -> None:
    cell = kernel.run(f"%%amp {line}\nran = True")
    assert cell.error is not None
    assert cell.error["ename"] == "MagicError"
    assert "expected %%amp [--model NAME] [--cpu] [--cover NAME]" in cell.error["evalue"]
    assert len(cell.error["traceback"]) == 1  # its one sentence
    assert kernel.value("'ran' in globals()") is False


def test_one_of_several_models(kernel: Kernel) -> None:
    two = LOOP + "    other_loss = other(x).pow(2).mean()\n    other_loss.backward()\n    other_optimizer.step()\n"
    kernel.run("other = nn.Linear(12, 2)\nother_optimizer = torch.optim.SGD(other.parameters(), lr=0.1)")
    both = kernel.run("%%amp" + two)
    assert both.error is None, both.error
    assert kernel.value("[layer.name for layer in session.layers]") == ["net", "net.0", "net.1", "net.2", "other"]
    kernel.run("%%amp --model other" + two)
    assert kernel.value("[layer.name for layer in session.layers], session.status().step") == ([], 8)
    kernel.run("%%amp --model net" + two)
    assert kernel.value("[layer.name for layer in session.layers], session.status().step") == (["0", "1", "2"], 8)
    none = kernel.run("%%amp --model nets" + two)
    assert none.error is None
    assert "no model named &#x27;nets&#x27; was trained; these were: net, other" in none.shown


def test_one_model_after_the_other(kernel: Kernel) -> None:
    code = LOOP.replace("\n", "\n    ").replace("net =", "first_net = weakref.ref(net) if run else None\n    net =", 1)
    cell = kernel.run(f"import weakref\n%%amp\nimport weakref\nfor run in range(2):{code}".partition("\n")[2])
    assert cell.error is None, cell.error
    # the first one was freed when the code let go of it; the session is of the second from its first step on
    assert kernel.value("session.status().step, first_net() is None, [n.name for n in session.layers]") == (
        8, True, ["0", "1", "2"],
    )  # fmt: skip
    assert kernel.value("session.history.columns('loss')['loss'].tolist()[-1] == loss.item()") is True
    assert cell.shown.count("<p>An amp_widgets dashboard was here") == 1


def test_nothing_to_see(kernel: Kernel) -> None:
    cell = kernel.run("%%amp\n1 + 1")
    assert cell.result == "2"
    assert "nothing to control in this cell: no optimizer has stepped" in cell.shown


def test_an_error_in_the_loop(kernel: Kernel) -> None:
    kernel.run("before = patchable()")
    behind = kernel.send("%%amp" + LOOP + "    if step == 3:\n        1 / 0\n"), kernel.send("behind = True")
    cell, aborted = (kernel.wait(message_id) for message_id in behind)
    assert cell.status == "error"
    assert aborted.status == "aborted"
    assert cell.error is not None
    assert cell.error["ename"] == "ZeroDivisionError"
    text = "\n".join(cell.error["traceback"])
    assert "amp_widgets" not in text
    assert "line 10" in text
    assert kernel.value("patchable() == before, session.closed, session.status().step, 'behind' in globals()") == (
        True, True, 4, False,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["", " --cpu"])
def test_an_interrupt(kernel: Kernel, kind: str) -> None:
    kernel.run("import time\nbefore = patchable()")
    cell = kernel.interrupt_when(
        f"%%amp{kind}{LOOP}    if step == 3:\n        print('now', flush=True)\n        time.sleep(60)\n", "now"
    )
    assert cell.error is not None
    assert cell.error["ename"] == "KeyboardInterrupt"
    assert kernel.value("patchable() == before, session.closed, session.status().step") == (True, True, 4)


def test_interrupts_at_any_moment_leave_nothing_patched(kernel: Kernel) -> None:
    kernel.run("before = patchable()")
    # One model: Python itself swallows an interrupt that meets a __del__, which a loop that makes sessions would be full of.
    _, net, optimizer, *steps = LOOP.splitlines()
    code = "\n    ".join([f"%%amp\n{net}\n{optimizer}\nprint('now', flush=True)\nwhile True:", *steps])
    for _ in range(5):
        message_id = kernel.send(code)
        while True:
            message = kernel.client.get_iopub_msg(timeout=TIMEOUT_S)
            if message["msg_type"] == "stream" and "now" in message["content"]["text"]:
                break
        time.sleep(0.05)
        kernel.manager.interrupt_kernel()
        cell = kernel.wait(message_id)
        assert cell.status == "error"  # IPython itself fails to format a traceback now and then, when it was within a C call
        assert kernel.value("patchable() == before") is True


def test_a_cell_within_a_cell_and_a_session_of_its_own(kernel: Kernel) -> None:
    cell = kernel.run("%%amp\nget_ipython().run_cell_magic('amp', '', 'pass')")
    assert cell.error is not None
    assert "one at a time" in cell.error["evalue"]
    own = kernel.run(
        "import amp_widgets as aw\nnet = nn.Linear(12, 4)\noptimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "own = aw.AmpSession(net, optimizer)"
    )
    assert own.error is None, own.error
    cell = kernel.run(
        "%%amp\nfor x, y in own.steps(DataLoader(train_dataset, batch_size=8)):\n    optimizer.zero_grad()\n"
        "    with own.autocast():\n        loss = nn.functional.cross_entropy(net(x), y)\n"
        "    own.scaler.scale(loss).backward()\n    own.scaler.step(optimizer)\n    own.scaler.update()\n"
    )
    assert cell.error is None, cell.error
    assert kernel.value("own.closed, own.status().step") == (False, 4)
    kernel.run("own.close()")


def test_without_the_packages_for_widgets(kernel: Kernel) -> None:
    kernel.run("import sys\nkept = sys.modules.pop('amp_widgets.widgets.dashboard')\n"
               "anywidget = sys.modules['anywidget']\nsys.modules['anywidget'] = None\n"
               "charts = sys.modules.pop('amp_widgets.charts.live', None)")  # fmt: skip
    try:
        cell = kernel.run("%%amp" + LOOP)
        assert cell.error is None, cell.error
        assert "pip install 'amp-widgets[notebook]'" in cell.shown.replace("&#x27;", "'")
        assert "data:image/svg+xml;base64," in cell.shown
        session = kernel.run("%amp net optimizer")
        assert session.error is None, session.error
        assert "pip install 'amp-widgets[notebook]'" in session.shown.replace("&#x27;", "'")
        assert kernel.run("%amp set autocast=bf16").printed.startswith("requested: autocast bf16")
        for line in LOOP.strip().splitlines()[:2]:
            assert "net" in line
        kernel.run("session.request(checkpointed=['0'])\nfor x, y in DataLoader(train_dataset, batch_size=8):\n"
                   "    net(x).sum().backward(); optimizer.step()")  # fmt: skip
        status = kernel.run("%amp")
        assert "in force: autocast bf16" in status.printed
        assert "data:image/svg+xml;base64," in status.shown
        kernel.run("%amp close")
    finally:
        kernel.run("sys.modules['anywidget'] = anywidget\nsys.modules['amp_widgets.widgets.dashboard'] = kept\n"
                   "if charts is not None: sys.modules['amp_widgets.charts.live'] = charts")  # fmt: skip


def test_reload_ext_three_times(kernel: Kernel) -> None:
    kernel.run("before = patchable()")
    for _ in range(3):
        assert kernel.run("%reload_ext amp_widgets").error is None
    assert kernel.value("patchable() == before") is True
    assert kernel.run("%%amp" + LOOP).error is None
    assert kernel.value("patchable() == before, session.status().step") == (True, 8)
    assert kernel.run("%unload_ext amp_widgets").error is None
    gone = kernel.run("%%amp\npass")
    assert gone.error is not None or "not found" in gone.printed
    assert kernel.run("%load_ext amp_widgets").error is None


PLAIN = """
model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(200, 12), torch.randint(0, 4, (200,))
seen = []
for layer in model:
    layer.register_forward_hook(lambda module, args, out: seen.append(weakref.ref(out.untyped_storage())))
for _ in range(3):
    optimizer.zero_grad()
    outputs = model(x)
    loss = nn.functional.cross_entropy(outputs, y)
    loss.backward()
    optimizer.step()
"""


def test_out_of_memory_in_a_cell(kernel: Kernel) -> None:
    """One error as usual, the report is kept, the memory is free, and the cell can be run again."""
    kernel.run("import gc, weakref")
    cell = kernel.run("%%amp\n%amp budget 150kB" + PLAIN)
    assert cell.status == "error"
    assert cell.error is not None
    assert cell.error["ename"] == "MemoryBudgetError"
    shown = "\n".join(cell.error["traceback"])
    assert "amp_widgets/capture" not in shown
    assert "failed resolving arguments" not in shown  # it was shown before what it holds was freed
    assert "memory budget: 150.0 kB" in cell.printed
    # also in the first step
    assert kernel.value("session.out_of_memory.report[0]").startswith("Out of memory at step 0 (fp32) in the forward pass")
    assert kernel.value("[event.kind for event in session.history.events('out_of_memory')]") == ["out_of_memory"]
    assert kernel.value("(gc.collect(), len({id(s) for r in seen if (s := r()) is not None}))[1]") <= 1
    assert kernel.value("(session.closed, torch._C._len_torch_dispatch_stack(), len(session.history))") == (True, 0, 0)
    cell = kernel.run("%%amp\n%amp budget off" + PLAIN)
    assert cell.error is None
    assert kernel.value("(len(session.history), session.out_of_memory)") == (3, None)
