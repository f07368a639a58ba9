//! The recipes of `docs/recipes.md`, as far as they run without the software that they are for.

use std::{fs, path::Path, process::Command};

use gpumux_tests::{Node, PATIENCE, Process, Run, binary, program, real, wait_for};
use serde_json::Value;

fn deploy(path: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../deploy")
        .join(path)
}

/// A Slurm script of the recipe, in the environment that Slurm gives it.
fn slurm(node: &Node, dir: &Path, script: &str) -> Command {
    let mut command = Command::new(deploy("slurm").join(script));
    command
        .env("SLURM_JOB_ID", "42")
        .env(
            "SLURM_JOB_UID",
            rustix::process::getuid().as_raw().to_string(),
        )
        .env("SLURM_JOB_GPUS", "0")
        .env("SLURM_JOB_PARTITION", "serve-a")
        .env("GPUMUX_RUNTIME_DIR", node.dir())
        .env("GPUMUX_SLURM_DIR", dir.join("secrets"))
        .env("GPUMUX_SLURM_PATH", dir)
        .env("GPUMUX_LIB_DIR", binary().parent().unwrap());
    command
}

#[test]
fn slurm_job_is_one_tenant_from_prolog_to_epilog() {
    if real() || Command::new("curl").arg("--version").output().is_err() {
        eprintln!("SKIPPED: needs curl and an emulated device");
        return;
    }
    let node = Node::start();
    let dir = tempfile::tempdir().unwrap();
    let devices = node.gpumux(["ps", "--json"]).run().ok();
    assert!(devices.out.contains('['), "{devices:?}");
    let uuid = Command::new("curl")
        .args(["-sS", "--unix-socket"])
        .arg(node.api_socket())
        .arg("http://gpumux/v1/devices")
        .run()
        .ok()
        .json()[0]["uuid"]
        .as_str()
        .unwrap()
        .to_owned();
    program(
        &dir.path().join("nvidia-smi"),
        &format!("#!/bin/sh\necho {uuid}\n"),
    );

    slurm(&node, dir.path(), "prolog.sh").run().ok();
    let tenant = node.wait_tenant("job-42", |_| true);
    assert_eq!(tenant["spec"]["class"], "latency", "{tenant}");
    assert_eq!(tenant["spec"]["guaranteed"], 0.3, "{tenant}");

    let exports = slurm(&node, dir.path(), "task-prolog.sh").run().ok().out;
    let mut task = node.on_device([
        binary().to_str().unwrap(),
        "workload",
        "batch",
        "--seconds",
        "600",
    ]);
    for line in exports.lines() {
        let (name, value) = line
            .strip_prefix("export ")
            .unwrap()
            .split_once('=')
            .unwrap();
        // The emulated device is preloaded, too.
        let value = match (name, task.get_envs().find(|(key, _)| *key == "LD_PRELOAD")) {
            ("LD_PRELOAD", Some((_, Some(other)))) => {
                format!("{value}:{}", other.to_str().unwrap())
            }
            _ => value.to_owned(),
        };
        task.env(name, value);
    }
    let task = Process::start(&mut task);
    node.wait_tenant("job-42", |tenant| tenant["domains"][0].is_object());
    task.kill();

    slurm(&node, dir.path(), "epilog.sh").run().ok();
    wait_for("the tenant's end", PATIENCE, || {
        node.find_tenant("job-42").is_none().then_some(())
    });
    assert_eq!(fs::read_dir(dir.path().join("secrets")).unwrap().count(), 0);
}

#[test]
fn slurm_job_without_a_daemon_runs_unmanaged() {
    let dir = tempfile::tempdir().unwrap();
    let node = Node::with(gpumux_tests::Options {
        without_daemon: true,
        ..Default::default()
    });
    let prolog = slurm(&node, dir.path(), "prolog.sh").run().ok();
    assert!(prolog.err.contains("runs unmanaged"), "{prolog:?}");
    let exports = slurm(&node, dir.path(), "task-prolog.sh").run().ok().out;
    assert_eq!(exports, "");
    if Command::new("curl").arg("--version").output().is_err() {
        eprintln!("SKIPPED: the socket of a daemon that was killed, since there is no curl");
        return;
    }
    program(&dir.path().join("nvidia-smi"), "#!/bin/sh\necho GPU-1\n");
    // What a daemon that was killed leaves behind.
    drop(std::os::unix::net::UnixListener::bind(node.api_socket()).unwrap());
    let prolog = slurm(&node, dir.path(), "prolog.sh").run().ok();
    assert!(prolog.err.contains("42 runs unmanaged"), "{prolog:?}");
    let exports = slurm(&node, dir.path(), "task-prolog.sh").run().ok().out;
    assert_eq!(exports, "");
}

