#!/usr/bin/env python3
"""Makes the pictures of the web page and of `gpumux top` in docs/pictures, on the emulated device.

    cargo build --workspace && python3 tools/screenshots.py [--bin target/debug] [--out docs/pictures] [--seconds 40]
    python3 tools/screenshots.py --out /tmp/pictures --pages 390,390-dark,1280,1280-dark,1920,1920-dark --columns 60,80,130

Needs Chromium and tmux; pngquant, where it is installed, makes the files small. The page is shown by `gpumux page`. The second line makes
those that a change of the page or of `top` is judged by.
"""

import argparse
import base64
import html
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

TENANTS = [
    ("web", "latency", "latency --rate 100 --poisson --kernels 10 --kernel-us 200 --memory 512MiB"),
    ("night-training-of-a-model-with-a-long-name", "batch", "batch --kernel-us 4000 --memory 1GiB"),
    ("notebook", "standard", "batch --kernel-us 500 --in-flight 1 --memory 256MiB"),
    *[(f"job-{n}", "batch", "batch --kernel-us 2000 --memory 128MiB") for n in range(1, 7)],
    ("sleeper", "standard", "idle --memory 512MiB"),
]


class Browser:
    """Chromium without a window, spoken to through two pipes."""

    def __init__(self, folder):
        to_read, self.to = os.pipe()
        self.back, back_write = os.pipe()
        program = next(filter(shutil.which, ["chromium", "chromium-browser", "google-chrome"]), None)
        if not program:
            raise SystemExit("no Chromium is installed (apt install chromium)")
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe"]
        # Chromium reads from file 3 and writes to file 4.
        script = f'exec "$@" 3<&{to_read} 4>&{back_write}'
        command = ["bash", "-c", script, "sh", program, *options, f"--user-data-dir={folder}/profile"]
        self.process = subprocess.Popen(command, pass_fds=[to_read, back_write], stderr=subprocess.DEVNULL)
        os.close(to_read), os.close(back_write)
        self.target, self.session, self.last, self.rest = None, None, 0, b""

    def call(self, method, **params):
        self.last += 1
        message = {"id": self.last, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.rest:
                if not (more := os.read(self.back, 1 << 20)):
                    raise SystemExit("the browser has ended")
                self.rest += more
            first, self.rest = self.rest.split(b"\0", 1)
            answer = json.loads(first)
            if answer.get("id") == self.last:
                if "error" in answer:
                    raise SystemExit(f"{method}: {answer['error']}")
                return answer["result"]

    def open(self, url, width, height=900, dark=False):
        self.session = None
        if self.target:
            # A page keeps a connection, and a browser makes six to one address.
            self.call("Target.closeTarget", targetId=self.target)
        self.target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=self.target, flatten=True)["sessionId"]
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        self.call("Page.navigate", url=url)

    def value(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        return result["result"].get("value")

    def picture(self, file, most=None):
        """All of the page, or its first `most` lines of pixels."""
        width, height = self.value("[innerWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": width, "height": min(height, most or height), "scale": 1}
        data = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"]
        Path(file).write_bytes(base64.b64decode(data))
        if shutil.which("pngquant"):
            subprocess.run(["pngquant", "--force", "--strip", "--output", file, "64", file], check=True)

    def close(self):
        stop(self.process)


def stop(process):
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_for(what, answer, patience=120):
    end = time.monotonic() + patience
    while not (found := answer()):
        if time.monotonic() > end:
            raise SystemExit(f"waited in vain: {what}")
        time.sleep(0.1)
    return found


class Node:
    """An emulated device, a daemon, and tenants on it."""

    def __init__(self, gpumux, folder, tenants=TENANTS):
        self.gpumux, self.processes = gpumux, []
        self.env = {**os.environ, "GPUMUX_RUNTIME_DIR": folder, "GPUMUX_EMU_SOCKET": f"{folder}/emu.sock"}
        self.start("emu", "serve", "--socket", f"{folder}/emu.sock")
        wait_for("the emulated device", Path(f"{folder}/emu.sock").exists)
        self.start("emu", "--", gpumux, "daemon")
        wait_for("the daemon", Path(f"{folder}/api.sock").exists)
        for name, kind, load in tenants:
            words = f"run --name {name} --class {kind} -- {gpumux} workload {load} --seconds 3600".split()
            self.start("emu", "--", gpumux, *words)
            # One after another, so that pictures are alike.
            wait_for(name, lambda: any(it["name"] == name for it in self.tenants()))

    def start(self, *words, stdout=subprocess.DEVNULL):
        process = subprocess.Popen([self.gpumux, *words], stdout=stdout, stderr=subprocess.DEVNULL, env=self.env, text=True)
        self.processes.append(process)
        return process

    def run(self, *words):
        return subprocess.run([self.gpumux, *words], env=self.env, capture_output=True, text=True)

    def tenants(self):
        done = self.run("ps", "--json")
        return json.loads(done.stdout)["tenants"] if done.returncode == 0 else []

    def close(self):
        for process in reversed(self.processes):
            stop(process)


COLORS = ["#1c1f24", "#e06c75", "#98c379", "#e5c07b", "#61afef", "#c678dd", "#56b6c2", "#dcdfe4"]


def terminal(screen, columns):
    """What a terminal shows, with its colours, as a page."""
    lines = []
    for line in screen.splitlines():
        spans, style = [], {}
        for piece in re.split(r"(\x1b\[[0-9;]*m)", line):
            if not piece.startswith("\x1b"):
                fore, back = style.get("fore", "#dcdfe4"), style.get("back", "#1c1f24")
                fore, back = (back, fore) if style.get("reverse") else (fore, back)
                weight = ";font-weight:700" * style.get("bold", False) + ";opacity:.65" * style.get("dim", False)
                spans.append(f'<span style="color:{fore};background:{back}{weight}">{html.escape(piece)}</span>')
                continue
            # 38;5;N is colour N as text, 48;5;N below it.
            piece = re.sub(r"([34])8;5;(\d)(?=[;m])", r"\g<1>\2", piece)
            for code in (int(code or 0) for code in piece[2:-1].split(";")):
                if code == 0:
                    style = {}
                elif code in (1, 2, 7):
                    style[{1: "bold", 2: "dim", 7: "reverse"}[code]] = True
                elif 30 <= code < 38 or 90 <= code < 98:
                    style["fore"] = COLORS[code % 10]
                elif code == 39:
                    style.pop("fore", None)
                elif 40 <= code < 48:
                    style["back"] = COLORS[code % 10]
        lines.append("".join(spans))
    text = "\n".join(lines)
    return f'<meta charset="utf-8"><body style="margin:0;background:#1c1f24"><pre style="margin:8px;font:14px/17px DejaVu Sans Mono,monospace;width:{columns}ch">{text}</pre>'


def show_top(node, browser, columns, file, keys=()):
    tmux = ["tmux", "-L", f"gpumux-{os.getpid()}-{columns}"]
    subprocess.run([*tmux, "-f", "/dev/null", "new-session", "-d", "-x", str(columns), "-y", "24", node.gpumux, "top"], env={**node.env, "LC_ALL": "C.UTF-8"}, check=True)
    subprocess.run([*tmux, "set", "-g", "status", "off"], check=True)
    time.sleep(3)
    for key in keys:
        subprocess.run([*tmux, "send-keys", key], check=True)
        time.sleep(1)
    screen = subprocess.run([*tmux, "capture-pane", "-p", "-e", "-N"], capture_output=True, text=True, check=True).stdout
    subprocess.run([*tmux, "kill-server"], check=True)
    data = base64.b64encode(terminal(screen, columns).encode()).decode()
    browser.open(f"data:text/html;base64,{data}", columns * 9 + 8, 24 * 17 + 16)
    time.sleep(0.5)
    browser.picture(file)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", default="target/debug")
    parser.add_argument("--out", default="docs/pictures")
    parser.add_argument("--seconds", type=float, default=40, help="how long the tenants run before")
    parser.add_argument("--pages", default="390,768-dark,1280", help="widths of the web page in pixels, light or dark")
    parser.add_argument("--columns", default="50,80,120", help="widths of `top`")
    args = parser.parse_args()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gm", dir="/tmp") as folder:
        node, browser = Node(str((Path(args.bin) / "gpumux").resolve()), folder), Browser(folder)
        try:
            wait_for("all tenants on the device", lambda: sum(bool(it["domains"]) for it in node.tenants()) == len(TENANTS))
            if (slept := node.run("sleep", "sleeper")).returncode:
                raise SystemExit(slept.stderr)
            time.sleep(args.seconds)
            page = node.start("page", stdout=subprocess.PIPE)
            url = re.search(r"http://\S+", page.stdout.readline()).group()
            for name in args.pages.split(","):
                width, _, scheme = name.partition("-")
                browser.open(url, int(width), dark=scheme == "dark")
                wait_for("the page", lambda: browser.value("document.querySelectorAll('#devices svg').length"))
                browser.value("location.hash = 'web'")
                time.sleep(3)
                browser.picture(out / f"page-{name}.png", 2400)
            for columns in map(int, args.columns.split(",")):
                show_top(node, browser, columns, out / f"top-{columns}.png")
            show_top(node, browser, 79, out / "top-gpus.png", ["Tab"])
        finally:
            browser.close()
            node.close()
    for file in sorted(out.glob("*.png")):
        print(file, file.stat().st_size // 1000, "kB")


if __name__ == "__main__":
    main()
