//! The packages: what is installed works, and what is removed is gone.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::{Mutex, PoisonError},
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

/// A package of what was built, which is made once; `None` where the tool for it is missing.
pub(crate) fn package(format: &'static str) -> Option<PathBuf> {
    static MADE: Mutex<BTreeMap<&str, Option<PathBuf>>> = Mutex::new(BTreeMap::new());
    let mut made = MADE.lock().unwrap_or_else(PoisonError::into_inner);
    made.entry(format).or_insert_with(|| make(format)).clone()
}

fn make(format: &str) -> Option<PathBuf> {
    let tool = match format {
        "deb" => Command::new("dpkg-deb").arg("--version").output(),
        "rpm" => Command::new("rpmbuild").arg("--version").output(),
        "wheel" => Command::new("python3")
            .args(["-c", "import hatchling"])
            .output(),
        _ => Command::new("tar").arg("--version").output(),
    };
    if !tool.is_ok_and(|it| it.status.success()) {
        eprintln!("SKIPPED: the tool for a {format} is missing");
        return None;
    }
    let gpumux = binary();
    let built = gpumux.parent().unwrap();
    let mut make = Command::new(repository().join("deploy/package.sh"));
    make.args(["--fast", "--formats", format, "--from"])
        .arg(built);
    make.arg("--out").arg(built.join("package"));
    let made = make.run().ok().out;
    Some(made.lines().last().unwrap().into())
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
    let Some(deb) = package("deb") else {
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
    let doctor = installed(&["emu", "--", gpumux.to_str().unwrap(), "doctor", "--json"]).json();
    assert_eq!(doctor["devices"].as_array().map(Vec::len), Some(1));
    for file in [
        "etc/gpumux/gpumux.toml",
        "usr/include/gpumux.h",
        "usr/lib/python3/dist-packages/gpumux/__init__.py",
        "usr/lib/systemd/system/gpumuxd.service",
        "usr/lib/systemd/system/run-gpumux-groups.mount",
        "usr/share/doc/gpumux/docs/getting-started.md",
        "usr/share/doc/gpumux/examples/inference-and-training.yaml",
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
fn rpm_comes_works_and_goes() {
    let dir = tempfile::tempdir().unwrap();
    let Some(made) = package("rpm") else {
        return;
    };
    let root = dir.path().join("root");
    let rpm = |args: &[&str]| {
        let mut rpm = Command::new("rpm");
        // Its scripts need a shell, which this root lacks.
        rpm.args(["--root", root.to_str().unwrap(), "--dbpath", "/var/lib/rpm"]);
        rpm.args(args).run().ok().out
    };
    let made = made.to_str().unwrap();
    let requires = rpm(&["-qp", "--requires", made]);
    assert!(requires.contains("libc.so.6(GLIBC_"), "{requires}");
    // The emulated device's library is called as the driver's: it is no driver for other packages.
    let provides = rpm(&["-qp", "--provides", made]);
    assert!(!provides.contains("libcuda"), "{provides}");
    rpm(&["-i", "--nodeps", "--noscripts", "--ignoreos", made]);
    let mut installed = Command::new(root.join("usr/bin/gpumux"));
    installed.env_remove("GPUMUX_LIB_DIR");
    installed.env("GPUMUX_RUNTIME_DIR", dir.path().join("run"));
    installed.args(["emu", "--", "gpumux", "doctor"]);
    let path = std::env::join_paths(
        [root.join("usr/bin")]
            .into_iter()
            .chain(std::env::split_paths(&std::env::var_os("PATH").unwrap())),
    );
    installed.env("PATH", path.unwrap()).run().ok();
    rpm(&["-e", "--noscripts", "gpumux"]);
    let left: Vec<_> = (files(&root).into_iter())
        .filter(|file| !file.starts_with(root.join("var/lib/rpm")))
        .collect();
    assert_eq!(left, Vec::<PathBuf>::new());
}

/// The workspace has the version; some files repeat it.
#[test]
fn version_is_the_same_everywhere() {
    let version = env!("CARGO_PKG_VERSION");
    for (file, text) in [
        (
            "python/gpumux/__init__.py",
            format!("__version__ = \"{version}\""),
        ),
        (
            "deploy/helm/gpumux/Chart.yaml",
            format!("appVersion: \"{version}\""),
        ),
        (
            "deploy/helm/gpumux/values.yaml",
            format!("tag: \"{version}\""),
        ),
        ("docs/kubernetes.md", format!("gpumux:{version} ")),
    ] {
        let whole = fs::read_to_string(repository().join(file)).unwrap();
        assert!(whole.contains(&text), "{file}: {text}");
    }
}

#[test]
fn bill_of_materials_lists_what_is_compiled_in() {
    let script = repository().join("deploy/sbom.py");
    let recent = "import sys, tomllib";
    let python = Command::new("python3").args(["-c", recent]).output();
    if !python.is_ok_and(|it| it.status.success()) {
        eprintln!("SKIPPED: no python3 from 3.11 on");
        return;
    }
    let bill = Command::new("python3").arg(script).run().ok().json();
    let all = bill["components"].as_array().unwrap();
    let has = |name: &str| all.iter().any(|it| it["name"] == name);
    for name in ["gpumux-shim", "gpumux-cli", "rustix", "tokio"] {
        assert!(has(name), "{name}");
    }
    // Tests, build scripts and macros.
    for name in ["gpumux-tests", "proptest", "protox", "serde_derive"] {
        assert!(!has(name), "{name}");
    }
    for it in all {
        let own = it["name"].as_str().unwrap().starts_with("gpumux-");
        assert!(own || it["hashes"][0]["content"].is_string(), "{it}");
        assert!(it["licenses"][0]["expression"].is_string(), "{it}");
    }
}

/// What systemd finds wrong in a unit, with its program in place of the installed one; `None` where there is no systemd.
fn wrong_in(unit: &str, scope: &str, name: &str) -> Option<Vec<String>> {
    let dir = tempfile::tempdir().unwrap();
    let here = dir.path().join(name);
    let program = binary().display().to_string();
    fs::write(&here, unit.replace("/usr/bin/gpumux", &program)).unwrap();
    let mut verify = Command::new("systemd-analyze");
    verify.args(["verify", "--man=no", scope]).arg(&here);
    let Ok(found) = verify.output() else {
        eprintln!("SKIPPED: no systemd-analyze");
        return None;
    };
    // It also speaks of other units of the machine.
    let found = String::from_utf8_lossy(&found.stderr);
    let ours = found.lines().filter(|line| line.contains(name));
    Some(ours.map(str::to_owned).collect())
}

#[test]
fn systemd_understands_the_units() {
    for (scope, file) in [
        ("--system", "deploy/systemd/gpumuxd.service"),
        ("--user", "deploy/systemd/user/gpumuxd.service"),
    ] {
        let unit = fs::read_to_string(repository().join(file)).unwrap();
        let Some(wrong) = wrong_in(&unit, scope, "gpumuxd.service") else {
            return;
        };
        assert_eq!(wrong, Vec::<String>::new(), "{file}");
        // A restart must not end the MPS servers of groups, and SIGTERM thaws all tenants.
        for line in ["StateDirectory=gpumux", "KillMode=process"] {
            assert!(unit.lines().any(|it| it == line), "{file}: {line}");
        }
        assert!(!unit.contains("KillSignal"), "{file}");
    }
    let mount = "run-gpumux-groups.mount";
    let file = repository().join("deploy/systemd").join(mount);
    let wrong = wrong_in(&fs::read_to_string(file).unwrap(), "--system", mount);
    assert_eq!(wrong, Some(Vec::new()));
    let system = fs::read_to_string(repository().join("deploy/systemd/gpumuxd.service")).unwrap();
    assert!(system.contains(&format!("After={mount}")));
    assert!(system.contains("RuntimeDirectoryPreserve=yes"));
}

/// The units of applications: systemd takes them, and their command makes the tenant that they name.
#[test]
fn service_of_an_application_becomes_a_tenant() {
    let node = Node::start();
    for (scope, file, name, class) in [
        ("--system", "web.service", "web", "latency"),
        ("--user", "night.service", "night", "batch"),
    ] {
        let unit = fs::read_to_string(repository().join("deploy/recipes").join(file)).unwrap();
        if let Some(wrong) = wrong_in(&unit, scope, file) {
            assert_eq!(wrong, Vec::<String>::new(), "{file}");
        }
        let command = unit
            .lines()
            .find_map(|it| it.strip_prefix("ExecStart=/usr/bin/"));
        let (run, _) = command.unwrap().split_once(" -- ").unwrap();
        let options = run.strip_prefix("gpumux run ").unwrap();
        let service = Process::start(&mut node.tenant(options, "gpumux scratch"));
        let tenant = node.wait_tenant(name, |tenant| tenant["domains"][0].is_object());
        assert_eq!(tenant["class"], class, "{tenant:#}");
        // systemd watches the process that it started.
        assert_eq!(tenant["pids"], serde_json::json!([service.pid()]));
    }
}

#[test]
fn a_tarball_is_installed_and_removed() {
    let dir = tempfile::tempdir().unwrap();
    let tarball = package("tar").unwrap();
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

/// All files are replaced while a tenant runs; the new daemon takes it over, with what was set for it.
#[test]
fn an_upgrade_while_tenants_run() {
    let dir = tempfile::tempdir().unwrap();
    let tarball = package("tar").unwrap();
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
