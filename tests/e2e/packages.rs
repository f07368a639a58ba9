//! The packages: what is installed works, and what is removed is gone.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use gpumux_tests::{Node, Options, PATIENCE, Process, Run, binary, wait_for};
use rustix::process::Signal;
use serde_json::Value;

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap()
        .into()
}

/// Makes both packages of what was built, in this folder; the one whose name ends so.
fn package(dir: &Path, end: &str) -> Option<PathBuf> {
    let mut make = Command::new(repository().join("deploy/package.sh"));
    make.arg("--fast").arg("--out").arg(dir);
    let made = make
        .arg("--from")
        .arg(binary().parent().unwrap())
        .run()
        .ok()
        .out;
    made.lines()
        .find(|line| line.ends_with(end))
        .map(Into::into)
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .flat_map(|entry| match entry.path() {
            path if entry.file_type().is_ok_and(|kind| kind.is_dir()) => files(&path),
            path => vec![path],
        })
        .collect()
}

#[test]
fn a_debian_package_comes_works_and_goes() {
    let dir = tempfile::tempdir().unwrap();
    let Some(deb) = package(dir.path(), ".deb") else {
        eprintln!("SKIPPED: no dpkg-deb");
        return;
    };
    let root = dir.path().join("root");
    fs::create_dir_all(root.join("var/lib/dpkg")).unwrap();
    let dpkg = |args: &[&str]| {
        let mut dpkg = Command::new("dpkg");
        dpkg.arg(format!("--root={}", root.display()));
        dpkg.args([
            "--force-not-root",
            "--force-depends",
            "--force-script-chrootless",
        ]);
        dpkg.args(args)
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .run()
            .ok()
    };
    dpkg(&["--install", deb.to_str().unwrap()]);
    let gpumux = root.join("usr/bin/gpumux");
    let installed = |args: &[&str]| {
        let mut command = Command::new(&gpumux);
        command.args(args).env_remove("GPUMUX_LIB_DIR");
        command.env("GPUMUX_RUNTIME_DIR", dir.path().join("run"));
        command.run().ok()
    };
    assert!(installed(&["--version"]).out.starts_with("gpumux "));
    let demo: Value = installed(&["demo", "--emulated", "--seconds", "10", "--json"]).json();
    assert_eq!(demo["rows"].as_array().map(Vec::len), Some(3), "{demo}");
    for file in [
        "etc/gpumux/gpumux.toml",
        "usr/lib/systemd/system/gpumuxd.service",
        "usr/share/man/man1/gpumux-run.1.gz",
        "usr/share/bash-completion/completions/gpumux",
    ] {
        assert!(root.join(file).is_file(), "{file}");
    }
    // Every command has a man page, and completes.
    let help = installed(&["--help"]).out;
    let list = help.split_once("Commands:\n").unwrap().1;
    let list = list.split("\n\n").next().unwrap();
    let commands = (list.lines())
        .filter(|line| !line.starts_with("   "))
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| *name != "help");
    let complete = root.join("usr/share/bash-completion/completions/gpumux");
    let complete = fs::read_to_string(complete).unwrap();
    let mut seen = 0;
    for name in commands {
        let page = root.join(format!("usr/share/man/man1/gpumux-{name}.1.gz"));
        assert!(
            page.is_file() && complete.contains(&format!("gpumux,{name})")),
            "{name}"
        );
        seen += 1;
    }
    assert!(seen > 15, "{help}");
    // An upgrade in place, then away with it.
    dpkg(&["--install", deb.to_str().unwrap()]);
    dpkg(&["--purge", "gpumux"]);
    let left: Vec<_> = files(&root)
        .into_iter()
        .filter(|file| !file.starts_with(root.join("var/lib/dpkg")))
        .collect();
    assert_eq!(left, Vec::<PathBuf>::new());
}

