//! What the README and "Getting started" print, in a fresh Debian: each way to install, the commands that follow, and removal,
//! after which the system is as it was before.

use std::{fmt::Write, fs, path::Path, process::Command};

use gpumux_tests::{PATIENCE, Process};

use crate::{
    docs::{self, commands},
    packages::package,
};

/// Pages whose commands a new user types.
const PAGES: [&str; 2] = ["README.md", "docs/getting-started.md"];

/// What is typed to install and to remove, by the word that all lines of one way have.
struct Way {
    format: &'static str,
    /// What its lines begin with.
    lines: &'static [&'static str],
    /// Those of them that remove it.
    remove: &'static str,
    /// What the system needs first.
    needs: &'static str,
    /// What stays, as the page says: here, it goes then.
    stays: Option<&'static str>,
    /// The header's place.
    header: &'static str,
    /// What finds the Python module.
    python: Option<&'static str>,
    /// Whose commands are typed then: once, since each way has the same program. For the others, the doctor finds its libraries.
    pages: &'static [&'static str],
}

const WAYS: [Way; 4] = [
    Way {
        format: "wheel",
        lines: &["pip install ./gpumux-", "pip uninstall "],
        remove: "uninstall",
        needs: "",
        stays: None,
        header: "/opt/venv/include/gpumux.h",
        python: Some("/opt/venv/bin/python3"),
        pages: &[],
    },
    Way {
        format: "deb",
        lines: &["sudo apt ", "sudo systemctl "],
        remove: " purge ",
        needs: "",
        stays: None,
        header: "/usr/include/gpumux.h",
        python: Some("/usr/bin/python3"),
        pages: &PAGES,
    },
    Way {
        format: "rpm",
        lines: &["sudo dnf ", "sudo systemctl "],
        remove: " remove ",
        needs: RPM,
        stays: Some("/var/lib/gpumux"),
        header: "/usr/include/gpumux.h",
        python: None,
        pages: &[],
    },
    Way {
        format: "tar",
        lines: &["tar -xzf gpumux-", "sudo gpumux-"],
        remove: "--uninstall",
        needs: "",
        stays: None,
        header: "/usr/local/include/gpumux.h",
        python: None,
        pages: &[],
    },
];

/// All commands of a page: the lines of its `sh` blocks, and those of its `console` blocks that begin with `$`.
fn printed(page: &str) -> Vec<String> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(page);
    let text = fs::read_to_string(page).unwrap();
    let lines = docs::blocks(&text).flat_map(|(kind, body)| match kind {
        "sh" => commands(body.lines()),
        "console" => body
            .lines()
            .filter_map(|it| it.strip_prefix("$ "))
            .map(str::to_owned)
            .collect(),
        _ => Vec::new(),
    });
    lines.collect()
}

/// The lines of a way, each once, in the order of what they begin with: those that install it, and those that remove it.
fn lines_of(way: &Way) -> (Vec<String>, Vec<String>) {
    let all: Vec<String> = PAGES.iter().flat_map(|page| printed(page)).collect();
    let mut found: Vec<String> = Vec::new();
    for start in way.lines {
        for line in all.iter().filter(|line| line.starts_with(start)) {
            if !found.contains(line) {
                found.push(line.clone());
            }
        }
    }
    found
        .into_iter()
        .partition(|line| !line.contains(way.remove))
}

/// A script with a page's commands of gpumux. A program that they start works until the script ends.
fn session(page: &str) -> String {
    let mut script = String::from("set -eu\ntrap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n");
    for (n, line) in printed(page).iter().enumerate() {
        if !line.starts_with("gpumux ") {
            continue;
        }
        let line = docs::shortened(line.trim_end_matches('&'));
        let line = line.trim_end();
        let quoted = line.replace('\'', r"'\''");
        writeln!(script, "printf '%s\\n' '$ {quoted}'").unwrap();
        let _ = match line {
            _ if line.contains("-- python ") => writeln!(
                script,
                "TICKS=/root/ticks.{n} {line} &\nuntil [ -s /root/ticks.{n} ]; do kill -0 $!; sleep 0.05; done"
            ),
            _ if line.starts_with("gpumux top") => writeln!(
                script,
                "(while sleep 0.2; do printf q; done) | script -qec 'stty rows 24 cols 80; {line}' /dev/null > /root/top"
            ),
            _ => writeln!(script, "{line}"),
        };
    }
    script
}

