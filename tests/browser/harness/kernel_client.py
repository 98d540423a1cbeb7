"""What Jupyter takes for a kernel: asks the nursery for one, and stands for it until it ends. See ``nursery.py``."""

import contextlib
import json
import os
import signal
import socket
import sys
import time

path, connection_file = sys.argv[1:]
nursery = socket.socket(socket.AF_UNIX)
end = time.monotonic() + 120
while nursery.connect_ex(path):  # it imports still
    if time.monotonic() > end:
        sys.exit(f"nothing answers at {path}")
    time.sleep(0.1)
env = {name: value for name, value in os.environ.items() if name != "JPY_PARENT_PID"}  # its parent is the nursery
order = {"connection_file": connection_file, "env": env, "directory": os.getcwd()}
nursery.sendall(json.dumps(order).encode() + b"\n")


def pass_on(number, frame):
    with contextlib.suppress(OSError):
        nursery.send(bytes([number]))


for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, pass_on)
nursery.recv(1)  # nothing comes: it is closed when the kernel has ended
