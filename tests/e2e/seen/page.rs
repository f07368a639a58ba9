//! The web page, in a real browser.

use std::{
    fs::{File, OpenOptions},
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Child, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

use serde_json::json;

use super::*;

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
            let answer = wait_for(method, PATIENCE, || {
                self.answers.recv_timeout(Duration::from_millis(20)).ok()
            });
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
fn web_page_in_a_browser_shows_all_and_changes_none() {
    let dir = tempfile::tempdir().unwrap();
    let Some(mut browser) = Browser::start(dir.path()) else {
        eprintln!("SKIPPED: no Chromium is installed (apt install chromium)");
        return;
    };
    let (node, _processes) = busy();
    browser.open(&address(&node));
    assert_eq!(
        browser.until("document.querySelectorAll('#tenants tr').length"),
        2
    );
    browser.until("document.querySelectorAll('#devices .chart svg path').length > 2");
    browser.click("tr[data-name=night] a");
    let why = browser.until("document.querySelector('#why').textContent");
    assert!(why.as_str().unwrap().contains("night"), "{why}");
    // Contexts, and the memory of a tenant.
    browser.until("document.querySelectorAll('#devices .map i').length > 1");
    let fact = |name: &str| {
        format!(
            "[...document.querySelectorAll('dt')].find(t => t.textContent === '{name}').nextSibling.textContent"
        )
    };
    browser.until(&format!("{} === 'in time'", fact("Sharing")));
    browser.until(&format!("{}.endsWith(' °C')", fact("Temperature")));
    browser.until(&format!("{}.endsWith(' of 700 W')", fact("Power")));
    // Its own course, from the daemon's history.
    browser.until("document.querySelectorAll('#past svg path').length > 2");
    // It is live: what it has received grows.
    let received = format!("parseFloat({})", fact("GPU time"));
    let before = browser.until(&format!("String({received})"));
    browser.until(&format!("{received} > {}", before.as_str().unwrap()));
    // And a change from elsewhere is seen.
    node.gpumux(["set", "night", "--class", "standard"])
        .run()
        .ok();
    browser
        .until("document.querySelector('tr[data-name=night]').cells[1].textContent === 'standard'");
    // On the daemon's TCP address nothing can be changed.
    browser.until("document.querySelector('#change').hidden");
    browser.until("document.querySelector('#rights').textContent.includes('read-only')");
    // How long requests took, of a program that marks them.
    let _api = Process::start(&mut node.tenant(
        "--name api --class latency",
        "gpumux workload hints --seconds 600",
    ));
    browser.click("tr[data-name=api] a");
    browser.until("document.querySelectorAll('#times i').length > 0");
    let scale = browser.until("document.querySelector('#scale').textContent");
    assert!(
        scale.as_str().unwrap().contains(" requests, half within "),
        "{scale}"
    );
    // One without marked requests shows none.
    browser.click("tr[data-name=night] a");
    browser.until("document.querySelector('#requests').hidden");
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
    // A daemon that is gone is plain to see, and its numbers are old.
    drop(node);
    browser.until(
        "document.body.classList.contains('stale') && !document.querySelector('#gone').hidden",
    );
}

/// Processes of one tenant in an MPS group run together: what the group had counts once, of whichever.
#[test]
fn share_of_a_tenant_with_several_members_is_shown_everywhere() {
    let node = Node::with(Options {
        daemon: ["--listen", "127.0.0.1:0"].map(Into::into).into(),
        ..Options::default()
    });
    let mut pair = node.tenant("--name pair --trust team --sharing space", "sh -c");
    let program = format!("{} workload batch --seconds 600", binary().display());
    pair.arg(format!("{program} & exec {program}"));
    let _pair = Process::start(&mut pair);
    let domains = |tenant: &Value| tenant["domains"].as_array().unwrap().clone();
    let share = |it: &Value| it["received_share"].as_f64().unwrap();
    let tenant = node.wait_tenant("pair", |tenant| {
        let domains = domains(tenant);
        domains.len() == 2 && domains.iter().map(share).sum::<f64>() > 0.9
    });
    let groups = domains(&tenant).into_iter().map(|it| it["group"].as_u64());
    assert!(groups.clone().all(|it| it.is_some()), "{tenant:#}");
    let why = node.gpumux(["explain", "pair"]).run().ok().out;
    let received = why.lines().find(|it| it.starts_with("received:")).unwrap();
    let part: f64 = received
        .split(['%', ' '])
        .find_map(|it| it.parse().ok())
        .unwrap();
    assert!((80.0..=100.0).contains(&part), "{why}");
    let metrics = node.request("GET", "/metrics", "").unwrap().1;
    let metric = metrics
        .lines()
        .find(|it| it.starts_with("gpumux_tenant_share_ratio{"));
    let shown: f64 = metric.unwrap().rsplit(' ').next().unwrap().parse().unwrap();
    assert!((0.8..1.01).contains(&shown), "{metric:?}");
    let dir = tempfile::tempdir().unwrap();
    let Some(mut browser) = Browser::start(dir.path()) else {
        eprintln!("SKIPPED: no Chromium is installed (apt install chromium)");
        return;
    };
    browser.open(&address(&node));
    browser.until("document.querySelector('tr[data-name=pair]') !== null");
    let bar = "document.querySelector('tr[data-name=pair]').cells[4].firstChild.children[0]";
    browser.until(&format!("parseFloat({bar}.style.width) > 80"));
}

/// Of the daemon's page, as its log has it.
fn address(node: &Node) -> String {
    wait_for("the page's address", PATIENCE, || {
        let log = node.daemon().err();
        let start = log.find("http://127.0.0.1:")?;
        log[start..].split_whitespace().next().map(str::to_owned)
    })
}

/// The page as a user, its address, and the process that serves it.
fn page(node: &Node) -> (Process, String) {
    let mut process = Process::start(&mut node.gpumux(["page"]));
    process.wait_lines(1);
    let url = process.out().split_whitespace().nth(1).unwrap().to_owned();
    (process, url)
}

#[test]
fn web_page_fits_phones_and_changes_own_tenants() {
    let dir = tempfile::tempdir().unwrap();
    let Some(mut browser) = Browser::start(dir.path()) else {
        eprintln!("SKIPPED: no Chromium is installed (apt install chromium)");
        return;
    };
    let (node, _processes) = busy();
    let long = "a-tenant-with-a-name-that-is-as-long-as-names-may-be-and-more";
    let _more = [
        format!("--name {long} --class standard"),
        "--name sleeper".into(),
    ]
    .map(|options| {
        Process::start(&mut node.tenant(
            &options,
            "gpumux workload idle --memory 256MiB --seconds 600",
        ))
    });
    for name in [long, "sleeper"] {
        node.wait_tenant(name, |tenant| {
            tenant["memory"][0]["in_use"].as_u64() > Some(256 << 20)
        });
    }
    let (_page, url) = page(&node);
    browser.open(&url);
    // The secret is not left in the address.
    browser.until("location.hash === ''");
    browser.until("document.querySelectorAll('#tenants tr').length === 4");
    browser.click("tr[data-name=sleeper] a");
    browser.until("!document.querySelector('#change').hidden");
    browser.until("document.querySelector('#move').click() === undefined");
    node.wait_tenant("sleeper", |tenant| tenant["asleep"] == true);
    browser.until("document.querySelector('#said').textContent === 'Its memory is on the host.'");
    browser.until(
        "document.querySelector('tr[data-name=sleeper]').textContent.includes('on the host')",
    );
    for width in [390, 768, 1280] {
        let size =
            json!({"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500});
        browser.call("Emulation.setDeviceMetricsOverride", size);
        // Drawn anew with all in it: charts, a tenant's own, long names.
        browser
            .until("new Set([...document.querySelectorAll('#past svg, #devices svg')]).size >= 6");
        let fits =
            browser.until("JSON.stringify([document.documentElement.scrollWidth, innerWidth])");
        let [wide, room]: [u32; 2] = serde_json::from_str(fits.as_str().unwrap()).unwrap();
        assert!(wide <= room && room == width, "{wide} pixels in {room}");
        let columns = browser
            .until("String(new Set([...document.querySelectorAll('#facts > div')].map(it => it.offsetLeft)).size)");
        let columns: u32 = columns.as_str().unwrap().parse().unwrap();
        assert!(columns >= 2, "facts in {columns} columns at {width} pixels");
    }
    browser.until("document.querySelector('#move').click() === undefined");
    node.wait_tenant("sleeper", |tenant| tenant["asleep"] == false);
    // Each tenant has a colour of its own.
    let colors = browser.until("String(new Set([...document.querySelectorAll('#tenants .chip')].map(c => c.style.background)).size)");
    assert_eq!(colors, "4");
    // A change can be taken back.
    let choose = "(c => { c.value = 'latency'; c.dispatchEvent(new Event('change')); return true; })(document.querySelector('#class'))";
    browser.until(choose);
    node.wait_tenant("sleeper", |tenant| tenant["class"] == "latency");
    browser.until("!document.querySelector('#undo').hidden");
    browser.until("document.querySelector('#undo').click() === undefined");
    node.wait_tenant("sleeper", |tenant| tenant["class"] == "standard");
}

#[test]
fn page_address_without_its_secret_shows_and_changes_nothing() {
    let (node, _processes) = busy();
    let (_page, url) = page(&node);
    let (address, secret) = url.split_once("#token=").unwrap();
    let ask = |words: &[&str]| {
        let mut curl = Command::new("curl");
        curl.args(["-sS", "-o", "/dev/null", "-w", "%{http_code}"])
            .args(words);
        curl.run().ok().out
    };
    let bearer = format!("authorization: Bearer {secret}");
    let (live, night) = (
        format!("{address}v1/status"),
        format!("{address}v1/tenants/night"),
    );
    let body = r#"{"class": "latency"}"#;
    let json = "content-type: application/json";
    assert_eq!(ask(&[address]), "200", "the page itself holds no data");
    assert_eq!(ask(&[&live]), "401");
    assert_eq!(ask(&[&live, "-H", "authorization: Bearer 00"]), "401");
    assert_eq!(ask(&[&live, "-H", &bearer]), "200");
    assert_eq!(
        ask(&[&live, "-H", &bearer, "-H", "host: evil.example"]),
        "421"
    );
    let change = ["-X", "PATCH", "-d", body, "-H", json];
    assert_eq!(ask(&[&[&*night][..], &change].concat()), "401");
    let foreign = ["-H", &*bearer, "-H", "origin: http://evil.example"];
    assert_eq!(ask(&[&[&*night][..], &change, &foreign].concat()), "403");
    assert_eq!(ask(&[&night, "-X", "DELETE", "-H", &bearer]), "405");
    assert_eq!(node.find_tenant("night").unwrap()["class"], "batch");
    assert_eq!(
        ask(&[&[&*night, "-H", &bearer][..], &change].concat()),
        "200"
    );
    assert_eq!(node.find_tenant("night").unwrap()["class"], "latency");
}
