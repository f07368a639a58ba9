#!/usr/bin/env python3
"""What it costs to watch: `gpumux top` and the web page's stream, both twice a second, with many tenants.

    cargo build --release && python3 bench/watching.py [--tenants 32] [--seconds 20] [--bin target/release]

Everything runs on the emulated device. The daemon's CPU time is taken without watchers and with both watching;
the difference, and the CPU time of `top` itself, are the cost. (A browser that shows the page is not counted.)
"""

import argparse
import datetime
import fcntl
import json
import os
import platform
import pty
import signal
import struct
import subprocess
import tempfile
import termios
import threading
import time
import urllib.request
from pathlib import Path

from common import cpu_seconds


def wait_for(what, answer, patience=60):
    end = time.monotonic() + patience
    while not (found := answer()):
        if time.monotonic() > end:
            raise SystemExit(f"waited in vain: {what}")
        time.sleep(0.05)
    return found


def read_all(read):
    """Reads to the end in a thread, as a terminal or a browser would."""
    thread = threading.Thread(target=read, daemon=True)
    thread.start()


def start_top(gpumux, env):
    pid, terminal = pty.fork()
    if pid == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        os.execve(gpumux, [gpumux, "top", "--interval", "0.5"], {**env, "TERM": "xterm-256color"})

    def drain():
        try:
            while os.read(terminal, 65536):
                pass
        except OSError:
            pass

    read_all(drain)
    return pid


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tenants", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--bin", default="target/release")
    args = parser.parse_args()
    gpumux = str((Path(args.bin) / "gpumux").resolve())
    processes = []
    with tempfile.TemporaryDirectory(prefix="gm", dir="/tmp") as folder:
        emulated = f"{folder}/emu.sock"
        env = {**os.environ, "GPUMUX_RUNTIME_DIR": folder, "GPUMUX_EMU_SOCKET": emulated}

        def start(*words, **more):
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": env}
            processes.append(subprocess.Popen([gpumux, *words], **{**quiet, **more}))
            return processes[-1]

        def tenants():
            said = subprocess.run([gpumux, "ps", "--json"], env=env, capture_output=True)
            return json.loads(said.stdout)["tenants"] if said.returncode == 0 else []

        try:
            start("emu", "serve", "--socket", emulated)
            wait_for("the emulated device", lambda: os.path.exists(emulated))
            log = open(f"{folder}/log", "w")
            daemon = start("daemon", "--listen", "127.0.0.1:0", stderr=log).pid
            wait_for("the daemon", lambda: os.path.exists(f"{folder}/api.sock"))
            for n in range(args.tenants):
                kind = ["latency", "standard", "batch"][n % 3]
                # They have a little work now and then, so that all figures change.
                load = ["latency", "--kernels", "1", "--iterations", "2000", "--period-us", "200000", "--seconds", "3600"]
                start("emu", "--", gpumux, "run", "--name", f"{kind}-{n}", "--class", kind, "--", gpumux, "workload", *load)
            wait_for("all tenants", lambda: sum(bool(t["domains"]) for t in tenants()) == args.tenants)
            time.sleep(3)

            def measure(pids):
                before = [cpu_seconds(pid) for pid in pids]
                began = time.monotonic()
                time.sleep(args.seconds)
                took = time.monotonic() - began
                return [(cpu_seconds(pid) - old) / took for pid, old in zip(pids, before)]

            alone = measure([daemon])[0]
            top = start_top(gpumux, env)
            url = [word for word in Path(log.name).read_text().split() if word.startswith("http://")][0]
            page = urllib.request.urlopen(url + "v1/live")
            events = []
            read_all(lambda: events.extend(line for line in page if line.startswith(b"data:")))
            time.sleep(2)
            seen = len(events)
            watched, own = measure([daemon, top])
            rate = (len(events) - seen) / args.seconds
            os.kill(top, signal.SIGTERM)
            os.waitpid(top, 0)
        finally:
            for process in reversed(processes):
                process.terminate()
            for process in processes:
                process.wait(timeout=20)
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    model = [line.split(": ")[1] for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    print(json.dumps({
        "tenants": args.tenants,
        "seconds": args.seconds,
        "page_events_per_second": round(rate, 2),
        "daemon_unwatched_percent": round(100 * alone, 2),
        "daemon_watched_percent": round(100 * watched, 2),
        "top_percent": round(100 * own, 2),
        "watching_percent": round(100 * (watched - alone + own), 2),
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "machine": f"{os.cpu_count()} x {model[0] if model else platform.machine()}",
        "build": args.bin,
    }, indent=1))


if __name__ == "__main__":
    main()