#[test]
fn systemd_understands_the_units() {
    let verify = |args: &[&str]| Command::new("systemd-analyze").args(args).output();
    if verify(&["--version"]).is_err() {
        eprintln!("SKIPPED: no systemd-analyze");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    for (scope, file) in [
        ("--system", "deploy/systemd/gpumuxd.service"),
        ("--user", "deploy/systemd/user/gpumuxd.service"),
    ] {
        let unit = fs::read_to_string(repository().join(file)).unwrap();
        let program = binary().display().to_string();
        let here = dir.path().join("gpumuxd.service");
        fs::write(&here, unit.replace("/usr/bin/gpumux", &program)).unwrap();
        let found = verify(&["verify", "--man=no", scope, here.to_str().unwrap()]).unwrap();
        let said = String::from_utf8_lossy(&found.stderr);
        // It also speaks of other units of the machine.
        let ours: Vec<_> = (said.lines())
            .filter(|line| line.contains("gpumuxd.service"))
            .collect();
        assert!(ours.is_empty(), "{file}: {said}");
        // A restart must not end the MPS servers of groups, and SIGTERM thaws everybody.
        for line in ["StateDirectory=gpumux", "KillMode=process"] {
            assert!(unit.lines().any(|it| it == line), "{file}: {line}");
        }
        assert!(!unit.contains("KillSignal"), "{file}");
    }
    let system = fs::read_to_string(repository().join("deploy/systemd/gpumuxd.service")).unwrap();
    assert!(system.contains("RuntimeDirectoryPreserve=yes"));
}

#[test]
fn a_tarball_is_installed_and_removed() {
    let dir = tempfile::tempdir().unwrap();
    let tarball = package(dir.path(), ".tar.gz").unwrap();
    let run = |program: &Path, args: &[&str]| Command::new(program).args(args).run().ok();
    let (from, to) = (dir.path().display().to_string(), dir.path().join("prefix"));
    run(
        "tar".as_ref(),
        &["-C", &from, "-xzf", tarball.to_str().unwrap()],
    );
    let name = tarball
        .file_name()
        .unwrap()
        .to_str()
        .unwrap()
        .trim_end_matches(".tar.gz");
    let install = dir.path().join(name).join("install.sh");
    let prefix = to.to_str().unwrap();
    run(&install, &["--prefix", prefix]);
    assert!(
        run(&to.join("bin/gpumux"), &["--version"])
            .out
            .starts_with("gpumux ")
    );
    let unit = fs::read_to_string(to.join("lib/systemd/system/gpumuxd.service")).unwrap();
    assert!(
        unit.contains(&format!("ExecStart={prefix}/bin/gpumux daemon")),
        "{unit}"
    );
    run(&install, &["--prefix", prefix, "--uninstall"]);
    assert_eq!(files(&to), Vec::<PathBuf>::new());
}

/// `apt install`, a daemon, the demo, `apt purge`: in a system of its own, which is afterwards as it was before.
const FRESH: &str = r#"
list() {
  find / -xdev \( -path /proc -o -path /dev -o -path /root -o -path /var/lib/apt -o -path /var/lib/dpkg \
    -o -path /var/cache -o -path /var/log \) -prune -o -print | sort
}
list > /root/before
apt-get install -qqy --no-install-recommends /root/gpumux.deb > /root/install 2>&1 || { cat /root/install; exit 1; }
gpumux daemon 2> /root/daemon &
for n in $(seq 200); do [ -S /run/gpumux/api.sock ] && break; sleep 0.05; done
gpumux ps
gpumux demo --emulated --seconds 10
kill $!
wait $! || true
apt-get purge -qqy gpumux > /root/purge 2>&1 || { cat /root/purge; exit 1; }
list > /root/after
diff /root/before /root/after
echo "as it was before"
"#;

#[test]
fn a_fresh_system_is_afterwards_as_it_was_before() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("root");
    let quiet = |command: &mut Command| command.output().is_ok_and(|it| it.status.success());
    // To make one takes minutes and a mirror: `.ci/run` does.
    let made = std::env::var_os("GPUMUX_TEST_ROOT")
        .is_some_and(|given| quiet(Command::new("cp").arg("-a").arg(given).arg(&root)));
    let Some(deb) = package(dir.path(), ".deb").filter(|_| made) else {
        eprintln!(
            "SKIPPED: no GPUMUX_TEST_ROOT (a folder made by `debootstrap --variant=minbase`), or no dpkg-deb"
        );
        return;
    };
    fs::copy(deb, root.join("root/gpumux.deb")).unwrap();
    let mut enter = Command::new("unshare");
    enter.args(["--mount", "--pid", "--fork", "--kill-child", "sh", "-c"]);
    enter.arg(r#"mount -t proc proc "$0/proc" && mount --rbind /dev "$0/dev" && exec chroot "$0" sh -euc "$1""#);
    enter.arg(&root).arg(FRESH).env_clear();
    enter
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .env("HOME", "/root");
    let done = Process::start(&mut enter).finish_within(PATIENCE * 6).ok();
    assert!(done.out.ends_with("as it was before\n"), "{done:?}");
}

/// All files are replaced while a tenant runs; the new daemon takes it over, with what was set for it.
#[test]
fn an_upgrade_while_tenants_run() {
    let dir = tempfile::tempdir().unwrap();
    let tarball = package(dir.path(), ".tar.gz").unwrap();
    let mut unpack = Command::new("tar");
    unpack.arg("-C").arg(dir.path()).arg("-xzf").arg(&tarball);
    unpack.run().ok();
    let name = tarball.file_name().unwrap().to_str().unwrap();
    let install = dir
        .path()
        .join(name.trim_end_matches(".tar.gz"))
        .join("install.sh");
    let prefix = dir.path().join("prefix");
    let install = || {
        Command::new(&install)
            .arg("--prefix")
            .arg(&prefix)
            .run()
            .ok()
    };
    install();
    let node = Node::with(Options {
        without_daemon: true,
        ..Options::default()
    });
    let gpumux = prefix.join("bin/gpumux").display().to_string();
    let daemon = || {
        let mut daemon = Process::start(&mut node.on_device([&*gpumux, "daemon"]));
        wait_for("the daemon", PATIENCE, || {
            assert!(daemon.poll().is_none(), "{}", daemon.err());
            node.gpumux(["ps"]).run().status.success().then_some(())
        });
        daemon
    };
    let tenant = || {
        let words = [&*gpumux, "run", "--name", "night", "--", &gpumux, "scratch"];
        let mut tenant = Process::start(&mut node.on_device(words));
        tenant.wait_lines(10);
        node.wait_tenant("night", |tenant| tenant["domains"][0].is_object());
        tenant
    };
    let old = daemon();
    let mut night = tenant();
    let set = ["set", "night", "--class", "batch", "--weight", "3"];
    node.gpumux(set).run().ok();

    install();
    old.signal(Signal::TERM);
    old.finish().ok();
    let new = daemon();
    let exe = fs::read_link(format!("/proc/{}/exe", new.pid())).unwrap();
    assert_eq!(exe, prefix.join("bin/gpumux"), "the new one");
    let is_batch = |tenant: &Value| {
        (tenant["class"] == "batch" && tenant["spec"]["weight"] == 3.0).then_some(tenant.clone())
    };
    let found = node.wait_tenant("night", |tenant| tenant["domains"][0].is_object());
    assert_eq!(found["pids"], serde_json::json!([night.pid()]));
    assert!(is_batch(&found).is_some(), "{found:#}");
    let maps = fs::read_to_string(format!("/proc/{}/maps", night.pid())).unwrap();
    let kept = |line: &str| line.contains("libgpumux.so") && line.ends_with("(deleted)");
    assert!(maps.lines().any(kept), "it keeps what it has loaded");
    night.wait_lines(night.lines() + 20);

    // The next one of this name has what was set.
    night.kill();
    wait_for("its end", PATIENCE, || {
        node.find_tenant("night").is_none().then_some(())
    });
    let _night = tenant();
    let found = node.find_tenant("night").unwrap();
    assert!(is_batch(&found).is_some(), "{found:#}");
}
