"""Answers questions about a kernel's namespace from a thread of its own. IPython runs this when a test's kernel starts.

A second Jupyter client would not do: while a cell runs, the main shell answers nobody, and a subshell is what some tests
are about. This goes past Jupyter's messages altogether: nothing of what is tested is touched, and a busy cell is no obstacle.
Each connection to a port on 127.0.0.1 carries one JSON line {"token", "mode", "code"} and gets one JSON line back.
"""


def _start_probe():  # runs in the user's namespace: no imports at the top
    import json
    import os
    import secrets
    import socketserver
    import threading
    import traceback
    from pathlib import Path

    from ipykernel.connect import get_connection_file
    from IPython import get_ipython

    namespace = get_ipython().user_ns
    token = secrets.token_hex(16)

    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            question = json.loads(self.rfile.readline())
            if question["token"] != token:
                return
            answer = {}
            try:
                code = compile(question["code"], "<probe>", question["mode"])
                answer["value"] = eval(code, namespace)
                line = json.dumps(answer, default=_plain)
            except BaseException:
                line = json.dumps({"error": traceback.format_exc()})
            self.wfile.write(line.encode() + b"\n")

    def _plain(value):
        for method in ("tolist", "_asdict"):
            if hasattr(value, method):
                return getattr(value, method)()
        if isinstance(value, (set, frozenset)):
            return sorted(value)
        return repr(value)

    class Server(socketserver.ThreadingTCPServer):
        def process_request(self, request, client_address):
            # By this name a test that counts threads knows ours: one may still be ending when the next question is answered.
            work = self.process_request_thread
            threading.Thread(target=work, args=(request, client_address), name="test probe", daemon=True).start()

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, name="test probe", daemon=True).start()
    connection = Path(get_connection_file())
    written = connection.with_name(f"{connection.stem}.probe")
    part = written.with_suffix(".part")
    part.write_text(json.dumps({"port": server.server_address[1], "token": token, "pid": os.getpid()}))
    part.replace(written)


_start_probe()
del _start_probe
