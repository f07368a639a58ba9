//! What an operator sees: explanations, traces, metrics, and the web page in a real browser.

use std::{
    fs::{self, File, OpenOptions},
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Child, Command, Stdio},
    sync::mpsc,
    thread,
};

use gpumux_tests::{Node, Options, PATIENCE, Process, Run, binary, wait_for};
use serde_json::{Value, json};

use crate::REQUESTS;

/// A node with a latency and a batch tenant that run.
pub(crate) fn busy() -> (Node, [Process; 2]) {
    let node = Node::with(Options {
        daemon: ["--listen", "127.0.0.1:0"].map(Into::into).into(),
        ..Options::default()
    });
    let start = |name: &str, class: &str, program: &str| {
        let options = format!("--name {name} --class {class}");
        Process::start(&mut node.tenant(&options, program))
    };
    let processes = [
        start("web", "latency", REQUESTS),
        start("night", "batch", "gpumux workload batch --seconds 600"),
    ];
    for name in ["web", "night"] {
        node.wait_tenant(name, |tenant| {
            tenant["domains"]
                .as_array()
                .is_some_and(|domains| !domains.is_empty())
        });
    }
    (node, processes)
}

#[test]
fn a_tenant_is_explained_and_traced() {
    let (node, _processes) = busy();
    let text = node.gpumux(["explain", "night"]).run().ok().out;
    assert!(
        text.starts_with("night is a batch tenant") && text.contains("web (latency"),
        "{text}"
    );
    let file = node.dir().join("out.json");
    // Its next request is on its way.
    wait_for("a request in the trace", PATIENCE, || {
        node.gpumux(["trace", "--seconds", "60", "-o"])
            .arg(&file)
            .run()
            .ok();
        let trace: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        let mut events = trace["traceEvents"].as_array().unwrap().iter();
        events
            .any(|e| e["args"]["reason"] == "takes the device at once")
            .then_some(())
    });
    let top = node.gpumux(["top"]).run();
    assert!(
        top.code() == 1 && top.err.contains("needs a terminal"),
        "{top:?}"
    );
}

#[test]
fn the_accounts_are_what_the_driver_measures() {
    let node = Node::start();
    let _tenants = [("large", 0.7), ("small", 0.3)].map(|(name, guaranteed)| {
        let options = format!("--name {name} --class standard --guaranteed {guaranteed}");
        // So long that a slow machine doesn't let the device wait for the next.
        let program = "gpumux workload batch --kernel-us 20000 --seconds 600";
        Process::start(&mut node.tenant(&options, program))
    });
    wait_for("the same shares from both", PATIENCE * 2, || {
        let shares = ["large", "small"].map(|name| {
            let tenant = node.find_tenant(name)?;
            let share = |what: &str| tenant["domains"][0][what].as_f64();
            Some((share("received_share")?, share("measured_share")?))
        });
        let [large, small] = [shares[0]?, shares[1]?];
        let alike = |(received, measured): (f64, f64)| (received - measured).abs() < 0.15;
        (alike(large) && alike(small) && large.1 > 1.5 * small.1).then_some(())
    });
}

#[test]
fn doctor_and_demo_disturb_nobody() {
    let (node, mut processes) = busy();
    let gpumux = binary();
    let on_device = |command: &str| node.on_device([gpumux.as_os_str(), command.as_ref()]).run();
    for _ in 0..3 {
        on_device("doctor").ok();
        // Who comes next is served.
        let load = "gpumux workload batch --seconds 0.2";
        node.tenant("--name first --class standard", load)
            .run()
            .ok();
    }
    // A daemon of its own, beside this one's tenants, would bring the device to a stop.
    let demo = on_device("demo");
    assert!(demo.code() == 1, "{demo:?}");
    assert!(demo.err.contains("uses the device"), "{demo:?}");
    let received = |tenant: &Value| tenant["domains"][0]["received_us"].as_u64().unwrap();
    let before = received(&node.find_tenant("night").unwrap());
    node.wait_tenant("night", |tenant| received(tenant) > before + 100_000);
    for process in &mut processes {
        assert!(process.poll().is_none(), "{}", process.err());
    }
}

/// A browser, spoken to through two pipes: no port, no network.
struct Browser {
    process: Child,
    pipe: File,
    answers: mpsc::Receiver<Value>,
    last: u64,
    session: Option<String>,
}