/// Stands in for what a fresh system lacks: programs of the user's, a service manager, questions that are answered.
const BEFORE: &str = r#"
mkdir -p /root/bin /root/work
cd /root/work
stand_in() { printf '#!/bin/sh\n%s\n' "$2" > "/root/bin/$1"; chmod +x "/root/bin/$1"; }
stand_in sudo 'exec "$@"'
stand_in python 'exec gpumux scratch > "$TICKS"'
stand_in systemctl 'GPUMUX_RUNTIME_DIR=/run/gpumux GPUMUX_STATE_DIR=/var/lib/gpumux setsid gpumux daemon 2> /root/daemon.log &
echo $! > /root/daemon; until [ -S /run/gpumux/api.sock ]; do kill -0 $! || exit 1; sleep 0.05; done'
echo 'APT::Get::Assume-Yes "true";' > /etc/apt/apt.conf.d/99test
export PIP_YES=1 PIP_DISABLE_PIP_VERSION_CHECK=1
python3 -m venv /opt/venv
export PATH=/root/bin:/opt/venv/bin:$PATH
list() {
  find / -xdev \( -path /proc -o -path /dev -o -path /root -o -path /var/lib/apt -o -path /var/lib/dpkg \
    -o -path /var/lib/dnf -o -path /var/lib/rpm -o -path /var/cache -o -path /var/log -o -name __pycache__ \) -prune -o -not \( -type d -path '/opt/venv/*' \) -print | sort
  find / -xdev -path '*gpumux*/__pycache__' -not -path '/root/*'
}
quiet() { "$@" > /root/quiet 2>&1 || { echo "$* fails:"; cat /root/quiet; exit 1; }; }
"#;

/// Debian has dnf and rpm, but its C library is in no RPM: a package that provides what that library does, by RPM's own generator.
const RPM: &str = r#"
for program in dnf rpmbuild; do
  command -v $program > /root/quiet || { echo "SKIPPED: the fresh system has no $program"; exit 0; }
done
{
  printf 'Name: %s\n' system-libraries
  printf '%s\n' 'Version: 1' 'Release: 1' 'Summary: stand-in' 'License: none' 'Provides: /bin/sh' 'Provides: rtld(GNU_HASH)' 'AutoReqProv: no'
  for library in libc.so.6 libm.so.6 libdl.so.2 libpthread.so.0 librt.so.1 libgcc_s.so.1 ld-linux-*.so.*; do
    find /usr/lib /usr/lib64 -name "$library"
  done | /usr/lib/rpm/elfdeps --provides | sed 's/^/Provides: /' | sort -u
  printf '%s\n' '%description' 'Stand-in.' '%files'
} > /root/libraries.spec
quiet rpmbuild -bb --define '_rpmdir /root/rpms' /root/libraries.spec
quiet sh -c 'rpm -i /root/rpms/*/system-libraries-*.rpm'
mkdir -p /etc/dnf
echo 'assumeyes=True' >> /etc/dnf/dnf.conf
"#;

/// What the service manager does before a package is removed.
const STOP: &str = r#"
if [ -f /root/daemon ]; then
  gpumux ps
  kill "$(cat /root/daemon)"
  while kill -0 "$(cat /root/daemon)" 2> /root/gone; do sleep 0.05; done
fi
"#;

