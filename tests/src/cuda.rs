//! CUDA programs for tests, compiled by NVIDIA's own compiler from the Python package index.
//!
//! The packages are installed once into `cuda/` beside the test's target folder. Where that cannot be done (no network, no
//! Python) the tests that need it say so and pass. `GPUMUX_CUDA_PROGRAMS` names a folder with programs that were compiled
//! elsewhere, for machines without a compiler; [`collect`] fills it.

use std::{
    env,
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Mutex,
};

use rustix::fs::{FlockOperation, flock};

/// A runtime and the compiler that goes with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Runtime {
    /// CUDA 13.0 inside of the program.
    Static130,
    /// CUDA 13.0 as a library.
    Shared130,
    /// CUDA 12.8 as a library.
    Shared128,
    /// CUDA 13.5 inside of the program: newer than the driver.
    Static135,
    /// CUDA 13.5 as a library.
    Shared135,
}

impl Runtime {
    /// All that there are.
    pub const ALL: [Self; 5] = [
        Self::Static130,
        Self::Shared130,
        Self::Shared128,
        Self::Static135,
        Self::Shared135,
    ];

    fn packages(self) -> &'static [&'static str] {
        match self {
            Self::Static130 | Self::Shared130 | Self::Shared128 => &[
                "nvidia-cuda-nvcc==13.0.88",
                "nvidia-cuda-crt==13.0.88",
                "nvidia-nvvm==13.0.88",
                "nvidia-cuda-runtime==13.0.96",
                "nvidia-cuda-cccl==13.0.85",
                "nvidia-cuda-runtime-cu12==12.8.90",
            ],
            Self::Static135 | Self::Shared135 => &[
                "nvidia-cuda-nvcc==13.5.37",
                "nvidia-cuda-crt==13.5.37",
                "nvidia-nvvm==13.5.37",
                "nvidia-cuda-runtime==13.5.37",
                "nvidia-cuda-cccl==13.3.5.0.6",
            ],
        }
    }

    fn version(self) -> &'static str {
        match self {
            // Only the library is of 12.8: its compiler is not in a package.
            Self::Static130 | Self::Shared130 | Self::Shared128 => "13.0",
            Self::Static135 | Self::Shared135 => "13.5",
        }
    }

    fn linking(self) -> &'static str {
        match self {
            Self::Shared130 | Self::Shared135 => "shared",
            Self::Shared128 => "none",
            Self::Static130 | Self::Static135 => "static",
        }
    }
}

/// A compiled program and where its libraries are.
#[derive(Clone, Debug)]
pub struct Program {
    /// The executable.
    pub path: PathBuf,
    /// For `LD_LIBRARY_PATH`.
    pub libraries: PathBuf,
}

/// Compiles `tests/cuda/NAME.cu`; `None`, with a line on standard error, where there is no compiler to be had.
///
/// # Panics
/// When the compiler refuses the program.
pub fn program(name: &str, runtime: Runtime) -> Option<Program> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let file = format!("{name}-{}-{}", runtime.version(), runtime.linking());
    if let Some(dir) = env::var_os("GPUMUX_CUDA_PROGRAMS") {
        let dir = PathBuf::from(dir);
        let path = dir.join(file);
        assert!(path.exists(), "{} is missing", path.display());
        return Some(Program {
            path,
            libraries: dir.join(runtime.version()),
        });
    }
    let packages = install(runtime.version(), runtime.packages())?;
    let toolkit = packages.join("nvidia/cu13");
    let _alone = ONE_AT_A_TIME
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    let lock = File::create(home().join("lock")).expect("a lock file");
    flock(&lock, FlockOperation::LockExclusive).expect("the lock");
    // The linker asks for a name without a version.
    let _ = std::os::unix::fs::symlink("libcudart.so.13", toolkit.join("lib/libcudart.so"));
    let libraries = match runtime {
        Runtime::Shared128 => packages.join("nvidia/cuda_runtime/lib"),
        _ => toolkit.join("lib"),
    };
    let program = Program {
        path: home().join(file),
        libraries,
    };
    compile(name, runtime, &toolkit, &program);
    Some(program)
}

/// Copies a program and the libraries that it may need into a folder for `GPUMUX_CUDA_PROGRAMS`.
///
/// # Errors
/// When they cannot be copied.
pub fn collect(program: &Program, runtime: Runtime, into: &Path) -> io::Result<()> {
    let libraries = into.join(runtime.version());
    fs::create_dir_all(&libraries)?;
    let copy = |path: &Path, into: &Path| {
        let name = path.file_name().unwrap_or_default();
        fs::copy(path, into.join(name)).map(drop)
    };
    copy(&program.path, into)?;
    for entry in fs::read_dir(&program.libraries)?.flatten() {
        let name = entry.file_name();
        if name.to_string_lossy().starts_with("libcudart.so.") {
            copy(&entry.path(), &libraries)?;
        }
    }
    Ok(())
}