#[test]
fn slurm_job_whose_devices_are_not_known_runs_unmanaged() {
    if real() || Command::new("curl").arg("--version").output().is_err() {
        eprintln!("SKIPPED: needs curl and an emulated device");
        return;
    }
    let node = Node::start();
    let dir = tempfile::tempdir().unwrap();
    for broken in ["echo no driver; exit 9", "true"] {
        let script = format!("#!/bin/sh\n{broken}\n");
        program(&dir.path().join("nvidia-smi"), &script);
        let prolog = slurm(&node, dir.path(), "prolog.sh").run().ok();
        assert!(prolog.err.contains("nvidia-smi"), "{prolog:?}");
        // It would hold its guarantee on all devices.
        assert!(node.find_tenant("job-42").is_none(), "{broken}");
    }
}

#[test]
fn jupyter_kernel_starts_its_program_as_a_tenant() {
    let node = Node::start();
    let spec = fs::read_to_string(deploy("jupyter/gpumux/kernel.json")).unwrap();
    let spec: Value = serde_json::from_str(&spec).unwrap();
    let words = spec["argv"].as_array().unwrap().iter();
    let words: Vec<&str> = words.map(|word| word.as_str().unwrap()).collect();
    assert!(words.contains(&"{connection_file}"), "{words:?}");
    for key in ["display_name", "language"] {
        assert!(spec[key].is_string(), "{key}");
    }
    // In place of Python, a program that prints what it was started with.
    let dir = tempfile::tempdir().unwrap();
    program(
        &dir.path().join("python3"),
        "#!/bin/sh\necho \"$GPUMUX_TENANT\"; echo \"$@\"\n",
    );
    let path = std::env::var("PATH").unwrap();
    let mut kernel = node.gpumux(&words[1..]);
    kernel.env("PATH", format!("{}:{path}", dir.path().display()));
    let lines = kernel.run().ok().out;
    let (secret, arguments) = lines.trim_end().split_once('\n').unwrap();
    assert_eq!(secret.len(), 32, "{lines}");
    assert_eq!(arguments, "-m ipykernel_launcher -f {connection_file}");
}

/// The commands that the page gives to launchers, each as its launcher starts it.
#[test]
fn launchers_commands_start_tenants_with_their_arguments() {
    let page = include_str!("../../docs/recipes.md");
    let between = |start: &str, end: &str| {
        let rest = page
            .split_once(start)
            .unwrap_or_else(|| panic!("{start}"))
            .1;
        rest.split_once(end).unwrap().0.to_owned()
    };
    let node = Node::start();
    let dir = tempfile::tempdir().unwrap();
    let put = |name: &str, script: &str| program(&dir.path().join(name), script);
    // In place of Python, a program that prints its arguments and the tenants.
    put("python", "#!/bin/sh\necho \"$@\"\nexec gpumux ps --json\n");
    put("srun", "#!/bin/sh\nexec \"$@\"\n");
    let script = format!("#!/bin/sh\n{}", between("```text\n#!/bin/sh\n", "```"));
    put("interpreter", &script);
    let path = std::env::var("PATH").unwrap();
    let built = binary().parent().unwrap().display().to_string();
    let path = format!("{}:{built}:{path}", dir.path().display());

    let ray = between(r#"ray.init(runtime_env={"py_executable": ""#, "\"");
    let sweep = between("\ncommand: [", "]");
    let sweep: Vec<&str> = sweep
        .split(", ")
        .map(|word| word.trim_matches('"'))
        .collect();
    let sweep = (sweep.join(" "))
        .replace("${interpreter}", "python")
        .replace("${program}", "train.py")
        .replace("${args}", "--lr=0.1");
    let cases = [
        (
            "Slurm",
            between("--gres=gpu:1\n", "\n"),
            "job-42",
            "train.py",
        ),
        (
            "Ray",
            ray + " worker.py --port=1",
            "worker",
            "worker.py --port=1",
        ),
        (
            "MLflow",
            between("    command: \"", "\""),
            "train",
            "train.py",
        ),
        ("Weights & Biases", sweep, "train", "train.py --lr=0.1"),
        (
            "a script",
            "interpreter train.py -x".into(),
            "train",
            "train.py -x",
        ),
    ];
    for (launcher, command, name, arguments) in cases {
        let mut shell = node.on_device(["bash", "-euc", &command]);
        shell.env("PATH", &path).env("SLURM_JOB_ID", "42");
        let done = shell.run().ok();
        let (printed, tenants) = done.out.split_once('\n').unwrap();
        assert_eq!(printed, arguments, "{launcher}");
        let tenants: Value = serde_json::from_str(tenants).unwrap();
        let all = tenants["tenants"].as_array().unwrap();
        let tenant = all.iter().find(|tenant| tenant["name"] == name);
        let tenant = tenant.unwrap_or_else(|| panic!("{launcher}: {command}: {tenants:#}"));
        assert_eq!(tenant["class"], "batch", "{launcher}");
    }
}

#[test]
fn slurm_configuration_names_the_scripts_that_exist() {
    let page = include_str!("../../docs/recipes.md");
    let named = page
        .lines()
        .filter_map(|line| line.split_once("=/etc/slurm/gpumux/"));
    let scripts: Vec<&str> = named.map(|(_, script)| script).collect();
    assert_eq!(scripts.len(), 3, "{scripts:?}");
    for script in scripts {
        assert!(deploy("slurm").join(script).is_file(), "{script}");
    }
}
