"""Started in SGLang's place by server_main.py: it has a worker and answers, or acts by STUB.

ok | busy (answers no /health_generate and computes) | crash (at once) | silent (never listens) |
stubborn (ignores SIGTERM) | mortal (one launch that answers; later ones crash: the file
STUB_LAUNCHES counts them) | shared memory (it makes a file, its worker maps another)

Over several nodes none answers before all have met at the first one's address.
"""

import argparse
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # not the package, which imports torch

from server import FakeServer

from sglang.srt.managers.mm_utils import ShmPointerMMData

parser = argparse.ArgumentParser()
parser.add_argument("--host", default="127.0.0.1")
parser.add_argument("--port", type=int)
parser.add_argument("--api-key")
parser.add_argument("--admin-api-key")
parser.add_argument("--nnodes", type=int, default=1)
parser.add_argument("--node-rank", type=int, default=0)
parser.add_argument("--dist-init-addr", default="")
arguments, _ = parser.parse_known_args()
mode = os.environ["STUB"]
logging.basicConfig()
logging.warning("all arguments: %s", vars(arguments))
print("keys in the environment:", arguments.api_key in os.environ.values(), flush=True)
work = "while True: pass" if mode == "busy" else "import signal; signal.pause()"
if mode == "shared memory":
    path = f"/dev/shm/sgl_shm_stub_{os.getpid()}"  # noqa: S108
    Path(f"/dev/shm/sgl_shm_mm_{os.getpid()}_0").touch()  # noqa: S108
    work = f"import mmap, signal; f = open({path!r}, 'w+b'); f.truncate(4096); "
    work += "m = mmap.mmap(f.fileno(), 0); print('mapped', flush=True); signal.pause()"
print("pointers by", ShmPointerMMData.__init__.__module__, flush=True)
worker = subprocess.Popen([sys.executable, "-c", work])
print("worker", worker.pid, flush=True)
while mode == "shared memory" and not os.path.exists(path):
    pass

if mode == "mortal":
    launches = Path(os.environ["STUB_LAUNCHES"])
    with launches.open("a") as file:
        file.write(f"{arguments.port}\n")
    if launches.read_text().split().count(str(arguments.port)) > 1:
        mode = "crash"
if mode == "crash":
    sys.exit("no such model")
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if mode == "silent":
    signal.pause()
first, _, store = arguments.dist_init_addr.partition(":")
if arguments.node_rank:
    while True:
        try:
            socket.create_connection((first, int(store))).close()
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
elif arguments.nnodes > 1:
    with socket.create_server((first, int(store))) as listening:
        for _ in range(1, arguments.nnodes):
            listening.accept()
keys = arguments.api_key, arguments.admin_api_key
address = {"host": arguments.host, "port": arguments.port}
with FakeServer(**address, keys=keys, weight_version="default", device="cpu") as fake:
    if mode == "busy":
        fake.faults = {("/health_generate", call): "hang" for call in range(1, 1000)}
    signal.pause()