/// The folder with NVIDIA's Python binding of NVML, and a script that uses it; `None`, with a line on standard error, where
/// it is not to be had.
pub fn nvml_script() -> Option<(PathBuf, PathBuf)> {
    if let Some(dir) = env::var_os("GPUMUX_CUDA_PROGRAMS") {
        let dir = PathBuf::from(dir);
        return Some((dir.clone(), dir.join("nvml.py")));
    }
    let binding = install("nvml", &["nvidia-ml-py==13.580.82"])?;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda/nvml.py");
    Some((binding, script))
}

/// Copies both into a folder for `GPUMUX_CUDA_PROGRAMS`.
///
/// # Errors
/// When they cannot be copied.
pub fn collect_nvml_script(into: &Path) -> io::Result<()> {
    if let Some((binding, script)) = nvml_script() {
        fs::create_dir_all(into)?;
        fs::copy(binding.join("pynvml.py"), into.join("pynvml.py"))?;
        fs::copy(script, into.join("nvml.py"))?;
    }
    Ok(())
}

/// Where programs and packages are.
fn home() -> PathBuf {
    let test = env::current_exe().expect("the test's own path");
    let target = test.ancestors().nth(3);
    target.expect("<target>/<profile>/deps/<test>").join("cuda")
}

/// Installs Python packages into a folder, once; says so where that cannot be done.
fn install(name: &'static str, packages: &[&str]) -> Option<PathBuf> {
    // Once per process is enough to know that it cannot be.
    static FAILED: Mutex<Vec<&str>> = Mutex::new(Vec::new());
    let into = home().join(name);
    fs::create_dir_all(&into).expect("a folder for packages");
    // Other threads and test processes want the same.
    let mut failed = FAILED
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    let lock = File::create(into.with_extension("lock")).expect("a lock file");
    flock(&lock, FlockOperation::LockExclusive).expect("the lock");
    if into.join("complete").exists() {
        return Some(into);
    }
    if !failed.contains(&name) {
        let mut pip = Command::new("python3");
        pip.args(["-m", "pip", "install", "--quiet", "--no-deps"])
            .args(["--disable-pip-version-check", "--root-user-action=ignore"])
            .args(["--timeout", "20", "--retries", "1", "--target"])
            .arg(&into)
            .args(packages);
        let installed = pip.stdin(Stdio::null()).status();
        if installed.is_ok_and(|status| status.success()) {
            File::create(into.join("complete")).ok()?;
            return Some(into);
        }
        failed.push(name);
    }
    skipped(&format!("install {}", packages.join(" ")));
    None
}

/// Says so, but not through `eprintln`, which a passing test swallows.
fn skipped(what: &str) {
    let line = format!("SKIPPED: cannot {what}\n");
    let _ = io::stderr().write_all(line.as_bytes());
}

/// The PTX of a program's kernels as the compiler of 13.0 makes it; `None` where there is none.
pub fn ptx(name: &str) -> Option<String> {
    if env::var_os("GPUMUX_CUDA_PROGRAMS").is_some() {
        skipped("compile PTX");
        return None;
    }
    let program = program(name, Runtime::Static130)?;
    let nvcc = program.libraries.with_file_name("bin/nvcc");
    let out = program.path.with_extension("ptx");
    let compiled = Command::new(nvcc)
        .args(["-std=c++17", "-arch=sm_90", "-ptx"])
        .arg(source(name))
        .arg("-o")
        .arg(&out)
        .status();
    assert!(compiled.is_ok_and(|status| status.success()), "{name}");
    fs::read_to_string(out).ok()
}

fn source(name: &str) -> PathBuf {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda");
    sources.join(format!("{name}.cu"))
}

fn compile(name: &str, runtime: Runtime, toolkit: &Path, program: &Program) {
    let out = &program.path;
    let source = source(name);
    let text = fs::read_to_string(&source).expect("a program");
    let flags = text.lines().find_map(|it| it.strip_prefix("// nvcc: "));
    let changed = |path: &Path| fs::metadata(path).and_then(|it| it.modified()).ok();
    let newest = changed(&source).max(changed(&source.with_file_name("check.h")));
    if changed(out).is_some_and(|built| Some(built) > newest) {
        return;
    }
    let made = out.with_extension("new");
    let older = (runtime == Runtime::Shared128).then(|| {
        let headers = program.libraries.with_file_name("include");
        let library = program.libraries.join("libcudart.so.12");
        ["-I".into(), headers, "-Xlinker".into(), library]
    });
    let compiled = Command::new(toolkit.join("bin/nvcc"))
        .args([
            "-std=c++17",
            "-arch=sm_90",
            "-cudart",
            runtime.linking(),
            "-L",
        ])
        .arg(toolkit.join("lib"))
        .args(older.iter().flatten())
        .args(flags.iter().flat_map(|it| it.split(' ')))
        .arg(source)
        .arg("-o")
        .arg(&made)
        .output()
        .expect("nvcc starts");
    let said = String::from_utf8_lossy(&compiled.stderr);
    assert!(compiled.status.success(), "{name}: {said}");
    fs::rename(&made, out).expect("the program is there");
}
