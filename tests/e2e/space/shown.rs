//! What people are shown of a group whose members run together.

use gpumux_tests::drawn;

use super::*;

/// The sum of the percentages in a text.
fn percents(text: &str) -> f64 {
    let parts = text.split('%').filter_map(|part| {
        let digits = part.trim_end_matches(|it: char| it.is_ascii_digit());
        part[digits.len()..].parse::<f64>().ok()
    });
    parts.sum()
}

#[test]
fn members_are_counted_once_in_ps_top_explain_and_metrics() {
    let node = Node::start();
    let names = ["a", "b", "c", "d"];
    let _members = names.map(|name| {
        let process = member(&node, name, "", LOAD);
        node.wait_tenant(name, has_domain);
        process
    });
    let _other = Process::start(&mut node.tenant("--class batch --name other", LOAD));
    node.wait_tenant("other", has_domain);
    // Together they have most of the time, of which the last one has its part: each counted by itself, they would have all of it several times.
    let share = |ps: &Value, name: &str| domain(find(ps, name))["received_share"].as_f64();
    wait_ps(&node, "their shares", |ps| {
        let most = |name: &&str| share(ps, name) > Some(0.6);
        let part = share(ps, "other").filter(|it| (0.1..0.4).contains(it));
        (part.is_some() && names.iter().all(most)).then_some(())
    });
    // Shares are of a second or two, and not of the same.
    let once = |part: f64, text: &str| assert!((0.6..1.5).contains(&part), "{part}: {text}");
    let listed = node.gpumux(["ps"]).run().ok().out;
    let uid = rustix::process::getuid().as_raw();
    let line = format!("group {uid}/team: a, b, c, d run together");
    assert!(listed.contains(&line), "{listed}");
    let explained = node.gpumux(["explain", "other"]).run().ok().out;
    let others = explained.lines().find(|it| it.starts_with("others:"));
    let others = others.unwrap();
    assert!(others.contains("together in a group"), "{explained}");
    once(percents(others) / 100.0, others);
    let explained = node.gpumux(["explain", "a"]).run().ok().out;
    assert!(
        explained.contains("b, c and d in its own group"),
        "{explained}"
    );
    let (_, metrics) = node.request("GET", "/metrics", "").unwrap();
    let line = metrics.lines().find_map(|it| {
        let value = it.strip_prefix("gpumux_device_received_ratio{")?;
        value.rsplit(' ').next()?.parse().ok()
    });
    once(line.unwrap(), &metrics);
    let top = drawn(node.gpumux(["top"]), "\tq");
    let by = top.lines().find(|it| it.contains("received by")).unwrap();
    assert!(by.contains("a, b, c, d together"), "{top}");
    once(percents(by) / 100.0, by);
    // The page's picture is made of this.
    let groups = wait_for("the history of all", PATIENCE, || {
        let history = node.get("/v1/history");
        let all = history["tenants"].as_array()?;
        let group = |name: &str| Some(all.iter().find(|it| it["name"] == name)?["group"].clone());
        let members: Option<Vec<Value>> = names.into_iter().map(group).collect();
        Some((members?, group("other")?))
    });
    assert_eq!(groups.0, [(); 4].map(|()| format!("{uid}/team")));
    assert_eq!(groups.1, Value::Null);
}
