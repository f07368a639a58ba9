//! Settings of frameworks by which programs share a device well. `gpumux run` sets what the user has not set, and shows it.
//!
//! - JAX takes three quarters of the device at its first operation, TensorFlow nearly all of it. What is never written cannot be told apart
//!   from data, so it would be moved like data.
//! - NCCL reports collectives to gpumux's library. In a group its kernels have so few thread blocks that those of all members fit on a device
//!   at once. It takes several ranks on a device only where that is set.

use std::{env, ffi::OsString, path::Path, process::Command};

use gpumux_core::space::BLOCKS;
use gpumux_daemon::api::types::Placement;
use gpumux_wire::FRAMEWORKS_VARIABLE;

/// What `gpumux run` does with these settings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Frameworks {
    /// Have JAX and TensorFlow take memory as they need it, PyTorch give back its cache, and NCCL report and limit its collectives
    #[default]
    Adapt,
    /// Leave them as they are: JAX takes 75% of the device, TensorFlow nearly all
    Leave,
}

/// A variable, and what it is set to unless it or one of the others is set.
struct Setting {
    variable: &'static str,
    value: String,
    unless: &'static [&'static str],
}

impl Setting {
    fn new(variable: &'static str, value: impl ToString, unless: &'static [&'static str]) -> Self {
        let value = value.to_string();
        Self {
            variable,
            value,
            unless,
        }
    }
}

/// What `gpumux run` has set in a program's environment, a line each: a tenant that this program starts has settings of its own.
const SET: &str = "GPUMUX_SET";
/// What limits the thread blocks of a collective.
const LIMITS: [&str; 2] = ["NCCL_MAX_CTAS", "NCCL_MAX_NCHANNELS"];

/// The variables that an outer `gpumux run` has set, by what it wrote of them and what they are now.
fn inherited(set: &str, is: impl Fn(&str) -> Option<OsString>) -> Vec<&str> {
    let pairs = set.lines().filter_map(|line| line.split_once('='));
    let ours = pairs.filter(|(name, value)| is(name).is_some_and(|it| it == *value));
    ours.map(|(name, _)| name).collect()
}

/// What the user has set of a variable.
fn given(name: &str) -> Option<OsString> {
    let set = env::var(SET).unwrap_or_default();
    let is_ours = inherited(&set, |name| env::var_os(name)).contains(&name);
    env::var_os(name).filter(|_| !is_ours)
}

/// The most thread blocks of a collective, where the user has set that.
pub(crate) fn blocks_given() -> Option<u32> {
    let number = |name: &str| given(name)?.to_str()?.parse().ok();
    LIMITS.into_iter().filter_map(number).min()
}

/// Takes out of a program's environment what an outer `gpumux run` has set there.
pub(crate) fn clear(program: &mut Command) {
    let set = env::var(SET).unwrap_or_default();
    let ours = inherited(&set, |name| env::var_os(name)).into_iter();
    for name in ours.chain([SET, FRAMEWORKS_VARIABLE]) {
        program.env_remove(name);
    }
}

/// NCCL reads no longer path of a plug-in.
const LONGEST: usize = 254;

/// What a program is to have that is placed so. `python`: it may run Python.
fn wanted(python: bool, shim: &Path, placement: &Placement) -> Vec<Setting> {
    let mut all = Vec::new();
    if python {
        // docs.jax.dev, "GPU memory allocation"; the fraction has an old and a new name.
        all.push(Setting::new(
            "XLA_PYTHON_CLIENT_PREALLOCATE",
            false,
            &[
                "XLA_CLIENT_MEM_FRACTION",
                "XLA_PYTHON_CLIENT_MEM_FRACTION",
                "XLA_PYTHON_CLIENT_ALLOCATOR",
            ],
        ));
        // tensorflow.org, "Use a GPU: limiting GPU memory growth".
        let unless = &["TF_GPU_ALLOCATOR"];
        all.push(Setting::new("TF_FORCE_GPU_ALLOW_GROWTH", true, unless));
        if shim.as_os_str().len() <= LONGEST {
            all.push(Setting::new("NCCL_PROFILER_PLUGIN", shim.display(), &[]));
        }
    }
    // docs.nvidia.com, NCCL, "Environment Variables".
    let ranks = placement.ranks_per_gpu > 1;
    if let Some(blocks) = placement.max_ctas.filter(|it| ranks || *it < BLOCKS) {
        all.push(Setting::new(LIMITS[0], blocks, &LIMITS[1..]));
    }
    if ranks {
        all.push(Setting::new("NCCL_MULTI_RANK_GPU_ENABLE", 1, &[]));
        all.push(Setting::new("NCCL_NVLS_ENABLE", 0, &[]));
    }
    all
}

/// What is to be set where these variables are set already.
fn missing(wanted: Vec<Setting>, is_set: impl Fn(&str) -> bool) -> impl Iterator<Item = Setting> {
    let is_missing =
        move |it: &Setting| !is_set(it.variable) && !it.unless.iter().any(|other| is_set(other));
    wanted.into_iter().filter(is_missing)
}

/// Sets them for a program. What a user should know of that, if anything was set.
pub(crate) fn set(
    program: &mut Command,
    python: bool,
    shim: &Path,
    placement: &Placement,
) -> Option<String> {
    let wanted = wanted(python, shim, placement);
    let set: Vec<String> = missing(wanted, |name| given(name).is_some())
        .map(|it| {
            program.env(it.variable, &it.value);
            format!("{}={}", it.variable, it.value)
        })
        .collect();
    (!set.is_empty()).then(|| {
        program.env(SET, set.join("\n"));
        let all = set.join(" ");
        format!("set {all}, so that the program shares the GPU; --frameworks leave sets nothing")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const JAX: &str = "XLA_PYTHON_CLIENT_PREALLOCATE";
    const TENSORFLOW: &str = "TF_FORCE_GPU_ALLOW_GROWTH";
    const PROFILER: &str = "NCCL_PROFILER_PLUGIN";

    fn names(python: bool, placement: &Placement, given: &[&str]) -> Vec<&'static str> {
        let wanted = wanted(python, Path::new("/lib/libgpumux.so"), placement);
        missing(wanted, |name| given.contains(&name))
            .map(|it| it.variable)
            .collect()
    }

    #[test]
    fn setting_of_the_user_is_left_alone() {
        let names = |given: &[&str]| names(true, &Placement::default(), given);
        assert_eq!(names(&[]), [JAX, TENSORFLOW, PROFILER]);
        assert_eq!(names(&[JAX, PROFILER]), [TENSORFLOW]);
        assert_eq!(names(&["XLA_CLIENT_MEM_FRACTION", TENSORFLOW]), [PROFILER]);
        let other = ["XLA_PYTHON_CLIENT_MEM_FRACTION", "TF_GPU_ALLOCATOR"];
        assert_eq!(names(&other), [PROFILER]);
        let other = ["XLA_PYTHON_CLIENT_ALLOCATOR", PROFILER];
        assert_eq!(names(&other), [TENSORFLOW]);
    }

    #[test]
    fn collectives_are_limited_where_the_group_needs_that() {
        let placed = |blocks, ranks_per_gpu| Placement {
            max_ctas: Some(blocks),
            ranks_per_gpu,
            ..Placement::default()
        };
        assert_eq!(names(false, &placed(BLOCKS, 0), &[]), [""; 0]);
        assert_eq!(names(false, &placed(17, 0), &[]), ["NCCL_MAX_CTAS"]);
        assert_eq!(
            names(false, &placed(17, 0), &["NCCL_MAX_NCHANNELS"]),
            [""; 0]
        );
        assert_eq!(
            names(false, &placed(12, 2), &[]),
            [
                "NCCL_MAX_CTAS",
                "NCCL_MULTI_RANK_GPU_ENABLE",
                "NCCL_NVLS_ENABLE"
            ]
        );
    }

    #[test]
    fn setting_of_an_outer_run_is_no_users() {
        let set = "NCCL_MAX_CTAS=17\nNCCL_NVLS_ENABLE=0\nNCCL_PROFILER_PLUGIN=/a=b.so";
        let now = |name: &str| match name {
            "NCCL_MAX_CTAS" => Some("17".into()),
            "NCCL_PROFILER_PLUGIN" => Some("/a=b.so".into()),
            // Changed since.
            _ => Some("1".into()),
        };
        assert_eq!(inherited(set, now), ["NCCL_MAX_CTAS", PROFILER]);
        assert_eq!(inherited(set, |_| None), [""; 0]);
        assert_eq!(inherited("", now), [""; 0]);
    }

    #[test]
    fn library_whose_path_nccl_would_cut_is_not_named() {
        let path = format!("/{}/libgpumux.so", "a".repeat(LONGEST));
        let all = wanted(true, Path::new(&path), &Placement::default());
        assert!(all.iter().all(|it| it.variable != PROFILER));
    }
}
