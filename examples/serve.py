"""Serve a layer from a bundle: packed on a machine with a compiler, and served without one.

Examples:
    python examples/serve.py pack up.ksb             # builds the kernels of specs/vit.yaml's layer `up` for this device
    python examples/serve.py serve up.ksb            # answers POST /up with a JSON list of rows, until Ctrl-C
    python examples/serve.py serve up.ksb --short    # sends itself a few requests and ends
"""

import argparse
import json
import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from urllib.request import urlopen

import numpy as np

import ksgen
from ksgen.build.build import Request, build
from ksgen.build.bundle import write_bundle
from ksgen.devices import find_device
from ksgen.emit.render import render
from ksgen.launch.planner import PLANNER
from ksgen.paths import resource
from ksgen.spec import KernelSpec, load

CHAIN = load(resource("specs") / "vit.yaml").layers["up"]
ROWS = 16  # per request; the constants are chosen for this batch size


def pack(path: Path) -> None:
    """Build the kernel of each factor for this device, and write all of them to one file."""
    device, members = find_device(), []
    for pattern in CHAIN:
        choice = PLANNER.choice(device, KernelSpec(pattern), ROWS)
        source = render(KernelSpec(pattern), choice.constants, family=choice.family, dialect=device.dialect)
        request = Request(source.text, source.entry, device.target)
        members.append((request, build(request.text, request.entry, request.target, device.compiler())))
    write_bundle(path, members, {}, {"ksgen": ksgen.__version__, "spec": "vit.yaml"})
    print(f"{path}: {len(members)} kernels for {device.name}, {path.stat().st_size / 1e3:.0f} kB")


class Up(BaseHTTPRequestHandler):
    factors: list[tuple[ksgen.Launcher, ksgen.launcher.Weights]]

    def do_POST(self) -> None:
        x = np.array(json.loads(self.rfile.read(int(self.headers["Content-Length"]))), "f4")
        for launcher, weights in self.factors:
            x = launcher(x, weights)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(x.tolist()).encode())


def serve(path: Path, port: int, is_short: bool) -> None:
    if find_device().kind != "native":  # native devices compile a small launch function on the machine
        os.environ["KSGEN_NO_COMPILE"] = "1"  # a kernel that the bundle lacks is an error
    ksgen.use_bundle(path)
    draws, launchers = np.random.default_rng(0), [ksgen.Launcher(*pattern.shape) for pattern in CHAIN]
    Up.factors = [(ks, ks.pack(draws.standard_normal(ks.pattern.shape, dtype="f4") / ks.pattern.c)) for ks in launchers]
    server = HTTPServer(("127.0.0.1", port), Up)
    print(url := f"http://127.0.0.1:{server.server_port}/up", f"takes rows of {CHAIN.in_features} numbers")
    if not is_short:
        server.serve_forever()
    Thread(target=server.serve_forever, daemon=True).start()
    for x in draws.standard_normal((5, ROWS, CHAIN.in_features)).tolist():
        y = json.load(urlopen(url, json.dumps(x).encode()))
        print(f"an answer of {len(y)} x {len(y[0])} numbers")


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("do", choices=("pack", "serve"))
parser.add_argument("bundle", type=Path)
parser.add_argument("--port", type=int, default=0, help="0: any that is free")
parser.add_argument("--short", action="store_true")
len(sys.argv) > 1 or parser.exit(2, "say what to do with which file: python examples/serve.py pack up.ksb\n")
options = parser.parse_args()
pack(options.bundle) if options.do == "pack" else serve(options.bundle, options.port, options.short)
