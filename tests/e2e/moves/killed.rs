//! What takes part in a move is killed in the middle of it.

use super::*;

/// A move that is held up where the process is on no device.
struct HeldUp {
    node: Node,
    file: PathBuf,
    process: Process,
    command: Process,
}

impl HeldUp {
    fn new() -> Option<Self> {
        let folder = tempfile::tempdir().expect("a folder").keep();
        let file = folder.join("delay");
        let node = devices(&[
            (
                "GPUMUX_EMU_FAULT",
                "delay@1:cuCheckpointProcessRestore".into(),
            ),
            ("GPUMUX_EMU_DELAY_FILE", file.display().to_string()),
        ])?;
        let program = python(&node, WORK)?;
        let process = start(&node, "--name work", &program);
        let command = Process::start(&mut node.gpumux(["move", "work", "--gpu", "1"]));
        wait_for("the move to be held up", PATIENCE, || {
            file.exists().then_some(())
        });
        Some(Self {
            node,
            file,
            process,
            command,
        })
    }

    /// Lets the move go on.
    fn go_on(&self) {
        fs::remove_file(&self.file).expect("it is there");
    }
}

#[test]
fn daemon_killed_in_the_middle_leaves_the_tenant_running() {
    let Some(mut it) = HeldUp::new() else { return };
    it.node.kill_daemon();
    it.go_on();
    goes_on(&mut it.process);
    it.node.start_daemon();
    it.node.wait_tenant("work", |it| {
        it["devices"].as_array().map(Vec::len) == Some(1)
    });
    assert_eq!(
        numbers(&it.node, "work"),
        [1],
        "the helper has made its way to the end"
    );
    goes_on(&mut it.process);
}

#[test]
fn tenant_killed_in_the_middle_leaves_nothing_behind() {
    let Some(it) = HeldUp::new() else { return };
    let pid = it.node.find_tenant("work").expect("it lives")["pids"][0].as_i64();
    let pid = pid.and_then(|pid| Pid::from_raw(pid as i32));
    kill_process(pid.expect("a pid"), Signal::KILL).expect("it lives");
    it.go_on();
    let moved = it.command.finish();
    assert_eq!(moved.code(), 1, "{moved:#?}");
    assert_eq!(it.process.finish().code(), 137);
    // Nothing of it is accounted for on either device, nor kept for it.
    wait_for("both devices to be empty", PATIENCE, || {
        let all = accounts(&it.node);
        (all[0][0] == all[1][0] && all.iter().all(|it| it[1] == serde_json::json!([])))
            .then_some(())
    });
}

#[test]
fn helper_killed_in_the_middle_leaves_the_tenant_where_it_was() {
    let Some(mut it) = HeldUp::new() else { return };
    let helper = wait_for("the helper", PATIENCE, || {
        let processes = fs::read_dir("/proc").ok()?.flatten();
        let parent = format!("PPid:\t{}\n", it.node.daemon().pid());
        let mut pids = processes.filter_map(|it| it.file_name().to_str()?.parse::<i32>().ok());
        pids.find(|pid| {
            let read =
                |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
            read("cmdline").contains("\0relocate\0") && read("status").contains(&parent)
        })
    });
    let helper = Pid::from_raw(helper).expect("a pid");
    kill_process(helper, Signal::KILL).expect("it lives");
    // The next one is held up, too.
    wait_for("the file to be made again", PATIENCE, || {
        fs::remove_file(&it.file).ok();
        it.command.poll()
    });
    let moved = it.command.finish();
    assert!(moved.err.contains("goes on where it was"), "{moved:#?}");
    goes_on(&mut it.process);
    assert_eq!(numbers(&it.node, "work"), [0]);
}
