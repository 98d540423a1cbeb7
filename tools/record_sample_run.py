"""Record the run that the notebooks replay: ``python tools/record_sample_run.py``.

The digits demo, its settings changed on the way as a class would change them. The file is small enough to be kept with the
notebooks, and shows on any machine what this one measured.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import torch
from torch import nn

import amp_widgets as aw
from amp_widgets.demos.batches import ShuffledBatches
from amp_widgets.demos.digits import DigitsNet, digits_data

PLACE = Path(__file__).parent.parent / "notebooks" / "runs" / "digits.db"
STEPS = 360
MOST_BYTES = 300_000
NOTES = {
    0: "The digits demo, as it begins: everything in FP32.",
    60: "FP16 with loss scaling: the scale begins at 2^16.",
    140: "The initial scale is 2^40: steps are skipped until it fits.",
    210: "BF16: no loss scaling is needed.",
    270: "Every layer is checkpointed: less memory, and slower steps.",
}
CHANGES = {
    60: {"autocast": "fp16"},
    140: {"init_scale": 2.0**40},
    210: {"autocast": "bf16"},
    270: {"checkpointed": ["layers.*"]},
    330: {"autocast": "fp32", "checkpointed": []},
}
PROFILED_UNTIL = 300
"""The last change goes back to what was profiled before."""
COUNTED = (30, 90, 130, 190, 240)
"""Steps of which the sizes of gradients are counted."""


def record(path: Path = PLACE) -> int:
    """Record to `path`, which is replaced; the size of the file, in bytes."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    images, labels = digits_data()
    model = DigitsNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = ShuffledBatches(images, labels, batch_size=64, seed=0)
    with aw.AmpSession(model, optimizer) as session:
        session.record(path)
        steps = itertools.chain.from_iterable(itertools.repeat(batches))
        for step, (inputs, targets) in enumerate(itertools.islice(steps, STEPS)):
            session.profile_changes = step < PROFILED_UNTIL
            if step in NOTES:
                session.note(NOTES[step])
            if step in CHANGES:
                session.request(**CHANGES[step])
            if step in COUNTED:
                session.count_gradients()
            optimizer.zero_grad()
            with session.autocast():
                loss = nn.functional.cross_entropy(model(inputs), targets)
            session.scaler.scale(loss).backward()
            session.scaler.step(optimizer)
            session.scaler.update()
    return path.stat().st_size


if __name__ == "__main__":
    size = record()
    print(f"{PLACE}: {size:,} bytes")
    sys.exit(size > MOST_BYTES)