/// The whole script of a way.
fn script(way: &Way) -> String {
    let (install, remove) = lines_of(way);
    let mut script = format!("{BEFORE}{}", way.needs);
    let all =
        |lines: &[String]| -> String { lines.iter().map(|it| format!("quiet {it}\n")).collect() };
    writeln!(script, "list > /root/before\n{}hash -r", all(&install)).unwrap();
    writeln!(script, "[ -f {} ]\ngpumux --version", way.header).unwrap();
    if let Some(python) = way.python {
        writeln!(
            script,
            "{python} -c 'import gpumux; print(gpumux.__version__)'"
        )
        .unwrap();
    }
    script += "gpumux emu -- gpumux doctor\n";
    for n in 0..way.pages.len() {
        writeln!(script, "gpumux emu -- bash /root/session.{n}").unwrap();
    }
    script += STOP;
    script += &all(&remove);
    if let Some(folder) = way.stays {
        writeln!(script, "rm -r {folder}").unwrap();
    }
    script += "list > /root/after\n";
    script += "diff /root/before /root/after\necho 'as it was before'\n";
    script
}

/// Enters a fresh system whose changes are in memory, with the files of `$0/put` as root's.
const ENTER: &str = r#"
mkdir "$0/rw" "$0/root"
mount -t tmpfs none "$0/rw"
mkdir "$0/rw/upper" "$0/rw/work"
cp -R "$0/put" "$0/rw/upper/root"
mount -t overlay overlay -o "lowerdir=$1,upperdir=$0/rw/upper,workdir=$0/rw/work" "$0/root"
mount -t proc proc "$0/root/proc"
mount --rbind /dev "$0/root/dev"
exec chroot "$0/root" bash -eu /root/all
"#;

fn works(format: &str) {
    let way = WAYS.iter().find(|way| way.format == format).unwrap();
    let (install, remove) = lines_of(way);
    assert!(
        !install.is_empty() && !remove.is_empty(),
        "{PAGES:?} say how"
    );
    // To make one takes minutes and a mirror: `.ci/run` does.
    let Some(system) = std::env::var_os("GPUMUX_TEST_ROOT") else {
        eprintln!(
            "SKIPPED: no GPUMUX_TEST_ROOT (a folder made by `debootstrap --variant=minbase --include=python3-venv,dnf,rpm`)"
        );
        return;
    };
    let Some(made) = package(way.format) else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    // Under the name that the pages print. A wheel of this machine's build names its own C library.
    let printed = install.iter().flat_map(|line| line.split_whitespace());
    let printed = printed.map(|word| word.trim_start_matches("./"));
    let mut names = printed.filter(|word| word.starts_with("gpumux") && word.contains('.'));
    let name = names.next().unwrap();
    let own = made.file_name().unwrap().to_str().unwrap();
    let without_tag = |name: &str| name.split("-manylinux").next().unwrap().to_owned();
    assert_eq!(
        without_tag(name),
        without_tag(own),
        "the pages name this version"
    );
    let put = dir.path().join("put");
    fs::create_dir_all(put.join("work")).unwrap();
    fs::copy(&made, put.join("work").join(name)).unwrap();
    for (n, page) in way.pages.iter().enumerate() {
        fs::write(put.join(format!("session.{n}")), session(page)).unwrap();
    }
    fs::write(put.join("all"), script(way)).unwrap();
    let mut enter = Command::new("unshare");
    enter.args(["--mount", "--pid", "--fork", "--kill-child", "sh", "-euc"]);
    enter.arg(ENTER).arg(dir.path()).arg(system).env_clear();
    enter
        .env(
            "PATH",
            "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        )
        .env("HOME", "/root");
    let done = Process::start(&mut enter).finish_within(PATIENCE * 10).ok();
    println!("{}", done.out);
    let skipped = done.out.starts_with("SKIPPED");
    assert!(
        skipped || done.out.ends_with("as it was before\n"),
        "{done:?}"
    );
}

#[test]
fn wheel_in_a_fresh_system_comes_works_and_goes() {
    works("wheel");
}

#[test]
fn deb_in_a_fresh_system_comes_works_and_goes() {
    works("deb");
}

#[test]
fn rpm_in_a_system_with_dnf_comes_works_and_goes() {
    works("rpm");
}

#[test]
fn tarball_in_a_fresh_system_comes_works_and_goes() {
    works("tar");
}
