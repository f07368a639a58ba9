//! CUDA programs for tests, compiled by NVIDIA's own compiler from the Python package index.
//!
//! The packages are installed once into `cuda/` beside the test's target folder. Where that cannot be done (no network, no
//! Python) the tests that need it say so and pass. `GPUMUX_CUDA_PROGRAMS` names a folder with programs that were compiled
//! elsewhere, for machines without a compiler.

use std::{
    env,
    fs::{self, File},
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
}

impl Runtime {
    /// All that there are.
    pub const ALL: [Self; 4] = [
        Self::Static130,
        Self::Shared130,
        Self::Shared128,
        Self::Static135,
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
            Self::Static135 => &[
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
            Self::Static135 => "13.5",
        }
    }

    fn linking(self) -> &'static str {
        match self {
            Self::Shared130 => "shared",
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
            libraries: dir,
        });
    }
    let test = env::current_exe().expect("the test's own path");
    let target = test
        .ancestors()
        .nth(3)
        .expect("<target>/<profile>/deps/<test>");
    let dir = target.join("cuda");
    fs::create_dir_all(&dir).expect("a folder for the compiler");
    let _alone = ONE_AT_A_TIME
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    // Other test processes want the same.
    let lock = File::create(dir.join("lock")).expect("a lock file");
    flock(&lock, FlockOperation::LockExclusive).expect("the lock");
    let Some(toolkit) = toolkit(&dir, runtime) else {
        eprintln!(
            "SKIPPED: no CUDA compiler could be installed for {file}; see {}",
            dir.display()
        );
        return None;
    };
    let libraries = match runtime {
        Runtime::Shared128 => dir.join("13.0/nvidia/cuda_runtime/lib"),
        _ => toolkit.join("lib"),
    };
    let program = Program {
        path: dir.join(file),
        libraries,
    };
    compile(name, runtime, &toolkit, &program);
    Some(program)
}

/// The compiler's folder.
fn toolkit(dir: &Path, runtime: Runtime) -> Option<PathBuf> {
    let home = dir.join(runtime.version());
    let toolkit = home.join("nvidia/cu13");
    if home.join("complete").exists() {
        return Some(toolkit);
    }
    let installed = Command::new("python3")
        .args([
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
        ])
        .args(["--timeout", "20", "--retries", "1", "--target"])
        .arg(&home)
        .args(runtime.packages())
        .stdin(Stdio::null())
        .status();
    if !installed.is_ok_and(|status| status.success()) {
        return None;
    }
    // The linker asks for a name without a version.
    let _ = std::os::unix::fs::symlink("libcudart.so.13", toolkit.join("lib/libcudart.so"));
    File::create(home.join("complete")).ok()?;
    Some(toolkit)
}

fn compile(name: &str, runtime: Runtime, toolkit: &Path, program: &Program) {
    let out = &program.path;
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda");
    let source = sources.join(format!("{name}.cu"));
    let changed = |path: &Path| fs::metadata(path).and_then(|it| it.modified()).ok();
    let newest = changed(&source).max(changed(&sources.join("check.h")));
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
        .arg(source)
        .arg("-o")
        .arg(&made)
        .output()
        .expect("nvcc starts");
    let said = String::from_utf8_lossy(&compiled.stderr);
    assert!(compiled.status.success(), "{name}: {said}");
    fs::rename(&made, out).expect("the program is there");
}
