"""Started in SGLang's place by serve.py: it has a worker and answers, or does what STUB says.

ok | crash (at once) | silent (never listens) | stubborn (ignores SIGTERM)
"""

import argparse
import logging
import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
parser.add_argument("--api-key")
parser.add_argument("--admin-api-key")
arguments, _ = parser.parse_known_args()
mode = os.environ["STUB"]
logging.basicConfig()
logging.warning("all arguments: %s", vars(arguments))
print("keys in the environment:", arguments.api_key in os.environ.values(), flush=True)
worker = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print("worker", worker.pid, flush=True)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        known = self.headers["Authorization"] == f"Bearer {arguments.api_key}"
        self.send_response(200 if known or self.path == "/health" else 401)
        self.end_headers()


if mode == "crash":
    sys.exit("no such model")
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if mode == "silent":
    signal.pause()
HTTPServer(("127.0.0.1", arguments.port), Handler).serve_forever()
