//! The packages: what is installed works, and what is removed is gone.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use gpumux_tests::{Run, binary};
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
        assert!(unit.contains("StateDirectory=gpumux"), "{file}");
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