impl Browser {
    fn start(dir: &Path) -> Option<Self> {
        let known = ["chromium", "chromium-browser", "google-chrome"];
        let runs = |name: &&&str| {
            let mut command = Command::new(name);
            command
                .arg("--version")
                .stdout(Stdio::null())
                .stderr(Stdio::null());
            command.status().is_ok_and(|status| status.success())
        };
        let program = known.iter().find(runs)?;
        let pipes = ["to", "from"].map(|name| dir.join(name));
        for pipe in &pipes {
            assert!(Command::new("mkfifo").arg(pipe).status().unwrap().success());
        }
        let process = Command::new("sh")
            .args(["-c", r#"to=$0 from=$1; shift; exec "$@" 3<"$to" 4>"$from""#])
            .args(&pipes)
            .arg(program)
            .args([
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--remote-debugging-pipe",
            ])
            .arg(format!("--user-data-dir={}", dir.join("profile").display()))
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let pipe = OpenOptions::new().write(true).open(&pipes[0]).unwrap();
        let from = File::open(&pipes[1]).unwrap();
        let (sender, answers) = mpsc::channel();
        thread::spawn(move || {
            for message in BufReader::new(from).split(0).map_while(Result::ok) {
                if sender
                    .send(serde_json::from_slice(&message).unwrap())
                    .is_err()
                {
                    return;
                }
            }
        });
        Some(Self {
            process,
            pipe,
            answers,
            last: 0,
            session: None,
        })
    }

    fn call(&mut self, method: &str, params: Value) -> Value {
        self.last += 1;
        let mut message = json!({"id": self.last, "method": method, "params": params});
        if let Some(session) = &self.session {
            message["sessionId"] = session.clone().into();
        }
        self.pipe
            .write_all(format!("{message}\0").as_bytes())
            .unwrap();
        loop {
            let answer = self.answers.recv_timeout(PATIENCE).expect(method);
            if answer["id"] == self.last {
                assert!(answer["error"].is_null(), "{method}: {answer}");
                return answer["result"].clone();
            }
        }
    }

    fn open(&mut self, url: &str) {
        let target =
            self.call("Target.createTarget", json!({"url": "about:blank"}))["targetId"].clone();
        let attached = self.call(
            "Target.attachToTarget",
            json!({"targetId": target, "flatten": true}),
        );
        self.session = Some(attached["sessionId"].as_str().unwrap().into());
        // Comes back when the page has begun, so that what follows is asked of it.
        self.call("Page.navigate", json!({"url": url}));
    }

    /// The value of an expression, once it is true.
    fn until(&mut self, expression: &str) -> Value {
        let wait = format!(
            "new Promise(done => {{ const look = () => {{ let value; try {{ value = {expression} }} catch {{}}
             value ? done(value) : setTimeout(look, 20); }}; look(); }})"
        );
        let params = json!({"expression": wait, "awaitPromise": true, "returnByValue": true});
        self.call("Runtime.evaluate", params)["result"]["value"].clone()
    }

    fn click(&mut self, selector: &str) {
        let place = self.until(&format!(
            "(e => {{ e.scrollIntoView({{block: 'center'}}); const r = e.getBoundingClientRect(); return [r.x + 20, r.y + r.height / 2]; }})(document.querySelector({selector:?}))"
        ));
        for kind in ["mousePressed", "mouseReleased"] {
            let params = json!({"type": kind, "x": place[0], "y": place[1], "button": "left", "clickCount": 1});
            self.call("Input.dispatchMouseEvent", params);
        }
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Its children end with it.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn the_web_page_in_a_browser() {
    let dir = tempfile::tempdir().unwrap();
    let Some(mut browser) = Browser::start(dir.path()) else {
        eprintln!("SKIPPED: no Chromium is installed (apt install chromium)");
        return;
    };
    let (node, _processes) = busy();
    let url = wait_for("the page's address", PATIENCE, || {
        let log = node.daemon().err();
        let start = log.find("http://127.0.0.1:")?;
        log[start..].split_whitespace().next().map(str::to_owned)
    });
    browser.open(&url);
    assert_eq!(
        browser.until("document.querySelectorAll('#tenants tr').length"),
        2
    );
    browser.until("document.querySelectorAll('#devices canvas').length === 1");
    browser.click("tr[data-name=night]");
    let why = browser.until("document.querySelector('#why').textContent");
    assert!(
        why.as_str().unwrap().starts_with("night is a batch tenant"),
        "{why}"
    );
    // Contexts, and the memory of somebody.
    browser.until("document.querySelectorAll('#memory .map i').length > 1");
    browser.until("[...document.querySelectorAll('dt')].find(t => t.textContent === 'sharing').nextSibling.textContent === 'in time'");
    // Its own timeline is drawn.
    browser.until("(c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(v => v))(document.querySelector('#own'))");
    // It is live: what it has received grows.
    let received = "parseFloat([...document.querySelectorAll('dt')].find(t => t.textContent === 'device time').nextSibling.textContent)";
    let before = browser.until(&format!("String({received})"));
    browser.until(&format!("{received} > {}", before.as_str().unwrap()));
    // And a change from elsewhere is seen.
    node.gpumux(["set", "night", "--class", "standard"])
        .run()
        .ok();
    browser
        .until("document.querySelector('tr[data-name=night]').cells[1].textContent === 'standard'");
    // How long requests took, of a program that marks them.
    let _api = Process::start(&mut node.tenant(
        "--name api --class latency",
        "gpumux workload hints --seconds 600",
    ));
    browser.click("tr[data-name=api]");
    browser.until("document.querySelectorAll('#times i').length > 0");
    let scale = browser.until("document.querySelector('#scale').textContent");
    assert!(
        scale.as_str().unwrap().contains(" requests, half within "),
        "{scale}"
    );
    // Who has none marked shows none.
    browser.click("tr[data-name=night]");
    browser.until("document.querySelector('#requests').hidden");
    browser.click("tr[data-name=api]");
    browser.until("!document.querySelector('#requests').hidden");
    let foreign = "performance.getEntriesByType('resource').filter(e => !e.name.startsWith(location.origin)).length === 0";
    browser.until(foreign);
    let picture = browser.call("Page.captureScreenshot", json!({}));
    let picture = picture["data"].as_str().unwrap();
    assert!(
        picture.starts_with("iVBOR") && picture.len() > 10_000,
        "a PNG"
    );
    if let Some(file) = std::env::var_os("GPUMUX_TEST_SCREENSHOT") {
        fs::write(file, picture).unwrap();
    }
}
